"""Properties of encoders and masked models, for everything registered: all tokens see each other, padding changes nothing."""

import pytest
import torch

import combinations
import fullrank as fr
from combinations import VOCABULARY, tokens
from moving import moved, seed

PAIRS = combinations.pairwise()
LENGTHS = (7, 3, 5)


def masked_model(combination):
    seed(3)
    return moved(fr.MaskedLanguageModel(combination.config()).double().eval())


@pytest.mark.parametrize("combination", combinations.sparse(PAIRS, 6))
def test_every_token_sees_every_other(combination):
    model = masked_model(combination)
    read = []

    def leaf(module, args, out):
        read.append(out.detach().requires_grad_())
        return read[-1]

    model.encoder.get_submodule("embedding").register_forward_hook(leaf)
    logits = model(tokens(2, 6)).logits
    for place in range(6):
        cotangent = torch.randn(2, VOCABULARY, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(logits[:, place], read, cotangent, retain_graph=True)
        assert (gradient.abs().amax(2) > 0).all(), f"logits of token {place} leave a token out"


@pytest.mark.parametrize("combination", combinations.sparse(PAIRS, 6))
def test_padding_changes_nothing(combination):
    """On either side, whatever stands there; the loss of a padded batch is that of its texts."""
    model = masked_model(combination)
    ids, targets = tokens(3, 7), tokens(3, 7, seed=6)
    weights = torch.rand(3, 7, dtype=torch.float64)
    with torch.no_grad():
        for left in (False, True):
            mask = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
            mask = mask.flip(1) if left else mask
            logits = [model(ids.masked_fill(~mask, junk), mask).logits for junk in (0, VOCABULARY - 1)]
            assert torch.equal(logits[0][mask], logits[1][mask]), "what stands in the padding is read"
            total = torch.zeros((), dtype=torch.float64)
            for row in range(3):
                text, target, share = (x[row][mask[row]][None] for x in (ids, targets, weights))
                alone = model(text).logits[0]
                assert (logits[0][row][mask[row]] - alone).abs().max() < 1e-10, (left, row)
                total += model.loss(text, target, share) * share.sum()
            loss = model.loss(ids, targets, weights * mask, mask)
            assert abs(float(loss - total / (weights * mask).sum())) < 1e-11
