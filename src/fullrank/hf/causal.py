"""Pretrained causal models of transformers, trained, evaluated and decoded by what our language models go through."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from fullrank.config.finetune import AdapterConfig, PretrainedConfig
from fullrank.config.load import build_any, read_yaml
from fullrank.core.embedding import Linear, linear
from fullrank.core.errors import InputError
from fullrank.core.model import LossParts, ModelOutput, Pass
from fullrank.core.output import IGNORED, Output, scale_tokens, weigh_losses
from fullrank.core.trace import Trace
from fullrank.data.tokenizers import PretrainedTokenizer
from fullrank.files import write_json
from fullrank.forward import cache_argument, read_arguments
from fullrank.hf import load
from fullrank.hf.inject import arguments_of, inject
from fullrank.hf.interface import traced
from fullrank.seal import check_run
from fullrank.training.checkpoint import load_weights

MODEL = "model"  # the folder of the model of transformers in a run folder
_WHERE = "; give a folder with config.json, weights and tokenizer, or a name on the Hugging Face hub"


class Logits(Output):
    """The output layer of a model whose hidden states are logits already: it makes log-probabilities of them."""

    def log_prob(self, hidden: Tensor) -> Tensor:
        return hidden.to(torch.promote_types(hidden.dtype, torch.float32)).log_softmax(-1)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        log_prob = self.log_prob(hidden).flatten(0, -2)
        nll = F.nll_loss(log_prob, targets.flatten(), reduction="none", ignore_index=IGNORED)
        return nll.view(targets.shape)

    def loss(
        self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        counts = targets != IGNORED
        scale = scale_tokens(hidden, counts, weights)
        ids = targets.masked_fill(~counts, 0).flatten()
        return weigh_losses(self.log_prob(hidden).flatten(0, -2), ids, scale, label_smoothing)


class Sizes(NamedTuple):
    """Sizes that a configuration of a language model has."""

    vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int | None
    sees_future: bool = False


class KeyValueCache(transformers.DynamicCache):
    """Keys and values of earlier tokens as transformers keeps them; it changes as it is read."""

    def reorder(self, index: Tensor) -> KeyValueCache:
        """Select rows, which may repeat."""
        self.reorder_cache(index)
        return self


class CausalModel(nn.Module):
    """A causal model of transformers with the methods of a `LanguageModel` that training, evaluation and decoding call.

    Its hidden states are the logits, with the model's own soft-cap or scale; `output` makes log-probabilities of them.

    Args:
        model: the causal model of transformers, kept as `model`.
        adapted: the model of PEFT around it where an adapter is trained; `state_dict` then has the trained parameters alone.
            None: all parameters are trained.
    """

    memory_length = 0
    trained_length: int | None = None
    adapted: Any

    def __init__(self, model: Any, adapted: Any = None) -> None:
        super().__init__()
        self.model = model
        self.output = Logits()
        vars(self)["adapted"] = adapted  # no submodule: its parameters are those of the model
        self.max_length = load.find_longest_text(model)
        text = model.config.get_text_config()
        self.config = Sizes(text.vocab_size, text.num_hidden_layers, self.max_length)

    def hidden(
        self, input_ids: Tensor, memory: None = None, *, attention_mask: Tensor | None = None, cache: Any = None
    ) -> Pass:
        """Compute the logits of tokens.

        Args:
            input_ids: tokens (B, N).
            memory: None; such a model has no memory.
            attention_mask: (B, M + N) over all tokens so far, 1 for tokens and 0 for padding; None: nothing is padded.
            cache: keys and values of the M tokens before, changed in place; None: there are none.

        Returns:
            A `Pass`: logits (B, N, V) as `hidden`, no memory, and the cache.
        """
        options: dict[str, Any] = {}
        if attention_mask is None:
            tokens = input_ids.shape[1] + (0 if cache is None else cache.get_seq_length())
            attention_mask = input_ids.new_ones(len(input_ids), tokens)
        else:
            positions = attention_mask.long().cumsum(1).sub(1).clamp(min=0)
            options["position_ids"] = positions[:, -input_ids.shape[1] :]
        if cache is not None:
            options[cache_argument(read_arguments(self.model))] = cache
        out = self.model(input_ids, attention_mask=attention_mask.long(), use_cache=cache is not None, **options)
        return Pass(out.logits, None, cache)

    def forward(self, input_ids: Tensor, *, cache: Any = None, attention_mask: Tensor | None = None) -> ModelOutput:
        logits, _, cache = self.hidden(input_ids, attention_mask=attention_mask, cache=cache)
        return ModelOutput(logits, cache=cache)

    def loss_parts(
        self,
        input_ids: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        memory: None = None,
        *,
        label_smoothing: float = 0.0,
        trace: Trace | None = None,
        **unused: Any,
    ) -> LossParts:
        """Compute the loss and the nll without label smoothing, as `LanguageModel.loss_parts` does.

        Args:
            input_ids: tokens (B, N).
            targets: (B, T), those of the last T inputs; the inputs before them are context.
            weights: (B, T), of the targets; None: all weigh the same.
            memory: None; such a model has no memory.
            label_smoothing: share of the target that is spread over the vocabulary.
            trace: collects the attention of injected layers; None collects nothing.
            **unused: other arguments of `LanguageModel.loss_parts`, which are ignored, `attention_mask` among them.
        """
        with traced(trace):
            logits = self.hidden(input_ids).hidden
        logits = logits[:, input_ids.shape[1] - targets.shape[1] :]
        return LossParts(*self.output.loss(logits, targets, weights, label_smoothing))

    def new_cache(self) -> KeyValueCache:
        return KeyValueCache()

    def with_memory(self, memory_length: int | None = None, **others: Any) -> CausalModel:
        """Return this model; InputError for a memory, which it cannot have."""
        if memory_length:
            raise InputError(f"memory_length: for models of ours, given {memory_length} for a pretrained one")
        return self

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    # -- saving and loading -------------------------------------------------------------------------------------------

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return parameters, tied ones once, and buffers; of an adapter the trained parameters alone."""
        is_full = self.adapted is None
        saved = {name for name, parameter in self.named_parameters() if is_full or parameter.requires_grad}
        saved |= dict(self.named_buffers()).keys() if is_full else set()
        return {name: value for name, value in super().state_dict(*arguments, **options).items() if name in saved}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        names = self.state_dict().keys()
        if wrong := sorted(names ^ state_dict.keys()):
            raise RuntimeError(f"{type(self.model).__name__}: missing or unknown are {', '.join(wrong[:3])}")
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    def save(self, folder: Path, tokenizer: Any = None) -> None:
        """Write the model, or its adapter with the mixing parameters, and the tokenizer if it is given.

        `fullrank.load_injected` reads an adapter, and a model with injected attention; `from_pretrained` reads any other model.
        """
        if self.adapted is None:
            self.model.save_pretrained(folder)
        else:
            self.adapted.save_pretrained(folder)
            settings = load.read_injected_settings(self.model.config)
            write_json(folder / load.INJECTED, arguments_of(settings) if settings else {})
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def merge(self) -> Any:
        """Return the model of transformers by itself, with an adapter merged into its weights, in place."""
        return self.model if self.adapted is None else self.adapted.merge_and_unload()

    @classmethod
    def load(cls, folder: str | Path, checkpoint: str = "best") -> CausalModel:
        """Load a checkpoint of a run of fine-tuning on a text, in evaluation mode.

        Raises InputError if the folder has no such checkpoint, or is damaged.
        """
        folder = Path(folder)
        config: Any = build_any(read_yaml(folder / "config.yaml"))
        weights = folder / "checkpoints" / checkpoint
        if not weights.is_dir():
            names = sorted(path.name for path in (folder / "checkpoints").glob("[!.]*/"))
            raise InputError(f"{weights}: no such checkpoint; there are {', '.join(names) or 'none yet'}")
        check_run(folder, checkpoint)
        with load.quiet(), torch.random.fork_rng(devices=[]):
            if config.train.adapter is None:
                model_config = transformers.AutoConfig.from_pretrained(folder / MODEL)
                load.forget_injection(model_config)
                model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
                inject_configured(model, config.model)
            else:
                model = load_causal(config.model)
            causal = adapt(model, config.train.adapter)
        load_weights(causal, weights)
        return causal.eval()


# -- pretrained models -------------------------------------------------------------------------------------------------


@contextmanager
def explain(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Run the block with errors of transformers as an InputError that names the model.

    Yields the options of `from_pretrained` that the configuration asks for.
    """
    with load.explain_errors(f"model.pretrained: {config.pretrained}: no causal model", _WHERE):
        yield {"revision": config.revision} if config.revision else {}


def load_tokenizers(config: PretrainedConfig) -> tuple[Any, PretrainedTokenizer]:
    """Load the tokenizer of a pretrained model: that of transformers, and ours around it.

    Raises InputError for a model without a fast tokenizer, and for a tokenizer without a token that begins a text.
    """
    key = f"model.pretrained: {config.pretrained}"
    with explain(config) as options:
        load.read_part("AutoConfig", config.pretrained, **options)  # is it a model at all?
        hf_tokenizer = load.read_part("AutoTokenizer", config.pretrained, **options)
    if not getattr(hf_tokenizer, "is_fast", False):
        raise InputError(f"{key} has a tokenizer without a fast version; fine-tuning needs tokenizer.json")
    marks = (hf_tokenizer.bos_token, hf_tokenizer.eos_token, hf_tokenizer.cls_token, hf_tokenizer.sep_token)
    start = next((mark for mark in marks if mark in hf_tokenizer.get_vocab()), None)
    if start is None:
        raise InputError(f"{key}: its tokenizer has no bos_token and no eos_token, after which a text begins; set one")
    return hf_tokenizer, PretrainedTokenizer(
        copy.deepcopy(hf_tokenizer.backend_tokenizer), start=start, eos=hf_tokenizer.eos_token
    )


def load_causal(config: PretrainedConfig) -> Any:
    """Load the causal model of `config` in fp32, in evaluation mode, with our attention injected where it is asked for.

    Raises InputError where there is none, where it lacks weights, where its tokens see later ones, and where it holds other
    attention of ours than `config` asks for.
    """
    key = f"model.pretrained: {config.pretrained}"
    with explain(config) as options:
        where = load.location_of(config.pretrained)
        model_config = load.read_part("AutoConfig", where, **options)
        is_injected = holds_injected(config, model_config)
        auto = transformers.AutoModelForCausalLM
        model, loading = load.load_weights(auto, where, model_config, torch.float32, **options)
    if missing := sorted(loading["missing_keys"]):
        raise InputError(
            f"{key}: no causal model: it lacks weights of {type(model).__name__}: {', '.join(missing[:3])}"
        )
    model.eval()
    ids = torch.tensor([[0, 1, 2], [0, 3, 4]])
    with torch.no_grad(), explain(config):
        first, other = model(ids, attention_mask=torch.ones_like(ids)).logits[:, 0]
    if not torch.allclose(first, other, rtol=1e-4, atol=1e-5):
        raise InputError(f"{key}: no causal model: tokens of {type(model).__name__} see later ones")
    if not is_injected:
        inject_configured(model, config)
    return model


class TransposedLinear(Conv1D):
    """The linear layer of GPT-2, whose weight is (in, out), computed by our `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


def use_own_products(model: nn.Module) -> None:
    """Make linear layers of a model of transformers multiply as ours do; parameters and their names stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
        elif type(module) is Conv1D:
            module.__class__ = TransposedLinear


def adapt(model: Any, adapter: AdapterConfig | None) -> CausalModel:
    """Prepare a model for training, in place: all of it, or an adapter on it. Mixing parameters are trained in both cases.

    Raises InputError where PEFT is not installed, and for target modules that are no linear layers of the model.
    """
    use_own_products(model)
    if adapter is None:
        return CausalModel(model)
    peft = load.import_peft("train.adapter")
    has_mixing = any(".fullrank." in f".{name}" for name, _ in model.named_parameters())
    settings = peft.LoraConfig(
        r=adapter.r,
        lora_alpha=cast(int, adapter.alpha),
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules,
        modules_to_save=["fullrank"] if has_mixing else None,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fan_in_fan_out, which PEFT sets right
            adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        layers = [name for name, part in model.named_modules() if getattr(part, "weight", None) is not None]
        names = {name.rpartition(".")[2] for name in layers}
        raise InputError(
            f"train.adapter.target_modules: {adapter.target_modules}; name linear layers of {type(model).__name__}, which "
            f"has {', '.join(sorted(names))} ({str(error)[:120]})"
        ) from error
    return CausalModel(adapted.get_base_model(), adapted)


def inject_configured(model: Any, config: PretrainedConfig) -> None:
    """Inject the attention that a configuration asks for."""
    graft = config.attention
    if not graft.at_rest:
        inject(model, mix=graft.mix, normalize=graft.normalize, cross_head=graft.cross_head, layers=config.layers)


def holds_injected(config: PretrainedConfig, model_config: Any) -> bool:
    """Return whether a checkpoint has attention of ours; InputError where that is another than the one asked for."""
    settings = load.read_injected_settings(model_config)
    if settings is None:
        return False
    keys = ("mix", "normalize", "cross_head", "layers")
    injected = {key: settings.get(key) for key in keys}
    if injected != config.attention.to_dict() | {"layers": config.layers}:
        settings_to_change = " ".join(
            f"model.{'' if key == 'layers' else 'attention.'}{key}={json.dumps(injected[key])}" for key in keys
        )
        raise InputError(
            f"model.pretrained: {config.pretrained} holds attention of ours already; to go on with it, set {settings_to_change}"
        )
    return True
