"""A trained run as a folder that `transformers` reads, with our package or without it, and back."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from fullrank import __version__, storage
from fullrank.config.finetune import finetunes
from fullrank.config.load import build, read_yaml
from fullrank.config.run import RunConfig
from fullrank.core.config import ModelConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError, RunError
from fullrank.core.masked import MaskedLanguageModel
from fullrank.core.translator import Translator
from fullrank.data import load_language, load_tokenizer
from fullrank.files import write_json
from fullrank.hf.card import card
from fullrank.hf.code import code_files
from fullrank.hf.configuration import FullRankConfig
from fullrank.hf.tokenizer import of_language, of_vocabulary
from fullrank.reporting.runs import is_run, read_run


class _Kind(NamedTuple):
    """One of our models, and its names in Hugging Face."""

    built: type[Any]
    objective: str
    architecture: str
    auto: str


KINDS = {
    "LanguageModel": _Kind(LanguageModel, "causal", "FullRankForCausalLM", "AutoModelForCausalLM"),
    "MaskedLanguageModel": _Kind(MaskedLanguageModel, "masked", "FullRankForMaskedLM", "AutoModelForMaskedLM"),
    "Translator": _Kind(Translator, "translation", "FullRankForSeq2SeqLM", "AutoModelForSeq2SeqLM"),
}

TARGET = "target_tokenizer"  # the folder of the target's tokenizer in an exported translator
_LONGEST = 256  # tokens of a translation without other limit


def export_run(folder: str | Path, out: str | Path, checkpoint: str = "best") -> Path:
    """Write the model of a run folder (or of a folder that `model.save` wrote) into the new folder `out`; returns `out`.

    `out` holds `config.json`, `model.safetensors`, `generation_config.json`, the tokenizer, a model card with the figures of
    `result.json`, and modelling code: `from_pretrained(out, trust_remote_code=True)` works where this package is not installed.
    Raises InputError if `out` holds anything, if `folder` has no such model, and for a stage that cannot be exported.
    """
    folder, out = Path(folder), Path(out)
    _check_free(out)
    _check_ours(folder)
    file, config = storage.find(folder, checkpoint)
    tensors = storage.read(file)
    kind = KINDS[storage.kind_of(tensors)]
    code = code_files(config)
    with torch.device("meta"):
        model: nn.Module = kind.built(config)
    storage.assign(model, tensors, file)  # raises for tensors that do not fit
    record = read_run(folder) if (folder / "run.json").is_file() and is_run(folder) else None
    run = build(read_yaml(folder / "config.yaml")) if record is not None else None
    with _appearing(out) as place:
        _write_weights(place, model.state_dict())
        special, missing = (
            _write_tokenizers(place, folder, kind, run.masks) if run is not None else ({}, "saved outside a run")
        )
        _write_configuration(place, kind, config, special, run, next(iter(tensors.values())).dtype)
        for name, content in code.items():
            (place / name).write_text(content, encoding="utf-8")
        text = card(out.name, kind.objective, kind.auto, config, record, checkpoint, model.state_dict(), missing)
        (place / "README.md").write_text(text, encoding="utf-8")
    return out


def import_folder(folder: str | Path, out: str | Path) -> Path:
    """Write the model of an exported folder as `model.save` does, into the new folder `out`; returns `out`.

    `folder` may also come from `save_pretrained` of one of our classes for Hugging Face.
    Raises InputError if `out` holds anything, and if `folder` holds no model of ours.
    """
    folder, out = Path(folder), Path(out)
    _check_free(out)
    if not (folder / storage.HUGGING_FACE).is_file():
        raise InputError(f"{folder}: holds no {storage.HUGGING_FACE}; give a folder that `fullrank export` wrote")
    file, _ = storage.find(folder, "best")
    model = KINDS[storage.kind_of(storage.read(file))].built.load(folder)
    with _appearing(out) as place:
        model.save(place)
    return out


# -- what is refused ------------------------------------------------------------------------------------------------------


def _check_free(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: a file of that name exists; give a folder that is not there yet")
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out}: not empty, and nothing there is overwritten; give another folder or remove it")


def _check_ours(folder: Path) -> None:
    """InputError for a folder without a model of ours; it names the other kind of folder."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give a run folder (fullrank train --out)")
    if not (folder / storage.CONFIG).is_file():
        if (folder / storage.HUGGING_FACE).is_file():
            raise InputError(f"{folder}: already a folder of Hugging Face; it loads with transformers as it is")
        raise InputError(f"{folder}: not a run folder, it has no {storage.CONFIG}")
    raw = read_yaml(folder / storage.CONFIG)
    if finetunes(raw):
        raise InputError(
            f"{folder}: a fine-tuned run ({raw['data']['name']}); its model is a folder of Hugging Face already: "
            f"{folder / 'model'}, see fullrank.load_injected"
        )


# -- what is written ------------------------------------------------------------------------------------------------------


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A new folder that is renamed to `out` when it is complete, and removed if anything fails."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror})") from error
    try:
        place.chmod(0o755)
        yield place
        if out.is_dir():
            out.rmdir()  # it was empty
        os.replace(place, out)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _write_weights(place: Path, tensors: Mapping[str, Tensor]) -> None:
    """Our tensors, under `model.`."""
    named = {f"{storage.PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, place / storage.WEIGHTS, metadata={"format": "pt"})
    (place / storage.WEIGHTS).chmod(0o644)


def _write_tokenizers(place: Path, folder: Path, kind: _Kind, masks: bool) -> tuple[dict[str, Any], str | None]:
    """Write the tokenizer of a run; of a translator the source's, and the target's in a folder of its own.

    Returns the ids of special tokens of the language that the model writes, and the reason if there is no tokenizer.
    """
    try:
        if kind.objective == "translation":
            source, written = (of_language(load_language(folder / "tokenizer" / side)) for side in ("source", "target"))
            source.save_pretrained(place)
            written.save_pretrained(place / TARGET)
        else:
            written = of_vocabulary(load_tokenizer(folder), masks=masks)
            written.save_pretrained(place)
    except InputError as error:
        return {}, str(error)
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
    return {name: found for name in names if (found := getattr(written, name)) is not None}, None


def _write_configuration(
    place: Path, kind: _Kind, config: ModelConfig, special: dict[str, Any], run: RunConfig | None, dtype: torch.dtype
) -> None:
    """`config.json` and, for models that write, `generation_config.json`."""
    made = FullRankConfig.of(config, objective=kind.objective, **special)
    made.architectures, made.dtype = [kind.architecture], str(dtype).removeprefix("torch.")
    content = made.to_diff_dict()
    content["auto_map"] = {
        "AutoConfig": "configuration_fullrank.FullRankConfig",
        kind.auto: f"modeling_fullrank.{kind.architecture}",
    }
    content |= {"transformers_version": transformers.__version__, "fullrank_version": __version__}
    write_json(place / storage.HUGGING_FACE, content)
    if kind.objective == "masked" or config.sees_future:
        return
    wanted: dict[str, Any] = {"bos_token_id": special.get("bos_token_id")}  # a text goes on past the end of a line
    if kind.objective == "translation":
        wanted = {key: special.get(key) for key in ("eos_token_id", "pad_token_id")}
        wanted |= {"decoder_start_token_id": made.decoder_start_token_id, "max_new_tokens": _LONGEST}
        if run is not None:
            wanted |= {
                "num_beams": run.eval.beams,
                "early_stopping": True,  # as our search ends
                "length_penalty": run.eval.length_penalty,
                "no_repeat_ngram_size": run.eval.no_repeat_ngram_size,
            }
    transformers.GenerationConfig(**{key: value for key, value in wanted.items() if value is not None}).save_pretrained(
        place
    )
