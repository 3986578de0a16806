"""The configuration of fine-tuning: its kinds, and the usual values of keys that are null."""

import pytest

from fullrank.config.finetune import FinetuneConfig, FinetuneTrainConfig, TaskDataConfig
from fullrank.config.load import build, build_any, finetunes, resolve, resolve_any
from fullrank.core.errors import InputError


def test_the_name_of_the_data_says_which_kind_of_run_it_is():
    assert finetunes({"data": {"name": "glue/cola"}})
    assert finetunes({"data": {"name": "squad-v2"}})
    assert not finetunes({"data": {"name": "ptb"}})
    assert not finetunes({"data": None})
    assert not finetunes({})
    with pytest.raises(InputError, match="fullrank finetune"):
        build({"data": {"name": "glue/cola"}})
    with pytest.raises(InputError, match="fine-tuned"):
        resolve("mixhead/table5")
    assert isinstance(resolve_any("mixhead/table5", "cola-b").config, FinetuneConfig)


def test_keys_that_are_null_get_the_usual_values_of_the_task():
    glue, squad = TaskDataConfig(name="glue/rte"), TaskDataConfig(name="squad")
    assert (glue.max_length, glue.doc_stride, glue.answers, glue.task) == (128, None, False, "rte")
    assert (squad.max_length, squad.doc_stride, squad.max_query_length, squad.answers) == (384, 128, 64, True)
    assert build_any(FinetuneConfig().to_dict()) == FinetuneConfig()


def test_the_loop_gets_the_warm_up_in_steps_and_the_rate_of_mixing_as_a_scale():
    options = FinetuneTrainConfig(epochs=3, batch_size=32, warmup_ratio=0.1, gradient_accumulation_steps=4).options(101)
    assert options.warmup_steps == round(0.1 * 3 * 26)  # 101 batches are 26 updates
    assert (options.objective, options.epochs, options.steps) == ("labels", 3, None)
    assert FinetuneTrainConfig(steps=50, warmup_ratio=0.1).options(7).warmup_steps == 5
    assert FinetuneTrainConfig().mixing_scale == 1
    assert FinetuneTrainConfig(learning_rate=2e-5, mixing_learning_rate=1e-3).mixing_scale == pytest.approx(50)
