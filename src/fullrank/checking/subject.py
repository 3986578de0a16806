"""A model as the checks see it: ids in, logits out. All that the checks know of a model's inside stands here."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fullrank.core.attention import Attention
from fullrank.core.config import AttentionConfig, ModelConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.translator import Translator
from fullrank.models import logits_in

ROWS = 3
LENGTHS = (67, 71, 61, 53, 41, 37, 31, 17, 19, 13, 23, 11, 7, 5, 3)  # primes: hardly another size is one
SHORT, SEED = 23, 5
MASKS: tuple[Callable[[Tensor], Tensor], ...] = (  # forms of a mask of padding; the mask of ones and zeros is the first
    lambda mask: mask,
    lambda mask: mask.bool(),
    lambda mask: ~mask.bool(),
    lambda mask: torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, float("-inf")),
)


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


@dataclass(frozen=True)
class Subject:
    """model: a copy, every parameter moved a little, in double precision where the model can be; own: as it was passed.

    kind: our LanguageModel, our Translator (as FixedSources), a model of Hugging Face, or any module. ids (3, N): random
    tokens, or vectors (3, N, E) of a model that reads these. The end of the last row is padding by `padding_id`, for models
    that look for it in the ids (None: they do not). fixed: the other inputs, by name; sequence: the name of the input that
    `ids` are (empty: the first one); given: the inputs of a user, as they were given. step(ids, cache): logits and the next
    cache, of a module with a cache of its own. time_first: the model reads ids (N, B) and gives logits (N, B, V).
    """

    model: Any
    own: Any
    kind: Literal["fullrank", "translator", "hugging_face", "module"]
    vocab_size: int
    dtype: torch.dtype
    ids: Tensor
    padding_id: int | None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    sequence: str = ""
    step: Callable[..., tuple[Tensor, Any]] | None = None
    given: Any = None
    time_first: bool = False

    def call(self, ids: Tensor, mask: Tensor | None = None, *, model: Any = None, **options: Any) -> Any:
        """Output of the model for rows of ids; the fixed inputs take turns, as the rows of a mask (3, N) do."""
        model = self.model if model is None else model
        turns = torch.arange(len(ids), device=ids.device) % ROWS
        known = accepted(self.model)
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), self.dtype)
        given: dict[str, Any] = {}
        for name, value in self.fixed.items():
            if isinstance(value, Tensor):
                value = value.to(dtype) if value.is_floating_point() else value
                value = value[turns] if value.dim() and len(value) == ROWS else value
            given[name] = value
        if mask is not None:
            mask = (self.mask_form or MASKS[0])(mask[turns] if len(mask) != len(ids) else mask)
            given[self.mask_name] = mask.to(dtype) if mask.is_floating_point() else mask
        if "use_cache" in known:
            options.setdefault("use_cache", False)
        ids = self.turned(ids.to(dtype) if ids.is_floating_point() else ids)
        if self.sequence:
            return model(**{**given, **options, self.sequence: ids})
        return model(ids, **{**given, **options})

    def logits(self, ids: Tensor, mask: Tensor | None = None, *, model: Any = None, **options: Any) -> Tensor:
        """Logits (B, N, V)."""
        return self.turned(logits_in(self.call(ids, mask, model=model, **options)))

    def turned(self, tensor: Tensor) -> Tensor:
        """(B, N, ..) as the model reads it, and back again."""
        return tensor.transpose(0, 1) if self.time_first else tensor

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
    def has_modes(self) -> bool:
        """It can be put into training; a function in which no module was found cannot."""
        return not hasattr(self.model, "function") or any(True for _ in self.model.children())

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

    def short(self, most: int = SHORT) -> Subject:
        """With texts of few tokens, for what computes slowly."""
        taken = {size for tensor in self.model.state_dict().values() for size in tensor.shape}
        length = next((n for n in LENGTHS if n <= most and n not in taken), self.length)
        return self if self.length <= length else replace(self, ids=self.ids[:, :length].contiguous())

    @property
    def even(self) -> int:
        """The length of a text as people train with: a power of two."""
        return self.length if self.given is not None else 1 << (self.length.bit_length() - 1)

    @property
    def stepping(self) -> Subject:
        """With the model that `step` reads: the copy, where it is a method of the model, else the model as it was passed."""
        if self.step is None:
            return self
        if getattr(self.step, "__self__", None) is self.own:
            return replace(self, step=getattr(self.model, self.step.__name__))
        dtype = next((p.dtype for p in self.own.parameters() if p.is_floating_point()), torch.float32)
        return replace(self, model=self.own, dtype=dtype)

    @functools.cached_property
    def single(self) -> Subject | None:
        """In fp32, for what cannot be computed in fp64; None where it is in fp32 already."""
        if self.dtype != torch.float64:
            return None
        moved = duplicate(self.own)
        move(moved)
        return replace(self, model=moved.float().eval(), dtype=torch.float32)

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
    def mask_name(self) -> str:
        return "decoder_attention_mask" if self.sequence.startswith("decoder_") else "attention_mask"

    @property
    def takes_mask(self) -> bool:
        return self.mask_form is not None

    @property
    def without_mask(self) -> str:
        """The reason why no mask of padding can be given."""
        if self.mask_name not in accepted(self.model):
            return f"forward takes no {self.mask_name}"
        return f"{self.mask_name} is no mask of padding (B, N), neither of numbers nor of booleans; which argument is the mask?"

    @functools.cached_property
    def mask_form(self) -> Callable[[Tensor], Tensor] | None:
        """Form in which the model takes a mask of padding: as 1 and 0, booleans of either sense, or 0 and -inf.

        It is the first form by which a mask without padding changes nothing and a first token that is padding is not seen by
        later ones; else one with less of that. None where the model refuses all.
        """
        if self.mask_name not in accepted(self.model):
            return None
        if self.kind != "module":
            return MASKS[0]
        given = self.fixed.get(self.mask_name)
        if isinstance(given, Tensor) and given.shape[:2] != self.ids.shape[:2]:
            return None  # a square one
        ones = torch.ones(self.ids.shape[:2], dtype=torch.int64, device=self.ids.device)
        hidden = torch.cat((0 * ones[:, :1], ones[:, 1:]), 1)
        other = torch.cat((self.ids.roll(1, 0)[:, :1], self.ids[:, 1:]), 1)
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), self.dtype)

        def works(form: Callable[[Tensor], Tensor]) -> int:
            def read(ids: Tensor, mask: Tensor) -> Tensor:
                mask = form(mask).to(dtype) if form(mask).is_floating_point() else form(mask)
                return self.logits(ids, **{self.mask_name: mask})

            pairs = ((read(self.ids, ones), plain), (read(self.ids, hidden)[:, 1:], read(other, hidden)[:, 1:]))
            same, hides = (bool(torch.isclose(a, b, 1e-4, 1e-4, equal_nan=True).all()) for a, b in pairs)
            return 1 + same + (same and hides)

        ranks = dict[Callable[[Tensor], Tensor], int]()
        with torch.no_grad(), mode(self.model, training=False):
            plain = self.logits(self.ids)
            for form in MASKS:
                with contextlib.suppress(Exception):
                    ranks[form] = works(form)
        return max(ranks, key=lambda form: ranks[form], default=None)

    @property
    def takes_positions(self) -> bool:
        """Positions can be given, so that padding may stand on the left, and documents be packed."""
        return self.first_position is not None

    @functools.cached_property
    def first_position(self) -> int | None:
        """The position id of the first token, by which given positions change nothing; None where they cannot be given."""
        if self.ours or self.sequence.startswith("decoder_") or "position_ids" not in accepted(self.model):
            return None
        table = [getattr(module, "padding_idx", None) for module in self.model.modules()]
        with torch.no_grad(), mode(self.model, training=False), contextlib.suppress(Exception):
            expected = self.logits(self.ids)
            starts = {0, *(index + 1 for index in table if index is not None)}  # RoBERTa counts from padding on
            for first in sorted(starts):
                with contextlib.suppress(IndexError):
                    places = torch.arange(first, first + self.length, device=self.ids.device).expand(ROWS, -1)
                    off = (self.logits(self.ids, position_ids=places) - expected).abs().max()
                    if off < 1e-4 * expected.abs().max():
                        return first
        return None

    @property
    def attention(self) -> dict[str, AttentionConfig]:
        """Attention of our models by its place: part of a translation model, and layer where `model.layers` says so."""
        config = self.own.config
        parts = {"": config}
        if self.translates:
            parts = {"encoder": config.of_encoder(), "decoder": config.of_decoder(), "cross": config.of_cross()}
        return {
            f"{place} layer {layer}".strip() if part.layers else place: attention
            for place, part in parts.items()
            for layer, attention in enumerate(part.attentions)
        }

    def tokens(self, rows: int, length: int, seed: int) -> Tensor:
        return self.readable(random_ids(rows, length, self.vocab_size, seed).to(self.ids.device))

    def readable(self, ids: Tensor) -> Tensor:
        """Other tokens in place of padding, which some models of Hugging Face look for in the ids."""
        padding = getattr(getattr(self.own, "config", None), "pad_token_id", None)
        if (
            self.kind != "hugging_face"
            or not isinstance(padding, int)
            or self.vocab_size < 3
            or ids.is_floating_point()
        ):
            return ids
        return torch.where(ids == padding, (ids + 1) % self.vocab_size, ids)

    def masks(self) -> dict[str, Tensor]:
        """Attention masks (B, N) by the side of the padding; on the left where positions are counted or given with it."""
        masks = padding_masks(self.ids)
        stateful = getattr(self.model, "_is_stateful", False)  # a recurrent state begins with the padding
        return masks if self.ours or (self.takes_positions and not stateful) else {"right": masks["right"]}

    def positions_of(self, mask: Tensor) -> dict[str, Tensor]:
        """The option that tells positions of padded rows to a model that does not count them itself."""
        if self.first_position is None:
            return {}
        return {"position_ids": (mask.cumsum(1) - 1).clamp_min(0) + self.first_position}

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
    right = torch.ones(ids.shape[:2], dtype=torch.int64, device=ids.device)
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
    return config.with_attention(lambda part: part.with_known(**changes), encoder=encoder, decoder=decoder)


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
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in (
            trained or model.parameters()
        ):  # tables of positions stay, but for a model that is frozen as a whole
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            size = float(parameter.double().square().mean().sqrt())
            step = 0.1 * size if size > 0 else 0.3 / (parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 3)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * step
            parameter.add_(noise.to(parameter.device, parameter.dtype))


def accepted(model: nn.Module) -> dict[str, None]:
    """Names of the arguments of the model's forward."""
    return dict.fromkeys(inspect.signature(getattr(model, "function", model.forward)).parameters)


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
