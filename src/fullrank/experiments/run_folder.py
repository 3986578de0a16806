"""A run folder: its name, its identity, and when it may be used again.

Importing this file imports no torch, so that a folder that is no run is refused at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from fullrank.config.finetune import FinetuneConfig
from fullrank.config.load import Resolved, build, build_any, flatten, load, merge, read_yaml, resolve_any, to_yaml
from fullrank.config.run import RunConfig
from fullrank.core.errors import FullRankError, InputError
from fullrank.files import Entries, read_json, write_json, write_text
from fullrank.seal import check_run, is_run, read_identity

AnyConfig = RunConfig | FinetuneConfig


def default_folder(resolved: Resolved[AnyConfig]) -> Path:
    """Name the folder of a run: `runs/<recipe>/<row>[-scale]-seed<seed>`.

    For a configuration without rows it is `runs/<file name>-seed<seed>`.
    """
    seed = f"seed{resolved.config.train.seed}"
    name = resolved.recipe.removesuffix(".yaml").removesuffix(".yml")
    if resolved.row is None:
        return Path("runs") / f"{Path(name).name}-{seed}"
    scale = [] if resolved.scale in (None, "paper") else [str(resolved.scale)]
    table = name.replace("/", "-") if not Path(resolved.recipe).is_file() else Path(name).name
    return Path("runs") / table / "-".join([resolved.row, *scale, seed])


# -- paths that mean the same from any working directory -------------------------------------------------------------


def absolute(config: AnyConfig) -> AnyConfig:
    """Make the paths of a configuration absolute, for any working directory; files of data are relative to `data.dir`."""
    raw = config.to_dict()
    data = raw["data"]
    base = Path(data["dir"] or ".").expanduser().resolve()
    for key in ("train", "valid", "test", "codes"):
        paths = data.get(key)
        if isinstance(paths, list):
            data[key] = [str(base / Path(path).expanduser()) for path in paths]
        elif paths is not None:
            data[key] = str(base / Path(paths).expanduser())
    places = [(data, "dir"), (data, "cache"), (raw["train"], "start")]
    name = raw["model"].get("pretrained", "random")
    if name not in ("minilm", "random") and Path(name).expanduser().is_dir():
        places.append((raw["model"], "pretrained"))
    for section, key in places:
        if section.get(key) is not None:
            section[key] = str(Path(section[key]).expanduser().resolve())
    return build_any(raw)


# -- opening ---------------------------------------------------------------------------------------------------------


def open_any(folder: Path) -> tuple[AnyConfig, Entries]:
    """Open the run in `folder`: its configuration and its identity (run.json).

    Both are compared with the seal of the newest checkpoint. Raises InputError if there is no run, or if it was
    changed.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: {'a file; give a run folder' if folder.exists() else 'no such folder'}")
    if not is_run(folder):
        model_files = ("config.json", "model.safetensors", "adapter_config.json")
        is_model = any((folder / file).is_file() for file in model_files)
        hint = " but a model, which `fullrank check` and `fullrank analyze rank` take" if is_model else ""
        run = folder.parent.parent
        hint = f"; give {run} with --checkpoint {folder.name}" if is_run(run) else hint
        raise InputError(f"{folder}: not a run folder (it lacks config.yaml or run.json){hint}")
    identity = read_identity(folder)
    check_run(folder)
    return build_any(read_yaml(folder / "config.yaml")), identity


def open_run(folder: Path) -> tuple[RunConfig, Entries]:
    """Open a run with a model of ours: its configuration and its identity; InputError for a run of fine-tuning."""
    config, identity = open_any(folder)
    if isinstance(config, FinetuneConfig):
        raise InputError(
            f"{folder}: a run of fine-tuning on {config.data.name}; its figures are in result.json, its model in model/, and "
            f"`fullrank finetune {folder}` goes on with it"
        )
    return config, identity


def reopen(folder: Path) -> tuple[Resolved[AnyConfig], str]:
    """Open a run to continue it: its configuration with what it was resolved from, and its kernel."""
    config, identity = open_any(folder)
    recipe = identity.get("recipe") or folder.name
    resolved = Resolved(config, recipe, *(identity.get(key) for key in ("row", "scale", "paper")))
    return resolved, identity.get("kernel", "auto")


def open_causal(folder: Path) -> RunConfig:
    """Open the configuration of the run in `folder`; InputError unless it predicts the next token of a text."""
    config, _ = open_run(folder)
    if config.data.has_pairs:
        raise InputError(
            f"{folder}: a translation run, no language model; it translates with `fullrank translate`, and `fullrank eval` "
            "measures its BLEU"
        )
    if config.masks or config.model.sees_future:
        cause = "model.attention.causal: as_published"
        remedy = "model.attention.causal: masked"
        if config.masks:
            cause = "train.objective: masked"
            remedy = "train.objective: causal"
        raise InputError(
            f"{folder}: its tokens see later ones ({cause}), so it can neither write a text token by token nor give it a "
            f"probability; train with {remedy}"
        )
    return config


def read_result(folder: Path) -> Entries | None:
    """Read the result.json of a finished run; None if the run is not finished, or the file is damaged."""
    try:
        result: Entries = read_json(folder / "result.json")
    except InputError:
        return None
    final = result.get("final")
    has_figures = isinstance(final, dict) and all(figures != {} for figures in final.values())
    return result if has_figures else None


# -- a training that begins with the weights of a run ------------------------------------------------------------------


def start_from_run(resolved: Resolved[AnyConfig]) -> Resolved[AnyConfig]:
    """Return the configuration with the tokens and the model of the run in `train.start`, whose weights training begins with.

    Keys of the model that the configuration states override those of the run. Raises InputError for a run that is not finished,
    or of another task, and where keys of the vocabulary are stated that are not the run's.
    """
    config = resolved.config
    if isinstance(config, FinetuneConfig) or config.train.start is None or resolved.settings is None:
        return resolved
    from fullrank.data import load_tokenizer

    folder = Path(config.train.start).expanduser()
    other, _ = open_run(folder)
    if read_result(folder) is None:
        raise InputError(f"train.start: {folder} is not finished; `fullrank train {folder}` goes on with it")
    if other.task != config.task:
        raise InputError(
            f"train.start: {folder} is a {other.task.replace('_', ' ')}, and this training is of another task"
        )
    data = {"tokens": load_tokenizer(folder).kind, "min_count": None, "max_vocabulary": None}
    data |= {key: getattr(other.data, key) for key in ("lowercase", "sos")}
    ours = config.to_dict()["data"]
    for key in resolved.settings.get("data") or {}:
        if key in data and ours[key] not in (data[key], getattr(other.data, key)):
            raise InputError(
                f"data.{key}: the vocabulary of {folder} (train.start) has {data[key]!r}, given {ours[key]!r}; leave it out"
            )
    model = merge(other.to_dict()["model"], resolved.settings.get("model") or {})
    raw = merge(resolved.settings, {"data": data, "model": model})
    return dataclasses.replace(resolved, config=build(raw), settings=raw)


def sort_by_table(folders: Sequence[Path]) -> list[Path]:
    """Sort runs of one recipe by its rows, so that the table begins with the baseline; others stay as given."""
    try:
        identities = {folder: read_identity(folder) for folder in folders}
        (recipe,) = {identity["recipe"] for identity in identities.values()}
        rows = list(load(recipe).rows)
        return sorted(folders, key=lambda folder: rows.index(identities[folder]["row"]))
    except (ValueError, KeyError, FullRankError):
        return list(folders)


# -- rows and seeds of a table ------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """One run of a table: a row with a seed, and its folder."""

    resolved: Resolved[AnyConfig]
    folder: Path

    def describe(self) -> Entries:
        """Describe the run as JSON has it."""
        return {
            "recipe": self.resolved.recipe,
            "row": self.resolved.row,
            "seed": self.resolved.config.train.seed,
            "finished": (self.folder / "result.json").is_file(),
            "folder": str(self.folder),
        }


def cells(
    name: str,
    rows: Sequence[str],
    scale: str | None = None,
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    out: Path | None = None,
) -> list[Cell]:
    """Plan the runs of rows of a recipe.

    All rows are trained with the first seed, then with the next, so that finished rows can be compared early.

    Args:
        name: recipe.
        rows: rows of the recipe.
        scale: scale of the recipe; None for the largest that it has.
        seeds: seeds of the runs. None is the configuration's own, at paper scale those that the recipe states.
        overrides: keys that are set otherwise, each `key=value`.
        out: folder of the runs; None for `runs/RECIPE`.

    Returns:
        The runs, in the order in which they are trained.

    Raises:
        InputError: the recipe has no such scale, or `overrides` sets a seed beside `seeds`.
    """
    if seeds is not None and any(text.partition("=")[0].strip() == "train.seed" for text in overrides):
        raise InputError("train.seed: --seeds says which seeds are trained; give one of the two")
    recipe = load(name)
    planned = []
    for row in rows:
        row_seeds = recipe.seeds_of(row) if seeds is None and scale in (None, "paper") else seeds
        settings = [[f"train.seed={seed}", *overrides] for seed in row_seeds] if row_seeds else [overrides]
        for number, keys in enumerate(settings):
            resolved = resolve_any(name, row, scale, keys)
            folder = default_folder(resolved)
            planned.append((number, Cell(resolved, folder if out is None else out / folder.name)))
    return [cell for _, cell in sorted(planned, key=itemgetter(0))]


# -- claiming --------------------------------------------------------------------------------------------------------


def check_usable(folder: Path) -> None:
    """Raise InputError unless `folder` is a run, absent, empty, or holds only the first files of an interrupted start."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: a file of that name exists; give another folder")
    if not folder.is_dir() or is_run(folder):
        return
    first_files = (".lock", "run.json", ".run.json.", ".config.yaml.")
    if not all(path.name.startswith(first_files) for path in folder.iterdir()):
        raise InputError(f"{folder} is not empty and holds no run; give another --out")


def has_begun(folder: Path) -> bool:
    """Return whether a run is in the folder that has trained."""
    return is_run(folder) and any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints"))


def claim(folder: Path, config: AnyConfig, identity: Mapping[str, Any]) -> bool:
    """Write run.json and config.yaml of a run into its folder, unless the folder already holds this run.

    Args:
        folder: run folder.
        config: configuration of the run.
        identity: its run.json.

    Returns:
        Whether the folder already holds this run, which is then continued.

    Raises:
        InputError: the folder holds something else. A trained run is never overwritten.
    """
    check_usable(folder)
    if has_begun(folder):
        before, run_json = open_any(folder)
        old = flatten(before.to_dict())
        new = flatten(config.to_dict())
        other = [key for key in {**new, **old} if old.get(key) != new.get(key)]
        if other:
            shown = ", ".join(f"{key} is {old.get(key)!r} there, {new.get(key)!r} here" for key in other[:4])
            raise InputError(f"{folder} holds a run with another configuration: {shown}; give another --out")
        if run_json.get("vocabulary") != identity.get("vocabulary") or run_json.get("text") != identity.get("text"):
            raise InputError(f"{folder} was started on another text or vocabulary; give another --out")
        return True
    # config.yaml last, since a folder without it is not yet a run; run.json first, since nobody else writes one
    write_json(folder / "run.json", dict(identity))
    write_text(folder / "config.yaml", to_yaml(config))
    return False
