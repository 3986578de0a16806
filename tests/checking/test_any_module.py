"""Any module can be checked: functions, other inputs, vectors, caches of one's own, small vocabularies, half precision."""

import functools
import threading
import types

import leaky_models as leaky
import pytest
import torch
from torch import Tensor, nn

import fullrank as fr
from fullrank.checking import list_checks
from fullrank.checking.report import Finding, Report
from fullrank.checking.subject import open_subject
from fullrank.core.errors import InputError
from fullrank.forward import logits_in

LEAK = lambda module, args, out: out + out.mean(1, keepdim=True)  # noqa: E731


def leaking(report):
    return any(finding.leaks for finding in report.failures)


class Speech(nn.Module):
    """Frames (B, N, 6) of a speaker (B,) in, classes (B, N, 5) out."""

    def __init__(self, leaks):
        super().__init__()
        self.speakers, self.mix, self.out = nn.Embedding(3, 6), nn.Conv1d(6, 6, 3), nn.Linear(6, 5)
        self.leaks = leaks

    def forward(self, frames, speaker):
        x = (frames + self.speakers(speaker)[:, None]).transpose(1, 2)
        x = nn.functional.pad(x, (1, 1) if self.leaks else (2, 0))
        return {"logits": self.out(self.mix(x).transpose(1, 2))}


@pytest.mark.parametrize("form", ["by name", "in order"])
def test_other_inputs_and_vectors(form):
    frames = torch.randn(2, 23, 6)
    speaker = torch.tensor([0, 2])
    inputs = {"frames": frames, "speaker": speaker} if form == "by name" else (frames, speaker)
    assert fr.check(Speech(leaks=False), inputs, quick=True).passes
    report = fr.check(Speech(leaks=True), inputs, quick=True)
    assert leaking(report)
    assert report.layers == ("mix",)
    finding = report.of("future, by perturbation, evaluation")
    assert finding.leaks.startswith("positions before ")
    with pytest.raises(InputError, match=r"sequence: speaker; .* in inputs: frames"):
        fr.check(Speech(leaks=False), {"frames": frames, "speaker": speaker}, sequence="speaker")
    with pytest.raises(InputError, match="length: 40, but the example inputs"):
        fr.check(Speech(leaks=False), inputs, length=40)
    with pytest.raises(InputError, match=r"raised TypeError: .*speaker.* inputs=\{"):
        fr.check(Speech(leaks=False), frames)


def test_functions_and_methods():
    torch.manual_seed(2)
    table = torch.randn(11, 11)
    assert fr.check(lambda ids: table[ids], vocab_size=11, quick=True).passes
    assert leaking(fr.check(lambda ids: table[ids] + table[ids.flip(1)], vocab_size=11, quick=True))
    model = leaky.Model({1: leaky.Attention(leaky.everything)})
    assert fr.check(model.forward, quick=True).layers[0].endswith("blocks.1.attention")
    with pytest.raises(InputError, match="give vocab_size"):
        fr.check(lambda ids: table[ids])
    with pytest.raises(InputError, match="a torch module or a function of token ids, given str"):
        fr.check("gpt2")


@pytest.mark.full
def test_a_compiled_module_is_looked_into():
    model = torch.compile(leaky.Model({1: leaky.Attention(leaky.everything)}), backend="eager")
    assert fr.check(model, quick=True).layers == ("blocks.1.attention",)


class Recurrent(nn.Module):
    """A running mean of vectors, with a state (sum, count)."""

    def __init__(self, forgets=False):
        super().__init__()
        torch.manual_seed(4)
        self.words, self.out = nn.Embedding(13, 6), nn.Linear(6, 13)
        self.forgets = forgets

    def step(self, ids, state):
        before, count = (0.0, 0) if state is None else state
        total = self.words(ids).cumsum(1) + before
        positions = torch.arange(1, ids.shape[1] + 1, device=ids.device)[None, :, None]
        new_state = (total[:, -1:], 0 if self.forgets else count + ids.shape[1])
        return self.out(total / (positions + count)), new_state

    def forward(self, ids):
        return self.step(ids, None)[0]


def test_a_cache_of_ones_own():
    for forgets, method in ((False, True), (True, True), (False, False), (True, False)):
        model = Recurrent(forgets)
        step = model.step if method else lambda ids, state, model=model: model.step(ids, state)
        report = fr.check(model, quick=True, step=step)
        assert report.of("incremental decoding = one pass").verdict == ("fails" if forgets else "passes")
        assert report.of("future, by perturbation, after a cache").verdict == "passes"


def test_a_model_that_reads_short_texts_only():
    class Short(leaky.Model):
        def __init__(self):
            super().__init__()
            self.positions = nn.Embedding(20, leaky.WIDTH)

        def forward(self, input_ids):
            return self.output(self.hidden(input_ids) + self.positions(torch.arange(input_ids.shape[1])))

    assert fr.check(Short(), quick=True, vocab_size=leaky.VOCABULARY, length=17).passes
    # without a length, one that it reads is found
    assert fr.check(Short(), quick=True, vocab_size=leaky.VOCABULARY, only="future, prefix").passes
    with pytest.raises(InputError, match="40 tokens raised IndexError"):
        fr.check(Short(), vocab_size=leaky.VOCABULARY, length=40)


def test_two_sequences_that_are_short_both():
    class Short(nn.Module):
        """Twenty positions for each, which it does not say."""

        def __init__(self):
            super().__init__()
            self.config = types.SimpleNamespace(is_encoder_decoder=True)
            self.words, self.positions, self.out = nn.Embedding(30, 8), nn.Embedding(20, 8), nn.Linear(8, 30)

        def embed(self, ids):
            return self.words(ids) + self.positions(torch.arange(ids.shape[1]))

        def forward(self, input_ids, decoder_input_ids):
            source = self.embed(input_ids).mean(1, keepdim=True)
            return self.out(self.embed(decoder_input_ids) + source)

    report = fr.check(Short(), quick=True, only="future, by perturbation, evaluation")
    assert (report.verdict, report.description["length"]) == ("passes", 17)


def test_large_models_are_checked_in_single_precision(monkeypatch):
    monkeypatch.setattr("fullrank.checking.subject.DOUBLE_UP_TO", 100)
    assert open_subject(leaky.Model()).dtype == torch.float32
    assert fr.check(leaky.Model(), quick=True).passes
    assert leaking(fr.check(leaky.Model({1: leaky.Gated()}), quick=True))


def test_a_leak_of_double_precision_alone_is_none():
    """A mask in float32 beside vectors in float64: some kernels of torch misread it, and nobody trains so."""

    class Misreads(nn.Module):
        def forward(self, x):
            return x.mean(1, keepdim=True).expand_as(x) if x.dtype == torch.float64 else torch.zeros_like(x)

    report = fr.check(leaky.Model({1: Misreads()}), quick=True)
    assert report.passes
    assert "in float64 alone" in report.of("future, by perturbation, evaluation").remark
    assert "in float64 alone" in report.of("future, by gradient, evaluation").remark


def test_the_models_own_rounding_is_no_leak():
    """A sum over all experts' tokens, added and taken away again: what is left is rounding, and it is measured."""

    class Rounds(nn.Module):
        def forward(self, x):
            far = 3e3 * x.sum((0, 1), keepdim=True)
            order = torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device)[:, None, None]
            return (x + far * order) - far * order

    def finding(noise):
        subject = open_subject(leaky.Model({1: Rounds()}))
        return list_checks(subject, quick=True)["future, by perturbation, evaluation"](subject)

    assert finding(1.0).verdict == "passes"
    assert "own rounding" in finding(1.0).reason


def test_rounding_that_a_model_enlarges_is_no_difference():
    """An angle of 10^7: the last digits of a mean, which depend on how many tokens are added at once, are seen in its sine."""

    class Enlarges(nn.Module):
        def forward(self, x):
            counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
            return torch.sin(1e7 * x.cumsum(1) / counts[:, None])

    finding = fr.check(leaky.Model({1: Enlarges()}), only=["future, prefix = whole"], quick=True).findings[0]
    assert finding.verdict == "passes"
    assert "own rounding" in finding.reason


@pytest.mark.full
def test_an_encoder_decoder_of_hugging_face():
    import transformers

    sizes = {"vocab_size": 47, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    torch.manual_seed(3)
    some = ("future, by perturbation, evaluation", "future, by gradient, training", "padding", "incremental")
    report = fr.check(transformers.T5ForConditionalGeneration(config), only=some)
    assert report.passes, report
    assert report.of("incremental decoding = one pass").verdict == "passes"
    model = transformers.T5ForConditionalGeneration(config)
    model.decoder.block[1].layer[2].register_forward_hook(LEAK)
    report = fr.check(model, only=some)
    assert leaking(report)
    assert report.layers == ("decoder.block.1.layer.2",)


def test_inputs_that_allow_no_other_length():
    class Aligned(nn.Module):
        """As many frames as tokens."""

        def __init__(self):
            super().__init__()
            self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)

        def forward(self, ids, frames, attention_mask=None):
            out = self.out(self.words(ids) + frames)
            return out

    inputs = {"ids": torch.randint(9, (2, 11)), "frames": torch.randn(2, 11, 4)}
    report = fr.check(Aligned(), inputs, quick=True)
    assert report.passes, report
    assert "no text of another length" in report.of("padding changes nothing").reason


def test_lengths_that_a_model_refuses():
    model = leaky.Model()
    model.register_forward_pre_hook(lambda _, args: None if args[0].shape[1] % 8 == 0 else 1 / 0)
    assert fr.check(model, vocab_size=leaky.VOCABULARY).passes


# -- functions, modes, masks ------------------------------------------------------------------------------------------

IN_TRAINING = leaky.Model({1: leaky.TrainingOnly()})


def call_global(ids):
    return IN_TRAINING(ids)


def ways_to_hand_a_model_on():
    model = leaky.Model({1: leaky.TrainingOnly()})

    class Trainer:
        """Holds a model, and a lock, which Python cannot copy."""

        def __init__(self):
            self.model = model
            self.lock = threading.Lock()

        def run(self, ids):
            return self.model(ids)

        __call__ = run

    @torch.no_grad()
    def without_gradient(ids):
        return model(ids)

    trainer = Trainer()
    several = [model]
    return {
        "a closure": lambda ids: model(ids),
        "a closure of closures": lambda ids: without_gradient(ids),
        "a default": lambda ids, model=model: model(ids),
        "a list": lambda ids: several[0](ids),
        "a global": lambda ids: call_global(ids),
        "a partial": functools.partial(lambda model, ids: model(ids), model),
        "a method": model.forward,
        "a method of another object": trainer.run,
        "an object": trainer,
        "an object in a closure": lambda ids: trainer.model(ids),
        "a decorated function": without_gradient,
    }


FEW = {"a closure of closures", "a partial", "an object in a closure"}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in FEW else pytest.mark.full) for way in ways_to_hand_a_model_on()]
)
def test_the_model_inside_a_function_is_found(way):
    """Its leak in training is found, its layer named, and it is left as it was."""
    function = ways_to_hand_a_model_on()[way]
    before = [p.clone() for p in IN_TRAINING.parameters()]
    report = fr.check(function, quick=True, only=("future, by perturbation",))
    assert {finding.check.rpartition(", ")[2] for finding in report.failures} == {"training", "other seeds"}
    assert report.layers[0].endswith("blocks.1.attention")
    assert report.description["parameters"] == sum(p.numel() for p in IN_TRAINING.parameters())
    assert all(map(torch.equal, before, IN_TRAINING.parameters()))


def test_what_could_not_be_checked_does_not_pass():
    for report in (fr.check(leaky.Constant(), quick=True), fr.check(leaky.Model(), quick=True, only=("padding",))):
        assert (report.passes, report.verdict, report.failures) == (False, "not checked", ())
        assert (report.as_dict()["passes"], report.as_dict()["verdict"]) == (False, "not checked")
        assert report.headline.startswith("It could not be checked: ")
        assert "pass" not in report.headline.partition(";")[0]


def test_a_leak_that_rounding_hides_is_on_every_path():
    leak = Finding(
        "fails", check="future, by perturbation, evaluation", path="evaluation", leaks="positions see later ones"
    )
    names = ("in bfloat16", "under autocast, training")
    hidden = [Finding("passes", check=f"future, by perturbation, {name}") for name in names]
    assert Report((leak, *hidden), {}).headline.startswith("Sees later tokens on every code path.")


def test_a_square_mask_is_none_of_padding():
    class Square(leaky.Model):
        """Takes a mask (N, N) of what sees what."""

        def forward(self, input_ids, attention_mask=None):
            for block in self.blocks:
                seen = leaky.causal(input_ids.shape[1])
                block.attention.sees = lambda n, seen=seen: seen if attention_mask is None else attention_mask & seen
            return super().forward(input_ids)

    report = fr.check(Square(), quick=True)
    assert report.passes, report
    assert "which argument is the mask?" in report.of("padding changes nothing").reason
    ids = torch.randint(1, leaky.VOCABULARY, (3, 23))
    report = fr.check(Square(), {"input_ids": ids, "attention_mask": leaky.causal(23)}, quick=True)
    assert report.passes, report


def test_zeros_and_infinities_as_a_mask_of_padding():
    class Added(leaky.Attention):
        mask: Tensor | None = None

        def forward(self, x):
            query, key, value = self.project(x).chunk(3, dim=-1)
            scores = (query @ key.mT).masked_fill(~self.sees(x.shape[1]), float("-inf"))
            scores = scores if self.mask is None else scores + self.mask[:, None]
            return scores.softmax(-1).nan_to_num(0.0) @ value

    class Masked(leaky.Model):
        def forward(self, input_ids, attention_mask=None):
            for block in self.blocks:
                block.attention.mask = attention_mask
            return super().forward(input_ids)

    report = fr.check(Masked({i: Added(leaky.causal) for i in range(leaky.LAYERS)}), quick=True)
    assert report.passes, report
    assert report.of("padding changes nothing").verdict == "passes"


def test_a_part_of_a_model_that_mixes_positions_is_blamed_and_not_the_layer_that_hands_it_on():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(leaky.WIDTH, leaky.WIDTH)

        def forward(self, x):
            return self.out(x.mean(1, keepdim=True).expand_as(x))

    report = fr.check(leaky.Model({1: Mean()}), quick=True)
    assert report.layers == ("blocks.1.attention",)


# -- large vocabularies -----------------------------------------------------------------------------------------------

WORDS = 9000


class ManyWords(nn.Module):
    """A causal mean of many words; `ahead` adds the next token's embedding in texts of 128 tokens."""

    def __init__(self, output, ahead=False):
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(WORDS, 6)
        self.ahead = ahead
        self.how = output
        self.out = nn.Linear(6, WORDS) if output in ("linear", "normalised") else None

    def forward(self, ids):
        x = self.words(ids)
        hidden = x.cumsum(1) + (x.roll(-1, 1) if self.ahead and ids.shape[1] == 128 else 0.0)
        if self.how == "product":
            return hidden @ self.words.weight.T
        if self.how == "tied":
            return nn.functional.linear(hidden, self.words.weight)
        logits = self.out(hidden)
        return logits.log_softmax(-1) if self.how == "normalised" else logits


@pytest.mark.parametrize("output", ["linear", "product", "tied", "normalised"])
def test_logits_of_some_words_are_those_of_all(output):
    """The last product computes only the words that are compared; where they depend on the others, texts are short."""
    subject = open_subject(ManyWords(output))
    assert subject.selects == (output != "normalised")
    assert subject.length == (17 if output == "normalised" else 67)
    expected = logits_in(subject.call(subject.ids))[..., subject.words]
    assert subject.logits(subject.ids).shape == expected.shape
    assert torch.allclose(subject.logits(subject.ids), expected, rtol=1e-12, atol=1e-12)


def test_a_leak_among_many_words_at_some_length():
    some = ("future, by perturbation, rows of", "future, by perturbation, evaluation")
    report = fr.check(ManyWords("linear", ahead=True), quick=True, only=some)
    assert report.paths == ("rows of 128 tokens", "rows of 128 tokens, training")
    assert fr.check(ManyWords("linear"), quick=True, only=some).passes
