"""The model under test: what a user passes becomes token ids in and logits out."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from fullrank.checking.copies import OnlyWords, find_dtype, list_tensors, mode, move_copy
from fullrank.checking.report import largest
from fullrank.core.attention import Attention
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError, one_line
from fullrank.core.translator import Translator
from fullrank.forward import AsModule, logits_in, read_arguments

ROWS = 3
SEED = 5
LENGTHS = (67, 71, 61, 53, 41, 37, 31, 17, 19, 13, 23, 11, 7, 5, 3)  # primes, which sizes of models hardly are
SHORT = 23
WORDS = 2048  # that texts are made of and logits are compared at, where a model knows more than twice as many
DOUBLE_UP_TO = 50_000_000  # parameters; larger models are checked in fp32
LARGE = 20_000_000  # parameters of a model that reads shorter texts
SPECIAL = ("bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "unk_token_id", "decoder_start_token_id")
_SHORTER = (31, 17, 7, 64, 8)  # tokens, for a model that does not say how many it reads, or multiples of what
_SEQUENCES = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
MaskForm = Callable[[Tensor], Tensor]
MASKS: tuple[MaskForm, ...] = (  # forms of a mask of padding
    lambda mask: mask,
    lambda mask: mask.bool(),
    lambda mask: ~mask.bool(),
    lambda mask: torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, float("-inf")),
)


@dataclass(frozen=True)
class Subject:
    """A model under test, with its texts.

    Attributes:
        model: a copy, every parameter moved a little, in double precision where the model can be.
        original: the model as it was passed.
        vocab_size: V.
        texts: random tokens (3, M), or vectors (3, M, E) of a model that reads these.
        length: tokens of the texts that are read, fewer than the model can read.
        dtype: in which the model computes.
        fixed: the other inputs by name, the same in every call.
        sequence: the name of the input that `ids` are; empty: the first one.
        step: `step(ids, cache)` gives logits and the next cache of a module with a cache of its own kind.
        has_example: the inputs are those of a user.
        mask_form: turns a mask of ones and zeros into the form that the model takes; None: it takes no mask of padding.
        first_position: the position id of the first token; None: positions cannot be given.
        selects: only logits of `words` are computed.
        leaking: the modes (True is training) in which a call has already shown a leak.
    """

    model: Any
    original: Any
    vocab_size: int
    texts: Tensor
    length: int = 0
    dtype: torch.dtype = torch.float64
    fixed: Mapping[str, Any] = field(default_factory=dict)
    sequence: str = ""
    step: Callable[..., tuple[Tensor, Any]] | None = None
    has_example: bool = False
    mask_form: MaskForm | None = None
    first_position: int | None = None
    selects: bool = False
    leaking: set[bool] = field(default_factory=set)

    @property
    def kind(self) -> Literal["fullrank", "translator", "hugging_face", "module"]:
        if isinstance(self.original, LanguageModel):
            return "fullrank"
        if isinstance(self.original, Translator):
            return "translator"
        return "hugging_face" if hasattr(self.original, "get_input_embeddings") else "module"

    def call(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
        """Call the model; rows of the fixed inputs and of a mask take turns.

        Args:
            ids: texts (B, N).
            mask: of padding (3, N), ones at tokens; None: none is given.
            **options: further arguments of the model.

        Returns:
            The output as it is.
        """
        inputs = {**self.fixed, **options}
        if mask is not None:
            inputs[self.mask_name] = (self.mask_form or MASKS[0])(mask)
        if "use_cache" in read_arguments(self.original):
            inputs.setdefault("use_cache", False)
        dtype = find_dtype(self.model)
        inputs = {name: fit_rows(value, len(ids), dtype) for name, value in inputs.items()}
        ids = fit_rows(ids, len(ids), dtype)
        if self.sequence:
            return self.model(**inputs, **{self.sequence: ids})
        return self.model(ids, **inputs)

    def logits(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Compute the logits that are compared.

        Args:
            ids: texts (B, N).
            mask: as of `call`.
            **options: as of `call`.

        Returns:
            Logits (B, N, V), of a large vocabulary those of `words`.
        """
        with OnlyWords(self.words, self.vocab_size) if self.selects else contextlib.nullcontext():
            return self.select(logits_in(self.call(ids, mask, **options)))

    def select(self, logits: Tensor) -> Tensor:
        """Select the logits of `words`; return those as they are that were computed for `words` alone."""
        return logits if logits.shape[-1] == len(self.words) else logits[..., self.words]

    @functools.cached_property
    def words(self) -> Tensor:
        """Token ids that texts are made of: all, or of a large vocabulary some, evenly spread."""
        step = max(1, self.vocab_size // WORDS)
        return torch.arange(step // 2, self.vocab_size, step, device=self.ids.device)

    def draw_tokens(self, length: int, seed: int, rows: int = ROWS) -> Tensor:
        """Draw random texts (rows, length) of `words`.

        Args:
            length: tokens of a text.
            seed: of the draws.
            rows: number of texts.
        """
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(self.words), (rows, length), generator=generator)
        return self.replace_padding(self.words[chosen.to(self.ids.device)])

    def change(self, ids: Tensor) -> Tensor:
        """Make texts of other tokens, or vectors, at every place."""
        generator = torch.Generator().manual_seed(11)
        if ids.is_floating_point():
            return torch.randn(ids.shape, generator=generator).to(ids) * ids.std()
        count = len(self.words)
        step = 1 + torch.randint(max(1, count - 1), ids.shape, generator=generator).to(ids.device)
        return self.replace_padding(self.words[(torch.searchsorted(self.words, ids) + step) % count])

    def change_from(self, cuts: list[int], ids: Tensor) -> Tensor:
        """Change every token from the cut of its row on; rows without a cut stay."""
        changed = ids.clone()
        other = self.change(ids)
        for row, cut in enumerate(cuts):
            changed[row, cut:] = other[row, cut:]
        return changed

    def replace_padding(self, ids: Tensor) -> Tensor:
        """Put other tokens in place of padding, which some models of Hugging Face look for in the ids."""
        padding = getattr(getattr(self.original, "config", None), "pad_token_id", None)
        if self.kind != "hugging_face" or not isinstance(padding, int) or self.vocab_size < 3:
            return ids
        return torch.where(ids == padding, (ids + 1) % self.vocab_size, ids)

    def with_special_tokens(self) -> Subject:
        """Return the subject with texts of special, first and last ids.

        One has these ids at every other position, two have repeated ids, one has a single id, and the others each begin with
        one of these ids.
        """
        config = text_config(self.original)
        text = self.ids[0]
        ids = [0, 1, 2, self.vocab_size - 1, *_pytree.tree_leaves([getattr(config, name, None) for name in SPECIAL])]
        ids = [value for value in ids if isinstance(value, int) and 0 <= value < self.vocab_size]
        special = self.replace_padding(torch.tensor(ids, device=text.device)).unique()
        positions = torch.arange(self.length, device=text.device)
        mixed = text.clone()
        mixed[::2] = special[positions % len(special)][: len(mixed[::2])]
        beginnings = self.ids[1].repeat(len(special), 1)
        beginnings[:, 0] = special
        texts = (mixed, text[positions // 3], text[positions % 2], text[positions * 0], *beginnings)
        return replace(self, texts=torch.stack(texts))

    def with_length(self, length: int) -> Subject:
        """Return the subject with its texts, and sources of ours, cut to their first `length` tokens."""
        fixed = self.fixed
        if not self.has_example:  # sources
            fixed = {name: value[:, :length] for name, value in fixed.items()}
        return replace(self, length=length, fixed=fixed)

    @functools.cached_property
    def ids(self) -> Tensor:
        """The texts (3, N), or (3, N, E), that are read."""
        return self.texts[:, : self.length].contiguous()

    @property
    def even(self) -> int:
        """The largest power of two up to `length`, a usual length in training; of an example its own length."""
        return self.length if self.has_example else 1 << (self.length.bit_length() - 1)

    @property
    def lengths(self) -> list[int]:
        """Tokens of the texts that are read: `length`, `even`, and twice `even` or as many as `texts` have."""
        return list(dict.fromkeys((self.length, self.even, min(2 * self.even, self.texts.shape[1]))))

    @property
    def reads_tokens(self) -> bool:
        return not self.ids.is_floating_point()

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.original.parameters())

    @property
    def ours(self) -> bool:
        """True for a model made of our parts, in double precision throughout."""
        return self.kind in ("fullrank", "translator")

    @property
    def has_modes(self) -> bool:
        """True for a model that can be put into training; a function in which no module was found cannot."""
        return not isinstance(self.original, AsModule) or any(True for _ in self.original.children())

    @property
    def has_state(self) -> bool:
        """True where the model says that its cache is a recurrent state."""
        return bool(getattr(self.model, "_is_stateful", False))

    @property
    def pads_left(self) -> bool:
        """True where a text padded on the left is read as the text alone: its positions are counted, or given."""
        return self.ours or (self.first_position is not None and not self.has_state)

    @property
    def injected(self) -> bool:
        """True where `fullrank.inject` put our stages into a model of Hugging Face."""
        return self.kind == "hugging_face" and any("fullrank" in module._modules for module in self.model.modules())

    @property
    def core(self) -> Subject:
        """The language model of ours inside a `FullRankForCausalLM`; any other model itself."""
        inside = self.model._modules.get("model")
        if self.kind != "hugging_face" or not isinstance(inside, LanguageModel):
            return self
        return replace(self, model=inside, original=self.original.model)

    @functools.cached_property
    def single(self) -> Subject | None:
        """The model in fp32, for what cannot be computed in fp64; None where it is in fp32 already."""
        if self.dtype != torch.float64:
            return None
        return replace(self, model=move_copy(self.original).float(), dtype=torch.float32)

    @property
    def sees_future(self) -> str:
        """The key of the configuration by which attention of ours, in any model, looks ahead on purpose; empty without one."""
        if not any(isinstance(module, Attention) and module.attend.sees_future for module in self.model.modules()):
            return ""
        decoder = self.model.config.decoder if self.ours else None
        place = "decoder.attention" if decoder is not None and decoder.attention is not None else "attention"
        return f"model.{place}.causal: as_published"

    @property
    def mask_name(self) -> str:
        return "decoder_attention_mask" if self.sequence.startswith("decoder_") else "attention_mask"

    @property
    def without_mask(self) -> str:
        """The reason why no mask of padding can be given."""
        arguments = read_arguments(self.original)
        if self.mask_name not in arguments:
            others = [name for name in arguments if "mask" in name]
            advice = f"; check a function that takes {' or '.join(others)} by that name" if others else ""
            return f"forward takes no {self.mask_name}{advice}"
        return f"{self.mask_name} is no mask of padding (B, N), of numbers or of booleans; which argument is the mask?"

    def masks(self) -> dict[str, Tensor]:
        """Make attention masks (3, N) of rows of unequal lengths by the side of the padding, and one of ones."""
        ones = torch.ones(self.ids.shape[:2], dtype=torch.int64, device=self.ids.device)
        right = ones.clone()
        right[1, -(self.length // 3) :] = 0
        right[2, -(self.length // 2) :] = 0
        return {"right": right, "left": right.flip(1), "ones": ones}


def fit_rows(value: Any, count: int, dtype: torch.dtype) -> Any:
    """Repeat the three rows of an input in turn; an input of another form stays as it is.

    Args:
        value: the input.
        count: rows that are needed.
        dtype: what floating-point numbers are converted to.
    """
    if not isinstance(value, Tensor):
        return value
    if value.dim() and len(value) == ROWS != count:
        value = value[torch.arange(count, device=value.device) % ROWS]
    return value.to(dtype) if value.is_floating_point() else value


def text_config(model: Any) -> Any:
    """Find the configuration of a model, or of its decoder of texts; None without one."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def open_subject(
    model: Any,
    vocab_size: int | None = None,
    length: int | None = None,
    inputs: Any = None,
    sequence: str | None = None,
    step: Callable[..., tuple[Tensor, Any]] | None = None,
) -> Subject:
    """Make a model ready to be checked; it is left as it is.

    Args:
        model: a module, or a function of token ids.
        vocab_size: as for `check`.
        length: as for `check`.
        inputs: as for `check`.
        sequence: as for `check`.
        step: as for `check`.

    Raises:
        InputError: the model gives no logits (B, N, V), time seems to come first, or an option does not fit.
    """
    model = getattr(model, "_orig_mod", model)  # a compiled module: its own code is what hooks see
    if not callable(model):
        raise InputError(f"model: a torch module or a function of token ids, given {type(model).__name__}")
    model = model if isinstance(model, nn.Module) else AsModule(model)
    device = next((tensor.device for tensor in list_tensors(model)), torch.device("cpu"))
    if device.type == "meta":
        raise InputError("a model on the meta device has no numbers to check; build it on the cpu")
    if inputs is not None and length is not None:
        raise InputError(f"length: {length}, but the example inputs have a length of their own; give one of the two")
    texts = torch.zeros(ROWS, 0, dtype=torch.int64, device=device)
    subject = Subject(model, model, vocab_size or find_vocab_size(model), texts, step=step)
    if inputs is None:
        subject = _add_texts(subject, sequence, _choose_length(subject, length))
        subject = prepare(subject, () if length else _SHORTER)
    else:
        subject = prepare(_add_example(subject, inputs, sequence))
    with torch.no_grad(), mode(subject.model, training=False):
        if subject.kind == "module":
            refuse_time_first(subject)
        if len(subject.words) < subject.vocab_size:
            selecting = replace(subject, selects=True)
            if equals(lambda: selecting.logits(subject.ids), subject.logits(subject.ids)):
                subject = selecting
            elif length is None and inputs is None:  # shorter texts take less time, too
                subject = subject.with_length(_choose_length(subject, None, SHORT - 4))
        subject = replace(subject, mask_form=find_mask_form(subject))
        subject = replace(subject, first_position=find_first_position(subject))
        if subject.texts.is_cuda or not equals(lambda: subject.logits(subject.texts)):
            subject = replace(subject, texts=subject.ids)
        return subject


def find_vocab_size(model: nn.Module) -> int:
    """Find the vocabulary size in the configuration, or in the first table of embeddings; 0 where neither has it."""
    size = getattr(text_config(model), "vocab_size", None)
    tables = (module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
    return size if isinstance(size, int) else next(tables, 0)


def _choose_length(subject: Subject, length: int | None, most: int = 10**9) -> int:
    """Choose how many tokens a text has.

    By default this is a prime that no size of the model equals, so that positions are recognised by it.
    """
    model: Any = subject.original
    longest = model.max_length if subject.ours else getattr(text_config(model), "max_position_embeddings", None)
    longest = longest if isinstance(longest, int) and longest > 0 else 10**9
    if length is None:
        most = min(longest, most, 37 if subject.parameters > LARGE else longest)
        sizes = {size for tensor in list_tensors(model) for size in tensor.shape}
        length = next((size for size in LENGTHS if size <= most and size not in sizes), most)
    if not 3 <= length <= longest:
        most_read = f" and the model reads {longest}" if longest < 10**9 else ""
        raise InputError(f"length: {length} tokens, but a check needs 3{most_read}")
    return length


def _add_texts(subject: Subject, sequence: str | None, length: int) -> Subject:
    """Give the subject random texts, longer than are read; a model of two sequences gets random sources, too."""
    model: Any = subject.original
    name = type(model).__name__
    if subject.vocab_size < 2:
        raise InputError(f"{name} does not say how many token ids it knows; give vocab_size, 2 or more")
    subject = replace(subject, length=length, sequence=sequence or "")
    texts = subject.draw_tokens(2 * subject.even + 3, SEED)
    if subject.kind == "module":  # which may take token 0 for padding
        texts[-1, length - max(1, length // 4) : length] = 0
    count = max(1, length - 2)
    words = subject.vocab_size
    if subject.kind == "translator":
        count = min(count, model.max_source_length or length)
        words = model.encoder.config.vocab_size
    elif not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return replace(subject, texts=texts)
    sources = torch.randint(words, (ROWS, count), generator=torch.Generator().manual_seed(15)).to(texts.device)
    fixed = {"input_ids": subject.replace_padding(sources)}
    return replace(subject, texts=texts[:, :length], fixed=fixed, sequence=sequence or "decoder_input_ids")


def _add_example(subject: Subject, inputs: Any, sequence: str | None) -> Subject:
    """Give the subject the example inputs of a user."""
    names = list(read_arguments(subject.original))
    values = inputs if isinstance(inputs, tuple | list) else (inputs,)
    example = dict(inputs if isinstance(inputs, Mapping) else zip(names, values, strict=False))
    tensors = [name for name, value in example.items() if isinstance(value, Tensor) and value.dim() >= 2]
    name = sequence or next((candidate for candidate in (*_SEQUENCES, *tensors) if candidate in tensors), "")
    if name not in tensors or example[name].shape[1] < 3:
        raise InputError(
            f"sequence: {name or 'none'}; the input along which the check looks is one of the tensors (B, N) or (B, N, E) "
            f"with 3 or more positions in inputs: {', '.join(tensors) or 'there is none'}; inputs: a dict of tensors by "
            f"argument ({', '.join(names)}), a tuple of them, or a tensor"
        )
    texts: Tensor = example.pop(name)
    if not texts.is_floating_point() and subject.vocab_size < 2:
        raise InputError(f"{type(subject.original).__name__} does not say how many token ids it knows; give vocab_size")
    device = subject.texts.device
    rows = torch.arange(ROWS) % len(texts)
    for other, value in example.items():
        if isinstance(value, Tensor):
            example[other] = (value[rows] if value.dim() and len(value) == len(texts) else value).to(device)
    subject = replace(subject, texts=texts[rows].to(device), length=texts.shape[1], has_example=True)
    return replace(subject, fixed=example, sequence=name, vocab_size=max(2, subject.vocab_size))


def prepare(subject: Subject, shorter: Sequence[int] = ()) -> Subject:
    """Give the subject a copy of the model with moved parameters, in double precision where the model can compute in it.

    Some models cannot, as they have constants in fp32; their copy keeps the dtype of the model. `shorter` are lengths of texts
    that are tried after its own, since a model may not say how long a text it reads.
    Raises InputError where no length and precision runs, or the model gives no logits (B, N, V).
    """
    original = subject.original
    name = type(original).__name__
    error: Exception | None = None
    precisions = (True, False) if subject.parameters <= DOUBLE_UP_TO else (False,)
    lengths = [subject.length, *(length for length in shorter if length < subject.length)]
    for length, is_double in itertools.product(lengths, precisions):
        tried = replace(subject.with_length(length), model=move_copy(original))
        model = tried.model
        try:
            if is_double:
                if hasattr(model, "set_experts_implementation"):  # some lack double precision
                    model.set_experts_implementation("eager")
                model.double()
            with torch.no_grad(), mode(model, training=False):
                logits = logits_in(tried.call(tried.ids))
        except Exception as reason:
            error = error or reason
            continue
        if is_double and bool(logits.isnan().any()):
            continue
        if logits.dim() != 3 or logits.shape[:2] != tried.ids.shape[:2]:
            shape = (*tried.ids.shape[:2], "V")
            raise InputError(f"{name}: logits must be (B, N, V) = {shape}, given {tuple(logits.shape)}")
        dtype = min(logits.dtype, find_dtype(model), key=lambda dtype: dtype.itemsize)
        return replace(tried, dtype=dtype)
    raise InputError(
        f"{name}: a text of {subject.length} tokens raised {type(error).__name__}: {one_line(error or Exception())}; "
        "a model that needs other inputs is checked with inputs={...}, examples by argument; length= gives other texts"
    ) from error


def equals(read: Callable[[], Tensor], expected: Tensor | None = None) -> bool:
    """Return whether the model can be read so, and gives the expected logits (None: any), up to rounding in any type."""
    try:
        logits = read()
    except Exception:
        return False
    return expected is None or agree(logits, expected)


def agree(logits: Tensor, expected: Tensor) -> bool:
    """Return whether logits are equal up to rounding in any type."""
    return logits.shape == expected.shape and torch.allclose(logits, expected, 1e-4, 1e-4, equal_nan=True)


def refuse_time_first(subject: Subject) -> None:
    """Raise InputError where rows of ids depend on each other, and positions of a row do not."""
    ids = subject.ids
    changed = subject.change(ids)
    other_row = torch.cat((changed[:1], ids[1:]))
    other_position = torch.cat((changed[:, :1], ids[:, 1:]), 1)
    try:
        logits, after_row, after_position = map(subject.logits, (ids, other_row, other_position))
    except Exception:  # a check says why
        return
    if largest(after_row[1:], logits[1:]) > 1e-4 and not largest(after_position[:, 1:], logits[:, 1:]) > 1e-7:
        raise InputError(
            f"{subject.sequence or 'the model'}: rows see each other, positions of a row do not: time seems to come "
            "first; check a function that reads (B, N), such as lambda ids: model(ids.mT).transpose(0, 1)"
        )


def find_mask_form(subject: Subject) -> MaskForm | None:
    """Find the form in which the model takes a mask of padding: as 1 and 0, booleans of either sense, or 0 and -inf.

    It is the first form by which a mask without padding changes nothing and a first token that is padding is not seen by
    later ones; else the first one that the model takes. None where it refuses all.
    """
    if subject.mask_name not in read_arguments(subject.original):
        return None
    if subject.kind != "module":
        return MASKS[0]
    example = subject.fixed.get(subject.mask_name)
    ids = subject.ids
    if isinstance(example, Tensor) and example.shape[:2] != ids.shape[:2]:
        return None  # a mask of queries and keys, not of padding
    ones = subject.masks()["ones"]
    hidden = ones.clone()
    hidden[:, 0] = 0
    other_first = torch.cat((ids.roll(1, 0)[:, :1], ids[:, 1:]), 1)
    logits = subject.logits(ids)
    accepted_forms = []
    for form in MASKS:
        tried = replace(subject, mask_form=form)
        with contextlib.suppress(Exception):
            with_ones = tried.logits(ids, ones)
            accepted_forms.append(form)
            is_hidden = agree(tried.logits(ids, hidden)[:, 1:], tried.logits(other_first, hidden)[:, 1:])
            if is_hidden and agree(with_ones, logits):
                return form
    return next(iter(accepted_forms), None)


def find_first_position(subject: Subject) -> int | None:
    """Find the position id of the first token, with which given positions change nothing; None: they cannot be given."""
    if subject.sequence.startswith("decoder_") or "position_ids" not in read_arguments(subject.original):
        return None
    logits = subject.logits(subject.ids)
    for first in range(4):  # RoBERTa counts from padding on
        positions = torch.arange(first, first + subject.length, device=subject.ids.device).expand(ROWS, -1)
        if equals(functools.partial(subject.logits, subject.ids, position_ids=positions), logits):
            return first
    return None
