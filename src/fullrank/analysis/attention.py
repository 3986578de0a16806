"""The attention of any model, layer by layer: what it computes over texts, and its mixings, which an analysis may replace."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fullrank.analysis.rank import unwrapped
from fullrank.core.attention import LayerTrace, Trace, WeightedValues
from fullrank.core.decoder import LanguageModel
from fullrank.core.encoder import Encoder
from fullrank.core.errors import InputError
from fullrank.core.masked import MaskedLanguageModel
from fullrank.core.translator import Translator
from fullrank.decoding.sample import evaluating
from fullrank.training.device import device_of


class AttentionReader:
    """A model whose attention is read: one of ours, or of Hugging Face, that reads one sequence.

    model: the model itself if it is ours, or if something was injected into all its layers; else a copy, in which every other
    layer of attention has got an identity mixing.
    source: how weights are computed, in words. stages: what holds the `mix` of each layer, and names: where it stands. groups:
    in each layer, the number of heads that share keys and values.
    Raises InputError for other models, for encoder-decoders, and for attention without weights.
    """

    def __init__(self, model: nn.Module) -> None:
        own = unwrapped(model)
        self.plain: set[int] = set()  # the layers of a foreign model into which nothing was injected
        if isinstance(own, LanguageModel | MaskedLanguageModel | Encoder):
            self.model: Any = own
            self.source = "by the definition"
            stages = {name: part for name, part in own.named_modules() if isinstance(part, WeightedValues)}
            if not stages:
                raise InputError(
                    f"{type(own).__name__}: it has no attention weights and no heads (multi-linear attention)"
                )
        else:
            self.model, stages = self._foreign(model)
        self.names, self.stages = tuple(stages), tuple(stages.values())
        around = (self.model.get_submodule(name.rpartition(".")[0]) for name in self.names)
        self.groups = tuple(int(getattr(module, "num_key_value_groups", 1)) for module in around)

    def _foreign(self, model: Any) -> tuple[Any, dict[str, Any]]:
        if isinstance(model, Translator) or "decoder_input_ids" in inspect.signature(model.forward).parameters:
            raise InputError(
                f"{type(model).__name__}: reads two sequences; give its encoder, or a model of one sequence"
            )
        if not hasattr(getattr(model, "config", None), "is_encoder_decoder"):
            raise InputError(f"a model of fullrank or of Hugging Face, given {type(model).__name__}")
        from fullrank.hf.inject import complete, injected_modules

        self.source = "explicitly, by the model's own attention" + ", with what was injected" * bool(
            injected_modules(model)
        )
        model, self.plain = complete(model)
        return model, injected_modules(model)

    def traces(self, texts: Iterable[Tensor]) -> Iterator[Sequence[LayerTrace]]:
        """The attention of every layer over each text (1, N), in the order of the layers; without gradients or dropout.

        A model with memory reads the texts one after the other, each with the memory that those before have left.
        """
        memory = None
        for ids in texts:
            trace, ids = Trace(), ids.to(device_of(self.model))
            with evaluating(self.model):
                match self.model:
                    case LanguageModel():
                        memory = self.model.hidden(ids, memory, trace=trace).memory
                    case MaskedLanguageModel():
                        self.model.hidden(ids, trace=trace)
                    case Encoder():
                        self.model(ids, trace=trace)
                    case _:
                        from fullrank.hf.interface import traced

                        with traced(trace):
                            self.model(input_ids=ids)
            yield trace.layers


def texts_of(input_ids: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """All rows (1, N), of one length N. InputError for other shapes, for several lengths, and for no row."""
    texts: list[Tensor] = []
    for ids in [input_ids] if isinstance(input_ids, Tensor) else input_ids:
        if not isinstance(ids, Tensor):
            raise InputError(f"input_ids: tensors of token ids (B, N), given {type(ids).__name__}; encode texts first")
        if ids.ndim != 2 or ids.is_floating_point() or not ids.shape[1]:
            raise InputError(f"input_ids: (B, N) of whole numbers, given {tuple(ids.shape)} {ids.dtype}")
        texts += ids.split(1)
    if not texts:
        raise InputError("input_ids: no text to read")
    if len(lengths := {ids.shape[1] for ids in texts}) > 1:
        raise InputError(f"input_ids: texts of one length, given {' and '.join(map(str, sorted(lengths)))} tokens")
    return texts
