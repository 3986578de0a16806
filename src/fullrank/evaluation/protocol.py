"""How a text is read while perplexity is measured: a value, made in one place, that says itself in words.

    blocks     consecutive blocks, each read by itself
    window     overlapping windows, of which only the ends are scored: every token has much context, at many times the cost
    memory     parallel streams in segments, each segment with a memory of what came before it in its stream

Every token is scored exactly once in each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from fullrank.config.run import RunConfig
from fullrank.core.config import NOT_NEXT_TOKEN, stage_options, with_memory
from fullrank.core.errors import ConfigError, InputError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EvaluationProtocol:
    """`segment_length`: tokens read at a time (of a window: `context + stride`). Lengths are in tokens.

    context, stride: tokens of a window that are read again, and those that are scored; None unless `kind` is `window`.
    streams: how many, each begun without memory (with one of zeros where `memory_start` says so); None unless `memory`.
    memory_length, same_length: tokens remembered; with `same_length` every query sees as many keys, itself included.
    clamp_length: relative positions beyond it count as it; None: no limit, or no relative positions.
    next_token: every token is scored given earlier ones only. False where tokens of a model see later ones, unless
    `only_last`: what it reads then ends before the target.
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

    @property
    def only_last(self) -> bool:
        """Whether nothing is scored but the last position of what is read at a time, whose target is not read."""
        return self.segment_length == 1 or (self.kind == "window" and self.stride == 1)

    def in_words(self) -> str:
        """The protocol as a sentence, for people: printed and saved with every figure."""
        match self.kind:
            case "blocks":
                said = (
                    f"consecutive blocks of {_tokens(self.segment_length)}, every token scored once, given the tokens "
                    "before it in its block and the one before the block"
                )
            case "window":
                said = self._window_in_words()
            case "memory":
                said = self._memory_in_words()
        if self.clamp_length is not None:
            said += f"; positions clamped at {self.clamp_length}"
        return said if self.next_token else f"{said}; {NOT_NEXT_TOKEN}"

    def _window_in_words(self) -> str:
        assert self.context is not None
        assert self.stride is not None
        fewest, most = self.context + 1, self.context + self.stride  # the input of a target is the token before it
        span = f"{fewest} to {most} tokens" if most > fewest else _tokens(most)
        last = f"one of the last {self.stride}" if self.stride > 1 else "the last"
        return (
            f"windows of {self.segment_length} tokens that overlap by {self.context}, every token scored once, "
            f"as {last} of its window, given the {span} before it (fewer at the beginning of the text)"
        )

    def _memory_in_words(self) -> str:
        many = self.streams != 1
        begun = "without memory" if self.memory_start == "empty" else "with a memory of zeros"
        most = f"{self.memory_length} key{'s' if self.memory_length != 1 else ''}"
        keys = f", every query sees at most {most}, its own included" if self.same_length else ""
        return (
            f"{self.streams} {'streams, each begun' if many else 'stream, begun'} {begun}, read in segments of "
            f"{_tokens(self.segment_length)} with up to {_tokens(self.memory_length)} of memory{keys}; every token scored once"
        )


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says about the protocol; None: what the configuration says."""

    segment_length: int | None = None
    batch_size: int | None = None
    context: int | None = None
    stride: int | None = None
    memory_length: int | None = None
    same_length: bool | None = None
    clamp_length: int | None = None


def judging_protocol(config: RunConfig) -> EvaluationProtocol:
    """How a model is judged while it trains: with its own memory, or in blocks; `eval.segment_length` tokens at a time."""
    return _judged(config, _whole_text(config, Flags(), config.model.memory_length, config.model.same_length, None))


def final_protocol(config: RunConfig, flags: Flags | None = None) -> EvaluationProtocol:
    """How final figures are measured: what the `eval` section says, else as the model was trained; `flags` come before both.

    A flag wins over a key of the configuration that it excludes. Raises InputError for settings that exclude each other, and
    for those that the model cannot have.
    """
    return _judged(config, _final_protocol(config, flags or Flags()))


def _judged(config: RunConfig, protocol: EvaluationProtocol) -> EvaluationProtocol:
    """`protocol`, and whether what it measures is a next-token perplexity."""
    return replace(protocol, next_token=not config.model.sees_future or protocol.only_last)


def _final_protocol(config: RunConfig, flags: Flags) -> EvaluationProtocol:
    memory_length, same_length = _memory(config, flags)
    clamp = _first(flags.clamp_length, config.eval.clamp_length)
    if clamp is not None and config.model.position != "relative":
        raise InputError(
            f"{_name('clamp_length', config, flags)}: goes with model.position: relative, given model.position: "
            f"{config.model.position}; leave it out"
        )
    try:  # told here, before any work
        with_memory(config.model, memory_length, same_length=same_length and memory_length > 0, clamp_length=clamp)
    except ConfigError as error:
        keys = ("memory_length", "same_length", "clamp_length")
        given = [_name(key, config, flags) for key in keys if getattr(flags, key) is not None]
        raise InputError("; ".join(f"{', '.join(given)}: {problem}" for problem in error.problems)) from error
    context, stride = _window(config, flags)
    if context is None or stride is None:
        return _whole_text(config, flags, memory_length, same_length, clamp)
    if memory_length:
        slides = _name("context" if flags.stride is None else "stride", config, flags)
        instead = "give --memory-length 0 too" if flags.memory_length is None else "give one of the two"
        raise InputError(
            f"{slides}: a sliding window is for models without memory, given "
            f"{_name('memory_length', config, flags)} {memory_length}; {instead}"
        )
    if context == 0:  # a block
        return _whole_text(config, replace(flags, segment_length=stride), 0, False, clamp)
    return EvaluationProtocol(
        kind="window",
        segment_length=context + stride,
        context=context,
        stride=stride,
        clamp_length=_clamp(config, clamp),
    )


def _whole_text(
    config: RunConfig, flags: Flags, memory_length: int, same_length: bool, clamp: int | None
) -> EvaluationProtocol:
    """Blocks, or streams where there is a memory."""
    segment = _segment_length(config, flags)
    if not memory_length:
        return EvaluationProtocol(kind="blocks", segment_length=segment, clamp_length=_clamp(config, clamp))
    return EvaluationProtocol(
        kind="memory",
        segment_length=segment,
        streams=flags.batch_size or config.eval.batch_size,
        memory_length=memory_length,
        memory_start=config.model.memory_start,
        same_length=same_length,
        clamp_length=_clamp(config, clamp),
    )


def _segment_length(config: RunConfig, flags: Flags) -> int:
    return flags.segment_length or config.eval.segment_length or config.train.segment_length


def _memory(config: RunConfig, flags: Flags) -> tuple[int, bool]:
    """memory_length and same_length."""
    length = _first(flags.memory_length, config.eval.memory_length, config.model.memory_length) or 0
    same = _first(flags.same_length, config.eval.same_length, config.model.same_length) or False
    if flags.same_length and not length:
        raise InputError(
            "--same-length: goes with a memory, and this run is measured without one; give --memory-length too"
        )
    return length, same


def _window(config: RunConfig, flags: Flags) -> tuple[int | None, int | None]:
    """context and stride, both None where no window slides; one that is not given is what is left of the segment."""
    context, stride = _first(flags.context, config.eval.context), _first(flags.stride, config.eval.stride)
    if flags.memory_length and flags.context is None and flags.stride is None:
        return None, None
    if flags.segment_length is not None:  # a flag wins: of the other two, the configuration gives at most one
        if flags.context is None and flags.stride is not None:
            context = None
        elif flags.stride is None and context is not None:
            stride = None
    if context is None and stride is None:
        return None, None
    segment = _segment_length(config, flags)
    whole = f"{_name('segment_length', config, flags)} is {segment}"
    if context is None:
        assert stride is not None
        if stride > segment:
            raise InputError(f"{_name('stride', config, flags)}: at most the segment, and {whole}; given {stride}")
        context = segment - stride
    elif stride is None:
        if context >= segment:
            raise InputError(
                f"{_name('context', config, flags)}: shorter than the segment, and {whole}; given {context}"
            )
        stride = segment - context
    elif flags.segment_length not in (None, context + stride):
        raise InputError(
            f"--segment-length: a window has context + stride = {context + stride} tokens, given {flags.segment_length}; "
            "give two of --segment-length, --context and --stride"
        )
    return context, stride


def _clamp(config: RunConfig, given: int | None) -> int | None:
    """What positions are clamped at: as given, else as trained; None without relative positions."""
    if given is not None or config.model.position != "relative":
        return given
    trained: int | None = stage_options(config.model.attention.score).get("clamp_length")
    return trained


def _first(*values: T | None) -> T | None:
    """The first that is given."""
    return next((value for value in values if value is not None), None)


def _name(key: str, config: RunConfig, flags: Flags) -> str:
    """The flag or the key that says it."""
    if getattr(flags, key) is not None:
        return f"--{key.replace('_', '-')}"
    section = {"memory_length": "model", "segment_length": "train"}.get(key, "eval")
    return f"{section if getattr(config.eval, key) is None else 'eval'}.{key}"
