"""The corpora that have a name: what was published about them, and their downloads. They are listed in corpora.yaml."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from fullrank.config.finetune import GLUE, HUB, SQUAD, TASKS, GlueTask
from fullrank.config.run import PAIR_CORPORA
from fullrank.core.errors import InputError, RunError, one_line, pip_install, suggest
from fullrank.data.files import Report, create_folder, file_digest
from fullrank.files import SafeLoader, mended, no_room

SQUAD_SIZES: Mapping[str, Mapping[str, int]] = {
    "1.1": {"train": 87_599, "dev": 10_570},
    "2.0": {"train": 130_319, "dev": 11_873},
}
SQUAD_HUB = {"1.1": "rajpurkar/squad", "2.0": "rajpurkar/squad_v2"}
_TIMEOUT = 30  # seconds without a byte
_SHARDS = ("news.en-", "news.en.heldout-00000-of", "news.en.heldout-00001-of")  # of the archive of lm1b
_ENCODER = "those of the model"  # that is fine-tuned


@dataclass(frozen=True)
class CorpusInfo:
    """One corpus. `published` counts each split in `unit`; words are counted with one `<eos>` per line.

    `languages`: of the two sides of sentence pairs, source first; None for text of one language.
    `files`: accepted file names of each split (of sentence pairs, of each `split.language`), the published name first.
    `urls`: things to download, each with its mirrors. `packed`: the files in them, where these are not those of `files`.
    `hub`: its name on the Hugging Face hub, where it comes from there. `sha256`: of files that are known byte by byte.
    """

    name: str
    tokens: str
    licence: str
    source: str
    unit: Literal["words", "characters", "bytes", "pairs", "rows", "questions"] = "words"
    languages: tuple[str, str] | None = None
    published: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    urls: tuple[tuple[str, ...], ...] = ()
    packed: tuple[str, ...] = ()
    hub: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)

    def file_names(self) -> str:
        """The files that make up the corpus, in words."""
        return ", ".join(names[0] for names in self.files.values()) or self.source.rpartition(": ")[2]


@cache
def _read_table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = yaml.load(Path(__file__).with_name("corpora.yaml").read_bytes(), SafeLoader)
    return table


def read_extra(name: str, key: Literal["folder", "codes", "settings", "files"], default: Any) -> Any:
    """Read an entry of corpora.yaml as it stands there."""
    return _read_table().get(name, {}).get(key, default)


@cache
def list_corpora() -> dict[str, CorpusInfo]:
    """Corpora by name: values of `data.name`."""
    return {name: _read_info(name, entry) for name, entry in _read_table().items()}


def _read_info(name: str, entry: Mapping[str, Any]) -> CorpusInfo:
    about = {key: value for key, value in entry.items() if key not in ("folder", "codes", "settings")}
    files = {}
    for split, stems in entry.get("files", {}).items():
        files[split] = tuple(stems)
        for language in entry.get("languages", ()):
            files.pop(split, None)
            files[f"{split}.{language}"] = tuple(f"{stem}.{language}" for stem in stems)
    urls: list[tuple[str, ...]] = []
    for mirrors in entry.get("urls", ()):
        names = [names[0] for names in files.values()] if "{}" in mirrors[0] else [""]
        urls += [tuple(url.format(file) for url in mirrors) for file in names]
    languages, packed = entry.get("languages"), tuple(entry.get("packed", ()))
    about |= {"files": files, "urls": tuple(urls), "packed": packed, "languages": languages and tuple(languages)}
    return CorpusInfo(name, **about)


def register_corpus(corpus: CorpusInfo) -> CorpusInfo:
    """Make a text for language models of one's own known by its name, as `data.name`; InputError for a name that is taken."""
    if list_corpora().setdefault(corpus.name, corpus) != corpus or corpus.languages is not None:
        raise InputError(f"corpus {corpus.name}: a new name, and a text of one language; pairs are data.name=parallel")
    return corpus


def text_corpus(name: str) -> CorpusInfo:
    """The corpus of that name, for language models; InputError suggests the nearest name."""
    corpora = list_corpora()
    if name not in corpora:
        near, known = suggest(name, [*corpora, *TASKS]), f"known: {', '.join(corpora)}"
        hint = f"{near} ({known})" if near.startswith("did you mean") else known
        raise InputError(f"data.name: unknown corpus '{name}'; {hint}")
    if name in PAIR_CORPORA:
        raise InputError(f"data.name: {name} is a corpus of sentence pairs, for translation; this is a language model")
    return corpora[name]


def pair_corpus(name: str) -> CorpusInfo:
    """The corpus of sentence pairs of that name; InputError lists them all."""
    if name not in PAIR_CORPORA:
        raise InputError(f"data.name: '{name}' is none of the corpora of sentence pairs: {', '.join(PAIR_CORPORA)}")
    return list_corpora()[name]


def list_all_corpora() -> list[CorpusInfo]:
    """Every corpus: values of `data.name`, then tasks to fine-tune on, for `fullrank data list`."""
    return [*list_corpora().values(), *map(_describe_glue, GLUE.values()), *map(_describe_squad, SQUAD)]


def _describe_glue(task: GlueTask) -> CorpusInfo:
    return CorpusInfo(
        name=f"glue/{task.name}",
        tokens=_ENCODER,
        licence=task.licence,
        source=f"GLUE, {task.title} ({', '.join(task.metrics)}): a local folder, or the Hugging Face hub through `datasets`",
        unit="rows",
        published=task.sizes,
        files={split: (name,) for split, name in task.files.items()},
        hub=f"{HUB}, {task.name}",
    )


def _describe_squad(name: str) -> CorpusInfo:
    version = SQUAD[name]
    return CorpusInfo(
        name=name,
        tokens=_ENCODER,
        licence="CC BY-SA 4.0",
        source=f"SQuAD {version}, answers as spans of a context (exact match, F1): a local folder, or the Hugging Face hub "
        "through `datasets`",
        unit="questions",
        published=SQUAD_SIZES[version],
        files={split: (f"{split}-v{version}.json",) for split in SQUAD_SIZES[version]},
        hub=SQUAD_HUB[version],
    )


# downloads, which go into a temporary folder first and are verified


def download(info: CorpusInfo, cache: Path, report: Report) -> Path:
    """The folder `sources/<name>` of the cache with the files of a corpus, downloaded unless it is there.

    Raises RunError, naming the addresses and the local way, when no mirror gives the files.
    """
    final = cache / "sources" / info.name
    if final.is_dir():
        return final
    with create_folder(final) as folder:
        loaded = folder / "loaded"
        for mirrors in info.urls:
            _download_first(info, mirrors, loaded, report)
        names = {*info.packed, *itertools.chain.from_iterable(info.files.values())}
        for path in [*loaded.rglob("*")]:
            if path.is_file() and (path.name in names or path.name.startswith(_SHARDS)):
                path.rename(folder / path.name)
        shutil.rmtree(loaded)
        _verify(info, folder)
    return final


def _download_first(info: CorpusInfo, mirrors: tuple[str, ...], folder: Path, report: Report) -> None:
    """Download a file from the first mirror that has it, and unpack it."""
    import pooch

    pooch.get_logger().setLevel("WARNING")
    failures = []
    for url in mirrors:
        name = url.rpartition("/")[2]
        unpack = None
        if name.endswith(".zip"):
            unpack = pooch.Unzip()
        elif name.endswith((".tgz", ".tar.gz")):
            unpack = pooch.Untar()
        elif name.endswith(".gz"):
            unpack = pooch.Decompress(name=name.removesuffix(".gz"))
        report(f"{info.name}: downloading {url} ({info.licence})")
        loader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=_TIMEOUT)
        try:
            pooch.retrieve(url, None, fname=name, path=folder, processor=unpack, downloader=loader)
            return
        except Exception as error:  # of the network, of zip, tar and gzip
            if no_room(error):
                raise
            failures.append(f"{url}: {error}")
            (folder / name).unlink(missing_ok=True)
    raise RunError(
        f"{info.name} could not be downloaded ({'; '.join(failures)}). Either connect to the network, or fetch "
        f"the files elsewhere and name their folder: --from DIR (data.dir=DIR) with {info.file_names()}"
    )


def _verify(info: CorpusInfo, folder: Path) -> None:
    files = dict.fromkeys(info.packed, "") or {names[0]: split for split, names in info.files.items()}
    for name, split in files.items():
        path = folder / name
        if not path.is_file():
            raise RunError(f"{info.name}: the download holds no {name}")
        expected = info.sha256.get(split)
        if expected and file_digest(path, "data.name") != expected:
            raise RunError(f"{info.name}: the downloaded {name} is not the published file (its sha256 differs)")


def load_hub_rows(
    name: str,
    split: str,
    revision: str,
    licence: str,
    files: str,
    cache: str | Path | None,
    report: Report,
    configuration: str | None = None,
) -> Iterable[dict[str, Any]]:
    """The rows of a split of a data set on the Hugging Face hub. files: what a local folder would hold instead.

    Raises InputError where `datasets` is not installed, RunError where the hub cannot be reached; both name the local way.
    """
    local = f"give a local folder that holds {files}: --from DIR (data.dir=DIR)"
    if importlib.util.find_spec("datasets") is None:
        raise InputError(f"{local}; or install what the Hugging Face hub ({name}) needs: {pip_install('hf')}")
    import datasets

    report(f"{name}: {split} from the Hugging Face hub ({licence})")
    folder = None if cache is None else str(Path(cache) / "hub")
    try:
        rows = datasets.load_dataset(name, configuration, split=split, revision=revision, cache_dir=folder)
    except Exception as error:  # of many libraries: no network, no such revision, a full disk
        raise RunError(
            f"{name} could not be had from the Hugging Face hub ({type(error).__name__}: {one_line(error, 300)}). Either "
            f"connect to the network, or {local}"
        ) from error
    return map(mended, rows)
