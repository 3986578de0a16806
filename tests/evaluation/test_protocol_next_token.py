"""Which protocols measure next tokens, for models whose tokens see later ones and for all others."""

from __future__ import annotations

from typing import Any

import pytest

from fullrank.config.load import build
from fullrank.config.run import RunConfig
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.core.errors import InputError
from fullrank.evaluation.perplexity import Evaluation, figures
from fullrank.evaluation.protocol import Flags, final_protocol, judging_protocol

PUBLISHED = {"kind": "multilinear", "causal": "as_published", "not_next_token_perplexity": True}


def config(attention: dict[str, Any], **evaluation: Any) -> RunConfig:
    return build({"model": {"attention": attention}, "train": {"segment_length": 16}, "eval": evaluation})


@pytest.mark.parametrize(
    ("flags", "honest"),
    [
        (Flags(), False),
        (Flags(segment_length=9), False),
        (Flags(context=14, stride=2), False),
        (Flags(stride=16), False),  # context 0: blocks
        (Flags(stride=1), True),
        (Flags(context=15), True),
        (Flags(context=0, stride=1), True),  # blocks of one token
        (Flags(segment_length=1), True),
    ],
)
def test_nothing_but_last_positions_is_a_next_token_perplexity(flags: Flags, honest: bool) -> None:
    found = final_protocol(config(PUBLISHED), flags)
    assert found.next_token is honest
    assert found.in_words().endswith(f"; {NOT_NEXT_TOKEN}") is not honest
    assert ("next-token" in found.in_words()) is not honest
    for attention in ({"kind": "multilinear"}, {"kind": "weighted"}):
        plain = final_protocol(config(attention), flags)
        assert plain.next_token
        assert "next-token" not in plain.in_words()


def test_training_judges_by_segments_however_the_end_is_measured() -> None:
    slides = config(PUBLISHED, stride=1)
    assert final_protocol(slides).next_token
    assert not judging_protocol(slides).next_token
    assert judging_protocol(config({"kind": "weighted"}, stride=1)).next_token


def test_flags_that_the_model_cannot_have() -> None:
    with pytest.raises(InputError, match=r"^--memory-length: .*as_published.*given 4"):
        final_protocol(config(PUBLISHED), Flags(memory_length=4))
    relative = build({"model": {"position": "relative", "attention": {"kind": "multilinear", "score": "relative"}}})
    with pytest.raises(InputError, match=r"^--clamp-length: .*multi-linear.*given 7"):
        final_protocol(relative, Flags(clamp_length=7))
    decayed = build({"model": {"memory_length": 4, "attention": {"kind": "multilinear", "output_map": "decayed"}}})
    with pytest.raises(InputError, match=r"^--same-length: .*output_map: decayed"):
        final_protocol(decayed, Flags(same_length=True))


def test_last_positions_are_figures_of_their_own() -> None:
    found = figures(Evaluation(20.0, 10, Evaluation(6.0, 2)), words=5)
    assert found["nll"] == 2.0
    assert found["last_position"] == {"nll": 3.0, "perplexity": pytest.approx(20.085537), "tokens": 2}
    assert "last_position" not in figures(Evaluation(20.0, 10))
    both = Evaluation(20.0, 10, Evaluation(6.0, 2)) + Evaluation(1.0, 4, Evaluation(0.5, 1))
    assert both == Evaluation(21.0, 14, Evaluation(6.5, 3))
    assert (both + Evaluation(1.0, 1)).last_position is None  # one of them was not measured so
