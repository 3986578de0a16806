"""Corpora from their public places: downloads, which go into a temporary folder first and are verified, and the Hugging Face
hub."""

from __future__ import annotations

import gzip
import http.client
import importlib.util
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from fullrank.core.errors import InputError, RunError
from fullrank.data.corpora import CorpusInfo
from fullrank.data.files import Report, file_digest, publish, workspace, writing

_ATTEMPTS = 3
_TIMEOUT = 30  # seconds without a byte
_BLOCK = 1 << 18
_SHARDS = ("news.en-", "news.en.heldout-00000-of", "news.en.heldout-00001-of")  # of the archive of lm1b


def fetch(url: str, target: Path, report: Report, *, timeout: float = _TIMEOUT) -> None:
    """Download `url` to `target`; a broken connection is taken up where it broke, at most twice.

    Raises OSError or http.client.HTTPException when it does not succeed.
    """
    for attempt in range(_ATTEMPTS):
        try:
            _fetch_rest(url, target, report, timeout)
            return
        except urllib.error.HTTPError:
            raise
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError):
            if attempt == _ATTEMPTS - 1 or not target.exists():  # nothing came at all: no network, no such host
                raise


def _fetch_rest(url: str, target: Path, report: Report, timeout: float) -> None:
    have = target.stat().st_size if target.exists() else 0
    headers = {"User-Agent": "fullrank"} | ({"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
        if have and response.status != 206:  # the server begins again
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        reported = 0  # tenths
        with writing(target.parent), target.open("ab" if have else "wb") as file:
            while block := response.read(_BLOCK):
                file.write(block)
                have += len(block)
                if total and 10 * have // total > reported:
                    reported = 10 * have // total
                    report(f"{url}: {10 * reported} % of {total / 1e6:,.1f} MB")
        if total and have < total:
            raise ConnectionError(f"the connection closed after {have:,} of {total:,} bytes")


def _unpack(archive: Path, info: CorpusInfo) -> None:
    """Take the corpus's files out of a .zip, .tar.gz, .tgz or .gz, next to it, and remove the archive."""
    folder = archive.parent
    wanted = {*info.packed, *(name for names in info.files.values() for name in names)}
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            for member in packed.namelist():
                if (name := Path(member).name) in wanted:
                    _copy(packed.open(member), folder / name)
    elif not archive.name.endswith((".tar.gz", ".tgz")):
        with gzip.open(archive) as content:
            _copy(content, folder / archive.stem)
    else:
        with tarfile.open(archive) as packed:
            for entry in packed:
                name = Path(entry.name).name
                if entry.isfile() and (name in wanted or name.startswith(_SHARDS)):
                    inner = packed.extractfile(entry)
                    assert inner is not None  # it is a file
                    _copy(inner, folder / name)
    archive.unlink()


def _copy(source: IO[bytes] | gzip.GzipFile, target: Path) -> None:
    with source, target.open("wb") as file:
        shutil.copyfileobj(source, file)


def _verify(info: CorpusInfo, folder: Path) -> None:
    wanted = dict.fromkeys(info.packed, "") if info.packed else {names[0]: split for split, names in info.files.items()}
    for name, split in wanted.items():
        path = folder / name
        if not path.is_file():
            raise RunError(f"{info.name}: the download holds no {name}")
        expected = info.sha256.get(split)
        if expected and file_digest(path, "data.name") != expected:
            raise RunError(f"{info.name}: the downloaded {name} is not the published file (its sha256 differs)")


def download(info: CorpusInfo, cache: Path, report: Report) -> Path:
    """The folder `sources/<name>` of the cache with the files of a corpus, downloaded unless it is there.

    Raises RunError, naming the addresses and the local way, when no mirror gives the files.
    """
    final = cache / "sources" / info.name
    if final.is_dir():
        return final
    with workspace(final.parent) as folder:
        for mirrors in info.urls:
            failures = []
            for url in mirrors:
                target = folder / url.rpartition("/")[2]
                report(f"{info.name}: downloading {url} ({info.licence})")
                try:
                    fetch(url, target, report)
                    if target.name.endswith((".zip", ".gz", ".tgz")):
                        with writing(folder):
                            _unpack(target, info)
                    break
                except (
                    OSError,
                    http.client.HTTPException,
                    zipfile.BadZipFile,
                    tarfile.TarError,
                    EOFError,
                    zlib.error,
                ) as error:
                    failures.append(f"{url}: {getattr(error, 'reason', None) or error}")
                    target.unlink(missing_ok=True)
            else:
                raise RunError(
                    f"{info.name} could not be downloaded ({'; '.join(failures)}). Either connect to the network, or fetch "
                    f"the files elsewhere and name their folder: --from DIR (data.dir=DIR) with {info.wanted()}"
                )
        _verify(info, folder)
        with writing(final.parent):
            publish(folder, final)
    return final


def hub_rows(
    name: str,
    split: str,
    *,
    configuration: str | None = None,
    revision: str,
    cache: Path | None,
    what: str,
    licence: str,
    local: str,
    report: Report,
) -> Iterable[dict[str, Any]]:
    """The rows of a split of a data set on the Hugging Face hub, through `datasets`.

    `what` names the data in messages, `local` says how local files are given instead.
    Raises InputError where `datasets` is not installed, RunError where the hub cannot be reached; both name the local way.
    """
    if importlib.util.find_spec("datasets") is None:
        raise InputError(
            f"{what}: {local}; or install what the Hugging Face hub ({name}) needs: pip install 'fullrank[hf]'"
        )
    report(f"{what}: {split} from the Hugging Face hub, {name} ({licence})")
    try:
        import datasets

        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            *((name, configuration) if configuration else (name,)),
            split=split,
            revision=revision,
            cache_dir=None if cache is None else str(cache / "hub"),
        )
    except Exception as error:  # of many libraries: no network, no such revision, a full disk
        words = " ".join(str(error).split())[:300]
        raise RunError(
            f"{what} could not be had from the Hugging Face hub, {name} ({type(error).__name__}: {words}). Either connect to "
            f"the network, or {local}"
        ) from error
    return rows
