"""The modelling code of an export for translators and masked models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `hf`")

from portable_models import check_close, check_gradients, portable

import fullrank as fr
from fullrank.decoding import beam_search, sample
from fullrank.hf.portable.modeling_fullrank import FullRankForMaskedLM, FullRankForSeq2SeqLM
from moving import moved

MULTILINEAR: dict[str, Any] = {"kind": "multilinear", "cores": 2, "rank": 5}
SIZES: dict[str, Any] = {
    "vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20,
    "max_position_embeddings": 24,
}  # fmt: skip
MASKS = (
    None,
    torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 6 + [0]]),
    torch.tensor([[1] * 7, [0] * 3 + [1] * 4, [0] + [1] * 6]),
)


def attention(**keys: Any) -> dict[str, Any]:
    return {"attention": fr.AttentionConfig(**keys)}


# settings of the model, of its encoder and of its decoder
TRANSLATORS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "mixed": (attention(mix="position_wise", normalize="sigsoftmax"), {}, {}),
    "relative": (attention(score="relative", mix="position_independent") | {"position": "relative"}, {}, {}),
    "rotary, post-norm": ({"position": "rotary", "norm": "post"}, {}, {}),
    "one table": ({"position": "learned", "output": fr.OutputConfig(tied=True)}, {"share_embedding": True}, {}),
    "multi-linear": (attention(**MULTILINEAR), {}, {}),
    "multi-linear across": ({}, {}, {"cross": fr.AttentionConfig(**MULTILINEAR)}),
    "decayed": ({}, {}, attention(**MULTILINEAR, output_map="decayed", decays=3)),
    "random synthesizer": (attention(score="random_synthesizer", mix="position_wise"), {}, {}),
    "released": (attention(mix="position_wise"), {}, {"released_cross": True, "released_decoding": True}),
    "unlike halves": (
        {},
        {"num_hidden_layers": 1, "vocab_size": 9},
        {"num_hidden_layers": 3, **attention(mix="average")},
    ),
}


def translator(name: str) -> fr.Translator:
    model, encoder, decoder = TRANSLATORS[name]
    config = fr.ModelConfig(**SIZES | model, encoder=fr.EncoderConfig(**encoder), decoder=fr.DecoderConfig(**decoder))
    torch.manual_seed(1)
    return moved(fr.Translator(config).double().eval())


@pytest.mark.parametrize("name", TRANSLATORS)
def test_translators_are_ours(name: str) -> None:
    """Logits, every gradient, greedy search and beams; the source is padded on either side."""
    model = translator(name)
    other = portable(model, FullRankForSeq2SeqLM, decoder_start_token_id=0, eos_token_id=0, pad_token_id=0)
    sources, target = torch.randint(1, 9, (3, 7)), torch.randint(1, 13, (3, 5))
    for mask in MASKS:
        check_close(other(sources, mask, target).logits, model(sources, target, mask).logits, what=f"{mask}")
    begun = torch.cat((torch.zeros(3, 1, dtype=torch.int64), target[:, :-1]), dim=1)
    expected = model.nll(sources, begun, target, MASKS[1]).per_token.mean()
    given = other(sources, MASKS[1], labels=target).loss
    check_close(given, expected)
    expected.backward()
    given.backward()
    check_gradients(other.model, model)
    with torch.no_grad():
        written = model.of_source(model.encode(sources, MASKS[1]))
        first, how = torch.zeros(3, 1, dtype=torch.int64), {"max_new_tokens": 6}
        new = {"do_sample": False, "eos_token_id": None, "pad_token_id": None, "attention_mask": MASKS[1], **how}
        assert torch.equal(other.generate(sources, **new)[:, 1:], sample(written, first, greedy=True, **how).ids)
        beams = beam_search(written, first, beams=3, n_best=1, length_penalty=1.0, eos_id=None, **how).ids[:, 0]
        assert torch.equal(other.generate(sources, num_beams=3, **new)[:, 1:], beams)


ENCODERS: dict[str, dict[str, Any]] = {
    "mixed": attention(mix="position_wise", normalize="sigsoftmax"),
    "relative": attention(score="relative") | {"position": "relative"},
    "dense synthesizer": attention(score="dense_synthesizer"),
    "multi-linear": attention(**MULTILINEAR, score="relative") | {"position": "relative"},
    "decayed": attention(**MULTILINEAR, output_map="decayed", decays=2),
    "tied mixture": {"output": fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=2, tied=True)},
}


@pytest.mark.parametrize("name", ENCODERS)
def test_masked_models_are_ours(name: str) -> None:
    torch.manual_seed(1)
    model = moved(fr.MaskedLanguageModel(fr.ModelConfig(**SIZES | ENCODERS[name])).double().eval())
    other, read = portable(model, FullRankForMaskedLM, objective="masked"), torch.randint(13, (3, 7))
    for mask in MASKS:
        seen = torch.ones_like(read, dtype=torch.bool) if mask is None else mask.bool()
        check_close(other(read, mask).logits[seen], model(read, mask).logits[seen], what=f"{mask}")
    labels = read.where(torch.arange(7) % 3 == 0, -100)
    expected, given = model.nll(read, read).per_token[labels != -100].mean(), other(read, labels=labels).loss
    check_close(given, expected)
    expected.backward()
    given.backward()
    check_gradients(other.model, model)
