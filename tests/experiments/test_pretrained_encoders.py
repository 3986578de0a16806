"""Encoders for `model.pretrained`: other families, checkpoints of other tasks, and injected ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_encoder import SPECIAL, WORDS, tiny_encoder, tiny_tokenizer

from fullrank.config.finetune import FinetuneConfig, GraftConfig, PretrainedConfig, TaskDataConfig
from fullrank.config.glue import GLUE
from fullrank.core.errors import InputError
from fullrank.data.glue import Examples
from fullrank.experiments.finetuning import encode, logits_of
from fullrank.experiments.models import load_pretrained
from fullrank.experiments.run_folder import absolute

transformers = pytest.importorskip("transformers")

TEXTS = ["the cat", "a red dog sleeps", "old bird not sings the blue a", "cat"]


def examples(texts: list[str]) -> Examples:
    labels = np.zeros(len(texts), np.int64)
    ids = [str(i) for i in range(len(texts))]
    return Examples(texts, None, labels, ids, GLUE["cola"], "dev", True, None, "")


def load(folder: Path, num_labels: int = 2, **graft: Any) -> Any:
    config = PretrainedConfig(pretrained=str(folder), attention=GraftConfig(**graft))
    return load_pretrained(config, "classification", num_labels=num_labels)


def tiny_gpt2(folder: Path, **tokenizer: bool) -> Path:
    tiny_tokenizer(folder, **tokenizer)
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=4, n_positions=32, bos_token_id=None,
                                     eos_token_id=None)  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("padding", [False, True])
def test_a_decoder_is_read_at_the_last_token_of_each_text(tmp_path: Path, padding: bool) -> None:
    """In a batch of several lengths the logits are those of each text by itself, without any padding."""
    found = load(tiny_gpt2(tmp_path, padding=padding, end=True))
    together = logits_of(found.model, encode(found, examples(TEXTS), 16), 4)
    ids = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    with torch.no_grad():
        alone = [found.model(torch.tensor([[ids[word] for word in text.split()]])).logits[0] for text in TEXTS]
    torch.testing.assert_close(together, torch.stack(alone))
    assert together.std(0).min() > 0


def test_a_tokenizer_that_cannot_pad_is_refused(tmp_path: Path) -> None:
    tiny_gpt2(tmp_path, padding=False, end=True)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (tmp_path / name).exists():
            kept = json.loads((tmp_path / name).read_text())
            kept.pop("eos_token", None)
            (tmp_path / name).write_text(json.dumps(kept))
    with pytest.raises(InputError, match="its tokenizer has no padding token and no token that ends a text"):
        load(tmp_path)


def test_positions_that_are_counted_from_behind_the_padding_leave_fewer_tokens(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    config = transformers.RobertaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
                                        intermediate_size=16, max_position_embeddings=12, pad_token_id=0)  # fmt: skip
    transformers.RobertaModel(config).save_pretrained(tmp_path)
    found = load(tmp_path)
    assert found.max_length == 11
    long = examples([" ".join(["cat"] * 30)])
    assert logits_of(found.model, encode(found, long, 11), 1).shape == (1, 2)
    with pytest.raises(InputError, match="this encoder reads at most 11 tokens, given 12"):
        encode(found, long, 12)
    with pytest.raises((IndexError, RuntimeError), match="out of"):  # which is what the check saves us from
        found.model(torch.full((1, 12), 4))


def test_a_checkpoint_of_another_task_gives_its_encoder_and_a_new_output_layer(tmp_path: Path) -> None:
    tiny_encoder(tmp_path)
    of_mnli = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    of_mnli.save_pretrained(tmp_path)
    found = load(tmp_path, num_labels=2)
    assert found.model.config.num_labels == 2
    assert found.fresh == ("classifier.bias", "classifier.weight")
    for name, parameter in of_mnli.bert.named_parameters():
        assert torch.equal(found.model.bert.get_parameter(name), parameter)
    assert load(tmp_path, num_labels=3).fresh == ()


def test_a_configuration_that_does_not_fit_its_weights_is_refused(tmp_path: Path) -> None:
    tiny_encoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 30}))
    with pytest.raises(
        InputError, match=r"its config.json does not fit its weights \(bert\.embeddings\.word_embeddings"
    ):
        load(tmp_path)


def test_attention_of_ours_in_a_checkpoint_is_kept_and_has_to_be_asked_for(tmp_path: Path) -> None:
    first = load(tiny_encoder(tmp_path / "encoder"), mix="position_independent", cross_head=0.1)
    with torch.no_grad():
        for name, parameter in first.model.named_parameters():
            if ".fullrank." in name:
                parameter += 0.1 * torch.randn_like(parameter)
    first.model.save_pretrained(tmp_path / "tuned")
    first.tokenizer.save_pretrained(tmp_path / "tuned")
    again = load(tmp_path / "tuned", mix="position_independent", cross_head=0.1)
    texts = encode(first, examples(TEXTS), 16)
    assert torch.equal(logits_of(again.model, texts, 4), logits_of(first.model, texts, 4))
    assert again.fresh == ()
    other = load(tmp_path / "tuned", num_labels=3, mix="position_independent", cross_head=0.1)
    assert other.fresh == ("classifier.bias", "classifier.weight")
    for name, parameter in first.model.bert.named_parameters():
        assert torch.equal(other.model.bert.get_parameter(name), parameter)
    for graft in ({}, {"mix": "position_independent"}, {"mix": "position_wise", "cross_head": 0.1}):
        with pytest.raises(
            InputError, match=r'holds attention of ours already.*model\.attention\.mix="position_independent"'
        ):
            load(tmp_path / "tuned", **graft)


def test_a_text_has_to_have_room_beside_special_tokens(tmp_path: Path) -> None:
    found = load(tiny_encoder(tmp_path))
    assert encode(found, examples(TEXTS), 3).lengths.tolist() == [3, 3, 3, 3]
    with pytest.raises(InputError, match=r"data\.max_length: at least 3, of which 2 are special tokens"):
        encode(found, examples(TEXTS), 2)


def test_a_relative_folder_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "encoder").mkdir()
    (tmp_path / "minilm").mkdir()
    monkeypatch.chdir(tmp_path)

    def place(name: str) -> str:
        config = FinetuneConfig(model=PretrainedConfig(pretrained=name), data=TaskDataConfig(dir="glue"))
        assert absolute(config).data.dir == str(tmp_path / "glue")
        return absolute(config).model.pretrained

    assert place("encoder") == str(tmp_path / "encoder")
    assert [place(name) for name in ("minilm", "bert-base-uncased")] == ["minilm", "bert-base-uncased"]
