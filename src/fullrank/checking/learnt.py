"""Leaks that are learnt, and those of a trained model: the last position, and a copy that is trained on random tokens."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.causality import perturbed
from fullrank.checking.paths import TRAINED, CodePath
from fullrank.checking.report import Finding, bounded, inapplicable
from fullrank.checking.subject import SHORT, Subject, duplicate, mode, random_ids

# Only the last prediction of a segment has nothing after it that could be seen. A model that looks ahead finds its targets
# in its own input, at every position but the last: its perplexity there is far above its ordinary one. On random tokens no
# honest perplexity is below the size of the vocabulary.

_NEVER = 700.0  # nats below the likeliest token: the probability is zero, as of words that are masked
_STEPS, _FEWER, _ROWS, _SEGMENTS = 200, 20, 16, 512
_SECONDS = 2.5  # of CPU time; a model that is slower takes fewer steps, at least `_FEWER`
_MOST_PARAMETERS = 1_000_000  # of a model that is trained for the check
# nats: what overfitting may cost at the position with most context, and what chance may gain
_GAP, _GAIN = 0.1, 0.02


def last_position(subject: Subject, segments: Tensor) -> Finding:
    """segments (S, N + 1) of a text that the model was trained for."""
    per_token = _nll(subject, subject.own, segments)
    return _compared(per_token, f"{len(segments)} segments of {segments.shape[1] - 1} tokens of the text")


def on_random_tokens(subject: Subject) -> Finding:
    """A copy is trained on fresh random tokens, where nothing can be learnt but to look ahead; then tokens are changed."""
    if subject.parameters > _MOST_PARAMETERS:
        return inapplicable(
            f"a model of {subject.parameters:,} parameters is not trained for it; a text of its own (text=, --text) tells"
        )
    if subject.ids.is_floating_point():
        return inapplicable("the model reads no tokens that it could predict")
    model: Any = duplicate(subject.own).float()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return inapplicable("no parameter of the model can be trained, and no text was given")
    with torch.no_grad(), mode(model, training=False):
        scores = subject.logits(subject.ids, model=model).float().flatten(0, 1)
        words = (scores > scores.amax(1, keepdim=True) - _NEVER).any(0).nonzero()[:, 0]
        words = words[subject.readable(words) == words]
    if len(words) < 2:
        return inapplicable("all but one of the tokens have a logit that excludes them")
    length, limit, step = min(subject.length - 1, SHORT), _STEPS, 0
    optimizer = torch.optim.Adam(trained, lr=3e-3)
    with mode(model, training=True, seed=2), torch.enable_grad():
        while step < limit:
            begun = time.process_time()
            tokens = words[random_ids(_ROWS, length + 1, len(words), 1000 + step).to(words.device)]
            ids, targets = tokens[:, :-1], tokens[:, 1:]
            if subject.kind == "fullrank":
                loss = model.loss(ids, targets)
            else:
                logits = subject.logits(ids, model=model).float()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            if not loss.requires_grad:
                return inapplicable("its logits cannot be trained, and no text was given")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step == 3:
                limit = min(limit, max(_FEWER, int(_SECONDS / max(1e-9, time.process_time() - begun))))
        segments = words[random_ids(_SEGMENTS, length + 1, len(words), 7).to(words.device)]
    learnt = replace(subject, model=model.eval(), dtype=torch.float32)
    found = perturbed(learnt, CodePath("trained", how=TRAINED))
    if found.verdict == "fails":
        return found
    per_token = _nll(subject, model, segments)
    looked_at = (
        f"{step} steps on fresh random tokens, then {_SEGMENTS} other segments of {length}: no honest perplexity is "
        f"below {len(words)}; and a perturbation after them"
    )
    finding = _compared(per_token, looked_at)
    # a leak shows here before it is learnt well enough for a gap
    gain = math.log(len(words)) - float(per_token.mean())
    most = max(_GAIN, 5 * float(per_token.mean(dim=1).std()) / len(per_token) ** 0.5)
    if finding.verdict == "passes" and not gain <= most:
        reason = "nats below log V, which is the least of an honest model; 5 standard errors"
        return bounded(looked_at, gain, most, reason, remark=finding.remark)
    return finding


def _nll(subject: Subject, model: nn.Module, segments: Tensor) -> Tensor:
    """(S, N) nats, float64."""
    parts = []
    with torch.no_grad(), mode(model, training=False):
        for part in segments.to(subject.ids.device).split(max(1, 2048 // segments.shape[1])):
            log_prob = torch.log_softmax(subject.logits(part[:, :-1], model=model).double(), dim=-1)
            parts.append(-log_prob.gather(-1, part[:, 1:, None])[..., 0])
    return torch.cat(parts).cpu()


def _compared(per_token: Tensor, looked_at: str) -> Finding:
    last, ordinary = per_token[:, -1], per_token.mean(dim=1)
    gap = last - ordinary  # (S,): an honest model knows more at the last position than on average
    limit = max(_GAP, 5 * float(gap.std()) / len(gap) ** 0.5)
    why = "5 standard errors" if limit > _GAP else "more than overfitting makes it"
    remark = f"perplexity {_perplexity(last)} at the last position, ordinarily {_perplexity(ordinary)}"
    return bounded(looked_at, float(gap.mean()), limit, f"nats, the last position minus all; {why}", remark=remark)


def _perplexity(nll: Tensor) -> str:
    mean = float(nll.mean())
    return f"{math.exp(mean):,.2f}" if mean < 50 else f"exp({mean:,.0f})"
