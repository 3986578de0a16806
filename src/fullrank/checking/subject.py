"""The model under test as the checks see it: ids in, logits out. All that the checks know of a model's inside stands here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fullrank.checking.copies import AsModule, find_dtype, list_arguments, mode, move_copy
from fullrank.core.attention import Attention
from fullrank.core.decoder import LanguageModel
from fullrank.forward import logits_in

ROWS = 3
LENGTHS = (67, 71, 61, 53, 41, 37, 31, 17, 19, 13, 23, 11, 7, 5, 3)  # primes: hardly another size is one
SHORT, SEED = 23, 5
WORDS = 2048  # that texts are made of and logits compared at, where a model knows more than twice as many
SIDES = {"right": "padding on the right", "left": "padding on the left", "ones": "a mask of ones"}
MaskForm = Callable[[Tensor], Tensor]
MASKS: tuple[MaskForm, ...] = (  # forms of a mask of padding; the mask of ones and zeros is the first
    lambda mask: mask,
    lambda mask: mask.bool(),
    lambda mask: ~mask.bool(),
    lambda mask: torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, float("-inf")),
)


@dataclass(frozen=True)
class Subject:
    """A model under test, with its texts.

    model: a copy, every parameter moved a little, in double precision where the model can be; own: as it was passed.
    kind: our LanguageModel, our Translator, a model of Hugging Face, or any module. ids (3, N): random tokens, or vectors
    (3, N, E) of a model that reads these. The end of the last row is padding by `padding_id`, for models that look for it
    in the ids (None: they do not). fixed: the other inputs, by name; sequence: the name of the input that `ids` are (empty:
    the first one); has_example: the inputs are those of a user. step(ids, cache): logits and the next cache, of a module
    with a cache of its own.
    """

    model: Any
    own: Any
    kind: Literal["fullrank", "translator", "hugging_face", "module"]
    vocab_size: int
    dtype: torch.dtype
    ids: Tensor
    padding_id: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    sequence: str = ""
    step: Callable[..., tuple[Tensor, Any]] | None = None
    has_example: bool = False

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(self, ids: Tensor, mask: Tensor | None = None, *, model: Any = None, **options: Any) -> Any:
        """Output of the model for rows of ids; the fixed inputs take turns, as the rows of a mask (3, N) do."""
        model = self.model if model is None else model
        inputs = {name: take_turns(convert(value, model), len(ids)) for name, value in self.fixed.items()}
        if mask is not None:
            form = self.mask_form or MASKS[0]
            inputs[self.mask_name] = convert(form(take_turns(mask, len(ids))), model)
        if "use_cache" in list_arguments(self.model):
            options.setdefault("use_cache", False)
        ids = convert(ids, model)
        if self.sequence:
            return model(**{**inputs, **options, self.sequence: ids})
        return model(ids, **{**inputs, **options})

    def all_logits(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Logits (B, N, V)."""
        return logits_in(self.call(ids, mask, **options))

    def logits(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Logits that are compared (B, N, V): of a large vocabulary those of `words`."""
        return self.select(self.all_logits(ids, mask, **options))

    def select(self, logits: Tensor) -> Tensor:
        return logits[..., self.stride // 2 :: self.stride]

    def one_row(self, row: int) -> Subject:
        """With the fixed inputs of one row."""
        fixed = {name: v[row : row + 1].expand(v.shape) if has_rows(v) else v for name, v in self.fixed.items()}
        return replace(self, fixed=fixed)

    # -- texts --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def words(self) -> Tensor:
        """Token ids that texts are made of: all, or of a large vocabulary some, evenly spread."""
        return torch.arange(self.stride // 2, self.vocab_size, self.stride, device=self.ids.device)

    @property
    def stride(self) -> int:
        """The step from one word that is looked at to the next: above 1 in a large vocabulary."""
        return max(1, self.vocab_size // WORDS)

    def tokens(self, rows: int, length: int, seed: int) -> Tensor:
        return self.replace_padding(self.words[random_ids(rows, length, len(self.words), seed).to(self.ids.device)])

    def change(self, ids: Tensor, where: Tensor | None = None) -> Tensor:
        """Other tokens, or vectors, where `where` (B, N) is true; all of them without it."""
        generator = torch.Generator().manual_seed(11)
        if ids.is_floating_point():
            other = torch.randn(ids.shape, generator=generator).to(ids) * ids.std()
            return other if where is None else torch.where(where[..., None], other, ids)
        count = len(self.words)
        step = 1 + torch.randint(max(1, count - 1), ids.shape, generator=generator).to(ids.device)
        other = self.replace_padding(self.words[(torch.searchsorted(self.words, ids) + step) % count])
        return other if where is None else torch.where(where, other, ids)

    def change_from(self, cut: int) -> Tensor:
        """The texts, with every token from `cut` on another one."""
        return self.change(self.ids, (torch.arange(self.length, device=self.ids.device) >= cut).expand(ROWS, -1))

    def replace_padding(self, ids: Tensor) -> Tensor:
        """Other tokens in place of padding, which some models of Hugging Face look for in the ids."""
        padding = getattr(getattr(self.own, "config", None), "pad_token_id", None)
        if self.kind != "hugging_face" or not isinstance(padding, int) or self.vocab_size < 3:
            return ids
        return ids if ids.is_floating_point() else torch.where(ids == padding, (ids + 1) % self.vocab_size, ids)

    def first(self, length: int) -> Subject:
        """With the first tokens of its texts."""
        return replace(self, ids=self.ids[:, :length].contiguous())

    def short(self, most: int = SHORT) -> Subject:
        """With texts of few tokens, for what computes slowly."""
        taken = {size for tensor in self.model.state_dict().values() for size in tensor.shape}
        length = next((n for n in LENGTHS if n <= most and n not in taken), self.length)
        return self if self.length <= length else self.first(length)

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def even(self) -> int:
        """The length of a text as people train with: a power of two."""
        return self.length if self.has_example else 1 << (self.length.bit_length() - 1)

    @property
    def reads_tokens(self) -> bool:
        return not self.ids.is_floating_point()

    # -- what it is ---------------------------------------------------------------------------------------------------

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
    def has_modes(self) -> bool:
        """It can be put into training; a function in which no module was found cannot."""
        return not isinstance(self.model, AsModule) or any(True for _ in self.model.children())

    @property
    def has_state(self) -> bool:
        """Its maker says that its cache is a recurrent state."""
        return bool(getattr(self.model, "_is_stateful", False))

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

    @functools.cached_property
    def single(self) -> Subject | None:
        """In fp32, for what cannot be computed in fp64; None where it is in fp32 already."""
        if self.dtype != torch.float64:
            return None
        return replace(self, model=move_copy(self.own).float(), dtype=torch.float32)

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

    # -- masks and positions ------------------------------------------------------------------------------------------

    @property
    def mask_name(self) -> str:
        return "decoder_attention_mask" if self.sequence.startswith("decoder_") else "attention_mask"

    @property
    def without_mask(self) -> str:
        """The reason why no mask of padding can be given."""
        if self.mask_name not in list_arguments(self.model):
            return f"forward takes no {self.mask_name}"
        return f"{self.mask_name} is no mask of padding (B, N), neither of numbers nor of booleans; which argument is the mask?"

    @functools.cached_property
    def mask_form(self) -> MaskForm | None:
        """Form in which the model takes a mask of padding: as 1 and 0, booleans of either sense, or 0 and -inf.

        It is the first form by which a mask without padding changes nothing and a first token that is padding is not seen by
        later ones; else one with less of that. None where the model refuses all.
        """
        if self.ours:
            return MASKS[0]
        if self.mask_name not in list_arguments(self.model):
            return None
        if self.kind != "module":
            return MASKS[0]
        example = self.fixed.get(self.mask_name)
        if isinstance(example, Tensor) and example.shape[:2] != self.ids.shape[:2]:
            return None  # a square one
        ranks = dict[MaskForm, int]()
        with torch.no_grad(), mode(self.model, training=False):
            for form in MASKS:
                with contextlib.suppress(Exception):
                    ranks[form] = self.rank_form(form)
        return max(ranks, key=lambda form: ranks[form], default=None)

    def rank_form(self, form: MaskForm) -> int:
        """1 where it can be given, 2 where a mask without padding changes nothing, 3 where padding is hidden too."""

        def read(ids: Tensor, mask: Tensor) -> Tensor:
            return self.logits(ids, **{self.mask_name: convert(form(mask), self.model)})

        def agree(logits: Tensor, expected: Tensor) -> bool:
            return bool(torch.isclose(logits, expected, 1e-4, 1e-4, equal_nan=True).all())

        ones = torch.ones(self.ids.shape[:2], dtype=torch.int64, device=self.ids.device)
        hidden = torch.cat((0 * ones[:, :1], ones[:, 1:]), 1)
        other = torch.cat((self.ids.roll(1, 0)[:, :1], self.ids[:, 1:]), 1)
        if not agree(read(self.ids, ones), self.logits(self.ids)):
            return 1
        return 2 + agree(read(self.ids, hidden)[:, 1:], read(other, hidden)[:, 1:])

    def masks(self) -> dict[str, Tensor]:
        """Attention masks (3, N) of rows of unequal lengths by the side of the padding, and one of ones."""
        ones = torch.ones(self.ids.shape[:2], dtype=torch.int64, device=self.ids.device)
        right = ones.clone()
        right[1, -(self.length // 3) :] = 0
        right[2, -(self.length // 2) :] = 0
        return {"right": right, **({"left": right.flip(1)} if self.pads_left else {}), "ones": ones}

    @functools.cached_property
    def pads_left(self) -> bool:
        """Padding may stand on the left: positions are counted, can be given, or do not matter."""
        if self.ours or (self.first_position is not None and not self.has_state):
            return True
        if self.mask_form is None or self.has_state or not self.reads_tokens:
            return False
        real = torch.arange(self.length, device=self.ids.device) >= self.length // 3
        with torch.no_grad(), mode(self.model, training=False), contextlib.suppress(Exception):
            alone = self.one_row(1).logits(self.ids[1:2, real])[0]
            padded = self.logits(self.ids, real.long().expand(ROWS, -1))[1, real]
            return bool(torch.isclose(padded, alone, 1e-4, 1e-4).all())
        return False

    @functools.cached_property
    def first_position(self) -> int | None:
        """The position id of the first token, by which given positions change nothing; None where they cannot be given."""
        arguments = list_arguments(self.model)
        if self.ours or self.sequence.startswith("decoder_") or "position_ids" not in arguments:
            return None
        padding = [getattr(module, "padding_idx", None) for module in self.model.modules()]
        starts = sorted({0, *(index + 1 for index in padding if index is not None)})  # RoBERTa counts from padding on
        with torch.no_grad(), mode(self.model, training=False), contextlib.suppress(Exception):
            expected = self.logits(self.ids)
            for first in starts:
                with contextlib.suppress(IndexError):
                    places = torch.arange(first, first + self.length, device=self.ids.device).expand(ROWS, -1)
                    off = (self.logits(self.ids, position_ids=places) - expected).abs().max()
                    if off < 1e-4 * expected.abs().max():
                        return first
        return None

    def positions_of(self, mask: Tensor) -> dict[str, Tensor]:
        """The option that tells positions of padded rows to a model that does not count them itself."""
        if self.first_position is None or bool(mask.all()):
            return {}
        return {"position_ids": (mask.cumsum(1) - 1).clamp_min(0) + self.first_position}


def has_rows(value: Any) -> bool:
    """True for an input with something for each of the three texts."""
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == ROWS


def take_turns(value: Any, count: int) -> Any:
    """`count` rows, which are the three of `value` in turn; another input as it is."""
    return value[torch.arange(count, device=value.device) % ROWS] if has_rows(value) and count != ROWS else value


def convert(value: Any, model: Any) -> Any:
    """Vectors in the type of the model; token ids and others as they are."""
    is_vector = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(find_dtype(model, value.dtype)) if is_vector else value


def random_ids(rows: int, length: int, vocab_size: int, seed: int) -> Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
