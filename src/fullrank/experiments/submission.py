"""The archive that GLUE's test server takes: the predictions of fine-tuned runs, one file for each of its eleven test sets."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path

from fullrank.config.finetune import FinetuneConfig
from fullrank.config.glue import GLUE, SCORES, GlueTask
from fullrank.core.errors import InputError
from fullrank.data.glue import read_score
from fullrank.experiments.run_folder import open_any
from fullrank.files import read_small, text_of, write_bytes

_SAVED = (1980, 1, 1, 0, 0, 0)  # the oldest date of a zip archive: the same predictions make the same bytes
_LARGEST = 1 << 25
_HOW = "train it with eval.test=true and the whole test files"


def pack(folders: Sequence[Path], out: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Write the predictions of runs on GLUE as one zip archive, under the server's names and in its order.

    Returns the run of each file, and the task of each file that no run has. Every file is checked against the server's
    format before anything is written. Raises InputError for a folder that is no such run or has no predictions, for a file
    that the server would refuse, and for two runs with the same file.
    """
    files: dict[str, Path] = {}
    contents: dict[str, bytes] = {}
    wanted = {name: task.name for task in GLUE.values() for name in task.submission.values()}
    for folder in folders:
        task = _task(folder)
        for split, name in task.submission.items():
            path = folder / "submission" / name
            if not path.is_file():
                raise InputError(f"{folder}: no submission/{name}; {_HOW}: fullrank finetune ... eval.test=true")
            if name in files:
                raise InputError(f"{name}: predicted by both {files[name]} and {folder}; give one run of each task")
            try:
                content = read_small(path, _LARGEST)
                _check(task, split, text_of(content, str(path)))
            except ValueError as error:
                raise InputError(f"{path}: {error}; {_HOW}") from error
            files[name], contents[name] = folder, content
    if out.exists() and not _is_archive(out, wanted):
        raise InputError(f"{out}: exists and holds no such predictions, so it is left alone; give another --out")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _SAVED)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, contents[name])
    write_bytes(out, packed.getvalue())
    return dict(sorted(files.items())), {name: wanted[name] for name in sorted(wanted.keys() - files.keys())}


def _task(folder: Path) -> GlueTask:
    config, _ = open_any(folder)
    if not isinstance(config, FinetuneConfig) or config.data.answers:
        raise InputError(f"{folder}: a run on {config.data.name}; the server takes predictions of the tasks of GLUE")
    return GLUE[config.data.task]


def _check(task: GlueTask, split: str, text: str) -> None:
    """ValueError unless `text` has the server's header, its row numbers in order, and what may stand beside them."""
    header, *rows = text.removesuffix("\n").split("\n")
    if header != "index\tprediction":
        raise ValueError(f"the first line is {header[:40]!r}, the server wants index and prediction")
    if len(rows) != task.sizes[split]:
        raise ValueError(f"{len(rows):,} rows, the server wants {task.sizes[split]:,}")
    labels = task.labels or ()
    allowed = set(labels if task.label_names else map(str, range(len(labels))))
    for number, row in enumerate(rows):
        index, _, word = row.partition("\t")
        if index != str(number) or not (word in allowed if allowed else read_score(word) is not None):
            what = ", ".join(sorted(allowed)) or f"a number from {SCORES[0]:g} to {SCORES[1]:g}"
            raise ValueError(f"line {number + 2} is {row[:40]!r}, the server wants {number} and {what}")


def _is_archive(path: Path, names: Collection[str]) -> bool:
    """True for an archive that holds files of the server and no others."""
    try:
        with zipfile.ZipFile(path) as archive:
            return set(archive.namelist()) <= set(names)
    except (OSError, zipfile.BadZipFile):
        return False
