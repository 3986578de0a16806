"""Writing text: a prompt continued by a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.model import longest
from fullrank.data import Tokenizer
from fullrank.decoding import Ensemble, beam_search, reader_of, sample, window_of
from fullrank.experiments.run_folder import open_causal
from fullrank.files import Entries, with_newlines
from fullrank.kernels import kernel
from fullrank.models import LoadedModel, TransformersModel, open_model
from fullrank.training.device import device_of

logger = logging.getLogger(__name__)


def generate(model: Any, prompt: str = "", **how: Any) -> str:
    """Continue `prompt` by a model, or by the run in a folder with the run's tokenizer.

        fr.generate("runs/demo/b", "The", max_new_tokens=200, temperature=0.8, top_p=0.9, seed=1)

    Args:
        model: model, run folder, or several of them, as in `write`.
        prompt: text that the model goes on with.
        **how: further options of `write`, the tokenizer of a LanguageModel among them.

    Returns:
        The prompt and its continuation.
    """
    text: str = write(model, prompt, **how)["texts"][0]["text"]
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
    **drawing: Any,
) -> Entries:
    """Write continuations of `prompt` by a model or by the run in a folder, by search or by sampling.

    Of several models, and of several checkpoints, the mean of their probabilities counts. Their vocabularies must be
    one.

    Args:
        model: model, run folder, or several of them.
        prompt: text that the model goes on with.
        tokenizer: tokenizer of the model; None for the one that was opened with it, which a LanguageModel has not.
        max_new_tokens: most tokens of a continuation.
        beams: width of the beam search; None for sampling.
        length_penalty: of the beam search, as in `fullrank.decoding.beam_search`.
        number: how many continuations.
        stop: whether a text ends at <eos>.
        memory_length: tokens that a model with memory remembers; None for as many as it was trained with.
        window: as in `LanguageModel.generate`. Where it slides is logged.
        checkpoint: checkpoint of a run, or several, as in `best,last`.
        device_name: device, as for `--device`.
        kernel_name: kernel of attention, as for `--kernel`.
        **drawing: options of sampling, as in `fullrank.decoding.sample`: temperature, top_k, top_p, min_p,
            repetition_penalty, greedy and seed.

    Returns:
        `run` (None for models that are no names), `prompt`, and `texts`. Each text has `text`, the prompt with its
        continuation, and of the continuation `tokens`, their number, and `log_prob` in nats.

    Raises:
        InputError: there are more texts than beams, no model, a model that writes no text, or vocabularies that differ.
    """
    if beams is not None and number > beams:
        raise InputError(f"--number: {number} texts from a beam of {beams}; make --beam at least {number}")
    names = list(model) if isinstance(model, Sequence) and not isinstance(model, str) else [model]
    if not names:
        raise InputError("generate: give a model, or a list of models that write together; the list is empty")
    run = ", ".join(map(str, names)) if isinstance(names[0], str | Path) else None
    checkpoints = [part.strip() for part in checkpoint.split(",")]
    opened = [open_writer(name, part, device_name, tokenizer) for name in names for part in checkpoints]
    if len({words.fingerprint for _, words in opened}) > 1:
        raise InputError(
            f"{run or 'generate'}: their vocabularies differ; several models write together if they have one vocabulary"
        )
    tokenizer = opened[0][1]
    models = [model.with_memory(memory_length) for model, _ in opened]
    start, *prompt_ids = encode_prompt(tokenizer, prompt)
    ids = torch.tensor([[start, *prompt_ids]], device=device_of(models[0]))
    readers = [reader_of(model) for model in models]
    reader: Any = readers[0] if len(readers) == 1 else Ensemble(readers)
    window = longest(*(window_of(model, window) for model in models))
    if window is not None and ids.shape[1] + max_new_tokens > window:
        logger.info(
            f"the model reads {window} tokens at once; where the text is longer, its last {-(-window // 2)} are read anew"
        )
    limits: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "eos_id": tokenizer.eos_id if stop else None, "window": window, **drawing,
    }  # fmt: skip
    with kernel(kernel_name), torch.no_grad():
        if beams is not None:
            hypotheses = beam_search(reader, ids, beams=beams, n_best=number, length_penalty=length_penalty, **limits)
            new = hypotheses.ids[0]
            lengths = hypotheses.lengths[0]
            scores = hypotheses.log_probs[0]
        else:
            drawn = sample(reader, ids.expand(number, -1), **limits)
            new = drawn.ids
            lengths = drawn.lengths
            scores = drawn.log_probs.sum(1)
    texts = [
        {"text": tokenizer.decode(prompt_ids + row[:length]), "tokens": length, "log_prob": score}
        for row, length, score in zip(new.tolist(), lengths.tolist(), scores.tolist(), strict=True)
    ]
    return {"run": run, "prompt": prompt, "texts": texts}


def open_writer(
    name: Any, checkpoint: str, device_name: str, tokenizer: Tokenizer | None = None
) -> tuple[Any, Tokenizer]:
    """Open what is decoded: a LanguageModel, or a model of transformers that is read as one, and its tokenizer.

    Args:
        name: model or run folder.
        checkpoint: checkpoint of a run.
        device_name: device, as for `--device`.
        tokenizer: tokenizer of the model; None for the one that was opened with it, which a LanguageModel has not.

    Returns:
        The model and its tokenizer.

    Raises:
        InputError: the model writes no text, or its tokenizer is missing.
    """
    if isinstance(name, str | Path):
        open_causal(Path(name))
    loaded = open_model(name, checkpoint=checkpoint, device=device_name, causal=True)
    model: Any = loaded.fullrank_model or loaded.module
    words = tokenizer or loaded.tokenizer
    if isinstance(loaded, TransformersModel):
        from fullrank.hf.causal import CausalModel

        loaded.require({"step"}, "generate")
        model = CausalModel(loaded.module)
    if not (hasattr(model, "new_cache") and isinstance(words, Tokenizer)):
        raise InputError("generate: give a LanguageModel and its tokenizer, or a run folder, which has both")
    return model, words


def encode_given(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text that comes from no file, with line ends as the text of a file has them."""
    return tokenizer.encode(text if tokenizer.kind == "byte" else with_newlines(text))


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encode a prompt as the model was trained to read it: after the start mark, and the mark of a line where one begins."""
    ids = encode_given(tokenizer, prompt)
    if tokenizer.sos_id is not None and (not ids or ids[-1] == tokenizer.eos_id):
        ids.append(tokenizer.sos_id)
    return [tokenizer.start_id, *ids]
