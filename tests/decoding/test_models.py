"""Decoding with language models and translators: caches, padding and limits are what decoding takes them for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from decoding_standin import PROMPTS
from decoding_standin import padded as left_padded
from torch import Tensor

import fullrank as fr
from fullrank.decoding import MemoryReader, beam_search, sample
from moving import moved

EOS, TARGETS, SOURCES = 0, 5, 9
SENTENCES = [[3, 1, 7, 2, 8], [4], [6, 6, 2], [1, 2, 3, 4, 5, 6, 7]]


def config(attention: dict[str, Any] | None = None, **keys: Any) -> fr.ModelConfig:
    """A tiny translation model; `attention` of all its places, `encoder` and `decoder` as in a configuration."""
    encoder = {"vocab_size": SOURCES} | keys.pop("encoder", {})
    sizes: dict[str, Any] = {
        "vocab_size": TARGETS, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
        "intermediate_size": 14, "max_position_embeddings": 12, "scale_embedding": True,
    }  # fmt: skip
    return fr.ModelConfig(
        **sizes | keys.pop("model", {}),
        attention=fr.AttentionConfig(**attention or {}),
        encoder=fr.EncoderConfig(**encoder),
        decoder=fr.DecoderConfig(**keys.pop("decoder", {})),
        **keys,
    )


def translator(settings: fr.ModelConfig, dtype: torch.dtype = torch.float64) -> fr.Translator:
    """With every parameter away from its start, where mixing does nothing."""
    torch.manual_seed(3)
    return moved(fr.Translator(settings).to(dtype).eval())


MIXES = ("none", "position_independent", "position_wise", "random", "average")
POSITIONS = ("sinusoidal", "learned", "relative", "rotary", "none")


def grid() -> dict[str, fr.ModelConfig]:
    """Every mixing, normalizer, position and cross-head in two places each; mixings meet both normalizers and both beta."""
    configs = {}
    for i in range(10):
        mix, position, normalize, beta = MIXES[i % 5], POSITIONS[(i + i // 5) % 5], i // 5, (i % 5 + i // 5) % 2
        attention = {
            "mix": mix, "normalize": ("softmax", "sigsoftmax")[normalize], "cross_head": 0.5 * beta,
            "score": "relative" if position == "relative" else "dot_product",
        }  # fmt: skip
        configs[f"{mix}, {attention['normalize']}, {position}, {attention['cross_head']}"] = config(
            attention, position=position
        )
    return configs


CLUSTERS = {"kind": "adaptive", "cutoffs": [2, 4]}
OTHERS: dict[str, fr.ModelConfig] = {
    "dense synthesizer": config({"score": "dense_synthesizer", "mix": "position_wise"}),
    "random synthesizer": config({"score": "random_synthesizer", "mix": "position_wise"}),
    "multi-linear encoder": config(
        {"mix": "position_wise"},
        encoder={"attention": fr.AttentionConfig(kind="multilinear", cores=2, rank=5)},
    ),
    "multi-linear decoder": config(
        decoder={"attention": fr.AttentionConfig(kind="multilinear", cores=2, rank=5, output_map="decayed")}
    ),
    "mixture of softmaxes": config(output=fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=3)),
    "adaptive": config(output=fr.OutputConfig(**CLUSTERS)),
    "post-norm, tied": config({"mix": "position_wise"}, norm="post", output=fr.OutputConfig(tied=True)),
    "A in the encoder, B across": config(
        encoder={"attention": fr.AttentionConfig(mix="position_independent")},
        decoder={"cross": fr.AttentionConfig(mix="position_wise")},
    ),
}
ALL = grid() | OTHERS


def padded(sentences: list[list[int]], longest: int | None = None, filler: int = EOS) -> tuple[Tensor, Tensor]:
    """Sentences with <eos>, padded on the right, and their mask."""
    width = longest or max(map(len, sentences)) + 1
    rows = [[*sentence, EOS] for sentence in sentences]
    return (
        torch.tensor([row + [filler] * (width - len(row)) for row in rows]),
        torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    )


@pytest.mark.parametrize("name", [*OTHERS, *list(grid())[::3]])
def test_a_batch_is_its_sentences_one_by_one(name: str) -> None:
    model = translator(ALL[name])
    longest = [5, 3, 6, 8]
    rules: dict[str, Any] = {"beams": 4, "n_best": 3, "eos_id": EOS, "min_new_tokens": 1, "no_repeat_ngram_size": 3}
    for filler, width in ((EOS, None), (5, 11)):  # what padding holds, and how much there is, changes nothing
        ids, mask = padded(SENTENCES, width, filler)
        start = torch.full((4, 1), EOS)
        together = beam_search(
            model.of_source(model.encode(ids, mask)), start, max_new_tokens=torch.tensor(longest), **rules
        )
        for b, sentence in enumerate(SENTENCES):
            alone = beam_search(
                model.of_source(model.encode(torch.tensor([[*sentence, EOS]]))), start[:1],
                max_new_tokens=longest[b], **rules,
            )  # fmt: skip
            assert together.lengths[b].tolist() == alone.lengths[0].tolist()
            for n, length in enumerate(alone.lengths[0].tolist()):
                assert together.ids[b, n, :length].tolist() == alone.ids[0, n, :length].tolist()
            torch.testing.assert_close(together.scores[b], alone.scores[0], rtol=0, atol=1e-10)
            torch.testing.assert_close(together.log_probs[b], alone.log_probs[0], rtol=0, atol=1e-10)


def every_text(longest: int) -> list[tuple[int, ...]]:
    """All texts that end with their only <eos>, and those of full length without one."""
    others = range(1, TARGETS)
    ended = [(*head, EOS) for length in range(longest) for head in itertools.product(others, repeat=length)]
    return [*ended, *itertools.product(others, repeat=longest)]


def twice(text: tuple[int, ...], n: int) -> bool:
    grams = [text[i : i + n] for i in range(len(text) - n + 1)] if n else []
    return len(grams) > len(set(grams))


@pytest.mark.parametrize(("penalty", "shortest", "ngram"), [(0.6, 2, 0), (1.0, 1, 2)])
@pytest.mark.parametrize("name", ["position_wise, sigsoftmax, rotary, 0.5"])
def test_a_wide_beam_is_exhaustive_search(name: str, penalty: float, shortest: int, ngram: int) -> None:
    """Against all 341 texts of up to four tokens, each read once with the whole model."""
    model = translator(ALL[name])
    sentences, longest = SENTENCES[:2], [4, 3]
    ids, mask = padded(sentences)
    found = beam_search(
        model.of_source(model.encode(ids, mask)), torch.full((2, 1), EOS), max_new_tokens=torch.tensor(longest),
        min_new_tokens=shortest, no_repeat_ngram_size=ngram, beams=4**4, n_best=12, length_penalty=penalty, eos_id=EOS,
    )  # fmt: skip
    for b, sentence in enumerate(sentences):
        ranked = []
        for length, texts in itertools.groupby(every_text(longest[b]), key=len):
            rows = list(texts)
            written = torch.tensor(rows)
            inputs = torch.cat((torch.full((len(rows), 1), EOS), written[:, :-1]), dim=1)
            with torch.no_grad():
                logits = model(torch.tensor([[*sentence, EOS]]).expand(len(rows), -1), inputs).logits
            totals = logits.log_softmax(-1).gather(2, written[..., None]).sum((1, 2))
            ranked += [
                (total / length**penalty, text)
                for total, text in zip(totals.tolist(), rows, strict=True)
                if EOS not in text[:shortest] and not twice(text, ngram)
            ]
        ranked.sort(reverse=True)
        for n, (score, text) in enumerate(ranked[:12]):
            assert tuple(found.ids[b, n, : int(found.lengths[b, n])].tolist()) == text
            assert found.scores[b, n].item() == pytest.approx(score, abs=1e-10)


# -- language models ----------------------------------------------------------------------------------------------------


def language_model(mix: str, position: str, **keys: Any) -> fr.LanguageModel:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 16,
    }  # fmt: skip
    score = "relative" if position == "relative" else "dot_product"
    attention = fr.AttentionConfig(score=score, mix=mix)
    return moved(
        fr.LanguageModel(fr.ModelConfig(**sizes | keys, position=position, attention=attention)).double().eval()
    )


@pytest.mark.parametrize("position", ["relative", "rotary"])
def test_a_memory_takes_the_place_of_the_cache(position: str) -> None:
    """A model that remembers four tokens writes what it writes when every window is read anew."""
    lm = language_model("position_wise", position, memory_length=4, num_hidden_layers=1)
    ids, mask = left_padded(PROMPTS)
    reader = MemoryReader(lm)
    batch = sample(reader, ids, greedy=True, attention_mask=mask, max_new_tokens=9)
    found = beam_search(reader, ids, beams=3, n_best=3, attention_mask=mask, max_new_tokens=9)
    for b, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for n in range(9):  # with one layer, what a token sees is all that counts
            window = text if n == 0 else text[-5:]
            log_probs = torch.log_softmax(lm(torch.tensor([window])).logits[0, -1].detach(), -1)
            token = int(log_probs.argmax())
            assert batch.ids[b, n] == token
            assert abs(float(batch.log_probs[b, n] - log_probs[token])) < 1e-10
            text.append(token)
        alone = beam_search(reader, torch.tensor([prompt]), beams=3, n_best=3, max_new_tokens=9)
        torch.testing.assert_close(found.scores[b], alone.scores[0], rtol=0, atol=1e-10)
