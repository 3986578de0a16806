"""One handle to a model: a run or a model of ours, a model of transformers, or any function of token ids."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank import storage
from fullrank.core.attention import WeightedValues
from fullrank.core.decoder import LanguageModel
from fullrank.core.draws import evaluating
from fullrank.core.encoder import Encoder, MaskedLanguageModel
from fullrank.core.errors import InputError, one_line
from fullrank.core.output import IGNORED
from fullrank.core.trace import LayerTrace, Trace
from fullrank.core.translator import Translator
from fullrank.data.prepared import load_language, load_tokenizer
from fullrank.decoding import reader_of
from fullrank.forward import cache_argument, check_ids, logits_in, read_arguments
from fullrank.names import Kind, model_kind
from fullrank.plugins import import_function
from fullrank.records import CAPABILITIES
from fullrank.training.device import choose_device

SOURCE_LANGUAGE = "tokenizer/source"  # of a translation run, in its folder
TWO_SEQUENCES = "it reads two sequences; give its encoder, or a model of one sequence"


@dataclass(frozen=True)
class AttentionLayers:
    """The attention of a model whose heads can be seen, layer by layer, in the order in which they run.

    Attributes:
        module: the model that runs the stages; of transformers a copy of the model.
        stages: what holds the `mix` of each layer.
        plain: numbers of layers of transformers into which nothing was injected.
        weights: how they are computed, in words.
    """

    module: Any
    stages: Sequence[Any]
    plain: Set[int]
    weights: str


class LoadedModel:
    """A model with all that is needed to read text with it.

    Methods read in evaluation mode without gradients, on the device of the model. One that the model lacks raises InputError.

    Attributes:
        name: the name by which it was opened, or the class of a module.
        source: "run", "saved model", "Hugging Face", "module" or "function".
        folder: that of a run, a saved model, or a Hugging Face model on this disk; else None.
        module: the module; None for a function.
        fullrank_model: the model of ours that reads, also inside an exported one; None for any other model.
        tokenizer: one of fullrank or of transformers.
        max_length: the most tokens that it reads; None: any number.
        vocab_size: entries of the vocabulary; None where the model does not say it.
        predicts: "next tokens", "masked tokens", or None without a vocabulary layer.
        mask_id: id of <mask>; None without.
        marks: ids that are no words.
        inputs: what the model is called with where token ids are not enough.
        has: those of `CAPABILITIES` that it has.
        lacks: the others, each with the reason.
    """

    source: str = "module"
    folder: Path | None = None
    tokenizer: Any = None
    inputs: Mapping[str, Tensor] | None = None
    predicts: str | None = "next tokens"
    max_length: int | None = None
    vocab_size: int | None = None
    mask_id: int | None = None
    marks: tuple[int, ...] = ()
    fullrank_model: Any = None

    def __init__(self, module: Any, *lacks: str, reason: str = "") -> None:
        self.module = module
        self.name = type(module).__name__
        self.lacks = {"tokenizer": "it was opened without one", **dict.fromkeys(lacks, reason)}

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Set the tokenizer; of one for segments between two marks, `mask_id` and `marks` are set too."""
        self.tokenizer = tokenizer
        del self.lacks["tokenizer"]
        if self.closes_segments:
            self.mask_id = tokenizer.mask_token_id
            self.marks = tokenizer.all_special_ids

    @property
    def has(self) -> frozenset[str]:
        return frozenset(CAPABILITIES) - self.lacks.keys()

    @property
    def device(self) -> torch.device:
        parameters = [] if self.module is None else self.module.parameters()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    @property
    def is_masked(self) -> bool:
        """Its tokens are predicted from both sides."""
        return self.mask_id is not None or self.predicts == "masked tokens"

    @property
    def closes_segments(self) -> bool:
        """Its segments stand between two marks, as those of BERT between [CLS] and [SEP]."""
        return self.predicts != "next tokens" and getattr(self.tokenizer, "cls_token_id", None) is not None

    def require(self, needs: Set[str], purpose: str = "") -> None:
        """Raise InputError unless the model has all of `needs`; purpose: what needs them."""
        for need in sorted(needs - self.has):
            reason = self.lacks.get(need, f"known are {', '.join(CAPABILITIES)}")
            raise InputError(f"{purpose and f'{purpose}: '}{self.name} has no {CAPABILITIES.get(need, need)}: {reason}")

    # -- reading ------------------------------------------------------------------------------------------------------

    def logits(self, ids: Tensor) -> Tensor:
        """Compute logits or log-probabilities (B, N, V) of ids (B, N) int64."""
        return self._read("logits", ids)

    def hidden(self, ids: Tensor) -> Tensor:
        """Compute the input of the output layer (B, N, E)."""
        return self._read("hidden", ids)

    def step(self, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Compute logits (B, N, V) of new tokens (B, N) after those of the cache, and the cache after them.

        cache: None for the first tokens.
        """
        return self._read("step", ids, cache)

    def output_matrix(self) -> Tensor:
        self.require({"output_matrix"})
        return self._output_matrix().detach()

    def nll(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Compute -log p(target) (B, N) in nats, in fp32 at least; 0 at targets -100."""
        return next(self.nlls([(ids, targets)]))

    def nlls(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Yield `nll` of several batches; a model with memory carries it from one to the next."""
        self.require({"logits"})
        memory = None
        for ids, targets in batches:
            with evaluating(self.module):
                nll, memory = self._nll(self._to_device(ids), self._to_device(targets), memory)
            yield nll

    def attention(self, ids: Tensor) -> Iterator[LayerTrace]:
        """Yield the attention of each layer over ids (B, N): `.weights` before and `.mixed` after mixing, (B, H, N, M)."""
        return iter(next(self.attentions([ids])))

    def attentions(self, texts: Iterable[Tensor]) -> Iterator[list[LayerTrace]]:
        """Yield `attention` of several texts (B, N); a model with memory carries it from one to the next."""
        module = self.attention_layers.module
        memory = None
        for ids in texts:
            with evaluating(module):
                layers, memory = self._trace(self._to_device(ids), memory)
            yield layers

    @property
    def attention_layers(self) -> AttentionLayers:
        """The stages of its attention; of a model of transformers on a copy, which is made once."""
        self.require({"attention"})
        return self._attention_layers

    def _read(self, need: str, ids: Tensor, *arguments: Any) -> Any:
        self.require({need})
        with evaluating(self.module):
            return getattr(self, f"_{need}")(self._to_device(ids), *arguments)

    def _to_device(self, ids: Tensor) -> Tensor:
        check_ids(ids)
        return ids.to(self.device)

    # -- of a kind of models --------------------------------------------------------------------------------------------

    _logits: Any
    _trace: Any
    _output_matrix: Any
    _attention_layers: Any

    def _nll(self, ids: Tensor, targets: Tensor, memory: Any) -> tuple[Tensor, Any]:
        logits = self._logits(ids).flatten(0, 1)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        nll = F.cross_entropy(logits.to(dtype), targets.flatten(), reduction="none", ignore_index=IGNORED)
        return nll.view(targets.shape), None


class OwnModel(LoadedModel):
    """A LanguageModel, a MaskedLanguageModel or an Encoder, also inside a model of transformers."""

    def __init__(self, module: nn.Module, model: Any) -> None:
        super().__init__(module)
        self.fullrank_model = model
        self.max_length = model.max_length
        self.vocab_size = model.config.vocab_size
        if isinstance(model, Encoder):
            self.predicts = None
            missing = ("logits", "output_matrix", "step")
            self.lacks |= dict.fromkeys(missing, "it is an encoder without a vocabulary layer")
        elif not hasattr(model.output, "matrix"):
            self.lacks["output_matrix"] = f"its output layer is of the kind {model.config.output.kind}"
        if isinstance(model, MaskedLanguageModel):
            self.predicts = "masked tokens"
            self.mask_id = model.mask_id
            self.lacks["step"] = "it predicts masked tokens, all at once"
        if not any(isinstance(part, WeightedValues) for part in model.modules()):
            self.lacks["attention"] = "its attention is multi-linear, without weights and heads"

    def _run(self, ids: Tensor, memory: Any = None, trace: Trace | None = None) -> tuple[Tensor, Any]:
        if isinstance(self.fullrank_model, LanguageModel):
            hidden, memory, _ = self.fullrank_model.hidden(ids, memory, trace=trace)
            return hidden, memory
        read = self.fullrank_model if isinstance(self.fullrank_model, Encoder) else self.fullrank_model.hidden
        return read(ids, trace=trace), None

    def _hidden(self, ids: Tensor) -> Tensor:
        return self._run(ids)[0]

    def _logits(self, ids: Tensor) -> Tensor:
        return self.fullrank_model.output(self._hidden(ids))

    def _nll(self, ids: Tensor, targets: Tensor, memory: Any) -> tuple[Tensor, Any]:
        hidden, memory = self._run(ids, memory)
        counts = targets != IGNORED
        nll = self.fullrank_model.output.nll(hidden[counts][None], targets[counts][None])
        return nll.new_zeros(counts.shape).masked_scatter(counts, nll), memory

    def _step(self, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        reader: Any = reader_of(self.fullrank_model)
        out = reader(ids, cache=reader.new_cache() if cache is None else cache, attention_mask=None)
        return out.logits, out.cache

    def _trace(self, ids: Tensor, memory: Any) -> tuple[list[LayerTrace], Any]:
        trace = Trace()
        _, memory = self._run(ids, memory, trace)
        return trace.layers, memory

    @functools.cached_property
    def _attention_layers(self) -> AttentionLayers:
        stages = [part for part in self.fullrank_model.modules() if isinstance(part, WeightedValues)]
        return AttentionLayers(self.fullrank_model, stages, frozenset(), "by the definition")

    def _output_matrix(self) -> Tensor:
        return self.fullrank_model.output.matrix


class TransformersModel(LoadedModel):
    """A model of transformers that reads one sequence. head: its output embedding, None without one."""

    def __init__(self, module: Any) -> None:
        from fullrank.hf.inject import find_weighted_modules
        from fullrank.hf.load import find_longest_text

        super().__init__(module)
        arguments = read_arguments(module)
        self.head = module.get_output_embeddings()
        self.takes_mask = "attention_mask" in arguments
        self.cache_argument = cache_argument(arguments)
        self.max_length = find_longest_text(module)
        config = module.config.get_text_config()
        self.vocab_size = getattr(config, "vocab_size", None)
        writes = module.can_generate()
        if not writes:
            self.predicts = "masked tokens"
            self.lacks["step"] = "it predicts masked tokens, all at once"
        elif not self.cache_argument:
            self.lacks["step"] = "its forward takes no cache"
        if getattr(self.head, "weight", None) is None:
            missing = "it has no output embedding (load it with AutoModelForCausalLM or AutoModelForMaskedLM)"
            self.head = None
            self.lacks["output_matrix"] = missing
            if writes:
                self.lacks["hidden"] = missing
            else:
                self.predicts = None
                self.lacks |= {"logits": missing, "step": missing}
        try:
            find_weighted_modules(module)
        except InputError as error:
            self.lacks["attention"] = str(error)

    def _call(self, ids: Tensor) -> Any:
        """Run the model on ids (B, N), of which none is padding, even where one has the id of padding."""
        options = {"attention_mask": torch.ones_like(ids)} if self.takes_mask else {}
        return self.module(ids, **options)

    def _logits(self, ids: Tensor) -> Tensor:
        return logits_in(self._call(ids))

    def _hidden(self, ids: Tensor) -> Tensor:
        if self.head is None:
            hidden = getattr(self._call(ids), "last_hidden_state", None)
        else:
            inputs = [None]
            with self.head.register_forward_pre_hook(lambda _module, arguments: inputs.append(arguments[0])):
                self._call(ids)
            hidden = inputs[-1]
        if hidden is None or hidden.shape[:2] != ids.shape:
            raise InputError(f"{type(self.module).__name__}: its hidden states cannot be seen; give its base model")
        return hidden

    def _step(self, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        out = self.module(ids, use_cache=True, **{self.cache_argument: cache})
        return out.logits, getattr(out, self.cache_argument)

    def _trace(self, ids: Tensor, memory: Any) -> tuple[list[LayerTrace], Any]:
        from fullrank.hf.interface import traced

        trace = Trace()
        with traced(trace):
            self._attention_layers.module(input_ids=ids)
        return trace.layers, None

    @functools.cached_property
    def _attention_layers(self) -> AttentionLayers:
        from fullrank.hf.inject import add_identities, find_injected_modules

        weights = "explicitly, by the model's own attention"
        if find_injected_modules(self.module):
            weights += ", with what was injected"
        module, plain = add_identities(self.module)
        return AttentionLayers(module, list(find_injected_modules(module).values()), plain, weights)

    def _output_matrix(self) -> Tensor:
        return self.head.weight


class FunctionOfIds(LoadedModel):
    """Any function of token ids, or any other module: its logits, and its steps where it has a method `step`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        is_module = isinstance(function, nn.Module)
        reason = "it is known as a function of token ids only"
        super().__init__(function if is_module else None, "hidden", "attention", "output_matrix", reason=reason)
        self.source = "module" if is_module else "function"
        self.function: Any = function
        self.name = getattr(function, "__name__", type(function).__name__)
        config = getattr(function, "config", None)
        self.vocab_size = getattr(config, "vocab_size", None)
        if not hasattr(function, "step"):
            self.lacks["step"] = "it has no method `step`"

    def _logits(self, ids: Tensor) -> Tensor:
        return logits_in(self.function(ids))

    def _step(self, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        logits, cache = self.function.step(ids, cache)
        return logits, cache


def _adapt(module: nn.Module) -> LoadedModel:
    config = getattr(module, "config", None)
    is_export = getattr(config, "model_type", None) == "fullrank"
    model = module._modules.get("model") if is_export else module
    if isinstance(model, LanguageModel | MaskedLanguageModel | Encoder):
        return OwnModel(module, model)
    if isinstance(model, Translator) or "decoder_input_ids" in read_arguments(module):
        return LoadedModel(module, *CAPABILITIES, reason=TWO_SEQUENCES)
    if hasattr(module, "can_generate"):
        return TransformersModel(module)
    return FunctionOfIds(module)


# -- opening -----------------------------------------------------------------------------------------------------------


def open_model(
    x: Any,
    *,
    checkpoint: str = "best",
    device: str = "auto",
    causal: bool = False,
    tokenizer: bool = True,
) -> LoadedModel:
    """Open a model.

    Names are a run folder, a folder written by `save` or `save_pretrained`, a name on the Hugging Face hub,
    `hf:TYPE` (small and untrained) and `python:MODULE:FUNCTION` (what the function returns). Of a translation run the encoder
    is opened.

    Args:
        x: a module, a function of token ids, or a name; a LoadedModel is returned as it is.
        checkpoint: of a run: `best`, `last`, or `average`.
        device: where a named model is put: `auto`, `cpu`, `cuda` or `cuda:0`. Any other stays where it is.
        causal: load a language model: a run or saved model of another kind is refused, and of transformers the class is
            AutoModelForCausalLM.
        tokenizer: False leaves out the tokenizer that comes with a name.

    Returns:
        The model; a named one has fp32 if it is one of transformers, else the saved dtype.

    Raises:
        InputError: there is no such model or device, the model is damaged, or `x` is none of these.
    """
    x = getattr(x, "_orig_mod", x)  # inside a compiled module
    if isinstance(x, LoadedModel):
        return x
    if isinstance(x, nn.Module):
        return _adapt(x)
    if isinstance(x, str | Path):
        model = _open_named(str(x), checkpoint, causal, tokenizer)
        model.module.to(choose_device(device, "--device"))
        return model
    if callable(x):
        return FunctionOfIds(x)
    raise InputError(f"model: a name, a module or a function of token ids, given {type(x).__name__}")


def trained_kind(name: str) -> Kind:
    """Find the kind of model that a name stands for; InputError for a configuration."""
    kind = model_kind(name)
    if kind == "configuration":
        raise InputError(
            f"{name}: a configuration, which has no weights; give a run folder, a saved model or a Hugging Face model"
        )
    return kind


def _open_named(name: str, checkpoint: str, causal: bool, tokenizer: bool) -> LoadedModel:
    kind = trained_kind(name)
    if checkpoint != "best" and kind in ("Python function", "Hugging Face model"):
        raise InputError(f"checkpoint: of a run; {name} is a {kind}; leave it out, given '{checkpoint}'")
    folder = Path(name).expanduser()
    inputs = None
    words = None
    no_words = ""
    match kind:
        case "Python function":
            module, inputs = _call_maker(name)
            source = "module"
        case "Hugging Face model":
            from fullrank.hf.load import load_named

            module, words, inputs = load_named(name, causal=causal, tokenizer=tokenizer)
            source = "Hugging Face"
            no_words = "its files have none; save it there, tokenizer.save_pretrained(folder)"
        case _:
            module = _load_own(folder, checkpoint, causal)
            source = kind
            if tokenizer:
                try:
                    translates = isinstance(module, Encoder)
                    words = load_language(folder / SOURCE_LANGUAGE) if translates else load_tokenizer(folder)
                except InputError as error:
                    no_words = str(error)
    model = _adapt(module)
    model.name = name
    model.source = source
    model.inputs = inputs
    if folder.is_dir():
        model.folder = folder
    if words is not None:
        model.set_tokenizer(words)
    elif tokenizer and no_words:
        model.lacks["tokenizer"] = no_words
    return model


def _load_own(folder: Path, checkpoint: str, causal: bool) -> nn.Module:
    kind = storage.read_saved_kind(folder, checkpoint)
    if kind == "CausalModel":
        from fullrank.hf.causal import CausalModel

        return CausalModel.load(folder, checkpoint).merge()
    if causal or kind == "LanguageModel":
        return LanguageModel.load(folder, checkpoint)
    if kind == "Translator":
        return Translator.load(folder, checkpoint).encoder
    return MaskedLanguageModel.load(folder, checkpoint)


def _call_maker(name: str) -> tuple[nn.Module, Mapping[str, Tensor] | None]:
    """Return the module that `python:MODULE:NAME` names, or that a function of that name returns.

    It is put into evaluation mode. Example inputs come with it, if there are any.
    """
    make = import_function(name.removeprefix("python:"), "python:")
    try:
        module = make if isinstance(make, nn.Module) else make()
    except Exception as error:
        raise InputError(
            f"{name}: the function failed ({type(error).__name__}: {one_line(error)}); it makes the model, without arguments"
        ) from error
    inputs = None
    if isinstance(module, tuple) and len(module) == 2:
        module, inputs = module
    if not isinstance(module, nn.Module):
        raise InputError(f"{name}: the function must return a torch module, given {type(module).__name__}")
    return module.eval(), inputs
