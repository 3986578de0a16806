"""Transformer-XL as transformers 4.35 had it, for transformers 5 (Dai et al. 2019, §3).

    weights = softmax((q + u) . k + (q + v) . W_r R(distance))    over the memory and the segment

Tensors have the names and shapes of the published checkpoint `transfo-xl/transfo-xl-wt103`. A text without memory begins with
`mem_len` zeros, which are attended to.
Differs from the old code: `losses` stand in the order of the text, not of the clusters, and labels are not changed; an id
outside of the vocabulary is an error; positions are exact in bf16; there is no `head_mask` and no `init: uniform`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput, can_return_tuple

from fullrank.core.embedding import check_ids
from fullrank.core.errors import ConfigError, InputError
from fullrank.core.output import IGNORED


@strict
class TransfoXLConfig(PreTrainedConfig):
    """The old configuration; it reads an old `config.json`. The defaults are those of the published model.

    cutoffs: where clusters of rarer tokens begin; cluster i has width d_embed // div_val^i. clamp_len: the greatest distance
    told apart; all are if it is not positive. same_length: a token sees mem_len tokens, itself included. tie_projs: for each
    cluster, whether input and output share a projection. `mem_len`, `clamp_len` and `same_length` may be changed at any time.
    """

    model_type = "transfo-xl"
    keys_to_ignore_at_inference = ["mems"]  # noqa: RUF012  Hugging Face reads a list
    attribute_map = {"n_token": "vocab_size", "hidden_size": "d_model", "num_attention_heads": "n_head",  # noqa: RUF012
                     "num_hidden_layers": "n_layer"}  # fmt: skip

    vocab_size: int = 267735
    cutoffs: list[int] | tuple[int, ...] = (20000, 40000, 200000)
    d_model: int = 1024
    d_embed: int = 1024
    n_head: int = 16
    d_head: int = 64
    d_inner: int = 4096
    div_val: int = 4
    pre_lnorm: bool = False
    n_layer: int = 18
    mem_len: int = 1600
    clamp_len: int = 1000
    same_length: bool = True
    proj_share_all_but_first: bool = True
    tie_projs: list[bool] | None = None
    dropout: float = 0.1
    dropatt: float = 0.0
    untie_r: bool = True
    proj_init_std: float = 0.01
    init_std: float = 0.02
    layer_norm_epsilon: float = 1e-5
    eos_token_id: int | list[int] | None = 0
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self.cutoffs, clusters = list(self.cutoffs), len(self.cutoffs) + 1
        self.tie_projs = self.tie_projs or [False] + [self.proj_share_all_but_first] * (clusters - 1)
        faults = []
        if any(first >= last for first, last in self.clusters):
            faults.append(f"cutoffs: rising, from 1 to vocab_size - 1 = {self.vocab_size - 1}, given {self.cutoffs}")
        if self.div_val < 1 or self.d_embed < self.div_val ** (clusters - 1):
            faults.append(
                f"div_val: from 1, and its power {clusters - 1} at most d_embed = {self.d_embed}, given {self.div_val}"
            )
        if self.same_length and self.mem_len < 1:
            faults.append("same_length: a token would see mem_len = 0 tokens; set same_length to false")
        if faults:
            raise ConfigError(*faults)
        super().__post_init__(**kwargs)

    @property
    def clusters(self) -> list[tuple[int, int]]:
        """First and last id (exclusive) of the shortlist and of every cluster."""
        return list(pairwise([0, *self.cutoffs, self.vocab_size]))

    @property
    def tables(self) -> list[tuple[int, int, int]]:
        """First id, last id and width of the tables: one for each cluster, or one for all with div_val 1."""
        spans = [(0, self.vocab_size)] if self.div_val == 1 else self.clusters
        return [(first, last, self.d_embed // self.div_val**i) for i, (first, last) in enumerate(spans)]

    @property
    def projected(self) -> bool:
        """True if tables are projected to d_model."""
        return self.div_val != 1 or self.d_embed != self.d_model


class AdaptiveEmbedding(nn.Module):
    """x_n = sqrt(d_model) W_i E_i[n] for a token n of table i."""

    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__()
        self.config, widths = config, [width for *_, width in config.tables if config.projected]
        self.emb_layers = nn.ModuleList(nn.Embedding(last - first, width) for first, last, width in config.tables)
        self.emb_projs = nn.ParameterList(torch.empty(config.d_model, width) for width in widths)

    def forward(self, input_ids: Tensor) -> Tensor:  # (B, N) -> (B, N, E)
        check_ids(input_ids, self.config.vocab_size, "input_ids")
        first_table: Any = self.emb_layers[0]
        out = first_table.weight.new_zeros(*input_ids.shape, self.config.d_model)
        for i, (first, last, _) in enumerate(self.config.tables):
            inside = (input_ids >= first) & (input_ids < last)
            rows = self.emb_layers[i](input_ids[inside] - first)
            out[inside] = (F.linear(rows, self.emb_projs[i]) if self.config.projected else rows).to(out.dtype)
        return out * self.config.d_model**0.5


class AdaptiveSoftmax(nn.Module):
    """log p(y) is log p(y | head) in the shortlist, log p(cluster | head) + log p(y | cluster) elsewhere."""

    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__()
        self.config, self.shortlist, clusters = config, config.clusters[0][1], len(config.cutoffs)
        if clusters:
            self.cluster_weight = nn.Parameter(torch.empty(clusters, config.d_embed))
            self.cluster_bias = nn.Parameter(torch.empty(clusters))
        self.out_layers = nn.ModuleList(nn.Linear(width, last - first) for first, last, width in config.tables)
        widths = [config.d_embed // config.div_val**i for i in range(clusters + 1) if config.projected]
        self.out_projs = nn.ParameterList(torch.empty(config.d_model, width) for width in widths)

    def _log_p(self, hidden: Tensor, i: int) -> Tensor:
        """(..., E) -> log-probabilities of the tokens of cluster i; for i = 0, of the shortlist and then of the clusters."""
        one_table = self.config.div_val == 1
        layer: Any = self.out_layers[0 if one_table else i]
        rows = slice(*self.config.clusters[i]) if one_table else slice(None)
        weight, bias = layer.weight[rows], layer.bias[rows]
        if i == 0 and self.config.cutoffs:
            weight, bias = torch.cat((weight, self.cluster_weight)), torch.cat((bias, self.cluster_bias))
        return F.linear(hidden @ self.out_projs[i] if self.config.projected else hidden, weight, bias).log_softmax(-1)

    def forward(self, hidden: Tensor) -> Tensor:  # (..., E) -> (..., V)
        head = self._log_p(hidden, 0)
        clusters = range(1, len(self.config.clusters))
        rare = [head[..., self.shortlist + i - 1, None] + self._log_p(hidden, i) for i in clusters]
        return torch.cat((head[..., : self.shortlist], *rare), -1)

    def nll(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """(B, N, E), labels (B, N) -> nats (B, N), 0 for labels of -100; a cluster is computed for its own tokens only."""
        check_ids(labels.masked_fill(labels == IGNORED, 0), self.config.vocab_size, "labels")
        head = self._log_p(hidden, 0)
        out = torch.zeros_like(head[..., 0])
        for i, (first, last) in enumerate(self.config.clusters):
            inside = (labels >= first) & (labels < last)
            log_p = self._log_p(hidden[inside], i) if i else head[inside]
            own = log_p.gather(1, labels[inside][:, None] - first)[:, 0]
            out[inside] = -(own + head[inside][:, self.shortlist + i - 1]) if i else -own
        return out


class RelativeAttention(nn.Module):
    """Attention with scores of content and of distance, its residual and its norm."""

    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__()
        self.config, heads = config, (config.n_head, config.d_head)
        size = config.n_head * config.d_head
        self.r_r_bias, self.r_w_bias = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads))
        self.qkv_net = nn.Linear(config.d_model, 3 * size, bias=False)
        self.r_net = nn.Linear(config.d_model, size, bias=False)
        self.o_net = nn.Linear(size, config.d_model, bias=False)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.drop, self.dropatt = nn.Dropout(config.dropout), nn.Dropout(config.dropatt)

    def forward(self, x: Tensor, memory: Tensor | None, table: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, N, E), memory (B, M - N, E), table of distances (M, E), distance (N, M) -> (B, N, E), weights (B, H, N, M)."""
        config, heads = self.config, (self.config.n_head, self.config.d_head)
        seen = x if memory is None else torch.cat((memory, x), 1)
        seen = self.layer_norm(seen) if config.pre_lnorm else seen
        query, key, value = self.qkv_net(seen).unflatten(-1, (3, *heads)).unbind(2)  # (B, M, H, D)
        query = query[:, -x.shape[1] :]
        content = torch.einsum("bnhd,bmhd->bhnm", query + self.r_w_bias, key)
        by_distance = torch.einsum("bnhd,mhd->bhnm", query + self.r_r_bias, self.r_net(table).unflatten(-1, heads))
        position = by_distance.gather(-1, distance.clamp_min(0).expand_as(by_distance))
        unseen = (distance < 0) | (distance >= config.mem_len) if config.same_length else distance < 0
        scores = ((content + position) * config.d_head**-0.5).masked_fill(unseen, -torch.inf)
        weights = self.dropatt(scores.softmax(-1))
        out = x + self.drop(self.o_net(torch.einsum("bhnm,bmhd->bnhd", weights, value).flatten(-2)))
        return out if config.pre_lnorm else self.layer_norm(out), weights


class FeedForward(nn.Module):
    """W_2 relu(W_1 x), its residual and its norm."""

    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__()
        inner, outer = nn.Linear(config.d_model, config.d_inner), nn.Linear(config.d_inner, config.d_model)
        self.CoreNet = nn.Sequential(inner, nn.ReLU(), nn.Dropout(config.dropout), outer, nn.Dropout(config.dropout))
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.pre_lnorm = config.pre_lnorm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.CoreNet(self.layer_norm(x)) if self.pre_lnorm else self.layer_norm(x + self.CoreNet(x))


class TransfoXLLayer(nn.Module):
    """Attention, then feed-forward."""

    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__()
        self.dec_attn, self.pos_ff = RelativeAttention(config), FeedForward(config)

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        x, weights = self.dec_attn(*inputs)
        return self.pos_ff(x), weights


@dataclass
class TransfoXLOutput(ModelOutput):
    """loss: the mean of losses (B, N - 1), nats of tokens 2 to N, 0 for labels of -100. prediction_scores: log p (B, N, V).

    mems: of every layer, (M, B, E). hidden_states (B, N, E): the input of each layer, then the output. attentions (B, H, N, M).
    """

    loss: Tensor | None = None
    losses: Tensor | None = None
    prediction_scores: Tensor | None = None
    last_hidden_state: Tensor | None = None
    mems: list[Tensor] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def logits(self) -> Tensor | None:
        """The prediction scores, as `generate` calls them."""
        return self.prediction_scores


class TransfoXLPreTrainedModel(PreTrainedModel):
    """Ties, start and input layer of both models."""

    config_class = TransfoXLConfig
    base_model_prefix = "transformer"
    _keys_to_ignore_on_load_unexpected = [r"pos_emb\.inv_freq"]  # noqa: RUF012  it follows from d_model

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Tied tensors; unlike other models', projections and biases are tied whatever `tie_word_embeddings` says."""
        return dict(self._tied_weights_keys)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        for name, tensor in module.named_parameters(recurse=False):
            if name.endswith("bias") and tensor.dim() == 1:
                init.zeros_(tensor)
            else:
                std = self.config.proj_init_std if isinstance(module, nn.ParameterList) else self.config.init_std
                init.normal_(tensor, float(isinstance(module, nn.LayerNorm)), std)

    def get_input_embeddings(self) -> nn.Module:
        """The input layer that reads input_ids."""
        model: Any = self._modules.get("transformer", self)
        embedding: nn.Module = model.word_emb
        return embedding

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> nn.Module:
        """The input layer unchanged; InputError for another number of tokens."""
        if new_num_tokens not in (None, self.config.vocab_size):
            raise InputError(
                f"a vocabulary in clusters keeps its {self.config.vocab_size} tokens, given {new_num_tokens}"
            )
        return self.get_input_embeddings()


class TransfoXLModel(TransfoXLPreTrainedModel):
    """Transformer-XL without an output layer."""

    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__(config)
        biases, heads = () if config.untie_r else ("r_w_bias", "r_r_bias"), (config.n_head, config.d_head)
        for name in biases:
            self.register_parameter(name, nn.Parameter(torch.empty(heads)))
        self.word_emb, self.drop = AdaptiveEmbedding(config), nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(TransfoXLLayer(config) for _ in range(config.n_layer))
        self._tied_weights_keys = {
            f"layers.{i}.dec_attn.{name}": name for i in range(config.n_layer) for name in biases
        }
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids: Tensor, mems: list[Tensor] | None = None, output_attentions: bool | None = None,
                output_hidden_states: bool | None = None) -> Any:  # fmt: skip
        """input_ids (B, N), and the `mems` of the segment before -> `TransfoXLOutput`."""
        config = self.config
        x = self.drop(self.word_emb(input_ids))
        if mems is None and config.mem_len > 0:
            mems = [x.new_zeros(config.mem_len, len(x), config.d_model)] * config.n_layer
        shape = (len(x), config.d_model)
        if mems is not None and (len(mems) != config.n_layer or any(mem.shape[1:] != shape for mem in mems)):
            raise InputError(
                f"mems: {config.n_layer} tensors (M, {shape[0]}, {shape[1]}), given {[tuple(m.shape) for m in mems]}"
            )
        past = 0 if mems is None else len(mems[0])
        keys = torch.arange(past + x.shape[1], device=x.device)
        distance = keys[past:, None] - keys
        table = self.drop(self._sinusoids(keys.clamp(max=config.clamp_len) if config.clamp_len > 0 else keys, x))
        wanted = config.output_attentions if output_attentions is None else output_attentions
        states, attentions, after = [x], [], []
        for i, layer in enumerate(self.layers):
            memory = None if mems is None else mems[i].transpose(0, 1).to(x)
            if memory is not None:
                joined = torch.cat((memory, x), 1).detach().transpose(0, 1)
                after.append(joined[max(0, len(joined) - config.mem_len) :])
            x, weights = layer(x, memory, table, distance)
            states.append(x)
            attentions += [weights] if wanted else []
        states[-1] = x = self.drop(x)
        return TransfoXLOutput(
            last_hidden_state=x,
            mems=None if mems is None else after,
            hidden_states=tuple(states) if output_hidden_states or config.output_hidden_states else None,
            attentions=tuple(attentions) if wanted else None,
        )

    def _sinusoids(self, distance: Tensor, like: Tensor) -> Tensor:
        """(M,) -> sines, then cosines (M, E). Frequencies are rounded to fp32, as in old checkpoints."""
        size, dtype = self.config.d_model, torch.promote_types(like.dtype, torch.float32)
        frequencies = 1 / 10000 ** (torch.arange(0, size, 2, dtype=torch.float32, device=like.device) / size)
        angles = torch.outer(distance.to(dtype), frequencies.to(dtype))
        return torch.cat((angles.sin(), angles.cos()), -1).to(like.dtype)


class TransfoXLLMHeadModel(TransfoXLPreTrainedModel, GenerationMixin):
    """Transformer-XL with its adaptive softmax. It knows no padding: the rows of a batch are of one length."""

    _is_stateful = True  # memory cannot forget rejected tokens, so that speculation is refused

    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__(config)
        self.transformer, self.crit = TransfoXLModel(config), AdaptiveSoftmax(config)
        self._tied_weights_keys = {
            f"transformer.{a}": f"transformer.{b}" for a, b in self.transformer._tied_weights_keys.items()
        }
        source = "transformer.word_emb"
        for i in range(len(config.tables) if config.tie_word_embeddings else 0):
            self._tied_weights_keys[f"crit.out_layers.{i}.weight"] = f"{source}.emb_layers.{i}.weight"
        for i, tied in enumerate(config.tie_projs or ()):
            if tied and config.projected:
                self._tied_weights_keys[f"crit.out_projs.{i}"] = f"{source}.emb_projs.{0 if config.div_val == 1 else i}"
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids: Tensor, mems: list[Tensor] | None = None, labels: Tensor | None = None,
                output_attentions: bool | None = None, output_hidden_states: bool | None = None,
                logits_to_keep: int = 0) -> Any:  # fmt: skip
        """The inputs of `TransfoXLModel` -> `TransfoXLOutput` with prediction scores; with labels their loss and no scores.

        labels (B, N): input_ids again, -100 where there is no loss. logits_to_keep: of the last so many tokens, 0: of all.
        """
        out = self.transformer(input_ids, mems, output_attentions, output_hidden_states, return_dict=True)
        hidden, out.last_hidden_state = out.last_hidden_state, None
        if labels is None:
            return TransfoXLOutput(**out, prediction_scores=self.crit(hidden[:, -logits_to_keep:]))
        losses = self.crit.nll(hidden[:, :-1], labels[:, 1:])
        loss = losses.sum() / (labels[:, 1:] != IGNORED).sum().clamp_min(1)
        return TransfoXLOutput(**out, losses=losses, loss=loss)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, mems: list[Tensor] | None = None, is_first_iteration: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Inputs of `forward` in `generate`: with memory, the prompt and then new tokens alone; without, the whole text."""
        new = input_ids if mems is None or is_first_iteration else input_ids[:, -1:]
        names = ("output_attentions", "output_hidden_states", "logits_to_keep")
        return {"input_ids": new, "mems": mems} | {name: kwargs[name] for name in names if name in kwargs}

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        model_kwargs.pop("past_key_values", None)  # transformers up to 5.23 puts mems there
        return model_kwargs | {"mems": outputs.mems}

    def _reorder_cache(self, mems: list[Tensor] | None, beams: Tensor) -> list[Tensor] | None:
        return mems and [mem.index_select(1, beams.to(mem.device)) for mem in mems]
