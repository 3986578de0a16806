"""Attention modules of transformers: the families that are known, where their queries are, and their sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fullrank.core.errors import InputError, suggest
from fullrank.core.stage import HeadSize


@dataclass(frozen=True)
class Family:
    """How attention modules on transformers' attention interface make their queries.

    query: names of submodules whose output (..., W) holds the projected queries with their bias; the first one that a module
    has counts. Empty: the attention function gets the projected queries as they are.
    blocks: the output is so many blocks of equal width, and each begins with the queries of H / blocks heads; None: H blocks.
    """

    query: Sequence[str] = ()
    blocks: int | None = None

    def projection(self, module: nn.Module) -> str | None:
        """The name of the submodule of `module` that projects its queries, None without one."""
        return next((name for name in self.query if getattr(module, name, None) is not None), None)

    def split_queries(self, output: Tensor, size: HeadSize) -> Tensor:
        """Output (..., W) of the projection -> queries (..., H, D)."""
        blocks = self.blocks or size.num_heads
        queries = output.unflatten(-1, (blocks, -1))[..., : size.num_heads * size.head_dim // blocks]
        return queries.flatten(-2).unflatten(-1, (size.num_heads, size.head_dim))


# Classes of attention modules by the way in which they make queries. Their eager attention functions are tried out.
FAMILIES = {
    name: family
    for family, names in (
        (
            Family(),
            """
            ASTAttention Aimv2Attention AlbertAttention AlignTextSelfAttention AltCLIPAttention AltRobertaSelfAttention
            BartAttention BertCrossAttention BertGenerationSelfAttention BertSelfAttention
            BigBirdPegasusDecoderAttention BioGptAttention BlenderbotAttention BlenderbotSmallAttention Blip2Attention
            Blip2QFormerMultiHeadAttention BridgeTowerSelfAttention CLIPAttention CLIPSegAttention
            CamembertSelfAttention CanaryCrossAttention CanarySelfAttention ChineseCLIPTextSelfAttention
            ChineseCLIPVisionAttention ClapTextSelfAttention CohereAsrCrossAttention CohereAsrSelfAttention
            Cosmos3EdgeVisionAttention DFineSelfAttention DPTSelfAttention Data2VecTextSelfAttention
            DecisionTransformerGPT2Attention DeiTAttention Deimv2SelfAttention DiaCrossAttention DistilBertSelfAttention
            EdgeTamVideoAttention EdgeTamVideoPerceiverAttention ElectraSelfAttention EomtAttention ErnieSelfAttention
            FunAsrNanoAttention GPT2Attention GPTBigCodeAttention GitVisionAttention GlmImageVisionAttention
            GraniteDoclingVisionAttention HYV4VLVisionAttention HunYuanVLVisionAttention IJepaAttention
            Idefics2PerceiverAttention Idefics2VisionAttention Idefics3VisionAttention IdeficsVisionAttention
            Inkling2FullAttention Inkling2LoopFullAttention Inkling2LoopSlidingAttention Inkling2SlidingAttention
            InstructBlipAttention InstructBlipQFormerMultiHeadAttention InstructBlipVideoAttention
            InstructBlipVideoQFormerMultiHeadAttention JambaAttention Kosmos2VisionAttention Kosmos2_5VisionAttention
            KosmosTextAttention LayoutLMSelfAttention LayoutLMv3SelfAttention LongT5Attention M2M100Attention
            MBartAttention MT5Attention MarianAttention MarkupLMSelfAttention MaskFormerDetrCrossAttention
            MaskFormerDetrSelfAttention MetaClip2Attention MiniCPMOcrVisionAttention MiniCPMV4_6VisionAttention
            MiniCPMV4_7VisionAttention MllamaVisionAttention MobileBertSelfAttention Molmo2VisionAttention
            MoonshineStreamingEncoderAttention MultiHeadAttention MusicgenAttention MusicgenMelodyAttention
            NemotronAsrStreamingEncoderAttention NemotronHAttention NllbMoeAttention OmniASRAttention
            Ovis2VisionAttention OwlViTAttention Owlv2Attention PLBartAttention PPDocLayoutV2SelfAttention
            PPDocLayoutV3SelfAttention PPDocLayoutV4SelfAttention PPFormulaNetAttention ParakeetEncoderAttention
            PatchTSTAttention PegasusAttention PegasusXAttention Pix2StructTextAttention Pix2StructVisionAttention
            Pop2PianoAttention Qwen2_5OmniAudioAttention Qwen3ASRAudioAttention Qwen3OmniMoeAudioAttention
            RTDetrSelfAttention RTDetrV2SelfAttention RadioAttention RoCBertSelfAttention
            RobertaPreLayerNormSelfAttention RobertaSelfAttention Sam2Attention Sam2MultiScaleAttention
            Sam2VideoAttention Sam3Attention Sam3LiteTextAttention Sam3TrackerAttention Sam3TrackerVideoAttention
            SamAttention SamHQAttention SeamlessM4TAttention SeamlessM4Tv2Attention SeamlessM4Tv2ConformerSelfAttention
            SegformerAttention Siglip2Attention SiglipAttention SmolVLMVisionAttention Speech2TextAttention
            SplinterSelfAttention SwinAttention SwitchTransformersAttention T5Attention T5GemmaCrossAttention
            Tipsv2TextAttention UMT5Attention UdopAttention UnlimitedOcrAttention ViTAttention ViTMAEAttention
            ViTMSNAttention VideoMAESelfAttention VideoPrismAttention VideomtAttention VivitAttention XCLIPAttention
            XCLIPCrossAttention XLMRobertaSelfAttention XLMRobertaXLSelfAttention XmodSelfAttention YolosSelfAttention
            ZambaAttention
            """,
        ),
        (  # queries are normalised, rotated or scaled before the attention function gets them
            Family(("q_b_proj", "q_proj", "query", "linear_q", "q")),
            """
            AXK1Attention AfmoeAttention Apertus1p5TextAttention ApertusAttention ArceeAttention AriaTextAttention
            AudioFlamingo3Attention BailingHybridAttention BambaAttention BeamAttention BeitAttention
            BertGenerationCrossAttention BitNetAttention BltCrossAttention BltSelfAttention BridgeTowerCrossAttention
            CamembertCrossAttention ChameleonAttention Cohere2Attention Cohere2MoeAttention CohereAttention
            CohereCompassAttention ConditionalDetrSelfAttention Cosmos3EdgeTextAttention CsmAttention CwmAttention
            DINOv3ViTAttention Data2VecAudioAttention Data2VecTextCrossAttention DeepseekOcr2TextAttention
            DeepseekOcr2VisionAttention DeepseekV2Attention DeepseekV3Attention DeepseekV4Attention
            DeformableDetrSelfAttention DetrCrossAttention DetrSelfAttention DiaSelfAttention DiffLlamaAttention
            DiffusionGemmaDecoderTextAttention DiffusionGemmaEncoderTextAttention Dinov2Attention
            Dinov2WithRegistersAttention DogeAttention DoryAttention Dots1Attention Dots3NoteAudioAttention
            EdgeTamAttention EdgeTamVideoRoPECrossAttention EdgeTamVideoRoPESelfAttention ElectraCrossAttention
            EmbeddingGemma2Attention Emu3Attention EomtDinov3Attention Ernie4_5Attention Ernie4_5_MoeAttention
            Ernie4_5_VLMoeTextAttention ErnieCrossAttention EsmSelfAttention EsmcAttention EuroBertAttention
            EvollaAttention EvollaSaProtSelfAttention Exaone4Attention Exaone4_5_Attention ExaoneMoeAttention
            FalconH1Attention FlexOlmoAttention FlintAttention GPTJAttention Gemma2Attention Gemma3Attention
            Gemma3nTextAttention Gemma4TextAttention Gemma4UnifiedTextAttention Gemma4VisionAttention GemmaAttention
            Glm4Attention Glm4MoeAttention Glm4MoeLiteAttention Glm4vMoeTextAttention Glm4vTextAttention
            Glm5NextTextAttention GlmAsrAttention GlmAttention GlmImageTextAttention GlmOcrTextAttention GptOssAttention
            GradiumPhononTTSAttention Granite4VisionTextAttention GraniteAttention GraniteDoclingTextAttention
            GraniteMoeAttention GraniteMoeHybridAttention GraniteMoeSWAAttention GraniteMoeSharedAttention
            GraniteSWAAttention GraniteSpeech5EncoderAttention GteAttention HYV3Attention HeliumAttention
            HiggsAudioV2Attention HrmTextAttention HubertAttention HunYuanDenseV1Attention HunYuanMoEV1Attention
            HunYuanVLDenseV1Attention HyperCLOVAXAttention IdeficsAttention InformerAttention Inkling2VisionAttention
            InklingAttention InternVLVisionAttention Jais2Attention JanusVisionAttention JinaEmbeddingsV3Attention
            KimiLinearAttention Kimi_K25VisionAttention Kolibri1Attention Kosmos2_5TextAttention
            KyutaiSpeechToTextAttention LagunaAttention LaraMiniAttention LasrEncoderAttention Lfm2Attention
            Lfm2MoeAttention Lfm3Attention Lfm3VlVisionAttention LightGlueAttention Llama4TextAttention
            Llama4VisionAttention LlamaAttention LongcatFlashMLA LwDetrAttention LwDetrViTAttention MLCDAttention
            MellumAttention MiMoV2FlashAttention MimiAttention MiniCPM3Attention MiniMaxAttention MiniMaxM2Attention
            MiniMaxM3VLVisionAttention Ministral3Attention MinistralAttention Mistral4Attention MistralAttention
            MixtralAttention MllamaTextCrossAttention MllamaTextSelfAttention ModernBertDecoderAttention Molmo2Attention
            MoonshineAttention MoonshineStreamingAttention MoshiAttention MossTranscribeDiarizeAudioAttention
            MuseGlimmerAssistantAttention MuseGlimmerTextAttention MuseGlimmerVisionAttention MuseSparkTextAttention
            MuseSparkVisionAttention NanoChatAttention Nemotron3DiarizationAttention Nemotron3_5TranscribeAttention
            NemotronAttention NeoMMEAttention NeuCodecAttention NomicBertAttention OPTAttention Olmo2Attention
            Olmo3Attention OlmoAttention OlmoHybridAttention OlmoeAttention OpenAIPrivacyFilterAttention
            PaddleOCRAttention PaddleOCRVisionAttention PatchTSMixerAttention PeAudioEncoderAttention
            PeAudioVideoEncoderAttention PeVideoEncoderAttention PhiAttention PhimoeAttention PixioAttention
            PixtralAttention PocketTTSAttention PocketTTSAudioTokenizerAttention QianfanOCRVisionAttention
            Qwen2Attention Qwen2AudioAttention Qwen2MoeAttention Qwen2VLAttention Qwen2_5OmniAttention
            Qwen2_5OmniVisionAttention Qwen2_5_VLAttention Qwen3Attention Qwen3MoeAttention Qwen3NextAttention
            Qwen3OmniMoeTalkerCodePredictorAttention Qwen3OmniMoeThinkerTextAttention Qwen3VLMoeTextAttention
            Qwen3VLTextAttention Qwen3_5Attention Qwen3_5MoeAttention Qwen4ExpTextAttention RecurrentGemmaAttention
            RoCBertCrossAttention RobertaCrossAttention RobertaPreLayerNormCrossAttention SEWAttention
            Sam2VideoRoPEAttention Sam3LiteTextTextAttention Sam3TrackerVideoRoPEAttention Sam3ViTRoPEAttention
            Sapiens2Attention SeamlessM4TConformerSelfAttention SeedOssAttention SmolLM3Attention SolarOpenAttention
            StableLmAttention Starcoder2Attention Step3p7Attention Step3p7VisionAttention T5Gemma2MergedAttention
            T5Gemma2SelfAttention T5GemmaSelfAttention TimeSeriesTransformerAttention TimesFm2_5Attention
            Tipsv2VisionAttention UltrabertAttention UniSpeechAttention UniSpeechSatAttention VJEPA2PoolerCrossAttention
            VJEPA2PoolerSelfAttention VJEPA2RopeAttention VaultGemmaAttention VideoLlama3VisionAttention
            VideoPrismMultiheadAttentionPoolingHead VitPoseBackboneSelfAttention VoxtralAttention
            VoxtralRealtimeAttention VoxtralRealtimeTextAttention Wav2Vec2Attention Wav2Vec2BertSelfAttention
            Wav2Vec2ConformerSelfAttention WhisperAttention XLMRobertaCrossAttention XLMRobertaXLCrossAttention
            Xcodec2Attention XmodCrossAttention YoutuAttention Zamba2Attention
            """,
        ),
        (Family(("query_key_value",)), "GPTNeoXAttention PersimmonAttention"),
        (  # the queries of all heads, then all keys, then all values
            Family(("qkv", "Wqkv", "qkv_proj"), blocks=1),
            """
            CohereCompassVisionAttention DbrxAttention Ernie4_5_VLMoeVisionAttention Exaone4_5_VisionAttention
            Glm4vMoeVisionAttention Glm4vVisionAttention Glm5NextVisionAttention GlmOcrVisionAttention
            ModernBertAttention Phi3Attention Phi4MultimodalAttention Qwen2_5_VLVisionAttention
            Qwen3OmniMoeVisionAttention Qwen3VLMoeVisionAttention Qwen3VLVisionAttention Qwen3_5MoeVisionAttention
            Qwen3_5VisionAttention Qwen4ExpVisionAttention VisionAttention
            """,
        ),
        (Family(("qkv_proj",), blocks=4), "CodeGenAttention"),
    )
    for name in names.split()
}
_described: dict[str, Family] = {}  # by `describe_families`, for this process


def describe_families(model: nn.Module, interface: Mapping[str, Mapping[str, Any]]) -> None:
    """Add families of a user: the fields of `Family` by the names of classes, as `inject(interface=...)` takes them.

    Raises InputError for other fields, and for a class that the model has not or that has no eager attention function.
    """
    homes = {kind.__name__: kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    for name, fields in interface.items():
        if not isinstance(fields, Mapping) or set(fields) - {"query", "blocks"}:
            raise InputError(f"interface: {name}: a mapping with query and blocks, given {fields!r}")
        if not hasattr(sys.modules.get(homes.get(name, "")), "eager_attention_forward"):
            raise InputError(
                f"interface: {name}: no class of a module of {type(model).__name__} that has an eager_attention_forward in its "
                "file"
            )
        query = fields.get("query") or ()
        _described[name] = Family((query,) if isinstance(query, str) else tuple(query), fields.get("blocks"))


def family_of(module: nn.Module) -> Family | None:
    """The family of an attention module on the attention interface; None for any other module."""
    kind = _computing_class(module)
    if not hasattr(sys.modules[kind.__module__], "eager_attention_forward"):
        return None
    known = FAMILIES if kind.__module__.startswith("transformers.") else {}
    return _described.get(kind.__name__) or known.get(kind.__name__)


def _computing_class(module: nn.Module) -> type:
    """The class, of a module or above it, that defines its forward pass."""
    return next(kind for kind in type(module).__mro__ if "forward" in vars(kind))


def eager_of(module: nn.Module) -> Callable[..., Any]:
    """The attention function of a module with `attn_implementation="eager"`."""
    if getattr(module, "reorder_and_upcast_attn", False):
        raise InputError(
            f"{type(module).__name__}: reorder_and_upcast_attn computes another attention; set it to false"
        )
    eager: Callable[..., Any] = sys.modules[_computing_class(module).__module__].eager_attention_forward
    return eager


HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_WIDTHS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_per_head")
QUERIES = ("q_proj", "query", "q_lin", "q", "query_proj", "linear_q", "wq")
_MODEL_WIDTHS = ("embed_dim", "hidden_size", "d_model")


def head_size(module: nn.Module) -> HeadSize:
    """The number of query heads of an attention module, and the width of a query."""
    config = getattr(module, "config", None)
    heads = _find_number((module, config), HEAD_COUNTS)
    if heads is None:
        raise InputError(f"{type(module).__name__}: says nowhere how many heads it has; choose others with `layers`")
    width = _find_number((module,), _WIDTHS)
    if width is None:
        projections = [getattr(module, name, None) for name in QUERIES]
        widths = [layer.out_features for layer in projections if isinstance(layer, nn.Linear)]
        width = (widths[0] if widths else _find_number((module, config), _MODEL_WIDTHS) or 0) // heads
    return HeadSize(num_heads=heads, head_dim=width, hidden_size=heads * width, max_length=0)


def _find_number(owners: Sequence[Any], names: Sequence[str]) -> int | None:
    values = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


# -- the attention modules of a model ------------------------------------------------------------------------------------


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """The attention modules of known families, by name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if family_of(module) is not None}


def unknown_modules(model: nn.Module) -> list[str]:
    """The names of attention modules with projections of their own that are of no known family."""
    known = attention_modules(model)
    return [
        name
        for name, module in model.named_modules()
        if "Attention" in type(module).__name__
        and sum(p.dim() == 2 for layer in module.children() for p in layer.parameters(recurse=False)) > 1
        and not any(f"{other}.".startswith(f"{name}.") for other in known)
    ]


def choose_modules(model: nn.Module, layers: Sequence[int | str] | None) -> dict[str, Any]:
    """The attention modules of `layers`: numbers (the first one in a module's name), or parts of names; None: all.

    Negative numbers count from the end of each list of layers.
    Raises InputError for a model without attention of a known family, and for layers that it does not have.
    """
    modules = attention_modules(model)
    if not modules:
        raise InputError(_explain_refusal(model))
    if layers is None:
        return modules
    if isinstance(layers, str | int) or not layers or not all(type(layer) in (int, str) for layer in layers):
        raise InputError(
            f"layers: a list of layer numbers or of parts of module names, or None for all; given {layers!r}"
        )
    chosen: set[str] = set()
    for layer in layers:
        matching = {name for name in modules if _matches(model, name, layer)}
        if not matching:
            numbers = sorted({number for name in modules if (number := _layer_number(name)) is not None})
            known = suggest(layer, modules) if isinstance(layer, str) else f"it has {', '.join(map(str, numbers))}"
            raise InputError(f"layers: {layer!r} is no attention layer of {type(model).__name__}; {known}")
        chosen |= matching
    return {name: module for name, module in modules.items() if name in chosen}


def _matches(model: nn.Module, name: str, layer: int | str) -> bool:
    if isinstance(layer, str):
        return f".{layer}." in f".{name}."
    number = _layer_number(name)
    if number is not None and layer < 0:
        layers: Any = model.get_submodule(f".{name}".partition(f".{number}.")[0].lstrip("."))
        layer += len(layers)
    return number == layer


def _layer_number(name: str) -> int | None:
    """The first number in a dotted name: 3 in `encoder.layer.3.attention.self`."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _explain_refusal(model: nn.Module) -> str:
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return f"{name}: not a Hugging Face model; for our own models set model.attention in their configuration"
    if config.model_type == "fullrank":
        return f"{name}: our own model; set model.attention in its configuration"
    classes = sorted({kind for module in model.modules() if "Attention" in (kind := type(module).__name__)})
    return (
        f"{name}: its attention ({', '.join(classes) or 'none found'}) is of no family that fullrank.hf.families knows: BERT, "
        "RoBERTa, GPT-2, GPT-NeoX, OPT, Llama, Mistral, Qwen, Gemma, T5, BART, Whisper, ViT and others. Describe a class on "
        "transformers' attention interface by interface={'ItsAttention': {'query': 'q_proj'}}; one that computes weights in "
        "code of its own cannot be injected into"
    )
