"""Every row of every recipe can be made small, and keeps its mechanisms."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import fullrank as fr
from fullrank.config.load import is_finetuning, list_shipped, load, resolve
from fullrank.experiments.check import list_changes, shrink_config

UNCHANGED = ("position", "norm", "hidden_act", "initializer", "dropout", "scale_embedding", "same_length", "final_norm")
SIZES = {"cutoffs", "mixtures", "rank", "cores", "decays", "stride"}


@pytest.mark.full
def test_every_recipe():
    seen = set()
    for name in list_shipped():
        if is_finetuning(name):
            continue  # the model is not ours
        recipe = load(name)
        for row in recipe.rows:
            first = row == next(iter(recipe.rows))
            for scale in list(recipe.scales)[: None if first else 1]:
                run = resolve(name, row, scale).config
                config = run.model
                if repr(config) in seen:
                    continue
                seen.add(repr(config))
                small = shrink_config(config, translates=run.translates)
                with torch.device("meta"):
                    count = (fr.Translator if run.translates else fr.LanguageModel)(small).num_parameters()
                assert count <= 100_000, (name, row, scale)
                assert list_changes(config, small), (name, row, scale)
                assert [getattr(small, key) for key in UNCHANGED] == [getattr(config, key) for key in UNCHANGED]
                for part in ("attention", "input", "output"):
                    before, after = getattr(config, part), getattr(small, part)
                    unchanged = {key: value for key, value in vars(before).items() if key not in SIZES}
                    assert {key: vars(after)[key] for key in unchanged} == unchanged
                    if hasattr(before, "cutoffs"):
                        assert len(after.cutoffs or ()) == len(before.cutoffs or ())
                assert (small.memory_length > 0) == (config.memory_length > 0)
                assert (small.hidden_size == small.num_attention_heads * (small.head_dim or 0)) == (
                    config.hidden_size == config.num_attention_heads * (config.head_dim or 0)
                )
    assert len(seen) > 50


def test_what_is_small_stays():
    config = fr.ModelConfig(vocab_size=50, hidden_size=24, num_hidden_layers=3, num_attention_heads=2)
    assert shrink_config(config) == config
    bare = replace(config, vocab_size=None)
    assert list_changes(bare, shrink_config(bare)) == ("vocab_size that of the data -> 32",)


def test_the_sections_of_a_translation_model():
    """Every attention keeps its mechanism; sizes, layers and words of both languages become small."""
    pairs = fr.AttentionConfig(kind="multilinear", rank=40, cores=6)
    config = fr.ModelConfig(
        max_position_embeddings=500,
        encoder=fr.EncoderConfig(num_hidden_layers=12, attention=pairs),
        decoder=fr.DecoderConfig(
            num_hidden_layers=1, cross=fr.AttentionConfig(mix="position_wise"), released_decoding=True
        ),
    )
    small = shrink_config(config, translates=True)
    changed = list_changes(config, small)
    assert small.encoder == fr.EncoderConfig(
        num_hidden_layers=2, vocab_size=35, attention=replace(pairs, rank=6, cores=3)
    )
    assert small.decoder == config.decoder
    assert (small.vocab_size, small.max_position_embeddings) == (32, 23)
    assert {
        "encoder.num_hidden_layers 12 -> 2", "encoder.vocab_size that of the data -> 35", "encoder.attention.rank 40 -> 6",
        "encoder.attention.cores 6 -> 3", "vocab_size that of the data -> 32", "max_position_embeddings 500 -> 23",
    } <= set(changed)  # fmt: skip
    assert not [change for change in changed if change.startswith("decoder")]
    bare = shrink_config(fr.ModelConfig(), translates=True)
    assert bare.encoder == fr.EncoderConfig(vocab_size=35)


def test_each_attention_of_model_layers_stays():
    layers = [
        fr.LayerConfig(at=[-2, -1], attention=fr.AttentionConfig(mix="position_wise")),
        fr.LayerConfig(at=[1], attention=fr.AttentionConfig(kind="multilinear", rank=50)),
    ]
    config = fr.ModelConfig(vocab_size=9000, hidden_size=512, num_hidden_layers=16, layers=layers)
    small = shrink_config(config)
    counts = Counter((part.kind, getattr(part, "mix", None), getattr(part, "rank", None)) for part in small.attentions)
    counts.subtract(
        {("weighted", "none", None): 13, ("multilinear", None, 6): 1, ("weighted", "position_wise", None): 2}
    )
    assert set(counts.values()) == {0}
    assert fr.LanguageModel(small).num_parameters() < 100_000
