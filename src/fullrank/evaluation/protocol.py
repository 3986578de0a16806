"""How a text is read while a figure is measured: a value, made in one place, that describes itself in words.

    blocks     consecutive blocks, each read by itself
    window     overlapping windows, of which only the ends are scored: every token has much context, at many times the cost
    memory     parallel streams in segments, each segment with a memory of what came before it in its stream
    masked     consecutive blocks, of which only masked tokens are scored

Every token is scored exactly once in each of the first three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from fullrank.config.run import MASKED_TOKEN, RunConfig
from fullrank.core.config import NOT_NEXT_TOKEN, stage_options, with_memory
from fullrank.core.errors import ConfigError, InputError


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
        """Only the last position of each reading is scored, whose target is not read."""
        return self.segment_length == 1 or (self.kind == "window" and self.stride == 1)

    def in_words(self) -> str:
        """The protocol as a sentence, for people: printed and saved with every figure."""
        read = f"segments of {_tokens(self.segment_length)}"
        match self.kind:
            case "blocks":
                words = (
                    f"consecutive blocks of {_tokens(self.segment_length)}, every token scored once, given the tokens "
                    "before it in its block and the one before the block"
                )
            case "window":
                assert self.context is not None
                assert self.stride is not None
                fewest, most = self.context + 1, self.context + self.stride  # a target's input is the token before it
                span = f"{fewest} to {most} tokens" if most > fewest else _tokens(most)
                last = f"one of the last {self.stride}" if self.stride > 1 else "the last"
                words = (
                    f"windows of {self.segment_length} tokens that overlap by {self.context}, every token scored once, "
                    f"as {last} of its window, given the {span} before it (fewer at the beginning of the text)"
                )
            case "memory":
                streams = "1 stream, begun" if self.streams == 1 else f"{self.streams} streams, each begun"
                start = "without memory" if self.memory_start == "empty" else "with a memory of zeros"
                keys = f"{self.memory_length} key{'s' if self.memory_length != 1 else ''}"
                seen = f", every query sees at most {keys}, its own included" if self.same_length else ""
                words = (
                    f"{streams} {start}, read in {read} with up to {_tokens(self.memory_length)} of memory{seen}; "
                    "every token scored once"
                )
        if self.clamp_length is not None:
            words += f"; positions clamped at {self.clamp_length}"
        return words if self.next_token else f"{words}; {NOT_NEXT_TOKEN}"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Options of the command line about the protocol; None: as the configuration says."""

    segment_length: int | None = None
    batch_size: int | None = None
    context: int | None = None
    stride: int | None = None
    memory_length: int | None = None
    same_length: bool | None = None
    clamp_length: int | None = None


@dataclass(frozen=True)
class _Settings:
    """Values of the protocol's keys: a flag, else the key in `eval`, else the value of training."""

    config: RunConfig
    flags: Flags

    def __call__(self, key: str) -> Any:
        config = self.config
        trained = {
            "segment_length": config.train.segment_length,
            "memory_length": config.model.memory_length,
            "same_length": config.model.same_length,
        }
        values = (getattr(self.flags, key), getattr(config.eval, key), trained.get(key))
        return next((value for value in values if value is not None), None)

    def name(self, key: str) -> str:
        """The flag, or the key of the configuration, that gives the value."""
        if getattr(self.flags, key) is not None:
            return f"--{key.replace('_', '-')}"
        section = {"memory_length": "model", "segment_length": "train"}.get(key, "eval")
        return f"{section if getattr(self.config.eval, key) is None else 'eval'}.{key}"

    def shown(self, key: str) -> str:
        return f"{self.name(key)} is {self(key)}"


def validation_protocol(config: RunConfig) -> EvaluationProtocol:
    """Protocol of validation while training: with the model's own memory, or in blocks of `eval.segment_length` tokens."""
    model, segment = config.model, config.eval.segment_length or config.train.segment_length
    return _whole_text(config, segment, config.eval.batch_size, model.memory_length, model.same_length, None)


def final_protocol(config: RunConfig, flags: Flags | None = None) -> EvaluationProtocol:
    """Protocol of final figures: as the `eval` section says, else as the model was trained; `flags` come before both.

    A flag wins over a key of the configuration that it excludes. Raises InputError for settings that exclude each other, and
    for those that the model cannot have.
    """
    flags = flags or Flags()
    settings = _Settings(config, flags)
    memory, same, clamp = settings("memory_length"), settings("same_length"), settings("clamp_length")
    if flags.same_length and not memory:
        raise InputError(
            "--same-length: goes with a memory, and this run is measured without one; give --memory-length too"
        )
    if clamp is not None and config.model.position != "relative":
        raise InputError(
            f"{settings.name('clamp_length')}: goes with model.position: relative, given model.position: "
            f"{config.model.position}; leave it out"
        )
    try:  # refused here, before any work
        with_memory(config.model, memory, same_length=same and memory > 0, clamp_length=clamp)
    except ConfigError as error:
        keys = ("memory_length", "same_length", "clamp_length")
        names = ", ".join(settings.name(key) for key in keys if getattr(flags, key) is not None)
        raise InputError("; ".join(f"{names}: {problem}" for problem in error.problems)) from error
    segment, streams = settings("segment_length"), flags.batch_size or config.eval.batch_size
    context, stride = _window(settings)
    if context is None or stride is None:
        return _whole_text(config, segment, streams, memory, same, clamp)
    if memory:
        name = settings.name("context" if flags.stride is None else "stride")
        instead = "give --memory-length 0 too" if flags.memory_length is None else "give one of the two"
        raise InputError(
            f"{name}: a sliding window is for models without memory, given {settings.name('memory_length')} {memory}; {instead}"
        )
    if context == 0:
        return _whole_text(config, stride, streams, 0, False, clamp)
    window = EvaluationProtocol(
        kind="window",
        segment_length=context + stride,
        context=context,
        stride=stride,
        clamp_length=_clamp(config, clamp),
    )
    return _with_next_token(config, window)


def _whole_text(
    config: RunConfig, segment_length: int, streams: int, memory_length: int, same_length: bool, clamp: int | None
) -> EvaluationProtocol:
    """Blocks, or streams where there is a memory."""
    protocol = EvaluationProtocol(kind="blocks", segment_length=segment_length, clamp_length=_clamp(config, clamp))
    if memory_length:
        protocol = replace(
            protocol, kind="memory", streams=streams, memory_length=memory_length, same_length=same_length,
            memory_start=config.model.memory_start,
        )  # fmt: skip
    return _with_next_token(config, protocol)


def _with_next_token(config: RunConfig, protocol: EvaluationProtocol) -> EvaluationProtocol:
    return replace(protocol, next_token=not config.model.sees_future or protocol.only_last)


def _clamp(config: RunConfig, clamp: int | None) -> int | None:
    """`clamp`, else the clamp of training; None without relative positions."""
    if clamp is not None or config.model.position != "relative":
        return clamp
    trained: int | None = stage_options(config.model.attention.score).get("clamp_length")
    return trained


def _window(settings: _Settings) -> tuple[int | None, int | None]:
    """context and stride, both None where no window slides; one that is not given is what is left of the segment."""
    flags, segment = settings.flags, settings("segment_length")
    context, stride = settings("context"), settings("stride")
    if flags.memory_length and flags.context is None and flags.stride is None:
        return None, None
    if flags.segment_length is not None:  # a flag wins: of the other two, the configuration gives at most one
        if flags.context is None and flags.stride is not None:
            context = None
        elif flags.stride is None and context is not None:
            stride = None
    if context is None and stride is None:
        return None, None
    if context is None:
        if stride > segment:
            raise InputError(
                f"{settings.name('stride')}: at most the segment, and {settings.shown('segment_length')}; given {stride}"
            )
        return segment - stride, stride
    if stride is None:
        if context >= segment:
            raise InputError(
                f"{settings.name('context')}: shorter than the segment, and {settings.shown('segment_length')}; given {context}"
            )
        return context, segment - context
    if flags.segment_length not in (None, context + stride):
        raise InputError(
            f"--segment-length: a window has context + stride = {context + stride} tokens, given {flags.segment_length}; "
            "give two of --segment-length, --context and --stride"
        )
    return context, stride


# -- masked tokens ----------------------------------------------------------------------------------------------------


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
        """The protocol as a sentence, for people: printed and saved with every figure."""
        same = max(0.0, 1 - self.mask_replace_prob - self.random_replace_prob)
        return (
            f"{_percent(self.mlm_probability)} of the tokens asked for, chosen by seed {self.mask_seed} and the same in every "
            f"run ({_percent(self.mask_replace_prob)} of them read as <mask>, {_percent(self.random_replace_prob)} as a random "
            f"token, {_percent(same)} as they are), given all of their block of {self.segment_length} tokens; {MASKED_TOKEN}"
        )


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def masked_protocol(config: RunConfig, flags: Flags | None = None) -> MaskedProtocol:
    """Protocol of a masked model, while training and in the end; `flags` come before the configuration.

    Raises InputError for flags that are about next tokens.
    """
    flags, train = flags or Flags(), config.train
    for key in ("context", "stride", "memory_length", "same_length", "clamp_length"):
        if getattr(flags, key):
            raise InputError(
                f"--{key.replace('_', '-')}: says how next tokens are read, and this run predicts masked ones "
                "(train.objective: masked); leave it out"
            )
    return MaskedProtocol(
        segment_length=flags.segment_length or config.eval.segment_length or train.segment_length,
        mlm_probability=train.mlm_probability,
        mask_replace_prob=train.mask_replace_prob,
        random_replace_prob=train.random_replace_prob,
        mask_seed=config.eval.mask_seed,
    )
