"""Causal models of Hugging Face, with their own tokenizers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fullrank.core.errors import InputError

# one of them is there wherever a tokenizer was saved
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "vocab.json", "vocab.txt", "vocab.bpe",
)  # fmt: skip


class HuggingFaceModel(NamedTuple):
    """A causal model, its tokenizer, and how many tokens it reads at most (None: any number)."""

    model: Any
    tokenizer: Any
    max_length: int | None


def load_causal(name: str, dtype: torch.dtype, *, tokenizer: bool = True) -> HuggingFaceModel:
    """The model and tokenizer of a folder or a name on the hub, in `dtype`, in evaluation mode; its code is never run.

    Without `tokenizer` there is none, and the folder need not hold one.
    Raises InputError where transformers is not installed, where there is no such model, and where it lacks its tokenizer
    or some of its weights.
    """
    folder = Path(name).expanduser()
    if importlib.util.find_spec("transformers") is None:
        what = "a Hugging Face model" if folder.is_dir() else "no such folder, and a model of the Hugging Face hub"
        raise InputError(f"{name}: {what} needs transformers; install it: pip install 'fullrank[hf]'")
    import transformers

    import fullrank.hf  # noqa: F401  tells the auto classes about exported models of ours

    if tokenizer and folder.is_dir() and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise InputError(
            f"{name}: holds no tokenizer (tokenizer.json or the like); save the model's tokenizer there, "
            "tokenizer.save_pretrained(folder)"
        )
    where = str(folder) if folder.is_dir() else name
    with quiet(transformers), _explained(name):
        config = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False)
        words = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False) if tokenizer else None
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True,
            experts_implementation="eager",  # the others lack double precision
        )  # fmt: skip
    if missing := sorted(found["missing_keys"]):
        raise InputError(f"{name}: lacks weights of {type(model).__name__}: {', '.join(missing[:3])}")
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return HuggingFaceModel(model.eval(), words, longest if isinstance(longest, int) and longest > 0 else None)


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Without progress bars, remarks and reports of retries."""
    from huggingface_hub.utils import logging as hub

    said = transformers.utils.logging
    level, of_hub, bars = said.get_verbosity(), hub.get_verbosity(), said.is_progress_bar_enabled()
    said.set_verbosity_error()
    hub.set_verbosity_error()
    said.disable_progress_bar()
    try:
        yield
    finally:
        said.set_verbosity(level)
        hub.set_verbosity(of_hub)
        if bars:
            said.enable_progress_bar()


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Whatever transformers raises as an InputError that names the model."""
    try:
        yield
    except Exception as error:
        words = " ".join(str(error).split())
        raise InputError(f"{name}: no causal model that transformers can load ({words[:240]})") from error
