"""A new mixing stage is one class and one registration: the property tests find it by themselves."""

import itertools

import property_checks as checks
import pytest
import test_kernels_agree as agree
import torch
from torch import nn

import combinations
import fullrank as fr
from closeness import all_close
from fullrank.core import registry
from fullrank.core.errors import ConfigError
from fullrank.core.stages import Mixing


class Neighbour(Mixing):
    """P'_i = P_i + w_i P_{i-1}."""

    needs = ()  # no query

    def __init__(self, config, size):
        super().__init__(config, size)
        self.share = nn.Parameter(torch.zeros(size.num_heads))

    def matrix(self, query):
        return torch.eye(len(self.share)).to(self.share) + torch.diag(self.share).roll(-1, dims=0)


@pytest.fixture(autouse=True)
def _registered():
    registry.register("mix", "neighbour")(Neighbour)
    combinations.slots.cache_clear()
    yield
    registry.unregister("mix", "neighbour")
    combinations.slots.cache_clear()


def row(mix):
    return next(c for c in combinations.pairwise() if c.mix == "none" and c.weighted).but("mix", mix)


def test_a_new_stage_is_found():
    for rows in (combinations.pairwise(), combinations.every_attention()):
        assert "neighbour" in {combination.mix for combination in rows}


def test_a_right_stage_passes_everything(tmp_path):
    stage = row("neighbour")
    wide = torch.float64
    for flag in (False, True):
        checks.changing_a_token_changes_nothing_before(stage, flag)
        checks.gradients_reach_every_parameter(stage, flag)
    for check in (
        checks.no_gradient_from_the_future, checks.starts_as_plain_attention, checks.mixing_leaves_other_parameters_alone,
        checks.evaluation_is_deterministic, checks.weight_decay_spares_mixing, checks.meta_build_is_the_real_one,
        checks.double_precision_agrees, checks.learns,
    ):  # fmt: skip
        check(stage)
    for agrees in (
        checks.decoding_equals_one_pass, checks.segments_with_memory_equal_one_pass, checks.padding_changes_nothing,
    ):  # fmt: skip
        agrees(stage, wide)
    checks.saved_and_loaded(stage, wide, tmp_path)
    attend = agree.stages("dot_product", "softmax", "neighbour").to(wide)
    for kernel, layout in itertools.product(("native", "auto"), ("past and padding", "gap of one")):
        ours, expected = (agree.computed(attend, agree.LAYOUTS[layout], wide, name) for name in (kernel, "reference"))
        all_close(ours, expected, 1e-13)


def test_registering_and_forgetting():
    assert "neighbour" in registry.names("mix")
    assert registry.lookup("mix", "neighbour") is Neighbour
    with pytest.raises(ConfigError, match="already registered"):
        registry.register("mix", "neighbour")(dict)
    assert registry.lookup("mix", "neighbour") is Neighbour
    with pytest.raises(ConfigError, match="did you mean 'mix'"):
        registry.register("mixx", "anything")
    assert fr.AttentionConfig(mix="neighbour").mix == "neighbour"


def test_a_stage_of_another_module_does_not_take_a_name():
    """Notebooks and plug-ins call their classes alike; a module that is read again registers its class again."""
    again = type("Neighbour", (Mixing,), {"__module__": Neighbour.__module__})
    assert registry.register("mix", "neighbour")(again) is registry.lookup("mix", "neighbour")
    elsewhere = type("Neighbour", (Mixing,), {"__module__": "elsewhere"})
    with pytest.raises(ConfigError, match="already registered by Neighbour"):
        registry.register("mix", "neighbour")(elsewhere)


def test_a_class_that_extends_no_stage_is_refused():
    class Loose(nn.Module):
        def matrix(self, query):
            return torch.eye(2)

    registry.register("mix", "loose")(Loose)
    try:
        with pytest.raises(ConfigError, match=r"model.attention.mix: 'loose' .* does not extend the base class"):
            fr.Attention(fr.AttentionConfig(mix="loose"), hidden_size=8, num_attention_heads=2)
    finally:
        registry.unregister("mix", "loose")
