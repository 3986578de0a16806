"""Run folders of translation models that nobody trained: small vocabularies, parameters away from their start."""

import json

import torch

import fullrank as fr
from fullrank.config.load import to_yaml
from fullrank.config.run import DataConfig, EvalConfig, RunConfig, TrainConfig
from fullrank.data.language import build_language, find_words, learn_byte_bpe
from moving import moved

GERMAN = ["ein", "hund", "mann", "schläft", "rennt", "rot", "im", "park", "und", "kind", "."]
ENGLISH = ["a", "dog", "man", "sleeps", "runs", "red", "in", "the", "park", "and", "child", "."]
LINES = [
    "ein hund schläft .",
    "",
    "ein mann und ein kind rennt im park .",
    "rot",
    "   ",
    "ein äffchen schläft im park .",
]


def languages(subwords=False):
    """Words of both, of the source also byte-level subwords."""
    source = learn_byte_bpe(GERMAN * 3, 275) if subwords else find_words(GERMAN)
    return build_language("de", source), build_language("en", find_words(ENGLISH))


def write_run(folder, *, subwords=False, evaluation=None, decoder=None, seed=0, **model):
    """A run folder as training leaves it, and the model in it, in double precision."""
    source, target = languages(subwords)
    sizes = {
        "vocab_size": len(target), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 20, "max_position_embeddings": 24, "scale_embedding": True,
    }  # fmt: skip
    config = fr.ModelConfig(
        **sizes | model, encoder=fr.EncoderConfig(vocab_size=len(source)), decoder=fr.DecoderConfig(**decoder or {})
    )
    torch.manual_seed(seed)
    translator = moved(fr.Translator(config).double().eval(), 0.4)
    translator.save(folder / "checkpoints" / "best")
    data = DataConfig(name="parallel", train="train", valid="valid", test="test", source="de", target="en")
    run = RunConfig(model=config, data=data, train=TrainConfig(batch_tokens=64), eval=EvalConfig(**evaluation or {}))
    (folder / "config.yaml").write_text(to_yaml(run), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"recipe": "none", "row": None}), encoding="utf-8")
    source.save(folder / "tokenizer" / "source")
    target.save(folder / "tokenizer" / "target")
    return translator
