"""A model as the checks see it: ids in, logits out. All that the checks know of a model's inside stands here."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fullrank.core.attention import Attention
from fullrank.core.config import AttentionConfig, ModelConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.translator import Translator

ROWS = 3
LENGTHS = (17, 19, 13, 23, 11, 7, 5, 3)  # primes: hardly another size of a model is one of them


class FixedSources(nn.Module):
    """A translator whose source sentences never change: a language model of target tokens.

    sources (3, M), mask (3, M): rows of input_ids (B, N) take turns with them. Modules have the names that they have in the
    translator. It has the methods of a LanguageModel that the checks use.
    """

    sources: Tensor
    mask: Tensor | None

    def __init__(self, translator: Translator, sources: Tensor, mask: Tensor | None = None) -> None:
        super().__init__()
        self.encoder, self.decoder, self.config = translator.encoder, translator.decoder, translator.config
        self.max_length = translator.max_length
        self._translator = (translator,)  # a tuple: its modules are registered above
        self.register_buffer("sources", sources, persistent=False)
        self.register_buffer("mask", mask, persistent=False)

    @property
    def translator(self) -> Translator:
        return self._translator[0]

    def _read(self, method: Callable[..., Any], input_ids: Tensor, *args: Any, **options: Any) -> Any:
        sources, mask = self.rows(torch.arange(len(input_ids), device=self.sources.device) % len(self.sources))
        return method(sources, input_ids, *args, mask, **options)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self._read(self.translator, input_ids, decoder_attention_mask=attention_mask)

    def log_prob(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.decoder.output.log_prob(self._read(self.translator.hidden, input_ids))
        return out

    def nll(self, input_ids: Tensor, targets: Tensor) -> Any:
        return self._read(self.translator.nll, input_ids, targets)

    def loss(self, input_ids: Tensor, targets: Tensor, weights: Tensor, *, label_smoothing: float) -> Any:
        return self._read(self.translator.loss, input_ids, targets, weights, label_smoothing=label_smoothing)

    def decoder_of_sources(self) -> Any:
        """The model that decoding calls with a cache."""
        return self.translator.of_source(self.translator.encode(self.sources, self.mask))

    def with_sources(self, sources: Tensor, mask: Tensor | None = None) -> FixedSources:
        return FixedSources(self.translator, sources, mask).train(self.training)

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sources and mask of the rows `index` (K,)."""
        return self.sources[index], None if self.mask is None else self.mask[index]

    def padded_sources(self) -> dict[str, FixedSources]:
        """Sentences of unequal lengths, by the side of the padding."""
        return {side: self.with_sources(self.sources, mask) for side, mask in padding_masks(self.sources).items()}


def fixed_sources(translator: Translator, length: int | None) -> FixedSources:
    """`translator` with three random sentences, of another length than the `length` tokens of the targets."""
    _refuse_meta(translator)
    longest, vocab_size = translator.max_source_length, translator.encoder.config.vocab_size
    assert vocab_size is not None
    taken = {length, *(size for parameter in translator.parameters() for size in parameter.shape)}
    too_short = f"the model reads sentences of at most {longest} tokens; a check needs {LENGTHS[-1]}"
    sources = random_ids(ROWS, _length(taken, longest, too_short), vocab_size, 15)
    return FixedSources(translator, sources.to(next(translator.parameters()).device))


@dataclass(frozen=True)
class Subject:
    """model: a copy, every parameter moved a little, in double precision where the model can be; own: as it was passed.

    kind: our LanguageModel, our Translator (as FixedSources), a causal model of Hugging Face, or any module. ids (B, N):
    random tokens, the end of the last row padding by `padding_id`, for models that look for it in the ids (None: they do
    not).
    """

    model: Any
    own: Any
    kind: Literal["fullrank", "translator", "hugging_face", "module"]
    vocab_size: int
    dtype: torch.dtype
    ids: Tensor
    padding_id: int | None

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.own.parameters())

    @property
    def translates(self) -> bool:
        return self.kind == "translator"

    @property
    def ours(self) -> bool:
        """Made of our parts, in double precision throughout."""
        return self.kind in ("fullrank", "translator")

    @property
    def core(self) -> Subject:
        """The language model of ours inside a `FullRankForCausalLM`; any other model itself."""
        inside = self.model._modules.get("model")
        if self.kind != "hugging_face" or not isinstance(inside, LanguageModel):
            return self
        return replace(self, model=inside, own=self.own.model, kind="fullrank")

    @property
    def injected(self) -> bool:
        """Our stages are inside a model of Hugging Face, by `fullrank.inject`."""
        return self.kind == "hugging_face" and any("fullrank" in module._modules for module in self.model.modules())

    @property
    def rounds(self) -> torch.dtype:
        """The precision to which two ways to compute the same agree: some models cast to fp32 on the way."""
        return torch.float32 if not self.ours and self.dtype == torch.float64 else self.dtype

    @property
    def sees_future(self) -> str:
        """The key of the configuration by which attention of ours, in whatever model, looks ahead on purpose; else empty."""
        if not any(isinstance(module, Attention) and module.attend.sees_future for module in self.model.modules()):
            return ""
        decoder = self.model.config.decoder if self.ours else None
        place = "decoder.attention" if decoder is not None and decoder.attention is not None else "attention"
        return f"model.{place}.causal: as_published"

    @property
    def takes_mask(self) -> bool:
        return "attention_mask" in accepted(self.model)

    @property
    def attention(self) -> dict[str, AttentionConfig]:
        """Attention of our models by its place; a language model has one, without a name."""
        config = self.own.config
        if not self.translates:
            return {"": config.attention}
        parts = {"encoder": config.of_encoder(), "decoder": config.of_decoder(), "cross": config.of_cross()}
        return {place: part.attention for place, part in parts.items()}

    def tokens(self, rows: int, length: int, seed: int) -> Tensor:
        return random_ids(rows, length, self.vocab_size, seed).to(self.ids.device)

    def masks(self) -> dict[str, Tensor]:
        """Attention masks (B, N) by the side of the padding: the models that count positions themselves are padded on both."""
        masks = padding_masks(self.ids)
        return masks if self.ours else {"right": masks["right"]}

    def rebuilt(self, config: ModelConfig, *, fresh: bool = False) -> Any:
        """A model of ours of another configuration with the same parameters, or with those of a `fresh` start."""
        old = self.model.translator if self.translates else self.model
        new = type(old)(config).to(self.ids.device)
        if not fresh:
            new = new.to(next(old.parameters()).dtype)
            new.load_state_dict(old.state_dict())
        return FixedSources(new, self.model.sources).train(new.training) if self.translates else new


def padding_masks(ids: Tensor) -> dict[str, Tensor]:
    """Masks (3, N) of rows of unequal lengths, by the side of the padding."""
    right = torch.ones_like(ids)
    right[1, -(ids.shape[1] // 3) :] = 0
    right[2, -(ids.shape[1] // 2) :] = 0
    return {"right": right, "left": right.flip(1)}


def everywhere(config: ModelConfig, **changes: Any) -> ModelConfig:
    """`config` with the attention of every place changed."""
    encoder, decoder = config.encoder, config.decoder
    if encoder is not None and encoder.attention is not None:
        encoder = replace(encoder, attention=encoder.attention.with_known(**changes))
    for key in ("attention", "cross"):
        if decoder is not None and (part := getattr(decoder, key)) is not None:
            decoder = replace(decoder, **{key: part.with_known(**changes)})
    return replace(config, attention=config.attention.with_known(**changes), encoder=encoder, decoder=decoder)


def subject_of(model: nn.Module, vocab_size: int | None = None, length: int | None = None) -> Subject:
    """`model` ready to be checked; it is left as it is. A Translator gets sources first, by `fixed_sources`.

    vocab_size: where the model does not say it; length: tokens of a text, by default a suitable one.
    Raises InputError where `model(input_ids)` gives no logits (B, N, V).
    """
    config: Any = getattr(model, "config", None)  # of a model that is not ours: nothing is known of it
    kind: Literal["fullrank", "translator", "hugging_face", "module"] = "module"
    if isinstance(model, FixedSources):
        kind = "translator"
    elif isinstance(model, LanguageModel):
        kind = "fullrank"
    elif hasattr(model, "save_pretrained") and hasattr(model, "get_input_embeddings"):
        kind = "hugging_face"
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if vocab_size is None:
        vocab_size = getattr(config, "vocab_size", None)
        if not isinstance(vocab_size, int):
            sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
            if not sizes:
                raise InputError(f"{type(model).__name__} does not say how many token ids it knows; give vocab_size")
            vocab_size = sizes[0]
    if vocab_size < 2:
        raise InputError(f"vocab_size: {vocab_size}; a check changes tokens and needs two or more")
    _refuse_meta(model)
    known = isinstance(model, FixedSources | LanguageModel)
    longest: Any = model.max_length if known else getattr(config, "max_position_embeddings", None)
    longest = longest if isinstance(longest, int) and longest > 0 else None
    tensors = [*model.parameters(), *model.buffers()]
    if length is None:
        taken = {size for tensor in tensors for size in tensor.shape}
        length = _length(taken, longest, f"the model reads at most {longest} tokens; a check needs 3")
    if length < 3 or (longest is not None and length > longest):
        limit = "" if longest is None else f" to {longest}"
        raise InputError(f"length: {length} tokens, but this model can be checked with 3{limit}")
    ids = random_ids(ROWS, length, vocab_size, 5).to(tensors[0].device if tensors else "cpu")
    padding_id = 0 if kind == "module" else None  # the others are told by a mask only
    if padding_id is not None:
        ids[-1, -max(1, length // 4) :] = padding_id
    moved, dtype = _moved(model, ids)
    return Subject(moved, model, kind, vocab_size, dtype, ids, padding_id)


def _refuse_meta(model: nn.Module) -> None:
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError("a model on the meta device has no numbers to check; build it on the cpu")


def _length(taken: set[Any], longest: int | None, too_short: str) -> int:
    """A length that no other size of the model equals, so that positions are recognised by it."""
    allowed = [length for length in LENGTHS if longest is None or length <= longest]
    if not allowed:
        raise InputError(too_short)
    return next((length for length in allowed if length not in taken), allowed[0])


def _moved(model: nn.Module, ids: Tensor) -> tuple[nn.Module, torch.dtype]:
    """A copy with parameters away from their start, in double precision, or as it was written where that fails."""
    for double in (True, False):
        moved = duplicate(model)
        move(moved)
        own = next((p.dtype for p in moved.parameters() if p.is_floating_point()), torch.float32)
        moved = (moved.double() if double else moved).eval()
        try:
            with torch.no_grad(), mode(moved, training=False):
                logits = call(moved, ids)
            break
        except InputError:
            raise
        except Exception as error:  # in double precision: some constants are fp32 for good
            if not double:
                words = " ".join(str(error).split())[:200]
                raise InputError(
                    f"{type(model).__name__}: model(input_ids) with input_ids {tuple(ids.shape)} int64 raised "
                    f"{type(error).__name__}: {words}"
                ) from error
    if logits.dim() != 3 or logits.shape[:2] != ids.shape:
        raise InputError(
            f"{type(model).__name__}: logits must be (B, N, V) = {(*ids.shape, 'V')}, given {tuple(logits.shape)}"
        )
    return moved, logits.dtype if double or logits.dtype.itemsize < own.itemsize else own


def random_ids(rows: int, length: int, vocab_size: int, seed: int) -> Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def duplicate(model: nn.Module) -> nn.Module:
    """A copy of the model; InputError where Python cannot make one."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__}: cannot be copied ({error}), and a check leaves its model alone"
        ) from error


def move(model: nn.Module, seed: int = 17) -> None:
    """Perturb every parameter by a tenth of its own size, so that what starts at zero, such as a mixing, shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            size = float(parameter.double().square().mean().sqrt())
            step = 0.1 * size if size > 0 else 0.3 / (parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 3)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * step
            parameter.add_(noise.to(parameter.device, parameter.dtype))


def accepted(model: nn.Module) -> set[str]:
    """Names of the arguments of the model's forward."""
    return set(inspect.signature(model.forward).parameters)


def call(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits (B, N, V)."""
    options: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
    if "use_cache" in accepted(model):
        options["use_cache"] = False
    return logits_in(model(ids, **options))


def logits_in(out: Any) -> Tensor:
    """Logits in the output of a model: a tensor, an object with `.logits`, a dict, or the first of several."""
    if isinstance(out, Mapping) and "logits" in out:
        out = out["logits"]
    out = getattr(out, "logits", out)
    if isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise InputError(f"the model returned {type(out).__name__}; a check needs logits, or an object with .logits")
    return out


def log_prob(model: Any, ids: Tensor) -> Tensor:
    """Log-probabilities (B, N, V) of a model of ours, by its output layer."""
    if isinstance(model, FixedSources):
        return model.log_prob(ids)
    out: Tensor = model.output.log_prob(model.hidden(ids).hidden)
    return out


@contextmanager
def mode(model: nn.Module, *, training: bool, seed: int = 1) -> Iterator[None]:
    """Inside, the model trains or not, random numbers begin at `seed`; afterwards all is as before, its buffers too."""
    before = {module: module.training for module in model.modules()}
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        model.train(training)
        try:
            yield
        finally:
            for module, was_training in before.items():
                module.training = was_training
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in kept and kept[name].shape == buffer.shape:
                        buffer.copy_(kept[name])
