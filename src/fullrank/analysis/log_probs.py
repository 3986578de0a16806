"""The matrix of log-probabilities that a model gives, contexts by words, in double precision."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.analysis.softmax_bound import OutputLayer, of_config, of_hugging_face
from fullrank.core.config import ModelConfig
from fullrank.core.errors import InputError, RunError

_CHUNK = 1 << 23  # log-probabilities that are made at a time


class Reader(Protocol):
    """A model as the analysis reads it. `layer` and `eps` may change while it reads: some things only show then.

    eps: the rounding of the log-probabilities, relative to them. vocab_size: V of the log-probabilities;
    known_ids: ids below it can be read.
    """

    layer: OutputLayer
    eps: float
    vocab_size: int
    known_ids: int
    device: torch.device

    def log_probs(self, ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        """Log-probabilities (rows, V) after the tokens at `places` of ids (B, N) laid end to end, a few rows at a time."""
        ...


def reader_of(model: nn.Module) -> Reader:
    """`model` read in double precision and evaluation mode, on a copy unless it is so already.

    Raises InputError for what is neither a `LanguageModel` nor a causal model of Hugging Face.
    """
    if isinstance(getattr(model, "config", None), ModelConfig) and hasattr(model, "output"):
        return _Ours(doubled(model))
    if callable(getattr(model, "get_output_embeddings", None)):
        return _HuggingFace(doubled(model))
    raise InputError(f"rank: give a LanguageModel or a causal model of Hugging Face, given {type(model).__name__}")


def doubled(model: Any) -> Any:
    """The model in double precision and evaluation mode: itself if it is so, else a copy."""
    numbers = [p for p in model.parameters() if p.is_floating_point()]
    if all(p.dtype == torch.float64 for p in numbers) and not any(module.training for module in model.modules()):
        return model
    model = copy.deepcopy(model).double().eval()
    # Hugging Face's fast kernels lack double precision
    if callable(choose := getattr(model, "set_experts_implementation", None)):
        choose("eager")
    if "flash" in str(getattr(model.config, "_attn_implementation", None)):
        model.set_attn_implementation("eager")
    return model


class _Ours:
    """A `LanguageModel`: its output layer is asked for the log-probabilities of chosen hidden states."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layer = of_config(model.config)
        self.eps = torch.finfo(torch.float64).eps
        self.vocab_size = self.known_ids = model.config.vocab_size
        self.device = next(model.parameters()).device

    def log_probs(self, ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        hidden = self.model.hidden(ids).hidden.flatten(0, 1)[places]
        at_a_time = max(1, _CHUNK // (self.vocab_size * (self.model.config.output.mixtures or 1)))
        for rows in hidden.split(at_a_time):
            yield self.model.output.log_prob(rows[None])[0]


class _HuggingFace:
    """A causal model of Hugging Face: its logits, beside what its output embedding gave.

    Where both agree up to a factor and a shift of each row, the bound holds: A = diag(c) (H W' + 1 b') - log Z 1'.
    A model that hands its logits over in a lower precision is then read at its output embedding.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layer = of_hugging_face(model)
        self.eps = torch.finfo(torch.float64).eps
        self.device = next(model.parameters()).device
        embedding = model.get_input_embeddings()
        self.known_ids = int(embedding.weight.shape[0])
        self.vocab_size = self._read(torch.zeros(1, 1, dtype=torch.long, device=self.device))[0].shape[-1]

    def log_probs(self, ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        logits, head = self._read(ids)
        for chosen in places.split(max(1, _CHUNK // self.vocab_size)):
            found = logits.flatten(0, 1)[chosen]
            eps = torch.finfo(found.dtype).eps
            if head is None:
                self._exempt("its output embedding is not called, so that what makes the logits cannot be seen")
            else:
                scaled, error = _scaled(head.flatten(0, 1)[chosen], found)
                of_head = torch.finfo(head.dtype).eps
                if error > 32 * max(eps, of_head):
                    self._exempt(
                        "its logits are not those of the output embedding up to a factor: more follows after it"
                    )
                elif of_head < eps:
                    found, eps = scaled, of_head
                eps = max(eps, of_head)
            self.eps = max(self.eps, eps)
            yield torch.log_softmax(found.double(), dim=-1)

    def _masks(self, ids: Tensor) -> dict[str, Tensor]:
        """Nothing is padding, also where a token has the id of padding."""
        takes = "attention_mask" in inspect.signature(self.model.forward).parameters
        return {"attention_mask": torch.ones_like(ids)} if takes else {}

    def _exempt(self, why: str) -> None:
        if self.layer.exempt is None:
            self.layer = replace(self.layer, exempt=why)

    def _read(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits (B, N, V), and the output embedding's, None where they have not that shape."""
        seen: list[Any] = []
        handle = self.model.get_output_embeddings().register_forward_hook(lambda _module, _args, out: seen.append(out))
        try:
            logits = getattr(self.model(ids, **self._masks(ids)), "logits", None)
        finally:
            handle.remove()
        if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape:
            raise InputError(f"{type(self.model).__name__} gives no logits; load it with AutoModelForCausalLM")
        head = seen[-1] if seen and isinstance(seen[-1], Tensor) else None
        if head is None or head.shape[:2] != ids.shape or head.shape[2] < logits.shape[2]:
            return logits, None
        return logits, head[..., : logits.shape[2]]  # some models cut padding off their vocabulary


def _scaled(head: Tensor, logits: Tensor) -> tuple[Tensor, float]:
    """`head` (rows, V) scaled row by row so that it is nearest to `logits`, up to a shift; the error, relative to them."""
    z, wanted = head.double(), logits.double()
    z, wanted = z - z.mean(1, keepdim=True), wanted - wanted.mean(1, keepdim=True)
    scaled = z * ((z * wanted).sum(1, keepdim=True) / (z * z).sum(1, keepdim=True).clamp_min(1e-300))
    return scaled, float((scaled - wanted).abs().max() / logits.abs().max().double().clamp_min(1e-300))


@dataclass(frozen=True)
class Contexts:
    """Batches of ids (B, N), each with the places (n,) in it, rows end to end, whose contexts are taken.

    repeats: places that were passed over, since the same tokens stood before an earlier one.
    """

    batches: list[tuple[Tensor, Tensor]]
    repeats: int

    @property
    def count(self) -> int:
        return sum(len(places) for _, places in self.batches)


def choose_contexts(batches: Iterable[Tensor], wanted: int, known_ids: int) -> Contexts:
    """The first `wanted` contexts that differ. The context after a token is that token and all before it in its row.

    Raises InputError for ids that are not integers (B, N), or not below `known_ids`.
    """
    seen: set[bytes] = set()
    chosen: list[tuple[Tensor, Tensor]] = []
    repeats = 0
    for ids in batches:
        if ids.dim() != 2 or ids.is_floating_point():
            raise InputError(f"input_ids: integers (B, N), given {ids.dtype} {tuple(ids.shape)}")
        rows = np.ascontiguousarray(ids.cpu().numpy().astype(np.int64))
        if rows.size and not 0 <= rows.min() <= rows.max() < known_ids:
            raise InputError(f"token ids from {rows.min()} to {rows.max()}, but the model reads 0 to {known_ids - 1}")
        places = []
        for b, row in enumerate(rows):
            digest = hashlib.blake2b(digest_size=16)
            for n, token in enumerate(row):
                if len(seen) == wanted:
                    break
                digest.update(token.tobytes())
                if (key := digest.copy().digest()) in seen:
                    repeats += 1
                    continue
                seen.add(key)
                places.append(b * rows.shape[1] + n)
        if places:
            chosen.append((ids, torch.tensor(places)))
        if len(seen) == wanted:
            break
    return Contexts(chosen, repeats)


@torch.no_grad()
def collect(reader: Reader, contexts: Contexts, columns: Tensor | None) -> Tensor:
    """Log-probabilities (contexts, columns) on the CPU, normalised over the whole vocabulary; None: of every word.

    Raises RunError where one is not finite.
    """
    width = reader.vocab_size if columns is None else len(columns)
    matrix = torch.empty(contexts.count, width, dtype=torch.float64)
    done = 0
    for ids, places in contexts.batches:
        for rows in reader.log_probs(ids.to(reader.device), places.to(reader.device)):
            kept = rows if columns is None else rows[:, columns.to(rows.device)]
            if not bool(torch.isfinite(kept).all()):
                raise RunError("a log-probability is NaN or infinite: such a matrix has no singular values")
            matrix[done : done + len(kept)] = kept
            done += len(kept)
    return matrix


def singular_values(matrix: Tensor) -> np.ndarray:
    """Largest first. A matrix that is longer than wide becomes a triangle before: its values are those of R in Q R."""
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    if tall.shape[0] > tall.shape[1]:
        tall = torch.linalg.qr(tall, mode="r").R
    return torch.linalg.svdvals(tall).cpu().numpy()
