"""Write transfo_xl_reference.json: outputs of the Transformer-XL that transformers 4.35.2 still had.

    pip install torch transformers==4.35.2 sacremoses && python tests/hf/transfo_xl_reference.py

Parameters follow a formula of their names; numbers are in fp64. In fp64 the old attention stops with an error: it casts scores
to fp32, where its mask, the least number of fp64, does not fit. The script leaves out this cast; the rest runs as it was.
"""

from __future__ import annotations

import json
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FILE = Path(__file__).with_suffix(".json")
SIZES: dict[str, Any] = {
    "vocab_size": 13, "cutoffs": [5, 9], "d_model": 12, "d_embed": 12, "n_head": 2, "d_head": 5, "d_inner": 14, "n_layer": 2,
    "mem_len": 4, "div_val": 1, "clamp_len": -1, "same_length": False, "dropout": 0.0, "eos_token_id": None,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "div_val 1, projections tied": {"d_embed": 16},
    "div_val 1, projections untied": {"d_embed": 16, "proj_share_all_but_first": False},
    "div_val 2, same length, clamped": {"d_embed": 16, "div_val": 2, "same_length": True, "clamp_len": 3},
    "div_val 4, projections tied": {"d_embed": 16, "div_val": 4, "clamp_len": 2},
    "div_val 4, all untied": {"d_embed": 16, "div_val": 4, "proj_share_all_but_first": False, "tie_word_embeddings": False},
    "norms first": {"pre_lnorm": True, "same_length": True},
    "one pair of biases": {"untie_r": False, "mem_len": 9, "same_length": True},
    "no memory": {"mem_len": 0},
    "no clusters": {"cutoffs": [], "clamp_len": 1},
}  # fmt: skip
SEGMENTS = torch.tensor([[3, 11, 0, 7, 12], [9, 1, 5, 8, 2]]), torch.tensor([[4, 10, 6], [12, 0, 3]])
WORDS = ["<eos>", "<unk>", "the", ",", ".", "on", "@-@", "of", "@,@", "@.@", "state", "art", "cost", "23", "000", "1", "80",
         "m", "tall", "people", "are", "<formula>", '"', "it", "'s"]  # fmt: skip
TEXTS = [
    "the state-of-the-art cost 23,000 .",
    "people are 1.80 m tall, it's <formula> unheard of",
    'on "the" state <eos> of',
]


def fill(model: nn.Module) -> None:
    """Set every parameter by a formula of its name."""
    for name, tensor in model.named_parameters():
        angle = torch.arange(tensor.numel(), dtype=torch.float64) * 0.7 + zlib.crc32(name.encode()) % 1000
        start = 1.0 if name.endswith("layer_norm.weight") else 0.0
        tensor.data.copy_((start + 0.4 * torch.sin(angle)).view_as(tensor))


def outputs(model: Any) -> dict[str, Any]:
    """Outputs of two segments, the second with the memory of the first."""
    first = model(SEGMENTS[0])
    second = model(SEGMENTS[1], mems=first.mems, output_hidden_states=True, output_attentions=True)
    losses = model(SEGMENTS[0], labels=SEGMENTS[0].clone())
    return {
        "logits": second.logits,
        "mems": second.mems and second.mems[-1].contiguous(),
        "hidden": second.hidden_states[1],
        "attention": second.attentions[-1][0],
        "losses": losses.losses.flatten().sort().values,  # the old order is that of the clusters
        "loss": losses.loss,
    }


def _numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [round(number, 12) for number in value.detach().flatten().tolist()]
    return value


def _case(settings: dict[str, Any]) -> dict[str, Any]:
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel

    model = TransfoXLLMHeadModel(TransfoXLConfig(**SIZES | settings)).eval()
    fill(model)
    single = outputs(model)["logits"]
    cast, Tensor.float = Tensor.float, lambda self: self  # type: ignore[method-assign, assignment]
    try:
        made = outputs(model.double())
    finally:
        Tensor.float = cast  # type: ignore[method-assign]
    greedy = model.float().generate(SEGMENTS[0], max_new_tokens=5, do_sample=False)
    beams = model.generate(SEGMENTS[0], max_new_tokens=5, num_beams=3, do_sample=False)
    return {
        **{name: _numbers(value) for name, value in made.items()},
        "fp32_error": float((single - made["logits"]).abs().max()),
        "greedy": greedy[:, 5:].tolist(),
        "beams": beams[:, 5:].tolist(),
    }


def _layout() -> dict[str, Any]:
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel

    with torch.device("meta"):
        model = TransfoXLLMHeadModel(TransfoXLConfig())
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    later = {name for name in shapes if name.startswith("transformer.layers.") and ".layers.0." not in name}
    return {
        "parameters": sum(tensor.numel() for tensor in model.parameters()),
        "tensors": len(shapes),
        "shapes": {name: shape for name, shape in shapes.items() if name not in later},
    }


def _tokenizer() -> list[dict[str, Any]]:
    from transformers import TransfoXLTokenizer

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
        tokenizer = TransfoXLTokenizer(vocab_file=f"{folder}/vocab.txt")
    ids = [tokenizer(text).input_ids for text in TEXTS]
    return [{"ids": one, "text": tokenizer.decode(one)} for one in ids]


if __name__ == "__main__":
    import transformers

    warnings.simplefilter("ignore")
    made = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "cases": {name: _case(settings) for name, settings in CASES.items()},
        "wt103": _layout(),
        "tokenizer": _tokenizer(),
    }
    FILE.write_text(json.dumps(made, separators=(",", ":")).replace('},"', '},\n"') + "\n", encoding="utf-8")
