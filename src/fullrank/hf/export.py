"""Export of a trained run as a folder that `transformers` reads, with our package or without it, and the way back."""

from __future__ import annotations

import glob
import html
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from jinja2 import Environment, PackageLoader
from safetensors.torch import save_file
from torch import nn

from fullrank import __version__, storage
from fullrank.comparison.runs import Run, integer, is_run, mapping, number, read_run
from fullrank.config.load import build, read_yaml
from fullrank.config.run import MASKED_TOKEN, RunConfig
from fullrank.core.config import (
    NOT_NEXT_TOKEN,
    AttentionConfig,
    MixtureConfig,
    ModelConfig,
    MultiLinearConfig,
    WeightedConfig,
    stage_name,
)
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError, RunError
from fullrank.core.masked import MaskedLanguageModel
from fullrank.core.translator import Translator
from fullrank.data import load_tokenizer
from fullrank.files import no_room, remove_leftovers, write_json
from fullrank.hf.code import code_files
from fullrank.hf.configuration import FullRankConfig
from fullrank.hf.tokenizer import tokenizer_of


class _Kind(NamedTuple):
    """One of our models, its names in Hugging Face, and the words of its card."""

    built: type[Any]
    objective: str
    architecture: str
    auto: str
    pipeline: str
    words: str


KINDS = {
    kind.built.__name__: kind
    for kind in (
        _Kind(LanguageModel, "causal", "FullRankForCausalLM", "AutoModelForCausalLM", "text-generation", "language model"),
        _Kind(MaskedLanguageModel, "masked", "FullRankForMaskedLM", "AutoModelForMaskedLM", "fill-mask",
              "masked language model"),
        _Kind(Translator, "translation", "FullRankForSeq2SeqLM", "AutoModelForSeq2SeqLM", "translation",
              "translation model"),
    )
}  # fmt: skip

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
    if (folder / storage.HUGGING_FACE).is_file() and not (folder / storage.CONFIG).is_file():
        raise InputError(
            f"{folder}: already a folder of Hugging Face; it loads with transformers as it is, or with "
            "fullrank.load_injected where attention was injected"
        )
    file, config = storage.find(folder, checkpoint)
    tensors = storage.read(file)
    kind = KINDS[storage.kind_of(tensors)]
    code = code_files(config)
    with torch.device("meta"):
        model: nn.Module = kind.built(config)
    storage.assign(model, tensors, file)  # raises for tensors that do not fit
    record = read_run(folder) if (folder / "run.json").is_file() and is_run(folder) else None
    run = build(read_yaml(folder / "config.yaml")) if record is not None else None
    with _new_folder(out) as new:
        state = model.state_dict()
        named = {f"{storage.PREFIX}{name}": tensor.contiguous() for name, tensor in state.items()}
        save_file(named, new / storage.WEIGHTS, metadata={"format": "pt"})
        (new / storage.WEIGHTS).chmod(0o644)
        special, missing = ({}, "saved outside a run") if run is None else _write_tokenizers(new, folder, kind)
        _write_configuration(new, kind, config, special, run, next(iter(tensors.values())).dtype)
        elements = sum(tensor.numel() for tensor in state.values())
        code["README.md"] = _card(out.name, kind, config, record, checkpoint, elements, missing)
        for name, content in code.items():
            (new / name).write_text(content, encoding="utf-8")
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
    with _new_folder(out) as new:
        model.save(new)
    return out


def _check_free(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: a file of that name exists; give a folder that is not there yet")
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out}: not empty, and nothing there is overwritten; give another folder or remove it")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A new folder that is renamed to `out` when it is complete, and removed if anything fails."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(out.parent, glob.escape(out.name))
        new = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.{os.getpid()}."))
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror})") from error
    try:
        new.chmod(0o755)
        yield new
        if out.is_dir():
            out.rmdir()  # it was empty
        os.replace(new, out)
    except Exception as error:  # safetensors and tokenizers have errors of their own
        if no_room(error):
            raise RunError(f"{out}: cannot be written (no space left on the disk); nothing of it is there") from error
        if isinstance(error, OSError):
            raise RunError(f"{out}: cannot be written ({error})") from error
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _write_tokenizers(new: Path, folder: Path, kind: _Kind) -> tuple[dict[str, Any], str]:
    """Write the tokenizer of a run; of a translator the source's, and the target's in a folder of its own.

    Returns the ids of special tokens of the language that the model writes, and the reason if there is no tokenizer.
    """
    ids: dict[str, Any] = {}
    try:
        if kind.objective == "translation":
            source, written = (tokenizer_of(folder, side) for side in ("source", "target"))
            source.save_pretrained(new)
            written.save_pretrained(new / TARGET)
        else:
            written, own = tokenizer_of(folder), load_tokenizer(folder)
            written.save_pretrained(new)
            if own.eos_id is not None:  # which has no name in a tokenizer where it is the end of a line
                ids = dict.fromkeys(("bos_token_id", "eos_token_id"), own.eos_id)
    except InputError as error:
        return {}, str(error)
    ids = {f"{name}_token_id": getattr(written, f"{name}_token_id") for name in ("bos", "eos", "pad", "mask")} | ids
    return {name: token for name, token in ids.items() if token is not None}, ""


def _write_configuration(
    new: Path, kind: _Kind, config: ModelConfig, special: dict[str, Any], run: RunConfig | None, dtype: torch.dtype
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
    write_json(new / storage.HUGGING_FACE, content)
    if kind.objective == "masked" or config.sees_future:
        return
    wanted: dict[str, Any] = {"bos_token_id": special.get("bos_token_id")}  # a text goes on past the end of a line
    if kind.objective == "translation":
        wanted = {key: special.get(key) for key in ("eos_token_id", "pad_token_id")}
        wanted |= {
            "decoder_start_token_id": made.decoder_start_token_id,
            "max_new_tokens": _LONGEST,
            "min_new_tokens": 1,
        }
        if run is not None:
            search = run.eval
            wanted |= {"num_beams": search.beams, "no_repeat_ngram_size": search.no_repeat_ngram_size}
            if search.beams > 1:  # greedy search is refused with these
                wanted |= {"length_penalty": search.length_penalty, "early_stopping": True}  # as our search ends
            if search.max_length_a == 0:
                wanted["max_new_tokens"] = search.max_length_b
    wanted = {key: value for key, value in wanted.items() if value is not None}
    transformers.GenerationConfig(**wanted).save_pretrained(new)


# -- the model card: a description of the model, and the figures that `result.json` holds, no other ones -------------------

# figures of a split that a card's header may carry, and their names there
_HEADER = {"perplexity": "Perplexity", "bits_per_character": "Bits per character", "bits_per_byte": "Bits per byte",
           "bleu": "BLEU"}  # fmt: skip


def _card(title: str, kind: _Kind, config: ModelConfig, record: Run | None, checkpoint: str, elements: int,
          without_tokenizer: str) -> str:  # fmt: skip
    """`README.md`: a YAML header for the hub, then facts and figures. The licence is left to the publisher.

    record: the run, None for a model that `model.save` wrote; elements: numbers in parameters and buffers; without_tokenizer:
    the reason for which there is none.
    """
    result = mapping(record.result) if record is not None else {}
    measured = mapping(result.get({"best": "final", "last": "last"}.get(checkpoint, "")))
    figures = {split: values for split in measured if (values := mapping(measured[split]))}
    remark = MASKED_TOKEN if kind.objective == "masked" else NOT_NEXT_TOKEN if config.sees_future else None
    numbers = (key for values in figures.values() for key, value in values.items() if number(value) is not None)
    environment = Environment(
        loader=PackageLoader("fullrank.hf"), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"shown": _shown, "literal": _escape, "code": _code}
    return environment.get_template("card.md").render(
        title=title, kind=kind, config=config, checkpoint=checkpoint, trained=record is not None, remark=remark,
        without_tokenizer=without_tokenizer, target=TARGET, result=result, corpus=mapping(result.get("corpus")),
        header=_header(title, kind, result, {} if remark else figures),  # no ranking of a figure that compares with no other
        figures=figures, keys=list(dict.fromkeys(numbers)),
        signatures=dict.fromkeys(v["bleu_signature"] for v in figures.values() if "bleu_signature" in v),
        model=_model_facts(config, mapping(result.get("parameters")), elements),
        training=() if record is None else _training_facts(record, result),
    )  # fmt: skip


def _header(title: str, kind: _Kind, result: Mapping[str, Any], figures: Mapping[str, Mapping[str, Any]]) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    corpus = mapping(result.get("corpus"))
    name = str(corpus.get("name") or "unknown")
    dataset = {"dataset_type": name, "dataset_name": str(corpus.get("label") or name)}
    results = [
        EvalResult(
            kind.pipeline, **dataset, dataset_split=split, metric_type=key, metric_name=words, metric_value=value
        )
        for split, values in figures.items()
        for key, words in _HEADER.items()
        if (value := number(values.get(key))) is not None
    ]
    data = ModelCardData(
        model_name=title if results else None, library_name="transformers", pipeline_tag=kind.pipeline, tags=["fullrank"],
        eval_results=results or None,
    )  # fmt: skip
    return str(data.to_yaml())


def _escape(value: Any) -> str:
    """A value as Markdown text: no HTML, link, code or column of a table begins in it."""
    escaped = html.escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"[\\`|]|\](?=[(\[:]|$)", lambda found: f"&#{ord(found[0])};", escaped)


def _code(value: Any) -> str:
    """A value as Markdown code, in which nothing has a meaning; nothing for an empty one."""
    text = " ".join(str(value).split()).replace("`", "'").replace("|", "/")
    return f"`{text}`" if text else ""


def _shown(value: Any) -> str:
    whole, finite = integer(value), number(value)
    if whole is not None and not isinstance(value, float):
        return f"{whole:,}"
    if finite is None:
        return ""
    return f"{finite:.4g}" if abs(finite) >= 1000 else f"{finite:.4f}".rstrip("0").rstrip(".")


def _model_facts(config: ModelConfig, counts: Mapping[str, Any], elements: int) -> Iterator[tuple[str, object]]:
    total = integer(counts.get("total"))
    yield "parameters", f"{elements:,} (with buffers)" if total is None else f"{total:,}"
    by_part = [f"{key} {value:,}" for key, value in counts.items() if key != "total" and value]
    yield "by part", ", ".join(by_part).replace("_", " ")
    encoder, decoder = config.encoder, config.decoder
    for name, attention in (
        ("attention", config.attention),
        *(
            (f"attention of layer {layer}", own)
            for layer, own in enumerate(config.attentions)
            if own != config.attention
        ),
        ("encoder attention", encoder.attention if encoder is not None else None),
        ("decoder attention", decoder.attention if decoder is not None else None),
        ("cross-attention", decoder.cross if decoder is not None else None),
    ):
        if attention is not None:
            yield name, _mechanism(attention, config)
    yield "layers", config.num_hidden_layers
    yield "hidden size", config.hidden_size
    yield "positions", config.position
    yield "memory", f"{config.memory_length} tokens" if config.memory_length else None
    yield "input", config.input.kind
    mixtures = f", {config.output.mixtures} softmaxes" if isinstance(config.output, MixtureConfig) else ""
    tied = ", tied to the input" if config.output.tied else ""
    yield "output", f"{config.output.kind.replace('_', ' ')}{mixtures}{tied}"
    yield "vocabulary", f"{config.vocab_size:,}" if config.vocab_size else None


def _mechanism(attention: AttentionConfig, config: ModelConfig) -> str:
    if isinstance(attention, MultiLinearConfig):
        future = ", **tokens see later ones**" if attention.sees_future else ""
        return (
            f"multi-linear, {attention.cores} cores of rank {attention.rank}, output map {attention.output_map}{future}"
        )
    words = [f"{config.num_attention_heads} heads of {config.head_dim}", f"score {stage_name(attention.score)}"]
    if isinstance(attention, WeightedConfig):
        words += [stage_name(attention.normalize), f"mixed heads: {stage_name(attention.mix)}"]
        if attention.cross_head:
            words.append(f"cross-head probability {attention.cross_head} in training")
        if attention.gate != "none":
            words.append("output gates by head")
        if attention.value_residual:
            words.append("value residuals of the first layer")
        if attention.stride is not None:
            words.append(f"pattern strided, stride {attention.stride}")
    return ", ".join(words).replace("_", " ")


def _training_facts(record: Run, result: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    environment, corpus = mapping(result.get("environment")), mapping(result.get("corpus"))
    recipe = record.get("recipe") or ""
    if recipe.endswith((".yaml", ".yml")):
        recipe = Path(recipe).name  # no path of the machine it was trained on
    yield "recipe", " ".join(word for word in (recipe, record.get("row"), record.get("scale")) if word)
    yield "corpus", corpus.get("label") or mapping(record.config.get("data")).get("name")
    counts = mapping(corpus.get("tokens"))
    tokens = [f"{split} {count:,}" for split in counts if (count := integer(counts[split])) is not None]
    yield "tokens of text", ", ".join(tokens)
    yield "distilled from", mapping(result.get("teacher")).get("name")
    yield "seed", record.seed
    yield "steps", result.get("steps")
    yield "tokens seen", result.get("tokens_seen")
    for key in ("fullrank", "commit", "torch", "python", "device", "precision"):
        yield key, environment.get(key)
