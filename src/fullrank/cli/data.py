"""The verb `data`: corpora that are known, and getting one ready."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullrank.cli.app import examples, verb
from fullrank.cli.options import Json, Source, with_source
from fullrank.cli.output import say, tell

if TYPE_CHECKING:
    from fullrank.config.data import DataConfig

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

    from fullrank.data import known_corpora

    corpora = [dataclasses.asdict(corpus) for corpus in known_corpora()]
    lines = [
        line
        for corpus in corpora
        for line in (
            corpus["name"],
            *(f"  {key}: {_words(value)}" for key, value in corpus.items() if key != "name" and value),
        )
    ]
    tell(corpora, lines, json=json)


def _words(value: Any) -> str:
    """A value of the table of corpora in words. Of mirrors and of accepted file names, the first."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_first(inner)}" for key, inner in value.items())
    return ", ".join(map(_first, value)) if isinstance(value, tuple | list) else _first(value)


def _first(value: Any) -> str:
    if isinstance(value, tuple):
        return str(value[0])
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value or "")


@verb(
    "fullrank data prepare ptb --from ~/corpora/ptb",
    "fullrank data prepare glue/cola --from ~/glue_data",
    name="prepare",
    group=data,
)
def prepare_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A corpus (`fullrank data list`).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings such as data.tokens=bpe")
    ] = None,
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
    words = [*with_source(overrides, source), *([f"data.cache={to}"] if to else [])]
    raw: dict[str, Any] = {"data": {"name": name}}
    if name in PAIR_CORPORA:
        raw["train"] = {"batch_tokens": 1}  # a run of translation has to say it; nothing is trained here
    config = build(apply_overrides(raw, words)).data
    tell(*(_prepared_pairs(config) if config.has_pairs else _prepared_text(config)), json=json)


def _read_task(
    name: str, overrides: list[str], source: str | None, to: Path | None
) -> tuple[dict[str, Any], list[Any]]:
    """A task to fine-tune on: its JSON, and lines for people."""
    from fullrank.cli.output import table_of
    from fullrank.config.glue import GLUE, glue_task
    from fullrank.core.errors import InputError
    from fullrank.data.corpora import SQUAD
    from fullrank.data.glue import load_glue, locate
    from fullrank.data.squad import read_squad

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
        missing = [split for split in task.splits[1:] if folder is not None and locate(task, split, folder) is None]
        parts = [load_glue(task, split, folder, to, say) for split in task.splits if split not in missing]
        label = f"GLUE {task.folder}"
        facts = {"title": task.title, "labels": task.labels, "metrics": task.metrics, "missing": missing}
    is_slice = any(part.is_slice for part in parts)
    label += " (slice)" if is_slice else ""
    splits = {part.split: part.describe() for part in parts}
    columns = [key for key in splits["train"] if key not in ("is_slice", "sha256")]
    rows = [[split, *(_words(content[key]) for key in columns)] for split, content in splits.items()]
    lines = [
        label,
        *(f"  {key}: {_words(value)}" for key, value in facts.items() if value),
        table_of(["split", *columns], rows, left=1),
    ]
    return {"name": name, "label": label, "is_slice": is_slice, **facts, "splits": splits}, lines


def _prepared_text(config: DataConfig) -> tuple[dict[str, Any], list[str]]:
    """A corpus for language models: its JSON, and lines for people."""
    from fullrank.data import prepare
    from fullrank.experiments.language_model import describe

    corpus = prepare(config, report=say)
    lines = [f"{corpus.label}: vocabulary {len(corpus.tokenizer):,} ({corpus.tokenizer.kind}), {corpus.folder}"]
    lines += [
        f"  {split:<6} {content.tokens:>12,} tokens   {content.words:>12,} words   {content.bytes:>13,} bytes"
        for split, content in corpus.splits.items()
    ]
    return {"folder": str(corpus.folder), **describe(corpus)}, lines


def _prepared_pairs(config: DataConfig) -> tuple[dict[str, Any], list[str]]:
    """A corpus of sentence pairs: its JSON, and lines for people."""
    import dataclasses

    from fullrank.data import prepare_pairs

    corpus = prepare_pairs(config, report=say)
    sides = {"source": corpus.source, "target": corpus.target}
    content = {
        "folder": str(corpus.folder), "name": corpus.name, "label": corpus.label, "is_slice": corpus.is_slice,
        "languages": {side: language.name for side, language in sides.items()},
        "vocabulary": {side: len(language) for side, language in sides.items()},
        "fingerprint": {side: language.fingerprint for side, language in sides.items()},
        "splits": {split: dataclasses.asdict(content) for split, content in corpus.splits.items()},
        "details": dict(corpus.details),
    }  # fmt: skip
    kind = corpus.source.segmenter.kind
    one = (
        "one vocabulary of both languages" if corpus.source.fingerprint == corpus.target.fingerprint else "vocabularies"
    )
    sizes = ", ".join(f"{language.name} {len(language):,}" for language in sides.values())
    lines = [f"{corpus.label}: {one}: {sizes} ({kind}), {corpus.folder}"]
    for split, counted in corpus.splits.items():
        counts = ", ".join(
            f"{language.name} {getattr(counted, f'{side}_tokens'):,} tokens of {getattr(counted, f'{side}_words'):,} words"
            for side, language in sides.items()
        )
        lines.append(f"  {split:<8} {counted.pairs:>10,} pairs   {counts}")
    cleaning = corpus.details["cleaning"]
    lines.append(
        f"  training pairs given {cleaning['given']:,}, left out {cleaning['given'] - cleaning['kept']:,}: "
        f"{cleaning['empty']:,} with an empty side, {cleaning['too_long']:,} too long (data.max_length), "
        f"{cleaning['ratio']:,} too unlike in length (data.max_ratio)"
    )
    return content, lines
