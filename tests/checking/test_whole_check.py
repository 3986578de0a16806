"""Whole reports: every registered stage passes, translators and models of Hugging Face too; leaks are named."""

import leaky_models as leaky
import pytest
import torch
from checked_models import SIZES, find, language_model, off, run, translating, translator
from torch import nn

import combinations
import fullrank as fr
import hugging_face_models as tiny
from combinations import noisy
from fullrank.checking import agreement, calls, causality, definition
from fullrank.checking.calls import PLAIN
from fullrank.checking.causality import search_by_gradient, search_by_perturbation
from fullrank.checking.subject import open_subject
from fullrank.core.stages import PositionIndependentMixing
from pairs import covering

FUTURE = [f"future, by {how}, {when}" for how in ("perturbation", "gradient") for when in ("evaluation", "training")]
PADDED = "future, by perturbation, with padding"


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Few steps on random tokens."""
    monkeypatch.setattr(causality, "_STEPS", 2)
    monkeypatch.setattr(causality, "_WORK", 0)  # few cuts
    monkeypatch.setattr(calls, "RARE", False)


def skipped(report):
    return {finding.check: finding.reason for finding in report.findings if finding.verdict == "not applicable"}


def failed(report):
    return {finding.check: finding.remark for finding in report.failures}


# -- every stage ------------------------------------------------------------------------------------------------------

MULTILINEAR = {"kind": "multilinear", "cores": 2, "rank": 5}


# each choice of each slot, and every third of these every day; tests/properties looks at all pairs
ROWS = covering(combinations.pairwise(), lambda row: set(vars(row).items()))


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n % 3 == 1 else pytest.mark.full) for n in range(len(ROWS))]
)
def test_every_stage_passes(number):
    """With memory and without."""
    row = ROWS[number]
    remembers = number % 3 == 0 and row.mix_scores != "multi_token"
    model = row.model(**noisy(row), memory_length=6 if remembers else 0, max_position_embeddings=34)
    report = fr.check(model, length=11)
    assert failed(report) == {}
    allowed = {"starts as plain attention", "memory in segments = one pass"}
    if row.mix == "differential":
        allowed.add("future, by perturbation, parameters scaled")  # the exponentials of lambda overflow
    assert set(skipped(report)) <= allowed, skipped(report)
    assert ("memory in segments = one pass" in skipped(report)) != remembers
    if not row.weighted:
        assert skipped(report)["starts as plain attention"].startswith("model.attention.kind is multilinear")


@pytest.mark.parametrize("same_length", [False, True])
def test_memory_of_a_model_with_a_large_vocabulary_is_compared(same_length):
    """Of more than 4,096 words only some are compared: of segments and of one pass the same ones."""
    sizes = {"vocab_size": 4_500, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = fr.ModelConfig(**sizes, memory_length=6, same_length=same_length)
    subject = open_subject(fr.LanguageModel(config), length=11)
    assert find(definition.memory, subject).verdict == "passes"


TRANSLATORS = {
    "B, sigsoftmax": {"attention": fr.AttentionConfig(mix="position_wise", normalize="sigsoftmax", cross_head=0.5)},
    "relative, one table": {
        "position": "relative", "attention": fr.AttentionConfig(score="relative"), "norm": "post",
        "encoder": fr.EncoderConfig(share_embedding=True), "output": fr.OutputConfig(tied=True),
    },
    "multi-linear everywhere": {"attention": fr.AttentionConfig(**MULTILINEAR)},
    "synthesizer, mixture, released cross": {
        "attention": fr.AttentionConfig(score="random_synthesizer", mix="position_independent"),
        "output": fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=2),
        "decoder": fr.DecoderConfig(released_cross=True),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if "table" in kind else pytest.mark.full) for kind in TRANSLATORS]
)
def test_translators_pass(kind):
    dropout = fr.DropoutConfig(embedding=0.1, residual=0.1, activation=0.1, output=0.1)
    model = translator(**TRANSLATORS[kind], dropout=dropout)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    report = fr.check(model, length=11)
    assert failed(report) == {}
    expected = {"memory in segments = one pass"}
    if getattr(model.config.attention, "mix", "none") == "none":
        expected.add("starts as plain attention")
    assert set(skipped(report)) == expected
    assert report.description["source"] == "a translation model of fullrank"
    assert (report.description["model"], report.description["vocab_size"]) == ("Translator", SIZES["vocab_size"])
    assert report.description["parameters"] == model.num_parameters()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())  # left as it was


# -- models of Hugging Face -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["gpt2", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("llama", "gemma2"))]
)
def test_honest_models_of_hugging_face_pass(kind, capsys):
    report = fr.check(getattr(tiny, kind)())
    assert failed(report) == {}
    lacks = {"gemma2": "sdpa"}
    assert set(skipped(report)) == ({f"future, by perturbation, {lacks[kind]}"} if kind in lacks else set())
    assert all(skipped(report).values())
    assert report.description["source"] == "a model of Hugging Face"
    assert report.description["precision"] == "float64"
    assert capsys.readouterr() == ("", "")


def make_opt():
    """Its hidden states are wider than the layer before its output: 8 and 6."""
    import transformers

    config = transformers.OPTConfig(
        hidden_size=8, word_embed_proj_dim=6, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=47,
        max_position_embeddings=32, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return tiny.built(config)


INJECTED = {
    "gpt2": (tiny.gpt2, {"mix": "position_wise", "cross_head": 0.5}),
    "llama": (tiny.llama, {"mix": "position_independent", "normalize": "sigsoftmax"}),
    "opt": (make_opt, {"mix": "random"}),
    "gemma2, heads permuted alone": (tiny.gemma2, {"cross_head": 0.5}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt2" else pytest.mark.full) for name in INJECTED]
)
def test_injected_models_pass(name):
    make, stages = INJECTED[name]
    model = fr.inject(make(), **stages)
    report = fr.check(model)
    assert failed(report) == {}
    not_checked = {"memory in segments = one pass"}
    if "position" not in stages.get("mix", ""):
        not_checked.add("starts as plain attention")
    assert {check for check in skipped(report) if "future" not in check and "packed" not in check} == not_checked
    assert "auto" in report.of("kernels = reference, fp32").looked_at


def test_an_injected_mixing_that_does_not_start_plain(monkeypatch):
    start = PositionIndependentMixing.__init__

    def started_off(self, *sizes):
        start(self, *sizes)
        self.mixing.data.mul_(1.01)

    monkeypatch.setattr(PositionIndependentMixing, "__init__", started_off)
    finding = find(definition.check_plain_start, open_subject(fr.inject(tiny.llama(), mix="position_independent")))
    assert finding.verdict == "fails"


def test_a_model_of_ours_as_hugging_faces():
    """Its mixing, kernels, memory and probabilities are checked in the model that is inside."""
    torch.manual_seed(1)
    config = fr.ModelConfig(**SIZES, memory_length=4, attention=fr.AttentionConfig(mix="position_wise"))
    report = fr.check(fr.FullRankForCausalLM(fr.FullRankConfig.of(config)))
    assert failed(report) == {}
    assert {check for check in skipped(report) if "future" not in check and "packed" not in check} == set()


class Blind(nn.Module):
    """An attention layer of Hugging Face without its mask."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.layer.is_causal = False

    def forward(self, hidden_states, *args, **more):
        shape = (len(hidden_states), 1, hidden_states.shape[1], hidden_states.shape[1])
        more["attention_mask"] = torch.zeros(shape, dtype=hidden_states.dtype)
        return self.layer(hidden_states, *args, **more)


def test_a_layer_of_hugging_face_that_leaks_is_named():
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, intermediate_size=16,
        vocab_size=47, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = tiny.built(config)
    model.model.layers[1].self_attn = Blind(model.model.layers[1].self_attn)
    subject = open_subject(model)
    for training in (False, True):
        assert find(search_by_gradient, subject, PLAIN[training]).verdict == "fails"
        finding = find(search_by_perturbation, subject, PLAIN[training])
        assert finding.verdict == "fails"
        assert len(finding.layers) == 1
        assert finding.layers[0].startswith("model.layers.1.self_attn.layer")


# -- models that leak -------------------------------------------------------------------------------------------------

PUBLISHED = {"causal": "as_published", "not_next_token_perplexity": True}


@pytest.mark.parametrize("score", ["dot_product", pytest.param("relative", marks=pytest.mark.full)])
def test_the_published_form_is_flagged_by_name(score):
    attention = fr.AttentionConfig(**MULTILINEAR, **PUBLISHED, score=score)
    position = "relative" if score == "relative" else "sinusoidal"
    report = fr.check(language_model(attention=attention, position=position, norm="post"))
    assert report.as_dict()["sees_future"] == "model.attention.causal: as_published"
    remarks = failed(report)
    leaks = {*FUTURE, PADDED}
    assert leaks <= set(remarks)
    assert all(name.startswith("future") for name in remarks)
    for name in leaks:
        assert remarks[name].endswith("; model.attention.causal: as_published leaves the mask out")
        assert set(report.of(name).layers) <= {"blocks.0.attention.attend", "blocks.1.attention.attend"}
        assert report.of(name).layers or name == PADDED or "gradient" in name
    assert report.layers == ("blocks.0.attention.attend", "blocks.1.attention.attend")
    for name in ("incremental decoding = one pass", "memory in segments = one pass"):
        assert skipped(report)[name].startswith("model.attention.causal: as_published: ")
    for name in ("padding changes nothing", "kernels = reference, fp64", "kernels = reference, fp32"):
        assert report.of(name).verdict == "passes"


def test_the_published_form_inside_a_users_own_module_is_flagged_by_name():
    class Published(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.scores = nn.Embedding(19, 12), nn.Linear(12, 19)
            self.attend = fr.MultiLinearAttention(
                hidden_size=12, rank=6, causal="as_published", max_position_embeddings=34
            )

        def forward(self, input_ids):
            out = self.scores(self.attend(self.words(input_ids)))
            return out

    torch.manual_seed(1)
    report = fr.check(Published(), vocab_size=19)
    assert report.layers == ("attend.attend",)
    remarks = failed(report)
    assert all(remarks[name].endswith("model.attention.causal: as_published leaves the mask out") for name in FUTURE)


def test_a_decoder_as_published_is_named():
    attention = fr.AttentionConfig(**MULTILINEAR, **PUBLISHED)
    decoder = translating(decoder=fr.DecoderConfig(attention=attention))
    assert decoder.sees_future == "model.decoder.attention.causal: as_published"
    finding = run(search_by_perturbation, decoder)
    assert off(finding)
    assert finding.remark.endswith("model.decoder.attention.causal: as_published leaves the mask out")
    assert run(agreement.decoding, decoder).verdict == "not applicable"
    assert find(agreement.padding, decoder).verdict == "passes"
    attention = fr.AttentionConfig(**MULTILINEAR, causal="as_published")
    encoder = translating(encoder=fr.EncoderConfig(vocab_size=23, attention=attention))
    assert (encoder.sees_future, find(search_by_perturbation, encoder).verdict) == ("", "passes")


def test_a_check_that_cannot_be_run_fails_and_the_others_go_on():
    class Untrainable(leaky.Model):
        def forward(self, input_ids):
            if self.training:
                raise RuntimeError("only for evaluation")
            return super().forward(input_ids)

    report = fr.check(Untrainable())
    random = "future, after training on random tokens"
    trained = {random, "rows of a batch are independent, training", "future, prefix = whole, training"}
    assert set(failed(report)) == {FUTURE[1], FUTURE[3], *trained}
    assert "RuntimeError: only for evaluation" in report.failures[0].remark
    assert report.of(FUTURE[0]).verdict == "passes"
    with pytest.raises(KeyError):
        report.of("another")
