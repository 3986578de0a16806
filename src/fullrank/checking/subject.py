"""A model as the checks see it: ids in, logits out, and what else it can do."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fullrank.checking.given import Given
from fullrank.core.config import ModelConfig
from fullrank.core.errors import InputError

ROWS = 3
LENGTHS = (17, 19, 13, 23, 11, 7, 5, 3)  # primes: hardly another size of a model is one of them


Kind = Literal["fullrank", "translator", "hugging_face", "module"]


@dataclass(frozen=True)
class Subject:
    """model: a copy, every parameter moved a little, in double precision where the model can be; own: as it was given.

    kind: our `LanguageModel`, our `Translator` (as `Given`), a causal model of Hugging Face, or any module. ids (B, N):
    random tokens, the end of the last row padding by `padding_id`, for models that look for it in the ids (None: they do
    not). embeddings: modules that read the ids themselves.
    """

    model: nn.Module
    own: nn.Module
    kind: Kind
    vocab_size: int
    dtype: torch.dtype
    ids: Tensor
    padding_id: int | None
    embeddings: tuple[str, ...]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def ours(self) -> bool:
        """Whether it is made of our parts, in double precision throughout."""
        return self.kind in ("fullrank", "translator")

    @property
    def rounds(self) -> torch.dtype:
        """The precision to which two ways to compute the same agree: some models cast to fp32 on the way."""
        return torch.float32 if not self.ours and self.dtype == torch.float64 else self.dtype

    @property
    def sees_future(self) -> str:
        """The key of the configuration by which attention of ours, in whatever model, looks ahead on purpose; else empty."""
        on_purpose = any(getattr(module, "sees_future", False) is True for module in self.model.modules())
        own = getattr(getattr(self.model, "config", None), "decoder", None)
        place = "decoder.attention" if getattr(own, "attention", None) is not None else "attention"
        return f"model.{place}.causal: as_published" if on_purpose else ""

    @property
    def takes_mask(self) -> bool:
        return "attention_mask" in accepted(self.model)

    def logits(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N, V)."""
        return call(self.model, ids, mask)

    def tokens(self, rows: int, length: int, seed: int) -> Tensor:
        return random_ids(rows, length, self.vocab_size, seed).to(self.ids.device)


def subject_of(model: nn.Module, vocab_size: int | None = None, length: int | None = None) -> Subject:
    """`model` ready to be checked; it is left as it is.

    vocab_size: where the model does not say it; length: tokens of a text, a suitable one if not given.
    Raises InputError where `model(input_ids)` gives no logits (B, N, V).
    """
    kind = _kind(model)
    vocab_size = vocab_size or _vocab_size(model, kind)
    first = next(iter([*model.parameters(), *model.buffers()]), None)
    if first is not None and first.is_meta:
        raise InputError("a model on the meta device has no numbers to check; build it on the cpu")
    device = torch.device("cpu") if first is None else first.device
    longest = _max_length(model, kind)
    chosen = length or _length(model, longest)
    if chosen < 3 or (longest is not None and chosen > longest):
        limit = "" if longest is None else f" to {longest}"
        raise InputError(f"length: {chosen} tokens, but this model can be checked with 3{limit}")
    ids = random_ids(ROWS, chosen, vocab_size, 5).to(device)
    padding_id = None if kind == "hugging_face" else 0  # those of Hugging Face are told by a mask only
    if padding_id is not None:
        ids[-1, -max(1, chosen // 4) :] = padding_id
    copied, dtype = _moved(model, ids)
    return Subject(copied, model, kind, vocab_size, dtype, ids, padding_id, _embeddings(copied, ids))


def accepted(model: nn.Module) -> set[str]:
    """The names of what the model's forward takes."""
    return set(inspect.signature(model.forward).parameters)


def call(model: nn.Module, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    """Logits (B, N, V)."""
    if mask is not None:
        more["attention_mask"] = mask
    if "use_cache" in accepted(model):
        more.setdefault("use_cache", False)
    return logits_in(model(ids, **more))


def logits_in(out: Any) -> Tensor:
    """The logits of what a model returned: a tensor, an object with `.logits`, a dict, or the first of several."""
    if isinstance(out, Mapping) and "logits" in out:
        out = out["logits"]
    out = getattr(out, "logits", out)
    if isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise InputError(f"the model returned {type(out).__name__}; a check needs logits, or an object with .logits")
    return out


@contextmanager
def mode(model: nn.Module, *, training: bool, seed: int = 1) -> Iterator[None]:
    """Inside, the model trains or not, random numbers begin at `seed`; afterwards all is as before, its buffers too."""
    before = {name: module.training for name, module in model.named_modules()}
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = [device for device in {p.device for p in model.parameters()} if device.type == "cuda"]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        model.train(training)
        try:
            yield
        finally:
            for name, module in model.named_modules():
                module.training = before[name]
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in kept and kept[name].shape == buffer.shape:
                        buffer.copy_(kept[name])


def move(model: nn.Module, seed: int = 17) -> None:
    """Every parameter a little, so that what starts at zero, such as a mixing, shows: by a tenth of its own size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            size = float(parameter.double().square().mean().sqrt())
            step = 0.1 * size if size > 0 else 0.3 / (parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 3)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * step
            parameter.add_(noise.to(parameter.device, parameter.dtype))


def duplicate(model: nn.Module) -> nn.Module:
    """A copy; InputError where Python cannot make one."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__}: cannot be copied ({error}), and a check leaves its model alone"
        ) from error


def _moved(model: nn.Module, ids: Tensor) -> tuple[nn.Module, torch.dtype]:
    copied = duplicate(model)
    move(copied)
    own = next((p.dtype for p in copied.parameters() if p.is_floating_point()), torch.float32)
    try:
        with torch.no_grad(), mode(copied.double().eval(), training=False):
            found = call(copied, ids)
        dtype = found.dtype
    except InputError:
        raise
    except Exception:  # some constants are fp32 for good: then in the precision that it was written for
        copied = duplicate(model)
        move(copied)
        try:
            with torch.no_grad(), mode(copied.eval(), training=False):
                found = call(copied, ids)
        except Exception as error:
            words = " ".join(str(error).split())[:200]
            raise InputError(
                f"{type(model).__name__}: model(input_ids) with input_ids {tuple(ids.shape)} int64 raised "
                f"{type(error).__name__}: {words}"
            ) from error
        dtype = found.dtype if found.dtype.itemsize < own.itemsize else own
    if found.dim() != 3 or found.shape[:2] != ids.shape:
        raise InputError(
            f"{type(model).__name__}: logits must be (B, N, V) = {(*ids.shape, 'V')}, given {tuple(found.shape)}"
        )
    return copied.eval(), dtype


def _kind(model: nn.Module) -> Kind:
    if isinstance(model, Given):
        return "translator"
    if isinstance(getattr(model, "config", None), ModelConfig) and hasattr(model, "new_cache"):
        return "fullrank"
    if hasattr(model, "save_pretrained") and hasattr(model, "get_input_embeddings"):
        return "hugging_face"
    return "module"


def _vocab_size(model: nn.Module, kind: str) -> int:
    config = getattr(model, "config", None)
    if kind == "hugging_face" and hasattr(config, "get_text_config"):
        config = config.get_text_config()  # type: ignore[union-attr]
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        size = sizes[0] if sizes else None
    if size is None:
        raise InputError(f"{type(model).__name__} does not say how many token ids it knows; give vocab_size")
    if size < 2:
        raise InputError(f"vocab_size: {size}; a check changes tokens and needs two or more")
    return size


def _max_length(model: nn.Module, kind: str) -> int | None:
    if kind in ("fullrank", "translator"):
        longest = getattr(model, "max_length", None)
    else:
        config = getattr(model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config  # type: ignore[union-attr]
        longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def _length(model: nn.Module, longest: int | None) -> int:
    """A length that no other size of the model equals, so that positions are recognised by it."""
    taken = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    allowed = [length for length in LENGTHS if longest is None or length <= longest]
    if not allowed:
        raise InputError(f"the model reads at most {longest} tokens; a check needs 3")
    return next((length for length in allowed if length not in taken), allowed[0])


def random_ids(rows: int, length: int, vocab_size: int, seed: int) -> Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def _embeddings(model: nn.Module, ids: Tensor) -> tuple[str, ...]:
    """Modules that were called with the ids and gave vectors, the outermost left out where an inner one did."""
    found: list[str] = []

    def hook(name: str) -> Any:
        def seen(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            read = args[0] if args else None
            whole = isinstance(read, Tensor) and read.shape == ids.shape and not read.is_floating_point()
            if not (whole and isinstance(out, Tensor) and out.is_floating_point() and out.dim() == 3):
                return
            if (
                isinstance(read, Tensor)
                and torch.equal(read, ids)
                and out.shape[:2] == ids.shape
                and not any(n.startswith(name) for n in found)
            ):
                found.append(name)

        return seen

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad(), mode(model, training=False):
            call(model, ids)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found)
