"""The verb `data`: corpora that are known, and getting one ready."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fullrank.cli.app import examples, verb
from fullrank.cli.options import Json, Overrides, Source
from fullrank.cli.output import describe, say, tell

data = typer.Typer(
    no_args_is_help=True,
    help="List corpora and prepare them.",
    epilog=examples(
        "fullrank data prepare ptb --from ~/corpora/ptb", "fullrank data prepare glue/cola --from ~/glue_data"
    ),
)


@verb("fullrank data list", name="list", group=data)
def list_data(json: Json = False) -> None:
    """List the known corpora: tokens, published counts, terms, source."""
    import dataclasses

    from fullrank.data import list_all_corpora

    corpora = [dataclasses.asdict(corpus) for corpus in list_all_corpora()]
    lines = []
    for corpus in corpora:
        about = {key: value for key, value in corpus.items() if key not in ("name", "sha256")}
        lines += [corpus["name"], *(f"  {line}" for line in describe(about))]
    tell(corpora, lines, json=json)


@verb(
    "fullrank data prepare ptb --from ~/corpora/ptb",
    "fullrank data prepare glue/cola --from ~/glue_data",
    name="prepare",
    group=data,
)
def prepare_data(
    name: Annotated[str, typer.Argument(metavar="CORPUS", help="A corpus (`fullrank data list`).")],
    overrides: Overrides = None,
    source: Source = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Where prepared corpora are kept (data.cache).")
    ] = None,
    json: Json = False,
) -> None:
    """Find or download a corpus, verify its counts, and store it as token ids.

    Of a task to fine-tune on (glue/cola, squad) every split is read and counted; token ids are those of its model.
    """
    from fullrank.config.data import PAIR_CORPORA
    from fullrank.config.load import apply_overrides, build
    from fullrank.data.corpora import is_task

    if is_task(name):
        tell(*_read_task(name, overrides or [], source, to), json=json)
        return
    words = list(overrides or [])
    words += [f"data.{name}={folder}" for name, folder in (("dir", source), ("cache", to)) if folder]
    raw: dict[str, Any] = {"data": {"name": name}}
    if name in PAIR_CORPORA:
        raw["train"] = {"batch_tokens": 1}  # a run of translation has to say it; nothing is trained here
    config = build(apply_overrides(raw, words)).data

    from fullrank.data import prepare
    from fullrank.experiments import language_model, translation

    corpus = prepare(config, report=say)
    about = {"folder": str(corpus.folder), **(translation if config.has_pairs else language_model).describe(corpus)}
    shown = {key: value for key, value in about.items() if key not in ("name", "label", "sha256", "fingerprint")}
    tell(about, [corpus.label, *describe(shown)], json=json)


def _read_task(
    name: str, overrides: list[str], source: str | None, to: Path | None
) -> tuple[dict[str, Any], list[Any]]:
    """A task to fine-tune on: its JSON, and lines for people."""
    from fullrank.config.finetune import GLUE, SQUAD, glue_task
    from fullrank.core.errors import InputError
    from fullrank.data.tasks import load_glue, locate, read_squad

    if overrides:
        raise InputError(f"{', '.join(overrides)}: {name} is read as it is; leave out all but --from and --to")
    if name in GLUE:
        raise InputError(f"unknown corpus '{name}'; did you mean 'glue/{name}'?")
    parts: list[Any]
    if name in SQUAD:
        version = SQUAD[name]
        parts = [read_squad(source, split, version, cache=to, report=say) for split in ("train", "dev")]
        label, facts = f"SQuAD {version}", dict[str, Any](version=version)
    else:
        task = glue_task(name.partition("/")[2])
        folder = None if source is None else Path(source).expanduser()
        missing = [split for split in [*task.sizes][1:] if folder is not None and locate(task, split, folder) is None]
        parts = [load_glue(task, split, folder, to, say) for split in task.sizes if split not in missing]
        label = f"GLUE {task.folder}"
        facts = {"title": task.title, "labels": task.labels, "metrics": task.metrics, "missing": missing}
    is_slice = any(part.is_slice for part in parts)
    label += " (slice)" if is_slice else ""
    splits = {part.split: part.describe() for part in parts}
    lines = [label, *describe({**facts, "splits": splits})]
    return {"name": name, "label": label, "is_slice": is_slice, **facts, "splits": splits}, lines
