"""Dynamic evaluation beside the equation, and temperature beside a loop over many."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from test_protocols import (
    IDS,
    RELATIVE,
    START,
    VOCABULARY,
    blocks,
    build,
    check,
    measured,
    remembering,
    windows,
)
from torch import Tensor

import fullrank as fr
from fullrank.config.load import build as configuration
from fullrank.config.run import DynamicConfig
from fullrank.core.errors import ConfigError, InputError
from fullrank.evaluation.perplexity import Evaluation, EvaluationProtocol, Flags, final_protocol, validation_protocol
from fullrank.experiments import dynamic
from fullrank.experiments.dynamic import choose, make_dynamic, measure_dynamically, root_mean_squares
from fullrank.experiments.measure import find_temperature

TRAINING = np.random.default_rng(1).integers(0, VOCABULARY, 60).astype(np.uint16)
PROTOCOLS = {"blocks": blocks(7), "windows": windows(7, 4), "memory": remembering(6, 5, 3)}
protocols = pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
RATE, DECAY = 0.02, 0.3


def measured_dynamically(
    model: fr.LanguageModel,
    protocol: EvaluationProtocol,
    ids: np.ndarray = IDS,
    kept: list[Tensor] | None = None,
    rate: float = RATE,
    decay: float = DECAY,
) -> Evaluation:
    asked = make_dynamic(protocol, rate, decay)
    r = root_mean_squares(model, TRAINING, asked, START)
    return measure_dynamically(model, ids, asked, r, start_id=START, kept=kept)


class ByHand:
    """A text segment by segment, from logits; `learn` is the update as the equation reads, with epsilon 1."""

    def __init__(self, model: fr.LanguageModel, protocol: EvaluationProtocol) -> None:
        self.model = copy.deepcopy(model).with_memory(protocol.memory_length)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.trained = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.step, self.context = protocol.stride or protocol.segment_length, protocol.context or 0

    def segments(self, ids: np.ndarray) -> Any:
        text, memory = [START, *ids.tolist()], None
        for first in range(0, len(ids), self.step):
            begin, end = max(0, first - self.context), min(first + self.step, len(ids))
            out = self.model(torch.tensor([text[begin:end]]), memory)
            memory = out.memory
            log_prob = out.logits[0].log_softmax(-1)
            nats = torch.stack([-log_prob[n - begin, ids[n]] for n in range(first, end)])
            grads = torch.autograd.grad(nats.mean(), list(self.model.parameters()), materialize_grads=True)
            yield nats.detach(), dict(zip(self.names, grads, strict=True))

    def statistics(self) -> dict[str, Tensor]:
        every = [gradients for _, gradients in self.segments(TRAINING)]
        return {n: (sum(g[n] ** 2 for g in every) / len(every)).sqrt() for n in self.names}

    def scores(self, ids: np.ndarray, rate: float, decay: float) -> Tensor:
        r, scores = self.statistics(), []
        mean = torch.cat([one.flatten() for one in r.values()]).mean()
        for nats, gradients in self.segments(ids):
            scores.append(nats)
            for name, p in self.model.named_parameters():
                share = torch.minimum(decay * r[name] / mean, torch.ones(()))
                p.data = p.data + share * (self.trained[name] - p.data) - rate * gradients[name] / (r[name] + mean)
        return torch.cat(scores)


@protocols
@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_every_score_is_that_of_the_equation(protocol: EvaluationProtocol, decay: float) -> None:
    settings: dict[str, Any] = RELATIVE if protocol.memory_length else {}
    model, kept = build(**settings, dropout=fr.DropoutConfig(residual=0.5)), list[Tensor]()
    found = measured_dynamically(model, protocol, kept=kept, decay=decay)
    expected = ByHand(model, protocol).scores(IDS, RATE, decay)
    assert torch.allclose(torch.cat(kept), expected, rtol=1e-9)
    check(found, Evaluation(float(expected.sum()), len(IDS)))
    static = measured(model, make_dynamic(protocol, RATE, decay))
    assert abs(found.nll - static.nll) > 1e-2


@protocols
def test_no_score_depends_on_its_own_token_or_a_later_one(protocol: EvaluationProtocol) -> None:
    """Bit for bit. The scores of later segments change: the model has learnt the token."""
    model = build(**(RELATIVE if protocol.memory_length else {}))
    kept = list[Tensor]()
    measured_dynamically(model, protocol, kept=kept)
    before = torch.cat(kept)
    for place in (0, 9, 22, 33, len(IDS) - 1):
        changed, kept = IDS.copy(), []
        changed[place] = (changed[place] + 1) % VOCABULARY
        measured_dynamically(model, protocol, changed, kept)
        after = torch.cat(kept)
        assert torch.equal(after[:place], before[:place])
        assert (after[place:] != before[place:]).all() if place < 30 else after[place] != before[place]


@protocols
def test_the_model_is_restored_bit_for_bit(protocol: EvaluationProtocol, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(**(RELATIVE if protocol.memory_length else {})).train()
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    static = measured(model, protocol)
    measured_dynamically(model, protocol)

    def check_restored() -> None:
        assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert model.training
        assert measured(model, protocol) == static

    check_restored()
    calls = 0

    def stopped(tally: Any, *_: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(dynamic.Tally, "add", stopped)
    with pytest.raises(KeyboardInterrupt):
        measured_dynamically(model, protocol)
    monkeypatch.undo()
    check_restored()


def test_a_text_that_repeats_is_learnt() -> None:
    model, ids = build(), np.tile(IDS[:5], 30)
    assert measured_dynamically(model, blocks(5), ids).nll < 0.8 * measured(model, blocks(5), ids=ids).nll
    assert measured_dynamically(model, blocks(5), ids, rate=0.0).nll == pytest.approx(
        measured(model, blocks(5), ids=ids).nll, rel=1e-12
    )


def test_rate_and_decay_are_those_of_least_nll_on_the_validation_text() -> None:
    model, options = build(), DynamicConfig(rate=[1e-4, 1e-2, 10.0], decay=[0.0, 0.5])
    found, statistics = choose(model, TRAINING, IDS, blocks(7), options, START)
    nll = {
        (rate, decay): measured_dynamically(model, blocks(7), rate=rate, decay=decay).nll
        for rate in options.rate  # type: ignore[union-attr]
        for decay in options.decay  # type: ignore[union-attr]
    }
    assert found.dynamic is not None
    assert found.dynamic.chosen
    assert (found.dynamic.rate, found.dynamic.decay) == min(nll, key=nll.__getitem__)
    assert measure_dynamically(model, IDS, found, statistics, start_id=START).nll == min(nll.values())
    single = choose(model, TRAINING, IDS[:0], blocks(7), DynamicConfig(rate=1.0, decay=0.0), START)[0]
    assert single == make_dynamic(blocks(7), 1.0, 0.0)  # without a text to choose on
    assert single.in_words() == (
        f"{blocks(7).in_words()}; dynamic evaluation: a gradient step on every segment, rate 1, decay 0; "
        "scored before it is learned"
    )


def test_streams_side_by_side_become_one() -> None:
    """A stream would learn from later text otherwise."""
    assert make_dynamic(remembering(6, 5, 3), 1e-3, 0.0).streams == 1
    assert "1 stream, begun without memory" in make_dynamic(remembering(6, 5, 3), 1e-3, 0.0).in_words()


# -- temperature ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [blocks(50), windows(30, 4), remembering(40, 5)], ids=PROTOCOLS)
@pytest.mark.parametrize(
    "output",
    [{}, pytest.param({"kind": "adaptive", "cutoffs": [4, 9]}, marks=pytest.mark.full)],
    ids=["softmax", "adaptive"],
)
def test_a_temperature_is_measured_and_the_best_is_found(protocol: EvaluationProtocol, output: dict[str, Any]) -> None:
    """On a text that the model wrote at temperature 0.7. The nll of softmaxes is convex in 1 / T: neighbours tell the best."""
    model = build(**(RELATIVE if protocol.memory_length else {}), output=fr.OutputConfig(**output))
    ids = model.generate(torch.tensor([[START]]), 150, temperature=0.7, seed=0)[0, 1:].numpy()

    def at(temperature: float) -> float:
        return measured(model, dataclasses.replace(protocol, temperature=temperature), ids=ids).nll

    best = find_temperature(model, ids, protocol, batch_size=4, start_id=START)
    assert 0.4 < best < 2.0
    assert best != 1.0
    assert at(best) < min(at(best - 0.01), at(best + 0.01), at(1.0))
    if not output and protocol.kind == "blocks":
        text, by_hand = [START, *ids.tolist()], 0.0
        for place, word in enumerate(ids):
            logits = model(torch.tensor([text[place // 50 * 50 : place + 1]])).logits[0, -1].detach()
            by_hand -= float((logits / best).log_softmax(-1)[word])
        assert at(best) == pytest.approx(by_hand, rel=1e-12)


def test_the_temperature_of_a_protocol() -> None:
    def protocol(split: str = "test", flags: Flags | None = None, **evaluation: Any) -> EvaluationProtocol:
        return final_protocol(configuration({"eval": evaluation}), flags, split)

    plain = protocol()
    assert protocol(temperature=1.08).in_words() == f"{plain.in_words()}; logits divided by 1.08"
    assert protocol("valid", test={"temperature": 1.08}) == plain
    assert protocol(test={"temperature": 1.08}).temperature == 1.08
    assert protocol(temperature=2, flags=Flags(temperature=1.0)) == plain
    chosen = protocol(temperature="valid")
    assert (chosen.temperature, chosen.temperature_chosen) == (1.0, True)
    assert chosen.in_words().endswith("; logits divided by 1, a temperature chosen on the validation text")
    for evaluation in ({"temperature": "valid", "valid": {"segment_length": 9}}, {"temperature": 3, "valid": {}}):
        judged = validation_protocol(configuration({"eval": evaluation}))
        assert (judged.temperature, judged.temperature_chosen) == (1.0, False), "while training"
    with pytest.raises(
        InputError, match=r"^eval.temperature: goes with `model.output.normalize: softmax`, given .*sigsoftmax"
    ):
        final_protocol(configuration({"eval": {"temperature": 2}, "model": {"output": {"normalize": "sigsoftmax"}}}))


@pytest.mark.parametrize(
    "raw",
    [
        {"eval": {"temperature": 0}},
        {"eval": {"dynamic": {"rate": 0}}},
        {"eval": {"dynamic": {"decay": 2}}},
        {"eval": {"dynamic": {}}, "train": {"objective": "masked"}},
    ],
)
def test_settings_that_cannot_be(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"eval.{next(iter(raw['eval']))}"):
        configuration(raw)
