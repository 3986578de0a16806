"""Leaks that are learnt, and those of a trained model: the last position, and a copy that is trained on random tokens.

Only the last prediction of a segment has nothing after it that could be seen. A model that looks ahead finds its targets in
its own input, at every position but the last: its perplexity there is far above its ordinary one. On random tokens no honest
perplexity is below the size of the vocabulary.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.calls import Call
from fullrank.checking.causality import find_leak
from fullrank.checking.copies import duplicate, mode
from fullrank.checking.report import Finding, inapplicable, judge
from fullrank.checking.subject import SHORT, Subject, random_ids

_NEVER = 700.0  # nats below the likeliest token: the probability is zero, as of words that are masked
_STEPS, _FEWER, _ROWS, _SEGMENTS = 200, 20, 16, 512
_SECONDS = 2.5  # of CPU time; a model that is slower takes fewer steps, at least `_FEWER`
_MOST_PARAMETERS = 1_000_000  # of a model that is trained for the check
# nats: what overfitting may cost at the position with most context, and what chance may gain
_GAP, _GAIN = 0.1, 0.02


def last_position(subject: Subject, segments: Tensor) -> Finding:
    """segments (S, N + 1) of a text that the model was trained for."""
    looked_at = f"{len(segments)} segments of {segments.shape[1] - 1} tokens of the text"
    return compare_last(compute_nll(subject, subject.own, segments), looked_at)


def check_on_random_tokens(subject: Subject) -> Finding:
    """A copy is trained on fresh random tokens, where nothing can be learnt but to look ahead; then tokens are changed."""
    if subject.parameters > _MOST_PARAMETERS:
        count = f"{subject.parameters:,} parameters"
        return inapplicable(f"a model of {count} is not trained for it; a text of its own (text=, --text) tells")
    if not subject.reads_tokens:
        return inapplicable("the model reads no tokens that it could predict")
    model: Any = duplicate(subject.own).float()
    words = find_likely_words(subject, model)
    if len(words) < 2:
        return inapplicable("all but one of the tokens have a logit that excludes them")
    length = min(subject.length - 1, SHORT)
    steps = train_on_random(subject, model, words, length)
    if not steps:
        return inapplicable("no parameter of the model can be trained, and no text was given")
    trained = replace(subject, model=model.eval(), dtype=torch.float32, is_sliced=False)
    leak = find_leak(trained, Call("after training on random tokens"))
    if leak.verdict == "fails":
        return leak
    nll = compute_nll(subject, model, words[random_ids(_SEGMENTS, length + 1, len(words), 7).to(words.device)])
    looked_at = (
        f"{steps} steps on fresh random tokens, then {_SEGMENTS} other segments of {length}: no honest perplexity is "
        f"below {len(words)}; and a perturbation after them"
    )
    finding = compare_last(nll, looked_at)
    # a leak shows here before it is learnt well enough for a gap
    gain = math.log(len(words)) - float(nll.mean())
    most = max(_GAIN, 5 * float(nll.mean(dim=1).std()) / len(nll) ** 0.5)
    if finding.verdict == "passes" and not gain <= most:
        reason = "nats below log V, which is the least of an honest model; 5 standard errors"
        return judge(looked_at, gain, most, reason, remark=finding.remark)
    return finding


def find_likely_words(subject: Subject, model: nn.Module) -> Tensor:
    """Ids of the words that the model may predict."""
    with torch.no_grad(), mode(model, training=False):
        logits = subject.all_logits(subject.ids, model=model).float().flatten(0, 1)
    words = (logits > logits.amax(1, keepdim=True) - _NEVER).any(0).nonzero()[:, 0]
    return words[subject.replace_padding(words) == words]


def train_on_random(subject: Subject, model: Any, words: Tensor, length: int) -> int:
    """Train on random words; the number of steps, 0 where nothing can be trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return 0
    step, start = 0, time.process_time()
    optimizer = torch.optim.Adam(trained, lr=3e-3)
    with mode(model, training=True, seed=2), torch.enable_grad():
        while step < _STEPS and (step < _FEWER or time.process_time() < start + _SECONDS):
            tokens = words[random_ids(_ROWS, length + 1, len(words), 1000 + step).to(words.device)]
            logits = subject.all_logits(tokens[:, :-1], model=model).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            if not loss.requires_grad:
                return 0
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
    return step


def compute_nll(subject: Subject, model: nn.Module, segments: Tensor) -> Tensor:
    """(S, N) nats, float64."""
    parts = []
    with torch.no_grad(), mode(model, training=False):
        for part in segments.to(subject.ids.device).split(max(1, 2048 // segments.shape[1])):
            log_prob = torch.log_softmax(subject.all_logits(part[:, :-1], model=model).double(), dim=-1)
            parts.append(-log_prob.gather(-1, part[:, 1:, None])[..., 0])
    return torch.cat(parts).cpu()


def compare_last(nll: Tensor, looked_at: str) -> Finding:
    """The last position beside all: an honest model knows more there than on average."""
    last, ordinary = nll[:, -1], nll.mean(dim=1)
    gap = last - ordinary
    limit = max(_GAP, 5 * float(gap.std()) / len(gap) ** 0.5)
    reason = f"nats, the last position minus all; {'5 standard errors' if limit > _GAP else 'more than overfitting makes it'}"
    perplexity = (
        f"{math.exp(float(last.mean())):,.2f} at the last position, ordinarily {math.exp(float(ordinary.mean())):,.2f}"
    )
    return judge(looked_at, float(gap.mean()), limit, reason, remark=f"perplexity {perplexity}")
