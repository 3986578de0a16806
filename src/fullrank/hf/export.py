"""Export of a trained run as a folder that `transformers` reads, with our package or without it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
import transformers
from huggingface_hub import ModelCardData
from jinja2 import Environment, PackageLoader
from safetensors.torch import save_file

from fullrank import __version__, storage
from fullrank.comparison.runs import Run, number, read_run
from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import NOT_NEXT_TOKEN, ModelConfig, stage_name
from fullrank.core.errors import InputError, RunError
from fullrank.core.section import ByKind, Parts, Section, Slot, hints_of
from fullrank.data import load_tokenizer
from fullrank.files import format_yaml, no_room, write_json
from fullrank.forward import load_tensors
from fullrank.hf.classes import FullRankForCausalLM, FullRankForMaskedLM
from fullrank.hf.configuration import FullRankConfig
from fullrank.hf.tokenizer import tokenizer_of
from fullrank.render.blocks import format_setting
from fullrank.seal import is_run

# our modules of `hf` that every export holds, by the names that Hugging Face uses for such files
CLASSES = {"configuration": "configuration_fullrank", "classes": "modeling_fullrank"}


KINDS: dict[str, Any] = {"LanguageModel": FullRankForCausalLM, "MaskedLanguageModel": FullRankForMaskedLM}
PIPELINES = {"causal": "text-generation", "masked": "fill-mask"}


def export_run(folder: str | Path, out: str | Path, checkpoint: str = "best") -> Path:
    """Export a trained model as a folder that transformers reads.

    The folder holds weights, tokenizer, model card and modelling code. With that code
    `from_pretrained(out, trust_remote_code=True)` works where this package is not installed.

    Args:
        folder: a run folder, or a folder that `model.save` wrote.
        out: the new folder; an empty one may exist.
        checkpoint: the checkpoint of the run: `best`, `last`, or another one that it has, such as `average`.

    Returns:
        The path of `out`.

    Raises:
        InputError: `out` holds anything, `folder` has no language model or encoder or no such checkpoint, or is damaged, or a
            stage cannot be exported.
        RunError: `out` cannot be written; then nothing of it is there.
    """
    folder = Path(folder)
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: a file of that name exists; give a folder that is not there yet")
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out}: not empty, and nothing there is overwritten; give another folder or remove it")
    file, config = storage.find(folder, checkpoint)
    tensors = storage.read(file)
    kind = KINDS.get(storage.kind_of(tensors))
    if kind is None:
        raise InputError(f"{folder}: a translation model, which transformers has no class for; use fullrank translate")
    code = code_files(config)
    with torch.device("meta"):
        model = kind.model_class(config)
    load_tensors(model, tensors, file, assign=True)  # raises for tensors that do not fit
    record = read_run(folder) if is_run(folder) else None
    with _make_folder(out) as new:
        state = model.state_dict()
        named = {f"{storage.PREFIX}{name}": tensor.contiguous() for name, tensor in state.items()}
        save_file(named, new / storage.WEIGHTS, metadata={"format": "pt"})
        (new / storage.WEIGHTS).chmod(0o644)
        special, why_no_tokenizer = ({}, "saved outside a run") if record is None else _write_tokenizer(new, folder)
        _write_configuration(new, kind, config, special, next(iter(tensors.values())).dtype)
        code["README.md"] = _make_card(out.name, kind, config, record, checkpoint, why_no_tokenizer)
        for name, content in code.items():
            (new / name).write_text(content, encoding="utf-8")
    return out


@contextmanager
def _make_folder(out: Path) -> Iterator[Path]:
    """Run the block with a new folder, which is renamed to `out` when it is complete, and removed if anything fails."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True) as temporary:
            new = Path(temporary) / out.name
            new.mkdir()
            yield new
            new.rename(out)  # also over an empty folder
    except Exception as error:  # safetensors and tokenizers have errors of their own
        reason = "no space left on the disk" if no_room(error) else error
        if no_room(error) or isinstance(error, OSError):
            raise RunError(f"{out}: cannot be written ({reason}); nothing of it is there") from error
        raise


def _write_tokenizer(new: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """Write the tokenizer of a run; return the ids of its special tokens, and the reason if there is no tokenizer."""
    try:
        tokenizer = tokenizer_of(folder)
        vocabulary = load_tokenizer(folder)
    except InputError as error:
        return {}, str(error)
    tokenizer.save_pretrained(new)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "mask")}
    if vocabulary.eos_id is not None:  # it has no name in a tokenizer where it is the end of a line
        ids |= dict.fromkeys(("bos_token_id", "eos_token_id"), vocabulary.eos_id)
    return {name: token for name, token in ids.items() if token is not None}, ""


def _write_configuration(
    new: Path, kind: Any, config: ModelConfig, special: dict[str, Any], dtype: torch.dtype
) -> None:
    """Write `config.json` and, for models that generate, `generation_config.json`."""
    settings = FullRankConfig.of(config, objective=kind.objective, **special)
    settings.architectures = [kind.__name__]
    settings.dtype = str(dtype).removeprefix("torch.")
    content = settings.to_diff_dict()
    content["auto_map"] = {
        "AutoConfig": "configuration_fullrank.FullRankConfig",
        kind.__name__.replace("FullRank", "AutoModel"): f"modeling_fullrank.{kind.__name__}",
    }
    content |= {"transformers_version": transformers.__version__, "fullrank_version": __version__}
    write_json(new / storage.HUGGING_FACE, content)
    if kind.objective == "causal" and not config.sees_future:
        start = {key: token for key, token in special.items() if key == "bos_token_id"}  # a text goes on past a line
        transformers.GenerationConfig(**start).save_pretrained(new)


# -- code: core and our classes for Hugging Face, copied -----------------------------------------------------------------


def code_files(config: ModelConfig) -> dict[str, str]:
    """Collect all code files of an export by name. The files of `core` are copied as they are.

    Raises InputError for a stage of one's own, whose code is not ours to copy.
    """
    for key, name in _list_own_stages(config, "model"):
        raise InputError(
            f"{key}: '{name}' is a stage of your own, which an export does not hold; read the run itself: "
            "fr.LanguageModel.load, or a verb with --import"
        )
    files = {name: text for name, text in _sources("fullrank.core") if name != "__init__.py"}
    # Hugging Face copies the files that a file imports, and those that they import; registered stages have to be imported
    names = [name.removesuffix(".py") for name in sorted(files)]
    footer = "\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:  # every file of this folder\n"
    footer += "".join(f"    from .{name} import __name__ as _{name}\n" for name in names)
    for name, text in _sources("fullrank.hf"):
        if exported := CLASSES.get(name.removesuffix(".py")):
            files[f"{exported}.py"] = _use_relative_imports(text) + footer
    return files


def _sources(package: str) -> Iterator[tuple[str, str]]:
    for file in resources.files(package).iterdir():
        if file.name.endswith(".py"):
            yield file.name, file.read_text(encoding="utf-8")


def _use_relative_imports(text: str) -> str:
    """Turn imports of `fullrank` into imports of files in the same folder."""
    for name, exported in CLASSES.items():
        text = re.sub(rf"\bfrom fullrank\.hf\.{name} import", f"from .{exported} import", text)
    return re.sub(r"\bfrom fullrank\.core\.(\w+) import", r"from .\1 import", text)


def _list_own_stages(section: Section, key: str) -> Iterator[tuple[str, str]]:
    """Yield (key, name) of every stage of a configuration that is not built in."""
    if isinstance(section, ByKind) and section.kind not in [member.kind for member in section.MEMBERS]:
        yield f"{key}.kind", section.kind
    for name, hint in hints_of(type(section)).items():
        value = getattr(section, name)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Section):
                yield from _list_own_stages(inner, f"{key}.{name}")
        for slot in get_args(hint):
            if isinstance(slot, Slot):
                stages = list(value) if isinstance(slot, Parts) else [stage_name(value)]
                yield from ((f"{key}.{name}", stage) for stage in stages if stage not in slot.built_in)


# -- the model card: a description of the model, and the figures that `result.json` holds, no other ones -------------------


def _make_card(
    title: str, kind: Any, config: ModelConfig, record: Run | None, checkpoint: str, without_tokenizer: str
) -> str:
    """Make the text of `README.md`: a YAML header for the hub, then facts and figures. The publisher adds the licence.

    record: the run; None for a model that `model.save` wrote. without_tokenizer: why there is no tokenizer, empty if there is.
    """
    result = record.result or {} if record else {}
    checkpoints = {"best": "final", "last": "last"}  # by their names in results
    figures = result.get(checkpoints.get(checkpoint, ""), {})
    keys: dict[str, None] = {}
    for values in figures.values():
        keys |= dict.fromkeys(key for key, value in values.items() if number(value) is not None)
    remark = NOT_NEXT_TOKEN if config.sees_future else None
    if kind.objective == "masked":
        remark = MASKED_TOKEN
    loader = PackageLoader("fullrank.hf")
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    # each string on one line, so that no text ends the block of code
    write_yaml = partial(format_yaml, width=float("inf"))
    environment.filters |= {"show": format_setting, "yaml": write_yaml}
    pipeline = PIPELINES[kind.objective]
    data = ModelCardData(library_name="transformers", pipeline_tag=pipeline, tags=["fullrank"])
    return environment.get_template("card.md").render(
        title=title,
        kind=kind,
        pipeline=pipeline,
        config=config,
        checkpoint=checkpoint,
        trained=record is not None,
        result=result,
        without_tokenizer=without_tokenizer,
        header=data.to_yaml(),
        figures=figures,
        keys=keys,
        corpus=result.get("corpus", {}),
        remark=remark,
        training=record and _list_training_facts(record),
    )


def _list_training_facts(record: Run) -> dict[str, object]:
    """List facts of the training; of a recipe the name, and no path of a machine."""
    keys = ("row", "scale", "parameters", "steps", "tokens_seen", "protocol", "corpus", "parts", "environment")
    facts = {"recipe": Path(record.get("recipe") or "").name, "seed": record.seed}
    facts |= {key: record.get(key) for key in keys}
    return {key: value for key, value in facts.items() if value not in (None, "", {})}
