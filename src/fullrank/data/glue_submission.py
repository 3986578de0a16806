"""Files for GLUE's test server: one of predictions for each test split, eleven in all, packed as one archive."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from fullrank.config.glue import GLUE, SCORES, GlueTask, glue_task
from fullrank.core.errors import InputError
from fullrank.data.glue import Examples
from fullrank.files import write_bytes, write_text

ARCHIVE = "submission.zip"
FILES = tuple(name for task in GLUE.values() for name in task.submission.values())


def write_submission(
    task: str | GlueTask,
    split: str,
    predictions: ArrayLike,
    folder: str | Path,
    examples: Examples | None = None,
) -> Path:
    """Writes the predictions of a test split as the test server wants them, under the server's name, and returns the path.

    predictions (n,): class ids, or scores of STS-B, which are clipped to 0 .. 5 and written with three decimals; in the order
    of the test file, or in that of `examples`, whose ids are then written.
    Raises InputError unless there is one valid prediction for every row of the published test split.
    """
    task = glue_task(task)
    task.check_split(split)
    if split not in task.test_splits:
        raise InputError(
            f"GLUE {task.folder}: a submission is of a test split ({', '.join(task.test_splits)}), not {split}"
        )
    words = _words(task, np.asarray(predictions))
    published = task.sizes[split]
    if len(words) != published:
        raise InputError(
            f"GLUE {task.folder}: {len(words):,} predictions for the split {split}; the test server wants one for each of its "
            f"{published:,} rows"
        )
    rows = range(published) if examples is None else submission_rows(task, split, examples)
    path = Path(folder).expanduser() / task.submission[split]
    lines = (f"{number}\t{word}\n" for number, word in sorted(zip(rows, words, strict=True)))
    write_text(path, "index\tprediction\n" + "".join(lines))
    return path


def _words(task: GlueTask, predictions: np.ndarray) -> list[str]:
    """What stands in the column `prediction`: names of classes where the server wants them, else ids, or scores."""
    if predictions.ndim != 1:
        raise InputError(f"predictions of shape {predictions.shape}: one for each row is wanted, as logits.argmax(-1)")
    if task.labels is None:
        if predictions.dtype.kind not in "iuf" or not np.isfinite(predictions).all():
            raise InputError(f"GLUE {task.folder}: predictions are finite numbers")
        return [f"{score:.3f}" for score in np.clip(predictions.astype(np.float64), *SCORES).tolist()]
    if predictions.dtype.kind not in "iub":
        raise InputError(f"GLUE {task.folder}: predictions are class ids, integers; given is {predictions.dtype}")
    ids = predictions.astype(np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= len(task.labels)))
    if len(outside):
        row = int(outside[0])
        raise InputError(
            f"GLUE {task.folder}: prediction {row} is {ids[row]}; allowed: 0 to {len(task.labels) - 1} "
            f"({', '.join(task.labels)})"
        )
    return [task.labels[i] if task.label_names else str(i) for i in ids.tolist()]


def submission_rows(task: GlueTask, split: str, examples: Examples) -> list[int]:
    """The ids of the examples as the server's row numbers.

    Raises InputError unless each of them is there once: worth asking before a model is trained.
    """
    if (examples.task.name, examples.split) != (task.name, split):
        raise InputError(
            f"predictions of GLUE {task.folder} {split} with examples of {examples.task.folder} {examples.split}"
        )
    published = task.sizes[split]
    if len(examples) != published or set(examples.ids) != {str(i) for i in range(published)}:
        raise InputError(
            f"GLUE {task.folder}: the {len(examples):,} ids of {examples.path or 'the hub'} are not 0 to {published - 1:,}, "
            "each once; the test server wants its whole test file"
        )
    return [int(number) for number in examples.ids]


def pack_submission(folder: str | Path) -> Path:
    """Packs the files of all test splits into one archive for the server; InputError names those that are missing."""
    place = Path(folder).expanduser()
    missing: Sequence[str] = [name for name in FILES if not (place / name).is_file()]
    if missing:
        raise InputError(f"{place}: the test server wants {len(FILES)} files; missing: {', '.join(missing)}")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in FILES:
            archive.writestr(zipfile.ZipInfo(name), (place / name).read_bytes(), zipfile.ZIP_DEFLATED)
    write_bytes(place / ARCHIVE, content.getvalue())
    return place / ARCHIVE
