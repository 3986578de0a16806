"""Attention modules on the attention interface of transformers: which those are, where their queries are, and their sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fullrank.core.errors import InputError, suggest
from fullrank.core.stages import HeadSize

# names of submodules whose output holds the projected queries with their bias: H blocks that begin with the query of a head,
# and the queries of all heads, then all keys, then all values
_QUERIES = ("q_b_proj", "q_proj", "query", "linear_q", "q", "q_lin", "q_attn")
_FUSED = ("qkv", "Wqkv", "qkv_proj", "c_attn")
# classes with another layout: the submodule, and the number of its blocks (None: H); None gets the queries as they are
LAYOUTS: dict[str, tuple[str | None, int | None]] = {
    "GPTNeoXAttention": ("query_key_value", None),
    "PersimmonAttention": ("query_key_value", None),
    "CodeGenAttention": ("qkv_proj", 4),
    "GPTBigCodeAttention": (None, None),
    "MultiHeadAttention": (None, None),  # CTRL
    "Sam2MultiScaleAttention": (None, None),  # queries are pooled after the projection
}
# in files with the interface, but off it, sparse, or with weights that are not those of heads over keys
_REFUSED = """
    AXK2Attention AriaCrossAttention BailingHybridDeltaAttention BigBirdPegasusBlockSparseAttention
    BigBirdPegasusSelfAttention ClapAudioSelfAttention ConditionalDetrDecoderCrossAttention
    ConditionalDetrDecoderSelfAttention ConditionalDetrMHAttentionMap DeepseekOcr2SamVisionAttention
    DeepseekOcr2SamVisionSdpaAttention DeepseekV32Attention DetrMHAttentionMap DiTAttention Dots3NoteTextAttention
    Dots3NoteVisionAttention EfficientLoFTRAttention Emu3VQVAEAttentionBlock EsmFold2AtomAttention
    EsmFold2DiffusionAttention EsmFold2MSAPairWeightedAveraging EvollaSequenceAlignerCrossAttention
    Florence2VisionChannelAttention Florence2VisionWindowAttention Gemma3nAudioAttention Gemma4AudioAttention
    GitSelfAttention Glm5NextTextLinearAttention GlmMoeDsaAttention HYV4Attention HYV4VLAttention
    InformerProbSparseAttention Inkling2BlockAttentionResidual Inkling2LoopBlockAttentionResidual
    Inkling2LoopMessageAttentionResidual JetMoeAttention KimiLinearDeltaAttention LongT5LocalAttention
    LongT5TransientGlobalAttention MaskFormerDetrMHAttentionMap MiniMaxLightningAttention MiniMaxM3VLAttention
    MistralLarge4TextAttention PPDocLayoutV2ReadingOrderSelfAttention PPFormulaNetVisionAttention
    PPOCRV5MobileRecAttention PPOCRV5ServerRecAttention PPOCRV6SmallRecAttention PegasusXGlobalLocalAttention
    Phi4MultimodalAudioAttention Phi4MultimodalVisionAttention Qwen3OmniMoeCode2WavAttention RfDetrAttention
    RfDetrDinov2Attention SamHQVisionAttention SamHQVisionSdpaAttention SamVisionAttention SamVisionSdpaAttention
    UnlimitedOcrSamVisionAttention UnlimitedOcrSamVisionSdpaAttention UnlimitedOcrTextAttention ZayaAttention
""".split()  # noqa: SIM905


# classes that users described, as `inject(interface=...)` takes them: submodule and blocks as above
_described: dict[str, tuple[str | None, int | None]] = {}


def describe_classes(model: nn.Module, interface: Mapping[str, Mapping[str, Any]]) -> None:
    """Note where classes of attention project their queries: {"OwnAttention": {"query": "q_proj", "blocks": 1}}.

    It is known by the names of the classes from then on, for all models of the process.
    Raises InputError for other fields and values, and for a class that the model lacks or that has no eager attention function.
    """
    if not isinstance(interface, Mapping):
        raise InputError(f"interface: a mapping of class names to mappings, given {interface!r}")
    described = {}
    for name, fields in interface.items():
        if not isinstance(fields, Mapping) or set(fields) - {"query", "blocks"}:
            raise InputError(f"interface: {name}: a mapping with query and blocks, given {fields!r}")
        query = fields.get("query")
        blocks = fields.get("blocks")
        modules = [module for module in model.modules() if _computing_class(module).__name__ == name]
        if not any(hasattr(_file_of(module), "eager_attention_forward") for module in modules):
            raise InputError(
                f"interface: {name}: no class of a module of {type(model).__name__} that has an eager_attention_forward in its "
                "file"
            )
        projections = [getattr(module, str(query), None) for module in modules]
        if query is not None and not all(isinstance(layer, nn.Module) for layer in projections):
            raise InputError(f"interface: {name}: query: the name of a submodule of each {name}, given {query!r}")
        if blocks is not None:
            heads = head_size(modules[0]).num_heads
            if type(blocks) is not int or blocks < 1 or heads % blocks:
                raise InputError(
                    f"interface: {name}: blocks: a number that divides the {heads} heads, given {blocks!r}"
                )
        described[name] = query, blocks
    _described.update(described)


def is_attention(module: nn.Module) -> bool:
    """Return whether the forward pass of a module calls an attention function of the interface.

    The class of such a module is named Attention, projects its queries by a submodule of a known name, and stands in a file
    with the interface. The tables above have the exceptions of transformers. Other classes are described by
    `inject(interface=...)`.
    """
    kind = _computing_class(module)
    if kind.__name__ in _described:
        return True
    if kind.__name__ in _REFUSED:
        return False
    file = _file_of(module)
    has_interface = hasattr(file, "ALL_ATTENTION_FUNCTIONS") and hasattr(file, "eager_attention_forward")
    is_named = "Attention" in kind.__name__ or kind.__name__ == "LongcatFlashMLA"
    has_queries = kind.__name__ in LAYOUTS or find_projection(module)[0] is not None
    return is_named and has_queries and has_interface


def find_projection(module: nn.Module) -> tuple[str | None, int | None]:
    """Find the submodule that projects an attention module's queries, and the number of blocks of its output (None: H).

    Without such a submodule (None) the attention function gets the projected queries as they are.
    """
    name = _computing_class(module).__name__
    if layout := _described.get(name) or LAYOUTS.get(name):
        return layout
    for names, blocks in ((_QUERIES, None), (_FUSED, 1)):
        for name in names:
            if isinstance(getattr(module, name, None), nn.Module):
                return name, blocks
    return None, None


def split_queries(output: Tensor, size: HeadSize, blocks: int | None) -> Tensor:
    """Take the queries out of the output of their projection.

    Args:
        output: (..., W), in equal blocks that begin with queries.
        size: the number of heads H and their size D.
        blocks: the number of blocks; None: one a head.

    Returns:
        Queries (..., H, D).
    """
    output = output.unflatten(-1, (blocks or size.num_heads, -1))
    queries = output[..., : size.num_heads * size.head_dim // output.shape[-2]]
    return queries.flatten(-2).unflatten(-1, (size.num_heads, size.head_dim))


def _computing_class(module: nn.Module) -> type:
    """Find the class, of a module or above it, that defines its forward pass."""
    return next(kind for kind in type(module).__mro__ if "forward" in vars(kind))


def _file_of(module: nn.Module) -> ModuleType | None:
    """Return the Python module of the class that defines the forward pass."""
    return sys.modules.get(_computing_class(module).__module__)


def eager_of(module: nn.Module) -> Callable[..., Any]:
    """Return the attention function of a module with `attn_implementation="eager"`; InputError if it uses another one."""
    if getattr(module, "reorder_and_upcast_attn", False):
        raise InputError(
            f"{type(module).__name__}: reorder_and_upcast_attn computes another attention; set it to false"
        )
    return _file_of(module).eager_attention_forward  # type: ignore[union-attr]


_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_WIDTHS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_per_head")
_MODEL_WIDTHS = ("embed_dim", "hidden_size", "d_model")


def head_size(module: nn.Module) -> HeadSize:
    """Find the number of query heads of an attention module, and the width of a query; InputError if the first is unknown."""
    config = getattr(module, "config", None)
    heads = _find_number((module, config), _HEAD_COUNTS)
    if heads is None:
        raise InputError(f"{type(module).__name__}: says nowhere how many heads it has; choose others with `layers`")
    width = _find_number((module,), _WIDTHS)
    if width is None:
        projections = [getattr(module, name, None) for name in _QUERIES[1:]]
        widths = [layer.out_features for layer in projections if isinstance(layer, nn.Linear)]
        widths.append(_find_number((module, config), _MODEL_WIDTHS) or 0)
        width = widths[0] // heads
    return HeadSize(num_heads=heads, head_dim=width, hidden_size=heads * width, max_length=0)


def _find_number(owners: Sequence[Any], names: Sequence[str]) -> int | None:
    values = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """Return the attention modules of a model, by name, in its order."""
    return {name: module for name, module in model.named_modules() if is_attention(module)}


def unknown_modules(model: nn.Module) -> list[str]:
    """List the names of modules off the interface that attend with projections of their own."""
    attentions = attention_modules(model)
    unknown = []
    for name, module in model.named_modules():
        holds_known = any(f"{other}.".startswith(f"{name}.") for other in attentions)
        if "Attention" in type(module).__name__ and not holds_known and _count_matrices(module) > 1:
            unknown.append(name)
    return unknown


def _count_matrices(module: nn.Module) -> int:
    """Count the matrices of the layers directly inside a module."""
    return sum(p.dim() == 2 for layer in module.children() for p in layer.parameters(recurse=False))


def choose_modules(model: nn.Module, layers: Sequence[int | str] | None) -> dict[str, Any]:
    """Choose the attention modules of `layers`: numbers (the first one in a module's name), or parts of names; None: all.

    Negative numbers count from the end of each list of layers. Parts of names are whole, between dots.
    Raises InputError for a model without attention on the interface, and for layers that it does not have.
    """
    modules = attention_modules(model)
    if not modules:
        raise InputError(_explain_refusal(model))
    if layers is None:
        return modules
    is_list = isinstance(layers, Sequence) and not isinstance(layers, str)
    if not is_list or not layers or not all(type(layer) in (int, str) for layer in layers):
        raise InputError(
            f"layers: a list of layer numbers or of parts of module names, or None for all; given {layers!r}"
        )
    numbers = {name: _number_layer(model, name) for name in modules}
    chosen = set()
    for layer in layers:
        if isinstance(layer, str):
            matching = {name for name in modules if f".{layer}." in f".{name}."}
            hint = suggest(layer, modules)
        else:
            matching = {name for name in modules if layer in numbers[name]}
            known = sorted({pair[0] for pair in numbers.values() if pair})
            hint = f"it has {', '.join(map(str, known))}"
        if not matching:
            raise InputError(f"layers: {layer!r} is no attention layer of {type(model).__name__}; {hint}")
        chosen |= matching
    return {name: module for name, module in modules.items() if name in chosen}


def _number_layer(model: nn.Module, name: str) -> tuple[int, ...]:
    """Return the first number in a dotted name, 3 in `encoder.layer.3.attention.self`, and the same counted from the end."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            layers: Any = model.get_submodule(".".join(parts[:place]))
            return int(part), int(part) - len(layers)
    return ()


def _explain_refusal(model: nn.Module) -> str:
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation") or config.model_type == "fullrank":
        return f"{name}: not a Hugging Face model, or our own; for our own models set model.attention in their configuration"
    kinds = {type(module).__name__ for module in model.modules()}
    classes = ", ".join(sorted(kind for kind in kinds if "Attention" in kind))
    return (
        f"{name}: its attention ({classes or 'none found'}) is not on transformers' attention interface, as that of "
        "BERT, RoBERTa, GPT-2, GPT-NeoX, OPT, Llama, Mistral, Qwen, Gemma, T5, BART, Whisper, ViT and others is, or is "
        "refused; describe a class that has an eager_attention_forward in its file with interface="
    )
