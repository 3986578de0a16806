"""The models that can be configured: `Combination`s of one choice for each slot.

They are discovered from the registry when the tests are collected: a stage that somebody registers is checked without a
word in this folder (`test_new_stage.py` proves it).
"""

import functools
import itertools
import random
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

import fullrank as fr
import moving
from fullrank.core import registry
from fullrank.core.config import DropoutConfig
from fullrank.core.errors import InputError
from moving import moved
from pairs import covering

VOCABULARY, WIDTH, HEADS, HEAD_DIM, LAYERS, LENGTH = 11, 10, 4, 6, 2, 7  # differential attention pairs heads

CLUSTERED = {"kind": "adaptive", "cutoffs": [4, 8], "div_val": 2}  # widths 10, 5, 2
MIXED = {"kind": "mixture_of_softmaxes", "mixtures": 3}

# outputs that need more than their name, and variants of them whose names are known here only
OUTPUTS = {
    "adaptive": CLUSTERED,
    "mixture_of_softmaxes": MIXED,
    "mixture_of_sigsoftmaxes": MIXED | {"normalize": "sigsoftmax", "latent_dropout": 0.1},
}

# gates that need more than their name
GATES = {"exclusive_learned": {"name": "exclusive", "learned": True}}

# ways to attend beside weighted values: what a configuration of each of them says
MULTILINEAR = {"kind": "multilinear", "cores": 2, "rank": 5}
ATTENDS = {"multilinear": MULTILINEAR, "multilinear_decayed": MULTILINEAR | {"output_map": "decayed", "decays": 3}}
# ways to attend that take `score: relative`; a multi-linear one adds a position term for it
POSITION_TERM = {"weighted", "multilinear"}

# Mixings that start as products with a factor of zero: the other factor has no gradient at the first step.
FACTORS = {"low_rank", "dynamic"}

# The two mixings of the paper's ablation (§4.4.2) do not start as plain attention; every other stage has to, unless its
# class says `starts_plain = False`.
NEVER_PLAIN = {"random", "average"}


# the slots whose pairs the everyday tier covers
ATTENTION_SLOTS = ("attend", "score", "normalize", "mix", "position", "norm")

# choices that go with everything; attention without weights has nothing else to normalise, to mix or to score
PLAIN = {
    "attend": "weighted", "score": "dot_product", "normalize": "softmax", "mix": "none", "position": "sinusoidal",
    "mix_qkv": "none", "mix_scores": "none", "gate": "none", "kv_heads": "all", "qk_norm": "False",
}  # fmt: skip
# slots of a weighted configuration alone
EXTRAS = ("mix_qkv", "mix_scores", "gate", "qk_norm")
# what a mixing of heads does not go with, by its slot and name
EXCLUDED = {
    ("mix_scores", "multi_token"): {
        "score": {"relative", "dense_synthesizer", "random_synthesizer"}, "position": {"relative", "alibi", "t5"},
    },
    ("mix_qkv", "interleaved"): {
        "score": {"relative", "dense_synthesizer", "random_synthesizer"}, "position": {"relative", "alibi", "t5"},
        "mix_scores": {"multi_token", "dynamic"}, "mix": {"dynamic"}, "gate": {"exclusive", "exclusive_learned"},
        "kv_heads": {"1"},
    },
}  # fmt: skip


def possible(choices):
    """True if a configuration may hold these choices, of all slots or of some.

    `score: relative` and `position: relative` go together only; norms of queries and keys go with scores that read both.
    """
    for (slot, name), others in EXCLUDED.items():
        if choices.get(slot) == name and any(choices.get(other) in names for other, names in others.items()):
            return False
    score, position, attend = (choices.get(slot) for slot in ("score", "position", "attend"))
    if score is not None and choices.get("qk_norm") == "True" and "keys" not in score_needs(score):
        return False
    if score is not None and position is not None and (score == "relative") != (position == "relative"):
        return False
    if attend is None or attend == "weighted":
        return True
    if attend not in POSITION_TERM and "relative" in (score, position):
        return False
    weightless = all(choices.get(slot, PLAIN[slot]) == PLAIN[slot] for slot in ("normalize", "mix", *EXTRAS))
    return weightless and score in (None, "dot_product", "relative") and position not in ("rotary", "alibi", "t5")


@dataclass(frozen=True)
class Combination:
    """One name for each slot that a configuration fills."""

    attend: str
    score: str
    normalize: str
    mix: str
    position: str
    norm: str
    activation: str
    initializer: str
    input: str
    output: str
    mix_qkv: str
    mix_scores: str
    gate: str
    norm_type: str
    kv_heads: str
    qk_norm: str

    def but(self, slot, choice):
        """This combination with another choice; choices that it excludes follow."""
        changed = vars(self) | {slot: choice}
        for partner, plain in PLAIN.items():
            if partner != slot and not possible({slot: choice, partner: changed[partner]}):
                changed[partner] = "relative" if choice == "relative" and partner != "attend" else plain
        assert possible(changed)
        return Combination(**changed)

    def __str__(self):
        return "-".join(getattr(self, field.name) for field in fields(self))

    @property
    def weighted(self):
        """True if there are attention weights."""
        return self.attend == "weighted"

    def config(self, **changes):
        attention = {"score": self.score, "normalize": self.normalize, "mix": self.mix}
        if self.weighted:
            attention |= {
                "mix_qkv": self.mix_qkv,
                "mix_scores": self.mix_scores,
                "gate": GATES.get(self.gate, self.gate),
            }
            attention["qk_norm"] = self.qk_norm == "True"
        attention |= ATTENDS.get(self.attend, {"kind": self.attend}) | changes.pop("attention", {})
        settings = {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "head_dim": HEAD_DIM,
            "intermediate_size": 13,
            "max_position_embeddings": 16,
            "position": self.position,
            "norm": self.norm,
            "norm_type": self.norm_type,
            "num_key_value_heads": None if self.kv_heads == "all" else 1,
            "hidden_act": self.activation,
            "initializer": self.initializer,
            "attention": fr.AttentionConfig(**attention),
            "input": fr.InputConfig(**CLUSTERED if self.input == "adaptive" else {"kind": self.input}),
            "output": fr.OutputConfig(**OUTPUTS.get(self.output, {"kind": self.output})),
        }
        return fr.ModelConfig(**settings | changes)

    def model(self, *, dtype=torch.float32, seed=3, **changes):
        moving.seed(seed)
        return fr.LanguageModel(self.config(**changes)).to(dtype).eval()

    def moved(self, *, dtype=torch.float32, **changes):
        """A model away from its start: every parameter, so every mixing weight too, is perturbed."""
        return moved(self.model(dtype=dtype, **changes))


@dataclass(frozen=True)
class Variant(Combination):
    """A combination with keys of the model that no slot has."""

    keys: tuple[tuple[str, Any], ...] = ()

    @property
    def weighted(self):
        return dict(self.keys)["attention"].get("kind") != "multilinear"

    def config(self, **changes):
        keys = dict(self.keys)
        attention = keys.pop("attention", {}) | changes.pop("attention", {})
        return super().config(**keys | changes, attention=attention)


B = {"mix": "position_wise"}
STRIDED = {"pattern": "strided", "stride": 3}
OF_QUERY = {"name": "dynamic", "keys": False}
OWN_BIASES = {"score": {"name": "relative", "shared_biases": False}}
# the attention of each layer, or of all, by the position of the model
VARIANTS = {
    "strided": ("none", [STRIDED]),
    "strided, relative": ("relative", [STRIDED | B | {"score": "relative"}]),
    "own biases": ("relative", [OWN_BIASES, OWN_BIASES | B]),
    "relative, then B": ("relative", [{"score": "relative"}, B | {"score": "relative", "normalize": "sigsoftmax"}]),
    "cross-head, then B": ("rotary", [{"cross_head": 0.5}, B]),
    "pairs, then B": ("sinusoidal", [MULTILINEAR, B]),
    "gates, then decayed sums": ("none", [{"gate": "head"}, ATTENDS["multilinear_decayed"]]),
    "decayed sums, then pairs": ("none", [ATTENDS["multilinear_decayed"], MULTILINEAR]),
    "synthesizers": ("none", [{"score": "dense_synthesizer"} | B, {"score": "random_synthesizer", "mix": OF_QUERY}]),
    "position terms": ("relative", [MULTILINEAR | {"score": "relative", "cores": cores} for cores in (1, 2)]),
}


def variant(name):
    """The variant of that name in `VARIANTS`; what it does not name is plain."""
    position, attentions = VARIANTS[name]
    layers = [fr.LayerConfig(attention=fr.AttentionConfig(**attention)) for attention in attentions]
    keys = {"attention": attentions[0], "layers": layers if len(layers) > 1 else []}
    others = {"norm": "pre", "activation": "relu", "initializer": "fairseq", "norm_type": "layer_norm"}
    plain = PLAIN | others | {"position": position, "input": "token", "output": "softmax"}
    return Variant(**plain, keys=tuple(keys.items()))


@functools.cache
def slots():
    """The choices of each field of a `Combination`; stages that other tests register later are not among them."""
    return {
        "attend": sorted({*registry.names("attend"), *ATTENDS}),
        "score": registry.names("score"),
        "normalize": registry.names("normalize"),
        "mix": registry.names("mix"),
        "position": registry.names("position"),
        "norm": ["post", "pre"],
        "activation": registry.names("activation"),
        "initializer": registry.names("initializer"),
        "input": registry.names("input"),
        "output": sorted({*registry.names("output"), *OUTPUTS}),
        "mix_qkv": registry.names("mix_qkv"),
        "mix_scores": registry.names("mix_scores"),
        # differential needs grouped queries: core/test_mixers.py
        "gate": sorted({*registry.names("gate"), *GATES} - {"differential"}),
        "norm_type": registry.names("norm_type"),
        "kv_heads": ["1", "all"],
        "qk_norm": ["False", "True"],
    }


TURNS = (
    "activation", "initializer", "input", "output", "mix_qkv", "mix_scores", "gate", "norm_type", "kv_heads", "qk_norm",
)  # fmt: skip


def every_attention():
    """The full product of the stages of attention with weights, in which the other slots take turns.

    With a score that reads no keys, positions take turns, too. Other ways to attend have every position, norms in turn.
    """
    choices = slots()
    others = TURNS
    positions = itertools.cycle(choices["position"])
    every = [*itertools.product(*(choices[slot] for slot in others))]
    random.Random(0).shuffle(every)  # in their own order the last choices of the first slot would come too late
    turns = itertools.cycle(every)
    combinations = []
    for stages in itertools.product(*(choices[slot] for slot in ("score", "normalize", "mix", "norm"))):
        row = dict(zip(("score", "normalize", "mix", "norm"), stages, strict=True))
        allowed = [position for position in choices["position"] if possible(row | {"position": position})]
        if "keys" not in score_needs(row["score"]):
            allowed = [next(position for position in positions if position in allowed)]
        for position in allowed:
            combinations.append(_turned("weighted", row | {"position": position}, turns))
    norms = itertools.cycle(choices["norm"])
    for attend, position in itertools.product(choices["attend"], choices["position"]):
        row = PLAIN | {"attend": attend, "position": position}
        row["score"] = "relative" if position == "relative" else "dot_product"
        if attend != "weighted" and possible(row):
            combinations.append(_turned(attend, row | {"norm": next(norms)}, turns))
    return combinations


def _turned(attend, row, turns):
    """`row` with the next choices of the slots that take turns."""
    others = dict(zip(TURNS, next(turns), strict=True))
    for slot in TURNS:
        chosen = row | others | {"attend": attend}
        if not all(possible({slot: others[slot], other: choice}) for other, choice in chosen.items()):
            others[slot] = PLAIN[slot]
    return Combination(**row | others | {"attend": attend})


def score_needs(score):
    """Heads that a score reads."""
    needs = getattr(registry.lookup("score", score), "needs", ("scored", "keys"))
    return needs


def tiered(rows, step=1):
    """Test cases: few rows that hold every pair of choices of attention, or every `step`-th of these; the rest is full."""
    chosen = covering(range(len(rows)), lambda i: _pairs_of(vars(rows[i]), ATTENTION_SLOTS))
    everyday = sorted(chosen)[::step]
    marks = [() if i in everyday else pytest.mark.full for i in range(len(rows))]
    return [pytest.param(row, id=str(row), marks=mark) for row, mark in zip(rows, marks, strict=True)]


def in_turn(rows, choices):
    """Test cases of `tiered` rows, each with one of the choices in turn; with the others they are of the full tier."""
    cases = []
    turns = itertools.count()
    for row in tiered(rows):
        turn = next(turns) if not row.marks else 0
        for i, (name, choice) in enumerate(choices.items()):
            marks = row.marks if i == turn % len(choices) else pytest.mark.full
            cases.append(pytest.param(*row.values, choice, id=f"{name}-{row.id}", marks=marks))
    return cases


def sparse(rows, step):
    """Test cases: every `step`-th row; all others are of the full tier."""
    marks = [() if i % step == 0 else pytest.mark.full for i in range(len(rows))]
    return [pytest.param(row, id=str(row), marks=mark) for row, mark in zip(rows, marks, strict=True)]


def every_pair_of_choices():
    """(slot, choice, other slot, its choice), for all that may stand together."""
    choices = slots()
    for a, b in itertools.combinations(choices, 2):
        for x, y in itertools.product(choices[a], choices[b]):
            if possible({a: x, b: y}):
                yield a, x, b, y


def pairwise():
    """Few combinations in which every pair of choices of two slots occurs."""
    choices = slots()
    names = list(choices)

    def pairs(row):
        return ((a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2))

    missing = set(every_pair_of_choices())
    rows = []
    while missing:
        a, x, b, y = min(missing)
        row = {a: x, b: y}
        for name in names:
            if name not in row:
                allowed = [c for c in choices[name] if possible(row | {name: c})]
                row[name] = max(allowed, key=lambda c: (len(missing & _pairs_of(row | {name: c}, names)), c))
        missing -= set(pairs(row))
        rows.append(Combination(**row))
    return rows


def _pairs_of(row, names):
    """Pairs of choices that stand in `row`, of the slots `names`."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2) if a in row and b in row}


def kernels_for(model):
    """The kernels that can compute a model on this machine.

    Triton's interpreter is left out: `test_kernels_agree.py` compares it with the definition, and it takes most of the time.
    """
    from fullrank.kernels import NAMES

    able = []
    for name in NAMES:
        if name == "auto" or (name == "triton" and not torch.cuda.is_available()):
            continue
        with fr.kernel(name):
            try:
                model(tokens(1, 2)) if isinstance(model, fr.LanguageModel) else model(torch.zeros(1, 2, WIDTH))
            except InputError:
                continue
        able.append(name)
    return able


def tokens(rows=2, length=LENGTH, seed=5):
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def starts_plain(mix):
    return getattr(registry.lookup("mix", mix), "starts_plain", mix not in NEVER_PLAIN)


def noisy(combination, attention=0.2, other=0.1, cross_head=0.5):
    """Every kind of randomness that training has; attention without weights drops none and permutes no head."""
    attention, cross_head = (attention, cross_head) if combination.weighted else (0.0, 0.0)
    dropout = DropoutConfig(embedding=other, attention=attention, activation=other, residual=other, output=other)
    return {"dropout": dropout, "attention": {"cross_head": cross_head}}
