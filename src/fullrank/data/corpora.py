"""The source files of corpora: downloaded, made by a program, or found in a folder.

IWSLT 2014 as it was published is read as everybody prepares it since Ranzato et al. (2016): the training file without its
address, keyword and id lines and without the tags of title and description; the test set is dev2010, dev2012, tst2010, tst2011
and tst2012, from XML; every 23rd of the cleaned training pairs is the validation set.
"""

from __future__ import annotations

import glob
import inspect
import logging
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fullrank.config.finetune import TaskDataConfig
from fullrank.config.run import CorpusInfo, DataConfig, find_corpus
from fullrank.core.errors import InputError, RunError
from fullrank.data import builtin, invented
from fullrank.files import (
    Section,
    check_folder,
    count_lines,
    create_folder,
    cut_files,
    digest,
    file_digest,
    lines,
    no_room,
    open_text,
    sha256_of,
)

logger = logging.getLogger(__name__)
_TIMEOUT = 30  # seconds without a byte
_SHARDS = ("news.en-", "news.en.heldout-00000-of", "news.en.heldout-00001-of")  # of the archive of lm1b
_MADE = {"builtin": builtin, invented.TRANSLATION: invented}  # by programs


# downloads, which go into a temporary folder first and are verified


def download(info: CorpusInfo, cache: Path) -> Path:
    """Download the files of a corpus into the folder `sources/<name>` of the cache, unless they are there.

    Raises RunError, naming the addresses and the local way, when no mirror gives the files, and for files that are not the
    published ones.
    """
    final = cache / "sources" / info.name
    if final.is_dir():
        return final
    files = {name: name for name in info.packed} or info.published_files
    with create_folder(final) as folder:
        loaded = folder / "loaded"
        for mirrors in info.urls:
            for file in files.values() if "{}" in mirrors[0] else [""]:
                _download_first(info, [url.format(file) for url in mirrors], loaded)
        for path in [*loaded.rglob("*")]:
            if path.is_file() and (path.name in files.values() or path.name.startswith(_SHARDS)):
                path.rename(folder / path.name)
        shutil.rmtree(loaded)
        for key, name in files.items():
            path = folder / name
            expected = info.sha256.get(key)
            if not path.is_file():
                raise RunError(f"{info.name}: the download holds no {name}")
            if expected and sha256_of(path) != expected:
                raise RunError(f"{info.name}: the downloaded {name} is not the published file (its sha256 differs)")
    return final


def _download_first(info: CorpusInfo, mirrors: Sequence[str], folder: Path) -> None:
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
        logger.info(f"{info.name}: downloading {url} ({info.licence})")
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


# -- source files ------------------------------------------------------------------------------------------------------

SPLITS = ("train", "valid", "test")
_MOST_CUT = 1000  # pairs of a split that is cut from the training files
_IWSLT_VALID_EVERY = 23
_IWSLT_DROPPED = re.compile("<url>|<talkid>|<keywords>")
_IWSLT_TAGS = re.compile("</?title>|</?description>")
_IWSLT_SEGMENT = re.compile(r'<seg id="[0-9]*">\s*|\s*</seg>\s*')


def files_of(config: DataConfig, split: str) -> list[Path]:
    """List the files of a split of the user's text or sentence pairs; of a text, a pattern is all files that match.

    Raises InputError for an empty list, and for a pattern that no file matches.
    """
    value = getattr(config, split)
    if value == []:
        raise InputError(f"data.{split}: an empty list; give a file, or null")
    folder = Path(config.dir or "").expanduser()
    files = list[Path]()
    for name in [value] if isinstance(value, str) else value or []:
        file = Path(name).expanduser()
        if config.has_pairs:
            files += [Path(f"{folder / file}.{str(side).lstrip('.')}") for side in (config.source, config.target)]
        else:
            files += _match_files(folder, file, f"data.{split}")
    return files


def _match_files(folder: Path, file: Path, key: str) -> list[Path]:
    """List a file of `folder`, all .txt files of a folder in it, or all files that match a pattern with `*`, `?` or `[`.

    They are in alphabetical order.
    """
    path = folder / file
    pattern = str(file)
    if path.is_dir():
        folder = path
        pattern = "**/*.txt"
    if path.is_file() or not glob.has_magic(pattern):
        return [path]
    matching = (folder / name for name in glob.glob(pattern, root_dir=folder, recursive=True))
    files = sorted(match for match in matching if match.is_file())
    if not files:
        raise InputError(f"{key}: no file matches {folder / pattern}")
    return files


def check_data(config: DataConfig | TaskDataConfig) -> None:
    """Check that the user's files, or the folder of a corpus, are there; no more than their names is read.

    Raises InputError where they are not.
    """
    if config.dir is not None and config.name not in _MADE:
        check_folder(Path(config.dir).expanduser(), "the files of the corpus")
    if not isinstance(config, DataConfig):
        return
    find_corpus(config.name)
    if config.name in ("text", "parallel"):
        for split in SPLITS:
            for path in files_of(config, split):
                open_text(path, f"data.{split}").close()


def _choose_folder(config: DataConfig, info: CorpusInfo, cache: Path) -> Path:
    """Choose the folder with the files of a corpus, which are downloaded, or made by a program, where no folder is named."""
    if info.name in _MADE:
        program = _MADE[info.name]
        folder = cache / "texts" / f"{info.name}-{digest([sys.version, inspect.getsource(program)])[:16]}"
        if not folder.is_dir():
            logger.info(f"{info.name}: making the text")
            with create_folder(folder) as new:
                program.write_texts(new)
        return folder
    if config.dir is not None:
        folder = check_folder(Path(config.dir).expanduser(), info.file_names())
    elif info.urls:
        folder = download(info, cache)
    else:
        raise InputError(
            f"data.name: {info.name} is not downloaded; give its folder with --from DIR (data.dir): {info.source}"
        )
    inner = [folder / name for name in (info.name, info.folder or info.name)]
    return next((candidate for candidate in inner if candidate.is_dir()), folder)


def _choose_files(info: CorpusInfo, folder: Path, suffixes: Sequence[str] = ("",)) -> dict[str, list[Path]]:
    """Match the files of each split: the first of its accepted names that has every suffix in `folder`.

    Raises InputError for a split that is missing; splits beyond train, valid and test may be.
    """
    files = {}
    missing = []
    for split, accepted in info.files.items():
        choices = []
        for name in accepted:
            choices.append([folder / f"{name}{suffix}" for suffix in suffixes])
        complete = next((paths for paths in choices if all(map(Path.is_file, paths))), None)
        if complete is not None:
            files[split] = complete
        elif split in (*SPLITS, "all"):
            missing += [path.name for path in choices[0] if not path.is_file()]
    if missing:
        hint = ". Without data.dir the corpus is downloaded" if info.urls else ""
        raise InputError(f"data.dir: {info.name}: {folder} lacks {', '.join(missing)}{hint}")
    return files


@dataclass(frozen=True)
class Split:
    """The files of a split, read one after another: of a text, or of both sides of sentence pairs.

    `key`: the configuration key that errors name. `is_raw`: files of IWSLT with their tags. `is_tokenized`: with Moses' rules
    already.
    """

    key: str
    columns: tuple[Sequence[Section], ...]
    is_raw: bool = False
    is_tokenized: bool = False

    def _read_side(self, sections: Sequence[Section]) -> Iterator[str]:
        for section in sections:
            rows = lines(section.path, self.key, section.start, section.end)
            yield from _read_iwslt(section.path, rows) if self.is_raw else rows

    def read_pairs(self) -> Iterator[tuple[str, str]]:
        """Yield the lines of both sides, side by side."""
        source, target = map(self._read_side, self.columns)
        return zip(source, target, strict=True)

    def check_pairs(self) -> None:
        """Raise InputError if the two sides have different numbers of lines, or none."""
        m, n = (sum(1 for _ in self._read_side(side)) for side in self.columns)
        if m != n:
            source, target = (" + ".join(str(section.path) for section in side) for side in self.columns)
            raise InputError(
                f"{self.key}: {source} has {m:,} lines and {target} has {n:,}; line k of the one must be the translation of "
                "line k of the other (where there is none, an empty line)"
            )


@dataclass(frozen=True)
class Sources:
    """The files of each split, and notes on how they were divided.

    Of sentence pairs: `languages`, source and target; `codes`, BPE merges that go with them; `valid_every`, every so many-th
    training pair that cleaning keeps belongs to the validation split instead, which then has no files.
    """

    splits: Mapping[str, Split]
    notes: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    codes: Path | None = None
    valid_every: int | None = None

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Files and their sha256, for the record of the corpus."""
        digests: dict[Path, str] = {}
        rows = []
        for name, split in self.splits.items():
            for side, sections in zip(("source", "target"), split.columns, strict=False):
                for section in sections:
                    path = section.path
                    digests[path] = digests.get(path) or file_digest(path, f"data.{name}")
                    row: dict[str, Any] = {"split": name, "file": str(path.absolute()), "sha256": digests[path]}
                    if self.languages:
                        row["side"] = side
                    if not self.languages or section.end is not None:
                        row |= {"start": section.start, "end": section.end}
                    rows.append(row)
        return rows


def _find_own(config: DataConfig) -> Sources:
    """Find the files of `data.name: text` or `parallel`.

    A file name with the part `tok`, as in `train.tok`, says that the file is tokenized.
    Splits without files are cut from the end of the training lines.
    """
    sides = 1 + config.has_pairs
    splits = {}
    for split in SPLITS:
        if files := files_of(config, split):
            columns = tuple(list(map(Section, files[side::sides])) for side in range(sides))
            splits[split] = Split(f"data.{split}", columns, is_tokenized=all(map(_is_tokenized, files)))
    absent = [split for split in SPLITS if split not in splits]
    if not absent:
        return Sources(splits)
    train = splits["train"]
    files = files_of(config, "train")
    unit = "lines"
    most = None
    if config.has_pairs:
        train.check_pairs()
        most = _MOST_CUT
        cut = f"pairs of the training files, 5 % each, at most {most:,}"
    else:
        if sum(count_lines(path, train.key) for path in files) <= len(absent):
            unit = "bytes"  # one huge line, or lines that carriage returns end
        cut = f"{unit} of the training files, 5 % each"
    shares = [1.0, *[0.05] * len(absent)]
    parts = [cut_files(files[side::sides], shares, train.key, unit=unit, most=most) for side in range(sides)]
    for split, *cuts in zip(["train", *absent], *parts, strict=True):
        splits[split] = replace(train, key=f"data.{split}", columns=tuple(cuts))
    note = f"{' and '.join(absent)}: the last {cut}"
    logger.info(note)
    return Sources({split: splits[split] for split in SPLITS}, (note,))


# text for language models


def list_sections(sections: Mapping[str, Sequence[Section]], *notes: str) -> Sources:
    """Make the sources of a text from the sections of each split."""
    return Sources({split: Split(f"data.{split}", (sections[split],)) for split in SPLITS}, notes)


def find_text(config: DataConfig, info: CorpusInfo, cache: Path) -> Sources:
    """Find the text of a corpus.

    Args:
        config: section `data` of the configuration.
        info: what `find_corpus` knows of it.
        cache: folder in which downloads, and texts made by programs, are kept.

    Returns:
        The files of each split.

    Raises:
        InputError: folders or files are missing, empty or of the wrong kind.
        RunError: the download failed.
    """
    if info.name == "text":
        return _find_own(config)
    folder = _choose_folder(config, info, cache)
    if info.name == "lm1b":
        return _find_lm1b(folder)
    files = _choose_files(info, folder)
    if "all" not in files:
        return list_sections({split: [Section(files[split][0])] for split in SPLITS})
    (path,) = files["all"]
    parts = cut_files([path], (0.9, 0.05, 0.05), "data.dir", unit="bytes")
    size = path.stat().st_size
    is_published = size == sum(info.published.values())
    notes = [] if is_published else [f"{path.name}: {size:,} bytes cut 90/5/5 in their order"]
    return list_sections(dict(zip(SPLITS, parts, strict=True)), *notes)


def _find_lm1b(folder: Path) -> Sources:
    """Find training shards with two held-out shards, or a slice of held-out shards alone."""
    train = sorted(folder.rglob("news.en-*-of-00100"), key=lambda path: path.name)
    heldout = {path.name: path for path in sorted(folder.rglob("news.en.heldout-*"))}
    valid = heldout.get("news.en.heldout-00001-of-00050")
    test = heldout.get("news.en.heldout-00000-of-00050")
    if train and valid and test:
        return list_sections({"train": [*map(Section, train)], "valid": [Section(valid)], "test": [Section(test)]})
    if train or len(heldout) < 2:
        raise InputError(
            f"data.dir: lm1b: {folder} holds {len(train)} training shards and {len(heldout)} held-out shards; wanted are "
            "news.en-*-of-00100 with news.en.heldout-00000-of-00050 (test) and -00001- (valid), or, as a slice, "
            "at least two files news.en.heldout-*. Without data.dir the corpus is downloaded."
        )
    *first, last = (heldout[name] for name in sorted(heldout))
    valid_half, test_half = cut_files([last], (0.5, 0.5), "data.dir")
    note = f"held-out shards only: {', '.join(p.name for p in first)} as train, {last.name} in halves as valid and test"
    return list_sections({"train": [*map(Section, first)], "valid": valid_half, "test": test_half}, note)


# sentence pairs


def _read_iwslt(path: Path, rows: Iterator[str]) -> Iterator[str]:
    """Yield the sentences of a published file: of the test set from XML, of the training set without their tags."""
    if path.suffix == ".xml":
        return (_IWSLT_SEGMENT.sub("", row).replace("\u2019", "'") for row in rows if "<seg id" in row)
    return (_IWSLT_TAGS.sub("", row) for row in rows if not _IWSLT_DROPPED.search(row))


def _is_tokenized(path: Path) -> bool:
    return "tok" in path.name.split(".")


def find_pairs(config: DataConfig, info: CorpusInfo, cache: Path) -> Sources:
    """Find the files of a corpus of sentence pairs.

    Args:
        config: section `data` of the configuration.
        info: what `find_corpus` knows of it.
        cache: folder in which downloads, and texts made by programs, are kept.

    Returns:
        The files of each split, with the languages, and BPE merges if there are any.

    Raises:
        InputError: folders or files are missing, empty, or of different numbers of lines.
        RunError: the download failed.
    """
    if info.languages is None:
        suffixes = (str(side).removesuffix(".txt") for side in (config.source, config.target))
        languages = tuple(suffix.rpartition(".")[2] for suffix in suffixes)
        sources = replace(_find_own(config), languages=languages)
    else:
        source = config.source or next(side for side in info.languages if side != config.target)
        target = config.target or next(side for side in info.languages if side != source)
        if {source, target} != set(info.languages):
            raise InputError(
                f"data.source, data.target: {info.name} has the languages {' and '.join(info.languages)}, given {source} "
                f"and {target}"
            )
        folder = _choose_folder(config, info, cache)
        sources = _find_iwslt(info, (source, target), folder) or _find_known(config, info, (source, target), folder)
    if config.codes is not None:
        sources = replace(sources, codes=Path(config.dir or "").expanduser() / Path(config.codes).expanduser())
    for split in sources.splits.values():
        split.check_pairs()
    return sources


def _find_iwslt(info: CorpusInfo, languages: tuple[str, str], folder: Path) -> Sources | None:
    """Find the files of IWSLT 2014 as it was published; None where they are not there."""
    files = [folder / name for name in info.packed]
    if not files or not all(path.is_file() for path in files):
        return None
    columns = []
    for language in languages:
        columns.append([Section(path) for path in files if path.name.removesuffix(".xml").endswith(language)])
    source, target = columns
    splits = {
        "train": Split("data.dir", (source[:1], target[:1]), is_raw=True),
        "test": Split("data.dir", (source[1:], target[1:]), is_raw=True),
    }
    note = f"every {_IWSLT_VALID_EVERY}rd training pair that cleaning keeps is in the validation split"
    return Sources(splits, (note,), languages, valid_every=_IWSLT_VALID_EVERY)


def _find_known(config: DataConfig, info: CorpusInfo, languages: tuple[str, str], folder: Path) -> Sources:
    """Find the files of a corpus by their known names, with the BPE merges beside them unless a size is asked for."""
    chosen = _choose_files(info, folder, [f".{side}" for side in languages])
    splits = {}
    for split, (source, target) in chosen.items():
        tokenized = info.name == "iwslt14-de-en" or _is_tokenized(source)
        splits[split] = Split("data.dir", ([Section(source)], [Section(target)]), is_tokenized=tokenized)
    codes = None
    if config.max_vocabulary is None:
        codes = next((folder / name for name in info.codes if (folder / name).is_file()), None)
    names = ", ".join(split for split, content in splits.items() if content.is_tokenized)
    return Sources(splits, (f"tokenized already: {names}",) if names else (), languages, codes)
