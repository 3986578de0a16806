"""The known corpora, listed in corpora.yaml with what was published about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from fullrank.core.errors import InputError, suggest
from fullrank.files import SafeLoader


@dataclass(frozen=True)
class CorpusInfo:
    """One corpus. `published` counts each split in `unit`; words are counted with one `<eos>` per line.

    `languages`: of the two sides of sentence pairs, source first; None for text of one language.
    `files`: accepted file names of each split, the published name first; of sentence pairs without the suffix of a language.
    `urls`: things to download, each with its mirrors; `{}` stands for every published file. `packed`: the files in them, where
    these are not those of `files`. `folder`: the name of its folder besides its own. `codes`: files of BPE merges beside it.
    `settings`: of sentence pairs, where the configuration leaves them open.
    `hub`: of a task to fine-tune on, its name on the Hugging Face hub and its configuration there.
    `sha256`: of files that are known byte by byte.
    """

    name: str
    tokens: str
    licence: str
    source: str
    unit: Literal["words", "characters", "bytes", "pairs", "rows", "questions"] = "words"
    languages: Sequence[str] | None = None
    published: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    urls: Sequence[Sequence[str]] = ()
    packed: Sequence[str] = ()
    folder: str = ""
    codes: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    hub: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)

    @property
    def published_files(self) -> dict[str, str]:
        """The published file of each split, or of each `split.language`."""
        ends = [f".{language}" for language in self.languages or ()] or [""]
        return {f"{split}{end}": f"{names[0]}{end}" for split, names in self.files.items() for end in ends}

    def file_names(self) -> str:
        """The files that make up the corpus, in words."""
        return ", ".join(self.published_files.values()) or self.source.rpartition(": ")[2]


@cache
def list_corpora() -> dict[str, CorpusInfo]:
    """Corpora by name: values of `data.name`, tasks to fine-tune on among them."""
    table = yaml.load(Path(__file__).with_name("corpora.yaml").read_bytes(), SafeLoader)
    return {name: CorpusInfo(name, **entry) for name, entry in table.items()}


def register_corpus(corpus: CorpusInfo) -> CorpusInfo:
    """Make a text for language models of one's own known by its name, as `data.name`; InputError for a name that is taken."""
    if list_corpora().setdefault(corpus.name, corpus) != corpus or corpus.languages is not None:
        raise InputError(f"corpus {corpus.name}: a new name, and a text of one language; pairs are data.name=parallel")
    return corpus


def find_corpus(name: str) -> CorpusInfo:
    """The text, or the sentence pairs, of that name; InputError suggests the nearest name."""
    corpora = list_corpora()
    if name not in corpora or corpora[name].hub:
        raise InputError(f"data.name: unknown corpus '{name}'; {suggest(name, corpora, whole=True)}")
    return corpora[name]


def has_pairs(name: str) -> bool:
    """The corpus of that name is one of sentence pairs, for translation; all others are text for language models."""
    corpus = list_corpora().get(name)
    return corpus is not None and corpus.unit == "pairs"
