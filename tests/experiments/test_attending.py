"""The heat map: the weights that the model really uses, beside the right tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch

import fullrank as fr
from fullrank.analysis.plots import HeatMaps, write_attention
from fullrank.core.attention import Trace
from fullrank.core.errors import InputError
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


@pytest.mark.parametrize("mix", ["none", "position_wise"])
def test_rows_are_what_was_written_and_columns_what_was_read(mix: str, tmp_path: Path) -> None:
    model = write_run(tmp_path, attention=fr.AttentionConfig(mix=mix))
    translating = LineTranslator(tmp_path, Search(beams=2))
    (best,) = translating.translate([LINE])[0]
    found = cross_weights(model, [2, 3, 10, 2, 11, 0], [0, *best.ids])
    maps = cross_attention(translating, LINE, best)
    assert maps.columns == ("ein", "hund", "und", "ein", "kind", "<eos>")
    assert maps.rows == (*best.text.split(), "<eos>")
    assert list(maps.panels) == ["layer 0", "layer 1"]
    assert maps.subtitle.endswith("weights after mixing" if mix != "none" else "weights (heads are not mixed)")
    for weights, one in zip(maps.panels.values(), found, strict=True):
        np.testing.assert_allclose(weights, one.mixed[0].mean(0).numpy(), atol=1e-12)
    heads = cross_attention(translating, LINE, best, 1)
    assert list(heads.panels) == ["mean", "head 0", "head 1", "head 2", "head 3"]
    for head in range(4):
        np.testing.assert_allclose(heads.panels[f"head {head}"], found[1].mixed[0, head].numpy(), atol=1e-12)


def test_subwords_are_shown_so_that_one_can_read_them(tmp_path: Path) -> None:
    write_run(tmp_path, subwords=True)
    translating = LineTranslator(tmp_path, Search(beams=1))
    line = "hund ä猫"
    maps = cross_attention(translating, line, translating.translate([line])[0][0])
    assert "".join(maps.columns).startswith("▁h")
    assert maps.columns[-1] == "<eos>"
    assert not any("Ġ" in name or "Ã" in name for name in maps.columns)
    assert maps.columns.count("▁") + sum(name.startswith("▁") and name != "▁" for name in maps.columns) == 2


def test_a_text_as_long_as_the_model_takes_is_drawn(tmp_path: Path) -> None:
    write_run(tmp_path, position="learned", max_position_embeddings=6)
    translating = LineTranslator(tmp_path, Search(beams=1, max_length_b=40))
    (best,) = translating.translate(["ein hund und ein mann und"])[0]
    maps = cross_attention(translating, "ein hund und ein mann und", best)
    rows, columns = maps.panels["layer 0"].shape
    assert len(maps.columns) == columns == 6
    assert len(maps.rows) == rows <= 6


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
    assert len(cross_attention(translating, LINE, best).panels) == 2
    with pytest.raises(InputError, match=r"--attention-layer: from 0 to 1 \(the decoder has 2 layers\), given 2"):
        cross_attention(translating, LINE, best, 2)
    with pytest.raises(InputError, match="an empty line has no attention"):
        cross_attention(translating, " ", best)


def dark(weights: np.ndarray, panels: int, folder: Path) -> np.ndarray:
    """Rows and columns of the darkest blue pixels, the scale left out."""
    rows, columns = weights.shape
    maps = HeatMaps(
        tuple(f"s{i}" for i in range(columns)), ("猫", *(f"t{i}" for i in range(1, rows))),
        {f"head {i}": weights for i in range(panels)}, "Cross-attention", subtitle="",
    )  # fmt: skip
    write_attention(maps, folder / "a.png")
    pixels = matplotlib.image.imread(folder / "a.png")[..., :3]
    assert max(pixels.shape[:2]) < 7000
    found = np.abs(pixels - np.array([0x00, 0x30, 0x4D]) / 255).max(-1) < 0.02
    columns_of_scale = np.flatnonzero(found.sum(0))[-15:]  # it stands at the right of everything
    found[:, columns_of_scale] = False
    return found


@pytest.mark.parametrize(("panels", "rows", "columns"), [(1, 2, 2), (3, 3, 8), (5, 5, 4), (1, 20, 62)])
def test_rows_go_down_and_columns_to_the_right(panels: int, rows: int, columns: int, tmp_path: Path) -> None:
    """A dark cell in one corner, then in the other: as far apart as the panel is wide and high, in every panel."""
    places = []
    for row, column in ((0, columns - 1), (rows - 1, 0)):
        weights = np.zeros((rows, columns))
        weights[row, column] = 1.0
        found = dark(weights, panels, tmp_path)
        assert found.sum() > panels * 30
        places.append(np.argwhere(found).mean(0))
    down, left = places[1] - places[0]
    assert down > 10 * rows**0.5
    assert left < -10 * columns**0.5
    if panels == 1:  # square cells
        assert down / (rows - 1) == pytest.approx(-left / (columns - 1), rel=0.1)


def test_equal_figures_give_equal_bytes(tmp_path: Path) -> None:
    maps = HeatMaps(("a", "b"), ("c", "d"), {"layer 0": np.eye(2)}, "Cross-attention", subtitle="")
    write_attention(maps, tmp_path / "a.png")
    write_attention(maps, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_negative_weights_have_another_colour(tmp_path: Path) -> None:
    pictures = []
    for low in (0.0, -1.0):
        weights = np.array([[1.0, low], [0.0, 0.5]])
        maps = HeatMaps(("a", "b"), ("c", "d"), {"layer 0": weights}, "Cross-attention", subtitle="")
        write_attention(maps, tmp_path / "a.png")
        pictures.append(matplotlib.image.imread(tmp_path / "a.png")[..., :3])
    brown = [(np.abs(one - np.array([0x7A, 0x32, 0x00]) / 255).max(-1) < 0.02).sum() for one in pictures]
    assert brown[0] == 0
    assert brown[1] > 300
