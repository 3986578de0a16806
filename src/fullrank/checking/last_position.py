"""The last-position test: only the last prediction of a segment has nothing after it that could be seen.

A model that looks ahead finds its targets in its own input, at every position but the last. Its perplexity there is far
above its ordinary one. On random tokens no honest perplexity is below the size of the vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.finding import Finding, inapplicable, judged
from fullrank.checking.subject import Subject, call, duplicate, mode

NAME = "last position"
_STEPS, _ROWS, _SEGMENTS = 200, 16, 512
_MOST_PARAMETERS = 1_000_000  # of a model that is trained for the check
# nats: what overfitting may cost at the position with most context, and what chance may gain
_GAP, _GAIN = 0.1, 0.02


def on_text(subject: Subject, segments: Tensor) -> Finding:
    """segments (S, N + 1) of a text that the model was trained for: ordinary perplexity, and that of the last position."""
    per_token = _nll(subject.own, segments, subject.ids.device)
    return _judged(per_token, f"{len(segments)} segments of {segments.shape[1] - 1} tokens of the text")


def on_random_tokens(subject: Subject) -> Finding:
    """A copy is trained on fresh random tokens, then measured on others: nothing can be learnt there but to look ahead."""
    count = sum(parameter.numel() for parameter in subject.own.parameters())
    if count > _MOST_PARAMETERS:
        return inapplicable(
            f"needs a text (--text): a model of {count:,} parameters is not trained on random tokens for it"
        )
    trained = [parameter for parameter in subject.own.parameters() if parameter.requires_grad]
    if not trained:
        return inapplicable("no parameter of the model can be trained, and no text was given")
    model = duplicate(subject.own).float()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    with mode(model, training=True, seed=2), torch.enable_grad():
        for step in range(_STEPS):
            tokens = subject.tokens(_ROWS, subject.length + 1, seed=1000 + step)
            loss = _loss(subject, model, tokens)
            if not loss.requires_grad:
                return inapplicable("its logits cannot be trained, and no text was given")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        segments = subject.tokens(_SEGMENTS, subject.length + 1, seed=7)
    per_token = _nll(model, segments, subject.ids.device)
    looked_at = (
        f"{_STEPS} steps on fresh random tokens, then {_SEGMENTS} other segments of {subject.length}: no honest perplexity is "
        f"below {subject.vocab_size}"
    )
    found = _judged(per_token, looked_at)
    if found.verdict == "passes":
        # before a leak is learnt well enough for a gap
        gain = math.log(subject.vocab_size) - float(per_token.mean())
        error = float(per_token.mean(dim=1).std()) / len(per_token) ** 0.5
        if not gain <= max(_GAIN, 5 * error):
            reason = "nats below log V, which is the least of an honest model; 5 standard errors"
            return judged(looked_at, gain, max(_GAIN, 5 * error), reason, remark=found.remark)
    return found


def _loss(subject: Subject, model: Any, tokens: Tensor) -> Tensor:
    if subject.kind == "fullrank":
        loss: Tensor = model.loss(tokens[:, :-1], tokens[:, 1:])
        return loss
    logits = call(model, tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _nll(model: nn.Module, segments: Tensor, device: torch.device) -> Tensor:
    """(S, N) nats, float64."""
    found = []
    rows = max(1, 2048 // segments.shape[1])
    with torch.no_grad(), mode(model, training=False):
        for part in segments.to(device).split(rows):
            log_prob = torch.log_softmax(call(model, part[:, :-1]).double(), dim=-1)
            found.append(-log_prob.gather(-1, part[:, 1:, None])[..., 0])
    return torch.cat(found).cpu()


def _judged(per_token: Tensor, looked_at: str) -> Finding:
    last, ordinary = per_token[:, -1], per_token.mean(dim=1)
    gap = last - ordinary  # (S,): an honest model knows more at the last position than on average
    error = float(gap.std()) / len(gap) ** 0.5
    limit = max(_GAP, 5 * error)
    remark = f"perplexity {_perplexity(last)} at the last position, ordinarily {_perplexity(ordinary)}"
    reason = f"nats, the last position minus all; {'5 standard errors' if limit > _GAP else 'more than overfitting makes it'}"
    return judged(looked_at, float(gap.mean()), limit, reason, remark=remark)


def _perplexity(nll: Tensor) -> str:
    mean = float(nll.mean())
    return f"{math.exp(mean):,.2f}" if mean < 50 else f"exp({mean:,.0f})"
