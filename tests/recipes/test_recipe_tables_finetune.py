"""The recipes of fine-tuning, row by row and scale by scale: they resolve, have the papers' figures, and equal terms."""

from __future__ import annotations

import pytest

from fullrank.config.finetune import FinetuneConfig, GraftConfig
from fullrank.config.load import flatten, is_finetuning, list_shipped, load, resolve_any

NAMES = [name for name in list_shipped() if is_finetuning(name)]

# Mixhead, Table 5: task -> (Mixhead, BERT - our run), scores of the test server
TABLE5 = {
    "mnli": ({"test": 83.6, "test_mismatched": 82.8}, {"test": 83.4, "test_mismatched": 82.9}),
    "qqp": ({"test": 70.2}, {"test": 70.1}),
    "qnli": ({"test": 90.9}, {"test": 90.7}),
    "sst2": ({"test": 93.7}, {"test": 93.5}),
    "cola": ({"test": 55.4}, {"test": 52.6}),
    "stsb": ({"test": 85.2}, {"test": 84.7}),
    "mrpc": ({"test": 87.7}, {"test": 87.4}),
    "rte": ({"test": 68.4}, {"test": 68.0}),
}
# Skip Cross-head, Table 4: task -> for each metric (BERT, with cross-head attention, % change of deviation)
TABLE4 = {
    "mrpc": {"accuracy": ([82.242, 1.281], [82.609, 1.4], 9.3), "f1": ([87.022, 0.988], [87.177, 0.91], -7.9)},
    "cola": {"matthews_correlation": ([59.849, 1.23], [58.744, 1.1], -10.6)},
    "sst2": {"accuracy": ([93.038, 0.333], [92.842, 0.192], -42.3)},
    "mnli": {"accuracy": ([84.25, 0.403], [84.39, 0.186], -53.8)},
    "qnli": {"accuracy": ([91.658, 0.303], [91.436, 0.216], -28.7)},
    "qqp": {"accuracy": ([91.394, 0.078], [91.422, 0.042], -46.1), "f1": ([88.428, 0.107], [88.436, 0.073], -31.8)},
}


def config_of(name: str, row: str, scale: str = "paper") -> FinetuneConfig:
    return resolve_any(name, row, scale).config


def test_figures_of_table_5() -> None:
    stated = {row: settings["paper"] for row, settings in load("mixhead/table5").rows.items()}
    expected = {
        f"{task}-{arm}": figures
        for task, both in TABLE5.items()
        for arm, figures in zip(("b", "plain"), both, strict=True)
    }
    assert stated == expected


def test_figures_of_table_4() -> None:
    """The printed changes follow from the printed deviations; MNLI's is printed as 0403, where only 0.403 agrees."""
    stated = {row: settings["paper"] for row, settings in load("skip-cross-head/table4").rows.items()}
    expected = {
        f"{task}-{arm}": {metric: figures[place] for metric, figures in metrics.items()}
        for task, metrics in TABLE4.items()
        for place, arm in enumerate(("plain", "beta0.1"))
    }
    assert stated == expected
    for metrics in TABLE4.values():
        for (_, base), (_, other), change in metrics.values():
            assert 100 * (other / base - 1) == pytest.approx(change, abs=0.06)


def test_grafts_are_the_papers() -> None:
    for task in TABLE5:
        plain, b = (config_of("mixhead/table5", f"{task}-{arm}") for arm in ("plain", "b"))
        assert plain.model.attention.at_rest
        assert b.model.attention == GraftConfig(mix="position_wise")
        assert (plain.train.epochs, b.train.epochs) == (3, 4)  # more steps for Mixhead
        assert b.train.mixing_scale > 1  # and a larger learning rate for its parameters
        assert plain.train.mixing_learning_rate is None
    for task in TABLE4:
        plain, beta = (config_of("skip-cross-head/table4", f"{task}-{arm}") for arm in ("plain", "beta0.1"))
        assert plain.model.attention.at_rest
        assert beta.model.attention == GraftConfig(cross_head=0.1)


@pytest.mark.parametrize("scale", ["small", "tiny"])
@pytest.mark.parametrize("name", ["mixhead/table5", "skip-cross-head/table4"])
def test_small_rows_of_a_task_have_equal_terms(name: str, scale: str) -> None:
    """Nothing but the mechanism differs: the graft, and the learning rate of its own parameters. All have as many examples."""
    rows = list(load(name).rows)
    for task in dict.fromkeys(row.partition("-")[0] for row in rows):
        one, other = (flatten(config_of(name, row, scale).to_dict()) for row in rows if row.startswith(f"{task}-"))
        differ = {key for key in one if one[key] != other[key]}
        assert differ <= {"model.attention.mix", "model.attention.cross_head", "train.mixing_learning_rate"}
        assert differ & {"model.attention.mix", "model.attention.cross_head"}
        assert one["data.max_train"] == (2400 if scale == "small" else None)


@pytest.mark.parametrize("name", NAMES)
def test_devlins_recipe_at_paper_scale(name: str) -> None:
    for row in load(name).rows:
        train = config_of(name, row).train
        assert (train.optimizer, train.betas, train.weight_decay, train.schedule) == (
            "adamw",
            (0.9, 0.999),
            0.01,
            "linear",
        )
        assert train.warmup_ratio == 0.1
        if name != "mixhead/table6":
            assert (train.batch_size, train.learning_rate) == (32, 2e-5)
