"""What is known of every corpus, with those to fine-tune on: the tasks of GLUE, and SQuAD."""

from __future__ import annotations

from collections.abc import Mapping

from fullrank.config.glue import GLUE, HUB, GlueTask
from fullrank.data import squad
from fullrank.data.known import CORPORA, CorpusInfo

_ENCODER = "those of the model"  # that is fine-tuned


def _glue(task: GlueTask) -> CorpusInfo:
    splits = ("train", "dev", "test")
    others = [split for split in task.splits if split not in splits]
    text = f"; further splits: {', '.join(others)}" if others else ""
    return CorpusInfo(
        name=f"glue/{task.name}",
        tokens=_ENCODER,
        licence=task.licence,
        source=f"GLUE, {task.title} ({', '.join(task.metrics)}): a local folder, or the Hugging Face hub through `datasets`"
        + text,
        unit="rows",
        published=task.sizes,
        files={split: (name,) for split, name in task.files.items()},
        hub=f"{HUB}, {task.name}",
    )


def _squad(name: str, version: str) -> CorpusInfo:
    return CorpusInfo(
        name=name,
        tokens=_ENCODER,
        licence="CC BY-SA 4.0",
        source=f"SQuAD {version}, answers as spans of a context (exact match, F1): a local folder, or the Hugging Face hub "
        "through `datasets`",
        unit="questions",
        published=squad.PUBLISHED[version],
        files={split: (f"{split}-v{version}.json",) for split in squad.PUBLISHED[version]},
        hub=squad.HUB[version],
    )


SQUAD: Mapping[str, str] = {"squad": "1.1", "squad-v2": "2.0"}  # name: version
TASKS: Mapping[str, CorpusInfo] = {
    info.name: info for info in (*map(_glue, GLUE.values()), *(_squad(*named) for named in SQUAD.items()))
}


def known_corpora() -> list[CorpusInfo]:
    """Every corpus: those that `data.name` may be, then those to fine-tune on, for `fullrank data list`."""
    return [*CORPORA.values(), *TASKS.values()]


def is_task(name: str) -> bool:
    """Whether a name is meant as that of a task to fine-tune on, be it right or not: `glue/cola`, `glue/x`, `cola`, `squad`."""
    return name.partition("/")[0] == "glue" or name in GLUE or name in SQUAD
