"""Writing text: one prompt continued by a run, or many prompts completed side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.model import longest
from fullrank.data import Tokenizer
from fullrank.decoding import Ensemble, MemoryReader, beam_search, reader_of, sample, window_of
from fullrank.experiments.measure import batches_by_length
from fullrank.experiments.run_folder import open_causal
from fullrank.files import with_newlines
from fullrank.kernels import kernel
from fullrank.models import LoadedModel, TransformersModel, open_model


def generate(
    model: LoadedModel | LanguageModel | str | Path | Sequence[Any],
    prompt: str = "",
    *,
    tokenizer: Tokenizer | None = None,
    **how: Any,
) -> str:
    """`prompt` and its continuation by a model, or by the run in a folder with the run's tokenizer.

    fr.generate("runs/demo/b", "The", max_new_tokens=200, temperature=0.8, top_p=0.9, seed=1)

    how: the options of `write`.
    """
    text: str = write(model, prompt, tokenizer=tokenizer, **how)["texts"][0]["text"]
    return text


def write(
    model: LoadedModel | LanguageModel | str | Path | Sequence[Any],
    prompt: str,
    *,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 100,
    beams: int | None = None,
    length_penalty: float = 1.0,
    number: int = 1,
    stop: bool = False,
    memory_length: int | None = None,
    window: int | None = None,
    checkpoint: str = "best",
    device_name: str = "auto",
    kernel_name: str = "auto",
    say: Callable[[str], None] | None = None,
    **drawing: Any,
) -> dict[str, Any]:
    """`number` continuations of `prompt` by a model or by the run in a folder, each with its log-probability in nats.

    By search with `beams`, else by sampling, whose options are `drawing`: temperature, top_k, top_p, min_p,
    repetition_penalty, greedy and seed, as in `fullrank.decoding.sample`. Of several models, and of several checkpoints
    (`best,last`), the mean of their probabilities; their vocabularies must be one. With `stop` a text ends at <eos>. window:
    as in `LanguageModel.generate`; say: told where it slides.
    A model with memory remembers the last `memory_length` tokens (null: as many as it was trained with).
    """
    if beams is not None and number > beams:
        raise InputError(f"--number: {number} texts from a beam of {beams}; make --beam at least {number}")
    if beams is not None and drawing:
        raise InputError(f"beams: a search draws nothing; leave out {', '.join(drawing)}, or beams")
    names = list(model) if isinstance(model, Sequence) and not isinstance(model, str) else [model]
    run = ", ".join(map(str, names)) if all(isinstance(name, str | Path) for name in names) else None
    opened = [pair for name in names for pair in _open_readers(name, checkpoint, device_name)]
    tokenizers = [words for words in (tokenizer, *(loaded.tokenizer for loaded, _ in opened)) if words is not None]
    if not tokenizers or not isinstance(tokenizers[0], Tokenizer):
        raise InputError("generate: give a LanguageModel and its tokenizer, or a run folder, which has both")
    if len({words.fingerprint for words in tokenizers}) > 1:
        raise InputError(f"{run}: their vocabularies differ; several models write together if they have one vocabulary")
    tokenizer, readers, windows = tokenizers[0], [], []
    for _, reads in opened:
        remembering = reads if memory_length is None else reads.with_memory(memory_length)
        readers.append(reader_of(remembering))
        windows.append(window_of(remembering, window))
    start, *prompt_ids = encode_prompt(tokenizer, prompt)
    ids = torch.tensor([[start, *prompt_ids]], device=opened[0][0].device)
    reader: Any = readers[0] if len(readers) == 1 else Ensemble(readers)
    window = longest(*windows)
    if say is not None and window is not None and ids.shape[1] + max_new_tokens > window:
        say(
            f"the model reads {window} tokens at once; where the text is longer, its last {-(-window // 2)} are read anew"
        )
    limits: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "eos_id": tokenizer.eos_id if stop else None, "window": window,
    }  # fmt: skip
    with kernel(kernel_name), torch.no_grad():
        if beams is not None:
            found = beam_search(reader, ids, beams=beams, n_best=number, length_penalty=length_penalty, **limits)
            new, lengths, scores = found.ids[0], found.lengths[0], found.log_probs[0]
        else:
            drawn = sample(reader, ids.expand(number, -1), **drawing, **limits)
            new, lengths, scores = drawn.ids, drawn.lengths, drawn.log_probs.sum(1)
    texts = [
        {"text": tokenizer.decode(prompt_ids + row[:length]), "tokens": length, "log_prob": score}
        for row, length, score in zip(new.tolist(), lengths.tolist(), scores.tolist(), strict=True)
    ]
    return {"run": run, "prompt": prompt, "texts": texts}


def _open_readers(name: Any, checkpoint: str, device_name: str) -> Iterator[tuple[LoadedModel, Any]]:
    """A model for each checkpoint, and what is decoded: a LanguageModel, or a model of transformers that is read as one."""
    is_named = isinstance(name, str | Path)
    if is_named:
        open_causal(Path(name))
    for one in checkpoint.split(",") if is_named else [checkpoint]:
        loaded = open_model(name, checkpoint=one.strip(), device=device_name, causal=True)
        reads: Any = loaded.own
        if isinstance(loaded, TransformersModel):
            from fullrank.hf.causal import CausalModel

            loaded.require({"step"}, "generate")
            reads = CausalModel(loaded.module)
        elif not isinstance(reads, LanguageModel):
            raise InputError("generate: give a LanguageModel and its tokenizer, or a run folder, which has both")
        yield loaded, reads


def encode_given(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that comes from no file, with line ends as the text of a file has them."""
    return tokenizer.encode(text if tokenizer.kind == "byte" else with_newlines(text))


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A prompt as the model was trained to read it: after the start mark, and the mark of a line where one begins."""
    ids = encode_given(tokenizer, prompt)
    if tokenizer.sos_id is not None and (not ids or ids[-1] == tokenizer.eos_id):
        ids.append(tokenizer.sos_id)
    return [tokenizer.start_id, *ids]


# -- many prompts ----------------------------------------------------------------------------------------------------

_SEEN = 8  # tokens of the prompt that tell how the first new one is joined to it


@dataclass(frozen=True)
class Completion:
    """Completion of prompts, by options of `sample`. stop: a text ends before the first of these strings."""

    stop: tuple[str, ...] = ()
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


def complete(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    how: Completion,
    *,
    segment_length: int,
    batch_size: int,
    seeds: Sequence[int],
    report: Callable[[int], None] | None = None,
) -> list[str]:
    """The continuation of each prompt, without it, in the order of the prompts; `seeds`: of each prompt's draws.

    A model with memory reads a prompt in segments. One without reads its last `segment_length` tokens; where positions end,
    as many as leave room for `max_new_tokens`. report: called with the number of prompts that each batch has finished.
    Raises InputError where new tokens alone are more than the model has positions for.
    """
    most = None if model.max_length is None else model.max_length - how.max_new_tokens
    if most is not None and most < 1:
        raise InputError(
            f"max_gen_toks: {how.max_new_tokens} new tokens and a prompt are more than the {model.max_length} positions of "
            "this model; lower it"
        )
    reader = MemoryReader(model, segment_length) if model.memory_length else model
    if not model.memory_length:
        most = segment_length if most is None else min(segment_length, most)
    encoded = [encode_prompt(tokenizer, prompt)[-(most or 0) :] for prompt in prompts]
    texts: dict[int, str] = {}
    for batch in batches_by_length([len(ids) for ids in encoded], batch_size, equal=bool(model.memory_length)):
        rows = [encoded[i] for i in batch]
        longest = max(map(len, rows))
        ids = torch.tensor([[tokenizer.start_id] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        device = next(model.parameters()).device
        own = {"stop": _Stop(tokenizer, rows, how.stop) if how.stop else None, "seed": [seeds[i] for i in batch]}
        drawn = sample(reader, ids.to(device), attention_mask=mask.to(device), **{**vars(how), **own})
        for i, row, new, length in zip(batch, rows, drawn.ids.tolist(), drawn.lengths.tolist(), strict=True):
            texts[i] = _cut_before(_decode_new(tokenizer, row, new[:length]), how.stop)
        if report is not None:
            report(len(batch))
    return [texts[i] for i in range(len(prompts))]


@dataclass(frozen=True)
class _Stop:
    """True for rows of new tokens that hold a stop string."""

    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    stop: tuple[str, ...]

    def __call__(self, ids: Tensor) -> Tensor:
        texts = [_decode_new(self.tokenizer, row, new) for row, new in zip(self.prompts, ids.tolist(), strict=True)]
        return torch.tensor([any(word in text for word in self.stop) for text in texts], device=ids.device)


def _decode_new(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of new tokens after those of a prompt (words are joined with a space)."""
    seen = list(prompt[-_SEEN:])
    before, whole = tokenizer.decode(seen), tokenizer.decode([*seen, *new])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new)


def _cut_before(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the stop strings."""
    ends = [text.find(word) for word in stop if word in text]
    return text[: min(ends)] if ends else text
