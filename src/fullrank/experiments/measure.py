"""Perplexity of a text: the protocol by which it is read, the passages that this makes, the sum of nats, and figures.

    blocks     consecutive blocks, each read by itself
    window     overlapping windows, of which only the ends are scored: every token has much context, at many times the cost
    memory     parallel streams in segments, each segment with a memory of what came before it in its stream
    masked     consecutive blocks, of which only masked tokens are scored

Every token is scored exactly once in each of the first three. Nats are summed in float64, tokens are counted, and one
division comes last. Passages are read side by side: a block is a passage whose every token counts, a window one whose
beginning is only read, and a stream one that a model with memory reads in segments.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fullrank.config.finetune import TextFinetuneConfig
from fullrank.config.run import MASKED_TOKEN, PROTOCOL_KEYS, EvalConfig, RunConfig
from fullrank.core.config import NOT_NEXT_TOKEN, stage_options, with_memory
from fullrank.core.decoder import LanguageModel
from fullrank.core.draws import evaluating
from fullrank.core.errors import InputError, count_things
from fullrank.core.output import Tempered
from fullrank.core.registry import with_parts
from fullrank.data.padded_batches import batches_by_length
from fullrank.files import Entries, batched
from fullrank.training.device import all_reduce, device_of, rank, world_size
from fullrank.training.values import EvaluationResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluationProtocol:
    """How a text is read for its perplexity. Lengths are in tokens.

    segment_length: tokens read at a time (of a window: `context + stride`).
    context, stride: tokens of a window that are read again, and those that are scored; None unless `kind` is `window`.
    streams: how many, each begun without memory (with one of zeros where `memory_start` says so); None unless `memory`.
    memory_length, same_length: tokens remembered; with `same_length` every query sees as many keys, itself included.
    clamp_length: relative positions beyond it count as it; None: no limit, or no relative positions.
    next_token: every token is scored given earlier ones only. False where tokens of a model see later ones, unless
    `only_last`: what it reads then ends before the target.
    temperature: divides the logits.
    """

    kind: Literal["blocks", "window", "memory"]
    segment_length: int
    context: int | None = None
    stride: int | None = None
    streams: int | None = None
    memory_length: int = 0
    memory_start: Literal["empty", "zeros"] = "empty"
    same_length: bool = False
    clamp_length: int | None = None
    next_token: bool = True
    temperature: float = 1.0

    @property
    def only_last(self) -> bool:
        """True if only the last position of each reading is scored, whose target is not read."""
        return self.segment_length == 1 or (self.kind == "window" and self.stride == 1)

    def in_words(self) -> str:
        """Describe the protocol in a sentence for people, which is printed and saved with every figure."""
        match self.kind:
            case "blocks":
                words = (
                    f"consecutive blocks of {count_things(self.segment_length, 'token')}, every token scored once, given the "
                    "tokens before it in its block and the one before the block"
                )
            case "window":
                fewest = (self.context or 0) + 1  # a target's input is the token before it
                most = self.segment_length
                span = f"{fewest} to {most} tokens" if most > fewest else count_things(most, "token")
                last = "the last" if self.only_last else f"one of the last {self.stride}"
                words = (
                    f"windows of {self.segment_length} tokens that overlap by {self.context}, every token scored once, "
                    f"as {last} of its window, given the {span} before it (fewer at the beginning of the text)"
                )
            case "memory":
                streams = "1 stream, begun" if self.streams == 1 else f"{self.streams} streams, each begun"
                start = "without memory" if self.memory_start == "empty" else "with a memory of zeros"
                seen = ""
                if self.same_length:
                    seen = f", every query sees at most {count_things(self.memory_length, 'key')}, its own included"
                words = (
                    f"{streams} {start}, read in segments of {count_things(self.segment_length, 'token')} with up to "
                    f"{count_things(self.memory_length, 'token')} of memory{seen}; every token scored once"
                )
        if self.clamp_length is not None:
            words += f"; positions clamped at {self.clamp_length}"
        if self.temperature != 1:
            words += f"; logits divided by {self.temperature:g}"
        return words if self.next_token else f"{words}; {NOT_NEXT_TOKEN}"


def change_evaluation(config: RunConfig, changes: Mapping[str, Any], split: str = "test") -> RunConfig:
    """Change the evaluation of a configuration so that `eval` alone says how a split is read.

    The section of that split overrides `eval`, and `changes` override both. A change drops what it excludes: a memory
    drops the window, another length of a segment drops the stride (or, with a stride, the context).

    Args:
        config: configuration of a run.
        changes: keys of `eval` that are set otherwise.
        split: split that is read.

    Returns:
        The configuration with another `eval`.

    Raises:
        ConfigError: `eval` has no such key, or it does not go with the run.
    """
    settings = config.eval.to_dict()
    sections = {name: settings.pop(name) or {} for name in ("valid", "test")}
    settings |= {key: value for key, value in sections.get(split, {}).items() if value is not None}
    if "segment_length" in changes and settings["context"] is not None:
        settings["context" if "stride" in changes else "stride"] = None
    if changes.get("memory_length"):
        settings |= {"context": None, "stride": None}
    return replace(config, eval=EvalConfig.from_dict({**settings, **changes}))


def validation_protocol(config: RunConfig) -> EvaluationProtocol:
    """Choose the protocol of validation while training.

    It is `eval.valid`, else the model's own memory, or blocks of `eval.segment_length`.
    """
    if config.eval.valid is None:
        as_trained: dict[str, Any] = dict.fromkeys(PROTOCOL_KEYS[1:])  # all but segment_length
        config = replace(config, eval=replace(config.eval, **as_trained))
    return replace(final_protocol(config, "valid"), temperature=1.0)


def final_protocol(config: RunConfig, split: str = "test") -> EvaluationProtocol:
    """Choose the protocol of a split's final figures: as `eval` and its section of that split say, else as in training.

    It has windows where there is a context, streams where there is a memory, else blocks. The clamp is that of training
    by default.
    Raises InputError for settings that exclude each other, and for those that the model cannot have.
    """
    config = change_evaluation(config, {}, split)
    model = config.model
    evaluation = config.eval
    memory_length = model.memory_length if evaluation.memory_length is None else evaluation.memory_length
    same_length = model.same_length if evaluation.same_length is None else evaluation.same_length
    if evaluation.same_length and not memory_length and evaluation.memory_length is None:
        raise InputError(
            "eval.same_length: goes with a memory, and the text is read without one; give eval.memory_length "
            "(--memory-length) too"
        )
    clamp_length = evaluation.clamp_length
    if isinstance(config, TextFinetuneConfig):
        if memory_length:
            raise InputError(f"eval.memory_length: for models of ours, given {memory_length} for a pretrained one")
    else:
        with_memory(model, memory_length, same_length=same_length and memory_length > 0, clamp_length=clamp_length)
    if clamp_length is None and model.position == "relative":
        clamp_length = stage_options(model.attention.score).get("clamp_length")
    segment_length = evaluation.segment_length or config.train.segment_length
    context, stride = _choose_window(evaluation, segment_length)
    if memory_length and stride:
        raise InputError(
            f"eval.context, eval.stride: a sliding window is for models without memory, given memory_length {memory_length}; "
            "give one of the two (--memory-length 0)"
        )
    settings: dict[str, Any] = {"kind": "blocks"}
    if context and stride:
        settings = {"kind": "window", "context": context, "stride": stride}
    elif memory_length:
        settings = {"kind": "memory", "streams": evaluation.batch_size, "memory_length": memory_length}
        settings |= {"memory_start": model.memory_start, "same_length": same_length}
    protocol = EvaluationProtocol(
        segment_length=(context or 0) + (stride or segment_length),
        clamp_length=clamp_length,
        temperature=evaluation.temperature or 1.0,
        **settings,
    )
    return replace(protocol, next_token=not model.sees_future or protocol.only_last)


def warn_of_length(config: RunConfig, protocol: Any) -> None:
    """Warn where more tokens are read at once than in training: positions beyond may mean nothing to a model of ours."""
    if config.translates or config.model.position == "pretrained":
        return
    read = protocol.segment_length
    trained = config.train.segment_length + config.train.context
    if read > trained and protocol.kind != "memory":
        logger.warning(
            f"warning: segments of {read} tokens, but the model is trained on {trained} and may not go further"
        )


def _choose_window(evaluation: EvalConfig, segment_length: int) -> tuple[int | None, int | None]:
    """Choose context and stride, None where no window slides.

    Where `eval` states one of them, the other is the rest of the segment.
    """
    context = evaluation.context
    stride = evaluation.stride
    if context is None and stride is None:
        return None, None
    context = segment_length - (stride or 0) if context is None else context
    stride = segment_length - context if stride is None else stride
    if context < 0 or stride < 1:
        raise InputError(
            "eval.context, eval.stride: a window has context + stride tokens, and a stride of 1 or more; given context "
            f"{evaluation.context}, stride {evaluation.stride} and segment_length {segment_length}; change one of them"
        )
    return context, stride


@dataclass(frozen=True, kw_only=True)
class MaskedProtocol:
    """Blocks of `segment_length` tokens, each read by itself, and which of their tokens are masked and scored.

    Masks are a function of `mask_seed` and the place in the text: the same for every run, size of blocks and batches.
    """

    segment_length: int
    mlm_probability: float
    mask_replace_prob: float
    random_replace_prob: float
    mask_seed: int
    kind: str = "masked"
    next_token: bool = False

    def in_words(self) -> str:
        """Describe the protocol in a sentence for people, which is printed and saved with every figure."""
        return (
            f"{100 * self.mlm_probability:.4g} % of the tokens asked for, the same in every run (seed {self.mask_seed}), given "
            f"all of their block of {self.segment_length} tokens; {MASKED_TOKEN}"
        )


@dataclass(frozen=True)
class Evaluation(EvaluationResult):
    """Nats summed over `tokens` targets, and scores.

    last_position: of the last target of each segment alone, where the others are among what the model reads.
    """

    last_position: Evaluation | None = None


class Tally:
    """Nats summed in float64 on the device, over all processes that share a text; nothing is read back before `total`."""

    def __init__(self, device: torch.device | str) -> None:
        self._nats = torch.zeros((), dtype=torch.float64, device=device)
        self._targets = 0

    def add(self, nll: Tensor) -> None:
        """Add nats of targets that count, in any shape."""
        self._nats += nll.double().sum()
        self._targets += nll.numel()

    def total(self) -> Evaluation:
        """Return the sums; InputError if there was no target at all."""
        targets = self._nats.new_tensor(self._targets)
        nats, tokens = all_reduce(torch.stack((self._nats, targets))).tolist()
        if tokens == 0:
            raise InputError("nothing to evaluate: no token of the text is scored")
        return Evaluation(nats, int(tokens))


def figures(
    evaluation: Evaluation,
    words: int | None = None,
    characters: int | None = None,
    bytes: int | None = None,
    line_starts: int | None = None,
) -> Entries:
    """Compute the figures of an evaluation.

        nll = S / tokens        perplexity = exp(nll)        perplexity_per_word = exp(S / words)
        bits_per_character = S / (ln 2 * characters)         bits_per_byte = S / (ln 2 * bytes)

        tokens_without_sos = tokens - line_starts            perplexity_without_sos = exp(S / tokens_without_sos)
        accuracy_percent = 100 correct / tokens

    S is the sum of nats; `nll` is in nats per token. Figures per word, character and byte do not depend on how the text
    was cut into tokens, and compare models with different vocabularies. The counts must be those of the text evaluated.
    `last_position` has nll, perplexity and tokens of the last targets alone, where they were counted. On enwik8, what
    papers call bits per character (bpc) is `bits_per_byte`: they count bytes. Papers without `<sos>` count the other
    tokens only, for the same text and the same S. After `<eos>` a `<sos>` is certain and costs almost nothing.

    Args:
        evaluation: sums over the text.
        words: words of the text; None for no figure per word.
        characters: characters of the text; None for no figure per character.
        bytes: bytes of the text; None for no figure per byte.
        line_starts: how many of the tokens are `<sos>`; None for no figure without them.

    Returns:
        Figures by name. One that is not finite (a perplexity beyond every float, a diverged model) is left out.
    """
    nats = evaluation.nll
    tokens = evaluation.tokens
    result: Entries = {"nll": nats / tokens, "perplexity": _exp(nats / tokens), **evaluation.scores}
    result["tokens"] = tokens
    if line_starts is not None:
        result["tokens_without_sos"] = tokens - line_starts
        result["perplexity_without_sos"] = _exp(nats / (tokens - line_starts))
    if words is not None:
        result["perplexity_per_word"] = _exp(nats / words)
    for key, count in (("bits_per_character", characters), ("bits_per_byte", bytes)):
        if count is not None:
            result[key] = nats / (math.log(2) * count)
    result = {key: value for key, value in result.items() if math.isfinite(value)}
    if evaluation.last_position is not None:
        result["last_position"] = figures(evaluation.last_position)
    return result


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(model: Any, ids: np.ndarray, protocol: EvaluationProtocol, *, batch_size: int, start_id: int) -> Evaluation:
    """Sum the nll of a text, read as a protocol says.

    The model is put into evaluation mode, and its mode is restored. The precision is that around the call: while
    training that of training, for final figures fp32. Where the protocol gives no next-token perplexity, the last
    positions of blocks or windows are measured alone, too.

    Args:
        model: causal language model.
        ids: token ids of the text (N,).
        protocol: how it is read.
        batch_size: blocks or windows at a time; streams are as many as the protocol says.
        start_id: token that the text follows.

    Returns:
        Nats, and the number of tokens that are scored.

    Raises:
        InputError: the model cannot read so many tokens (`check_length`).
    """
    check_length(model, protocol, len(ids))
    all_passages = passages(ids, protocol, start_id)
    share = slice(rank(), None, world_size())
    if protocol.streams is None:
        batches = list(batched(all_passages, batch_size))[share]
    else:  # streams are shared, each with its memory
        batches = list(batched(all_passages[share], protocol.streams))
    tally = Tally(device_of(model))
    with evaluating(model):
        changed = apply_protocol(model, protocol)
        if model.config.sees_future and protocol.streams is None:
            result = _score_padded(changed, batches, tally)
            return replace(result, last_position=None) if protocol.next_token else result
        for batch in batches:
            for states in read_states(changed, batch, protocol.segment_length):
                tally.add(changed.output.nll(states.hidden, states.targets))
    return tally.total()


def apply_protocol(model: LanguageModel, protocol: EvaluationProtocol) -> LanguageModel:
    """Return the model with the memory, the clamp and the temperature of a protocol; the result shares all parameters."""
    changed = model.with_memory(
        protocol.memory_length, same_length=protocol.same_length, clamp_length=protocol.clamp_length
    )
    return divide_logits(changed, protocol.temperature)


def divide_logits(model: LanguageModel, temperature: float) -> LanguageModel:
    """Return the model with its logits divided by a temperature; the result shares all parameters.

    Raises ConfigError for sigsoftmax, and for an output layer that has an nll of its own.
    """
    return model if temperature == 1 else with_parts(model, output=Tempered(model.output, temperature))


def check_length(model: LanguageModel, protocol: EvaluationProtocol, tokens: int) -> None:
    """Raise InputError if the model has no positions for what is read in one go: a block, a window, or a whole stream.

    Args:
        model: causal language model.
        protocol: how the text is read.
        tokens: length of the text.
    """
    limit = model.max_length
    if limit is None:
        return
    if protocol.streams is None:
        check_block(limit, min(tokens, protocol.segment_length))
        return
    stream = math.ceil(tokens / protocol.streams)
    if stream > limit:
        raise InputError(
            f"a stream of {stream:,} tokens is longer than the {limit:,} positions of this model "
            "(model.max_position_embeddings), and positions go on through the memory; measure it in more streams "
            "(eval.batch_size or --batch-size) or without memory (eval.memory_length or --memory-length 0)"
        )


def check_block(limit: int | None, longest: int) -> None:
    """Raise InputError if a block or window of `longest` tokens is longer than a model of `limit` positions can read."""
    if limit is not None and longest > limit:
        raise InputError(
            f"a block or window of {longest:,} tokens is longer than the {limit:,} positions of this model "
            "(model.max_position_embeddings); shorten it (eval.segment_length or --segment-length)"
        )


_LOGITS = 1 << 24  # numbers in a block of logits


@dataclass(frozen=True)
class Passage:
    """Tokens that are read from the first to the last but one, and predicted from the second to the last.

    ids (N + 1,): inputs ids[:-1], targets ids[1:]. The first `unscored` targets are only read.
    """

    ids: np.ndarray
    unscored: int = 0

    @property
    def inputs(self) -> int:
        """N."""
        return len(self.ids) - 1


class States(NamedTuple):
    """Inputs (1, T, E) of the output layer and targets (1, T) of the tokens that count; rows (T,): their passages."""

    hidden: Tensor
    targets: Tensor
    rows: Tensor


def passages(ids: Sequence[int] | np.ndarray, protocol: EvaluationProtocol, start_id: int) -> list[Passage]:
    """Cut a whole text as a protocol reads it: blocks, overlapping windows, or streams; every token counts once.

    Args:
        ids: token ids of the text (N,).
        protocol: how it is read.
        start_id: token that the first one follows. The first of a block or stream follows the token before it.

    Returns:
        Passages, in the order of the text.
    """
    text = np.concatenate(([start_id], ids)).astype(np.int64)
    tokens = len(ids)
    context = protocol.context or 0
    stride = protocol.stride or protocol.segment_length
    if protocol.streams is not None:
        stride = max(-(-tokens // protocol.streams), 1)
    parts = []
    for scored in range(0, tokens, stride):
        start = max(scored - context, 0)
        parts.append(Passage(text[start : min(scored + stride, tokens) + 1], scored - start))
    return parts


def _pad(batch: Sequence[Passage], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Pad passages on the right: ids (B, N + 1), which (B, N) of their inputs are tokens, and which targets count."""
    ids = pad_sequence([torch.from_numpy(passage.ids) for passage in batch], batch_first=True)
    ends = torch.tensor([[passage.inputs] for passage in batch])
    starts = torch.tensor([[passage.unscored] for passage in batch])
    places = torch.arange(int(ends.max()))
    is_token = places < ends
    counts = is_token & (places >= starts)
    return ids.to(device), is_token.to(device), counts.to(device)


def read_states(model: LanguageModel, batch: Sequence[Passage], segment_length: int) -> Iterator[States]:
    """Yield the states of the targets that count, of passages read side by side.

    A model with memory reads them in segments, and each segment remembers the ones before it. One without reads all at
    once.

    Args:
        model: causal language model.
        batch: passages read side by side.
        segment_length: tokens of a segment.

    Yields:
        The states of each segment with targets that count.
    """
    ids, _, counts = _pad(batch, device_of(model))
    step = segment_length if model.memory_length else counts.shape[1]
    memory = None
    segments = (part.split(step, dim=1) for part in (ids[:, :-1], ids[:, 1:], counts))
    for inputs, targets, counted in zip(*segments, strict=True):
        hidden, memory, _ = model.hidden(inputs, memory)
        if counted.any():
            yield States(hidden[counted][None], targets[counted][None], counted.nonzero()[:, 0])


def _score_padded(model: LanguageModel, batches: Sequence[Sequence[Passage]], tally: Tally) -> Evaluation:
    """Score blocks or windows of a model whose tokens see later ones: padding is masked, and last positions are counted.

    The last target of a row is the only one that the model does not read in the same row.
    """
    last_tally = Tally(device_of(model))
    for batch in batches:
        ids, is_token, counts = _pad(batch, device_of(model))
        mask = None if is_token.all() else is_token
        per_token = model.nll(ids[:, :-1], ids[:, 1:], attention_mask=mask).per_token
        tally.add(per_token[counts])
        last_tally.add(per_token.gather(1, is_token.sum(1, keepdim=True) - 1))
    return replace(tally.total(), last_position=last_tally.total())


def score(
    model: LanguageModel, texts: Sequence[Passage], *, segment_length: int, batch_size: int
) -> list[tuple[float, bool]]:
    """Score the targets that count of every passage.

    Passages of like length are read side by side, by a model that is in evaluation mode already.

    Args:
        model: causal language model.
        texts: passages to score, of any lengths.
        segment_length: tokens of a segment, for a model with memory.
        batch_size: passages at a time.

    Returns:
        For every passage log p in nats of the targets that count, and whether each of them was the model's first
        choice.
    """
    scores: dict[int, tuple[float, bool]] = {}
    for batch in batches_by_length([text.inputs for text in texts], batch_size):
        log_probs, missed = torch.zeros(2, len(batch), dtype=torch.float64, device=device_of(model))
        with torch.no_grad():
            for states in read_states(model, [texts[i] for i in batch], segment_length):
                log_probs.index_add_(0, states.rows, -model.output.nll(states.hidden, states.targets)[0].double())
                wrong = choose_first(model, states.hidden[0]) != states.targets[0]
                missed.index_add_(0, states.rows, wrong.double())
        for i, log_prob, misses in zip(batch, log_probs.tolist(), missed.tolist(), strict=True):
            scores[i] = (log_prob, misses == 0)
    return [scores[i] for i in range(len(texts))]


def choose_first(model: Any, hidden: Tensor) -> Tensor:
    """Choose the most probable token after each of hidden (T, E), (T,); a few tokens at a time, to save memory."""
    rows = max(_LOGITS // model.config.vocab_size, 1)
    return torch.cat([model.output(part[None])[0].argmax(-1) for part in hidden.split(rows)])
