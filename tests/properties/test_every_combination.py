"""The properties, for everything registered."""

import functools
import itertools
from dataclasses import replace

import property_checks as checks
import pytest
import torch

import combinations
import fullrank as fr
from fullrank.core.errors import ConfigError

ATTENTION = combinations.every_attention()
PAIRS = combinations.pairwise()
PLAIN_GATES = {"head", "elementwise", "exclusive_learned"}
PLAIN_STARTS = [c for c in ATTENTION if c.mix != "none" and combinations.starts_plain(c.mix)]

PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64}


def test_pairwise_holds_every_pair():
    """Combinations that go together; docs/combinations.md lists the others."""
    slots = combinations.slots()
    rows = [vars(row) for row in PAIRS]
    for a, b in itertools.combinations(slots, 2):
        expected = {(x, y) for first, x, second, y in combinations.every_pair_of_choices() if (first, second) == (a, b)}
        assert {(row[a], row[b]) for row in rows} == expected
    for slot, names in slots.items():
        assert {vars(row)[slot] for row in ATTENTION} == set(names)


def test_pairs_that_are_left_out_are_refused():
    """Multi-linear attention takes no stages: tests/core/refused.yaml."""
    plain = combinations.variant("strided")
    slots = combinations.slots()
    for a, b in itertools.combinations([slot for slot in slots if slot != "attend"], 2):
        for x, y in itertools.product(slots[a], slots[b]):
            if not combinations.possible({a: x, b: y}):
                with pytest.raises(ConfigError):
                    replace(plain, **{a: x, b: y}, keys=(("attention", {}),)).config()


@pytest.mark.parametrize(
    ("combination", "training"), combinations.in_turn(ATTENTION, {"evaluation": False, "training": True})
)
def test_changing_a_token_changes_nothing_before_it(combination, training):
    checks.changing_a_token_changes_nothing_before(combination, training)


@pytest.mark.parametrize("combination", combinations.tiered(ATTENTION))
def test_no_gradient_from_the_future(combination):
    checks.no_gradient_from_the_future(combination)


@pytest.mark.parametrize("combination", combinations.tiered(PLAIN_STARTS, 2))
def test_starts_as_plain_attention(combination):
    checks.starts_as_plain_attention(combination)


@pytest.mark.parametrize("combination", combinations.sparse([c for c in ATTENTION if c.gate in PLAIN_GATES], 20))
def test_gates_start_as_plain_attention(combination):
    checks.gates_start_as_plain_attention(combination)


@pytest.mark.parametrize("check", [
    checks.mixing_leaves_other_parameters_alone, checks.evaluation_is_deterministic, checks.weight_decay_spares_mixing,
    checks.meta_build_is_the_real_one,
])  # fmt: skip
@pytest.mark.parametrize("combination", combinations.tiered(ATTENTION, 4))
def test_of_some(check, combination):
    check(combination)


@pytest.mark.parametrize("check", [checks.decoding_equals_one_pass, checks.padding_changes_nothing])
@pytest.mark.parametrize(("combination", "dtype"), combinations.in_turn(ATTENTION, PRECISIONS))
def test_in_a_precision(check, combination, dtype):
    check(combination, dtype)


@pytest.mark.parametrize(
    ("combination", "dtype"),
    combinations.in_turn(
        [c for c in ATTENTION if c.mix_scores != "multi_token"],  # it has no memory
        PRECISIONS,
    ),
)
def test_segments_with_memory_equal_one_pass(combination, dtype):
    checks.segments_with_memory_equal_one_pass(combination, dtype)


@pytest.mark.parametrize("name", combinations.VARIANTS)
def test_keys_that_no_slot_has(name):
    """Patterns of keys, and layers that differ in attention."""
    variant = combinations.variant(name)
    wide = torch.float64
    checks.changing_a_token_changes_nothing_before(variant, False)
    checks.decoding_equals_one_pass(variant, wide)
    checks.segments_with_memory_equal_one_pass(variant, wide)
    checks.padding_changes_nothing(variant, wide)


@pytest.mark.parametrize(("combination", "at_start"), combinations.in_turn(ATTENTION, {"start": True, "later": False}))
def test_gradients_reach_every_parameter(combination, at_start):
    checks.gradients_reach_every_parameter(combination, at_start)


@pytest.mark.parametrize("combination", combinations.sparse(PAIRS, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_saved_and_loaded(combination, dtype, tmp_path):
    checks.saved_and_loaded(combination, dtype, tmp_path)


@pytest.mark.parametrize("combination", combinations.sparse(PAIRS, 3))
def test_double_precision_agrees(combination):
    checks.double_precision_agrees(combination)


@pytest.mark.parametrize("combination", combinations.sparse(PAIRS, 9))
def test_learns(combination):
    checks.learns(combination)


def _belongs_to(slot):
    """Test of names: does a parameter belong to the part of a model that a slot chooses?"""
    read = ("query", "key", "relative", "query_norm", "key_norm")  # a score says what it reads
    scores = (".attend.score.", *(f".project.{name}." for name in read))
    marks = {
        "attend": ("position.", ".attention."),
        "position": ("position.", *scores),  # with relative positions comes the relative score
        "activation": (".feed_forward.",),
        "score": ("position.", *scores),
        "normalize": (".attend.normalize.",),
        "mix": (".attend.mix.", ".project.query."),  # position-wise mixing reads the query where no score does
        "norm": ("final_norm.",),
        "initializer": (),
        "input": ("embedding.",),
        "output": ("output.",),
        "mix_qkv": (".project.mix_qkv.",),
        "mix_scores": (".attend.mix_scores.",),
        "gate": (".attention.gate.",),
        "norm_type": ("_norm.",),
        "kv_heads": (".project.key.", ".project.value.", ".project.relative."),
        "qk_norm": scores,  # a score that reads keys comes with it
    }
    return lambda name: any(mark in name for mark in marks[slot])


@functools.cache
def shapes_of(combination):
    with torch.device("meta"):
        model = fr.LanguageModel(combination.config(head_dim=None, hidden_size=24, num_hidden_layers=1))
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("rows", [PAIRS[::8], pytest.param(PAIRS, marks=pytest.mark.full)], ids=["some", "every"])
@pytest.mark.parametrize("slot", combinations.slots())
def test_configurations_that_share_a_part_share_its_names_and_shapes(slot, rows):
    belongs = _belongs_to(slot)
    for row in rows:
        shapes = []
        for choice in combinations.slots()[slot]:
            chosen = row.but(slot, choice)
            if slot != "attend" and chosen.attend != row.attend:
                continue  # another way to attend has other parts, and its own comparison
            mixers = {"mix_qkv", "mix_scores", "mix", "gate", "kv_heads"} - {slot}
            mixers |= {"score", "position"} if slot in ("mix_qkv", "mix_scores") else set()
            if any(vars(chosen)[name] != vars(row)[name] for name in mixers):
                continue  # it excludes another mixer of the row
            shapes.append({name: shape for name, shape in shapes_of(chosen).items() if not belongs(name)})
        assert all(other == shapes[0] for other in shapes)
