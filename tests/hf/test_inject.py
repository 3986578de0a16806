"""Injection into BERT-like models: nothing changes at the start, and what is mixed is what the equation says."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import fullrank as fr  # noqa: E402
from fullrank import kernels  # noqa: E402


@pytest.fixture
def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=60,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).eval()


@pytest.fixture
def batch():
    torch.manual_seed(1)
    mask = torch.ones(3, 17, dtype=torch.int64)
    mask[1, 12:], mask[2, 5:] = 0, 0
    return {"input_ids": torch.randint(3, 60, (3, 17)), "attention_mask": mask}


def eager_logits(model, batch) -> Tensor:
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    return own(**batch).logits


@pytest.mark.parametrize("mix", ["position_independent", "position_wise"])
def test_nothing_changes_at_the_start(bert, batch, mix):
    expected = eager_logits(bert, batch)
    injected = fr.inject(copy.deepcopy(bert), mix=mix, cross_head=0.5)
    with fr.kernel("reference"):
        assert torch.equal(injected(**batch).logits, expected)
    with kernels.chosen() as names:
        torch.testing.assert_close(injected(**batch).logits, expected, rtol=0, atol=1e-6)
    assert names <= {"native", "blocks"}
    assert names


def test_cross_head_alone_stays_with_the_fused_attention(bert, batch):
    expected = bert(**batch).logits
    injected = fr.inject(copy.deepcopy(bert), cross_head=1.0)
    assert torch.equal(injected(**batch).logits, expected)
    assert sum(p.numel() for p in injected.parameters()) == sum(p.numel() for p in bert.parameters())
    torch.manual_seed(0)
    assert not torch.allclose(injected.train()(**batch).logits, copy.deepcopy(bert).train()(**batch).logits)


def test_removed_is_as_before(bert, batch):
    names = set(bert.state_dict())
    removed = fr.remove(fr.inject(copy.deepcopy(bert), mix="position_wise", cross_head=0.1))
    assert set(removed.state_dict()) == names
    assert removed.config._attn_implementation == bert.config._attn_implementation
    assert not hasattr(removed.config, "fullrank")
    assert torch.equal(removed(**batch).logits, bert(**batch).logits)


def test_groups_never_decay_mixing(bert):
    injected = fr.inject(bert, mix="position_wise")
    groups = fr.parameter_groups(injected, learning_rate=1e-4, mixing_learning_rate=1e-2, weight_decay=0.1)
    counted = [p for group in groups for p in group["params"]]
    assert len(counted) == len(set(counted)) == len(list(injected.parameters()))
    mixing = {p for name, p in injected.named_parameters() if ".fullrank." in name}
    assert len(mixing) == 4
    (of_mixing,) = [group for group in groups if mixing & set(group["params"])]
    assert set(of_mixing["params"]) == mixing
    assert (of_mixing["lr"], of_mixing["weight_decay"]) == (1e-2, 0.0)
    assert {group["weight_decay"] for group in groups if group is not of_mixing} == {0.0, 0.1}
