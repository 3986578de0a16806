"""Tokenizers of Hugging Face give the ids that the vocabulary of a run gives, on real text and on odd text."""

import pydoc_data.topics
import random
from collections import Counter

import pytest
from transformers import AutoTokenizer

from fullrank.config.load import to_yaml
from fullrank.config.run import DataConfig, RunConfig, TrainConfig
from fullrank.core.config import ModelConfig
from fullrank.core.errors import InputError
from fullrank.data import build_bytes, build_characters, build_words, rank_entries, train_bpe
from fullrank.hf.tokenizer import tokenizer_of, tokenizer_of_vocabulary

REAL = [text for _, text in sorted(pydoc_data.topics.topics.items())][:40]
READ = "".join(REAL[:25])
MARKS = [
    "<unk>", "<eos>", "<pad>", "<s>", "<sos>", "@@", "</w>", "\u2581", "\u0120", "\u00ff", "\u0100", "\u010a", "\u2424",
]  # fmt: skip
ODD = [
    "", "\n", "\n\n", " ", "a", "the\n", "\nthe", "the  the\t the",
    "the <eos> the<eos>the <unk> the<unk>x <EOS> <sos> <mask> x",
    "don't won’t 'quoted' l'été naïve Ünïcödé ÅNGSTRÖM", "ΣΟΦΟΣ ΟΔΟΣ, ΣΑΣ. Σ 日Σ ΑΣ'Α ʰΣ",
    "x²½ Ⅷ ١٢٣ 中文 字 カナ 한글", "a_b __init__ -1 3.14 1e-5",
    "tab\x1cgroup\x1dunit\x1frow\x85next\u2028line\u3000wide\xa0hard", "emoji 👍🏽 👨‍👩‍👧 e\u0301", "trailing \n", "a\r\nb\rc",
    *(line.format(m=m) for m in MARKS for line in ("{m}", "the {m} of", "the{m}", "{m}of x", "th{m}e {m}{m}\n{m}")),
]  # fmt: skip


def texts():
    """Real text, odd text, and both mixed at random."""
    drawn = random.Random(3)
    pieces = [piece for text in REAL[25:] for piece in text.split(" ")] + ODD + ["\n", " ", "<eos>", "é", "Σ"]
    mixed = ["".join(drawn.choices(pieces, k=12)) for _ in range(40)]
    return [*REAL[30:], *ODD, *mixed]


def words(**options):
    counts = Counter(build_words(["<unk>", "\n"], **options).cut(READ))
    return build_words(rank_entries(counts, min_count=2), **options)


VOCABULARIES = {
    "words": lambda: words(),
    "words, lower case": lambda: words(lowercase=True),
    "words and punctuation": lambda: words(split="punctuation", lowercase=True),
    "characters": lambda: build_characters(rank_entries(Counter(READ), min_count=3)),
    "bytes": lambda: build_bytes(),
    "bytes, lower case": lambda: build_bytes(lowercase=True),
    "bpe": lambda: train_bpe([READ], size=700),
    "bpe, lower case": lambda: train_bpe([READ], size=700, lowercase=True),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_ids_are_ours(name, tmp_path):
    """Also after saving; with special tokens the text begins as our models read it."""
    vocabulary = VOCABULARIES[name]()
    built = tokenizer_of_vocabulary(vocabulary)
    built.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ends = vocabulary.eos_id is not None
    for text in texts():
        expected = vocabulary.encode(text)
        for tokenizer in (built, loaded):
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected, repr(text)
        if ends and loaded.unk_token_id not in expected:
            assert loaded.decode(expected, skip_special_tokens=True) == vocabulary.decode(expected), repr(text)
        assert built(text)["input_ids"] == [vocabulary.start_id, *expected]
        assert loaded.decode(expected) == vocabulary.decode(expected), repr(text)
    assert loaded.padding_side == "right"
    batch = loaded(["the", "the value of"], padding=True)
    assert batch["attention_mask"][0] != batch["attention_mask"][1]
    assert set(batch) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize("name", ["words", "words and punctuation", "characters", "bytes", "bpe"])
def test_a_mask_is_the_last_entry(name, tmp_path):
    vocabulary = VOCABULARIES[name]()
    tokenizer_of_vocabulary(vocabulary, masks=True).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == len(vocabulary) + 1
    assert loaded.mask_token_id == loaded.pad_token_id == len(vocabulary)
    for text in texts():
        if "<mask>" not in text:
            assert loaded(text, add_special_tokens=False)["input_ids"] == vocabulary.encode(text), repr(text)
    ids = loaded("the <mask> is", add_special_tokens=False)["input_ids"]
    assert ids.count(len(vocabulary)) == 1
    assert len(ids) == len(vocabulary.encode("the ")) + 1 + len(vocabulary.encode(" is"))


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_that_of_a_run(objective, tmp_path):
    vocabulary = words()
    vocabulary.save(tmp_path)
    train = TrainConfig(steps=1, objective=objective)
    model = ModelConfig(vocab_size=len(vocabulary) + (objective == "masked"))
    run = RunConfig(model=model, data=DataConfig(name="builtin"), train=train)
    (tmp_path / "config.yaml").write_text(to_yaml(run), encoding="utf-8")
    built = tokenizer_of(tmp_path)
    assert built("the value of")["input_ids"] == [vocabulary.start_id, *vocabulary.encode("the value of")]
    assert built.mask_token_id == (len(vocabulary) if objective == "masked" else None)
    assert built.padding_side == "right"
    with pytest.raises(InputError, match="cannot be read"):
        tokenizer_of(tmp_path / "nothing")
