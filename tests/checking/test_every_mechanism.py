"""Every registered stage passes: rows of choices in which each of them occurs, found in the registry."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import fullrank as fr
from fullrank.checking.agreement import agreements
from fullrank.checking.future import future
from fullrank.checking.kernels import definitions
from fullrank.checking.subject import subject_of
from fullrank.core import registry

SLOTS = ("score", "normalize", "mix", "position", "activation", "initializer", "input", "output")
CLUSTERED: dict[str, Any] = {"kind": "adaptive", "cutoffs": [6, 12], "div_val": 2}
MIXED: dict[str, Any] = {"kind": "mixture_of_softmaxes", "mixtures": 3, "latent_dropout": 0.1}
OUTPUTS = {"adaptive": CLUSTERED, "mixture_of_softmaxes": MIXED, "mixture_of_adaptive": CLUSTERED | MIXED}


MULTILINEAR: dict[str, Any] = {"kind": "multilinear", "cores": 2, "rank": 5}
DECAYED = MULTILINEAR | {"output_map": "decayed", "decays": 3}


def attends() -> list[tuple[dict[str, Any], str]]:
    """Every way to attend that has no weights, with a position for each; how it normalises, mixes and drops is fixed."""
    made = [(MULTILINEAR, "sinusoidal"), (MULTILINEAR | {"score": "relative"}, "relative"), (DECAYED, "none")]
    known = {"weighted", "multilinear"}
    return made + [({"kind": name}, "sinusoidal") for name in registry.names("attend") if name not in known]


def rows() -> list[dict[str, str]]:
    """As many as the slot with most choices has; score and position are relative together."""
    choices = {slot: registry.names(slot) for slot in SLOTS}
    choices["output"] = sorted({*choices["output"], *OUTPUTS})
    others = itertools.cycle(name for name in choices["score"] if name != "relative")
    made = []
    for i in range(max(map(len, choices.values()))):
        row = {slot: names[i % len(names)] for slot, names in choices.items()}
        row["score"] = "relative" if row["position"] == "relative" else next(others)
        made.append(row)
    assert {(slot, row[slot]) for row in made for slot in SLOTS} == {(s, name) for s in SLOTS for name in choices[s]}
    return made


@pytest.mark.parametrize("number", range(len(rows())))
def test_it_passes(number: int) -> None:
    row = rows()[number]
    attention = {slot: row[slot] for slot in ("score", "normalize", "mix")} | {"cross_head": 0.5}
    passes(number, row, attention, 0.1)


@pytest.mark.parametrize("number", range(2 * len(attends())))
def test_attention_without_weights_passes(number: int) -> None:
    """With a memory and without, pre-norm and post-norm."""
    attention, position = attends()[number // 2]
    passes(number, rows()[number % len(rows())] | {"position": position}, attention, 0.0)


def passes(number: int, row: dict[str, str], attention: dict[str, Any], dropout: float) -> None:
    config = fr.ModelConfig(
        vocab_size=19,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        head_dim=4,
        intermediate_size=14,
        max_position_embeddings=34,
        position=row["position"],
        norm="post" if number % 2 else "pre",
        hidden_act=row["activation"],
        initializer=row["initializer"],
        memory_length=6 if number % 2 else 0,
        dropout=fr.DropoutConfig(
            embedding=0.1, attention=dropout, activation=0.1, residual=0.1, output=0.1, locked=number == 1
        ),
        attention=fr.AttentionConfig(**attention),
        input=fr.InputConfig(**CLUSTERED if row["input"] == "adaptive" else {"kind": row["input"]}),
        output=fr.OutputConfig(**OUTPUTS.get(row["output"], {"kind": row["output"]})),
    )
    subject = subject_of(fr.LanguageModel(config))
    found = {name: check() for name, check in [*future(subject), *definitions(subject), *agreements(subject)]}
    assert {name: f.remark for name, f in found.items() if f.verdict == "fails"} == {}
    skipped = {name for name, f in found.items() if f.verdict == "not applicable"}
    assert skipped <= {"starts as plain attention", "memory in segments = one pass"}
    assert ("memory in segments = one pass" in skipped) == (config.memory_length == 0)
