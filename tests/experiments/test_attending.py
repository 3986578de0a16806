"""The heat map: the weights that the model really uses, beside the right tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fullrank as fr
from fullrank.core.errors import InputError
from fullrank.core.trace import Trace
from fullrank.experiments.translate import LineTranslator, Search, cross_attention, cross_weights
from translation_runs import write_run

LINE = "ein hund und ein kind"


@pytest.mark.parametrize("mix", ["none", "position_independent", "position_wise"])
def test_the_weights_are_those_of_the_pass(mix: str, tmp_path: Path) -> None:
    model = write_run(tmp_path, attention=fr.AttentionConfig(mix=mix))
    source, target = [2, 3, 10, 2, 11, 0], [0, 3, 5, 4]
    found = cross_weights(model, source, target)
    trace = Trace()
    with torch.no_grad():
        model(torch.tensor([source]), torch.tensor([target]), trace=trace)
    crossing = [one for one in trace.layers if one.weights.shape[2:] == (4, 6)]
    assert len(found) == len(crossing) == 2
    for one, expected in zip(found, crossing, strict=True):
        torch.testing.assert_close(one.mixed, expected.mixed, rtol=0, atol=1e-12)
        if mix == "none":
            torch.testing.assert_close(one.mixed.sum(-1), torch.ones(1, 4, 4, dtype=torch.float64))
        else:
            assert (one.mixed - one.weights).abs().max() > 1e-2


def test_decoder_layers_of_two_kinds(tmp_path: Path) -> None:
    model = write_run(
        tmp_path, layers=[fr.LayerConfig(at=[1], attention=fr.AttentionConfig(kind="multilinear", rank=3))]
    )
    source, target = [2, 3, 10, 2, 11, 0], [0, 3, 5, 4]
    found, trace = cross_weights(model, source, target), Trace()
    with torch.no_grad():
        model(torch.tensor([source]), torch.tensor([target]), trace=trace)
    assert [tuple(one.weights.shape[2:]) for one in trace.layers] == [(6, 6), (4, 4), (4, 6), (4, 6)]
    assert all(torch.equal(one.mixed, other.mixed) for one, other in zip(found, trace.layers[2:], strict=True))


def read_map(records: list[fr.Record]) -> tuple[list[str], list[str], dict[str, np.ndarray]]:
    """Words of the columns and of the rows, and the weights of each part."""
    columns = list(dict.fromkeys(record.labels["source"] for record in records))
    rows = list(dict.fromkeys(record.labels["written"] for record in records))
    weights = {part: [] for part in dict.fromkeys(record.labels["part"] for record in records)}
    for record in records:
        weights[record.labels["part"]].append(record.value)
    named = ([str(label).split(" ", 1)[1] for label in labels] for labels in (columns, rows))
    return *named, {part: np.reshape(values, (len(rows), len(columns))) for part, values in weights.items()}


@pytest.mark.parametrize("mix", ["none", "position_wise"])
def test_rows_are_what_was_written_and_columns_what_was_read(mix: str, tmp_path: Path) -> None:
    model = write_run(tmp_path, attention=fr.AttentionConfig(mix=mix))
    translating = LineTranslator(tmp_path, Search(beams=2))
    (best,) = translating.translate([LINE])[0]
    found = cross_weights(model, [2, 3, 10, 2, 11, 0], [0, *best.ids])
    columns, rows, weights = read_map(cross_attention(translating, LINE, best))
    assert columns == ["ein", "hund", "und", "ein", "kind", "<eos>"]
    assert rows == [*best.text.split(), "<eos>"]
    assert list(weights) == ["layer 0", "layer 1"]
    for part, one in zip(weights.values(), found, strict=True):
        np.testing.assert_allclose(part, one.mixed[0].mean(0).numpy(), atol=1e-12)
    _, _, heads = read_map(cross_attention(translating, LINE, best, 1))
    assert list(heads) == ["mean", "head 0", "head 1", "head 2", "head 3"]
    for head in range(4):
        np.testing.assert_allclose(heads[f"head {head}"], found[1].mixed[0, head].numpy(), atol=1e-12)


def test_subwords_are_shown_so_that_one_can_read_them(tmp_path: Path) -> None:
    write_run(tmp_path, subwords=True)
    translating = LineTranslator(tmp_path, Search(beams=1))
    line = "hund ä猫"
    columns, _, _ = read_map(cross_attention(translating, line, translating.translate([line])[0][0]))
    assert "".join(columns).startswith("▁h")
    assert columns[-1] == "<eos>"
    assert not any("Ġ" in name or "Ã" in name for name in columns)
    assert sum(name.startswith("▁") for name in columns) == 2


def test_a_text_as_long_as_the_model_takes_is_drawn(tmp_path: Path) -> None:
    write_run(tmp_path, position="learned", max_position_embeddings=6)
    translating = LineTranslator(tmp_path, Search(beams=1, max_length_b=40))
    (best,) = translating.translate(["ein hund und ein mann und"])[0]
    columns, rows, _ = read_map(cross_attention(translating, "ein hund und ein mann und", best))
    assert len(columns) == 6
    assert len(rows) <= 6


def test_attention_without_weights_is_no_drawing(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"kind": "multilinear", "rank": 4, "cores": 2}
    write_run(tmp_path, decoder={"cross": fr.AttentionConfig(**kinds)})
    translating = LineTranslator(tmp_path, Search(beams=1))
    (best,) = translating.translate([LINE])[0]
    with pytest.raises(
        InputError, match=r"multi-linear, which has no attention weights.*model.decoder.cross.kind: weighted"
    ):
        cross_attention(translating, LINE, best)
    # multi-linear self-attention is no obstacle
    other = tmp_path / "other"
    write_run(other, decoder={"attention": fr.AttentionConfig(**kinds, output_map="decayed")})
    translating = LineTranslator(other, Search(beams=1))
    (best,) = translating.translate([LINE])[0]
    assert len(read_map(cross_attention(translating, LINE, best))[2]) == 2
    with pytest.raises(InputError, match=r"--attention-layer: from 0 to 1 \(the decoder has 2 layers\), given 2"):
        cross_attention(translating, LINE, best, 2)
    with pytest.raises(InputError, match="an empty line has no attention"):
        cross_attention(translating, " ", best)
