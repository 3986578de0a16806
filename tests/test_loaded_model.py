"""One handle to every kind of model: its numbers are those of the model, and what it lacks is refused by name."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import fullrank as fr
import hugging_face_models as tiny
from fullrank.core.errors import InputError
from fullrank.data.tokenizers import build_words
from moving import narrow

IDS = torch.randint(tiny.VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(3))
INPUTS, TARGETS = IDS[:, :-1], IDS[:, 1:]
ALL = {"logits", "hidden", "attention", "step", "output_matrix", "tokenizer"}


def our_model(kind=fr.LanguageModel, **options):
    sizes = {"vocab_size": 47, "hidden_size": 8, "num_attention_heads": 2, "dropout": {"output": 0.5}}
    return narrow(kind, 0.1, **sizes | options)


def bert(masked=True):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=47, max_position_embeddings=32, **sizes)
    return (transformers.BertForMaskedLM if masked else transformers.BertModel)(config)


CAUSAL = {
    "plain": our_model,
    "position-wise": lambda: our_model(attention={"mix": "position_wise"}),
    "mixture": lambda: our_model(output={"kind": "mixture_of_softmaxes", "mixtures": 3}),
    "exported": lambda: fr.FullRankForCausalLM(fr.FullRankConfig.of(our_model().config)).double(),
    "gpt2": lambda: tiny.gpt2().double(),
    "llama": lambda: tiny.llama().double(),
    "injected": lambda: fr.inject(tiny.llama().double(), mix="position_wise"),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model(name):
    module = CAUSAL[name]().train()
    model = fr.open_model(module)
    assert fr.open_model(model) is model
    assert (model.module, model.source, model.predicts) == (module, "module", "next tokens")
    assert model.has == ALL - {"tokenizer"}
    module.eval()
    with torch.no_grad():
        expected = module(INPUTS).logits
    module.train()
    torch.testing.assert_close(model.logits(INPUTS), expected)
    assert module.training
    nll = F.cross_entropy(expected.mT, TARGETS, reduction="none")
    torch.testing.assert_close(model.nll(INPUTS, TARGETS), nll)
    some = TARGETS.masked_fill(TARGETS < 20, -100)
    torch.testing.assert_close(model.nll(INPUTS, some), nll.masked_fill(TARGETS < 20, 0))
    if name != "mixture":
        bias = expected - model.hidden(INPUTS) @ model.output_matrix().T
        torch.testing.assert_close(bias, bias[:1, :1].expand_as(bias))
    first, cache = model.step(INPUTS[:, :5])
    second, cache = model.step(INPUTS[:, 5:6], cache)
    third, _ = model.step(INPUTS[:, 6:], cache)
    torch.testing.assert_close(torch.cat((first, second, third), 1), expected)


@pytest.mark.parametrize("name", CAUSAL)
def test_attention(name):
    model = fr.open_model(CAUSAL[name]())
    layers = list(model.attention(INPUTS))
    assert len(layers) == len(model.attention_layers.stages)
    for layer, stage in zip(layers, model.attention_layers.stages, strict=True):
        assert layer.weights.shape == (3, 2, 11, 11)
        torch.testing.assert_close(layer.weights.sum(-1), torch.ones_like(layer.weights[..., 0]))
        mixing = stage.mix.matrix(None) if layer.mixing is None else layer.mixing
        if mixing is None:
            torch.testing.assert_close(layer.mixed, layer.weights)
        elif mixing.dim() == 2:
            torch.testing.assert_close(layer.mixed, torch.einsum("ji,bjnm->binm", mixing, layer.weights))
        else:
            torch.testing.assert_close(layer.mixed, torch.einsum("bnji,bjnm->binm", mixing, layer.weights))
    assert all(torch.equal(a.mixed, b.mixed) for a, b in zip(layers, next(model.attentions([INPUTS])), strict=True))


def test_memory_goes_from_one_text_to_the_next():
    module = our_model(memory_length=6, position="relative", attention={"score": "relative"}).eval()
    model = fr.open_model(module)
    parts = list(IDS[:1].split(4, 1))
    assert [layers[0].weights.shape[-1] for layers in model.attentions(parts)] == [4, 8, 10]
    targets = list(IDS.roll(-1, 1)[:1].split(4, 1))
    memory = None
    expected = []
    with torch.no_grad():
        for ids, next_ids in zip(parts, targets, strict=True):
            nll = module.nll(ids, next_ids, memory)
            memory = nll.memory
            expected.append(nll.per_token)
    torch.testing.assert_close(list(model.nlls(zip(parts, targets, strict=True))), expected)
    _, cache = model.step(parts[0])
    torch.testing.assert_close(model.step(parts[1], cache)[0], module(parts[1], module(parts[0]).memory).logits)


def test_a_masked_model():
    module = our_model(fr.MaskedLanguageModel)
    model = fr.open_model(module)
    assert (model.predicts, model.mask_id, model.has) == ("masked tokens", 46, ALL - {"tokenizer", "step"})
    expected = F.cross_entropy(model.logits(IDS).mT, IDS, reduction="none")
    torch.testing.assert_close(model.nll(IDS, IDS), expected)
    foreign = fr.open_model(bert())
    assert (foreign.predicts, foreign.has, foreign.max_length) == ("masked tokens", ALL - {"tokenizer", "step"}, 32)


def test_an_encoder_has_no_vocabulary_layer():
    encoder = our_model(fr.Encoder, dropout={})
    for model in (fr.open_model(encoder), fr.open_model(bert(masked=False))):
        assert (model.predicts, model.has) == (None, {"hidden", "attention"})
        assert model.hidden(IDS).shape == (3, 12, 8)
        with pytest.raises(InputError, match="has no logits"):
            model.nll(IDS, IDS)
    torch.testing.assert_close(fr.open_model(encoder).hidden(IDS), encoder(IDS))


def test_a_function_of_ids():
    table = torch.randn(47, 47)

    def guess(ids):
        return table[ids]

    model = fr.open_model(guess)
    assert (model.name, model.source, model.module, model.has) == ("guess", "function", None, {"logits"})
    torch.testing.assert_close(model.logits(IDS), table[IDS])
    torch.testing.assert_close(model.nll(INPUTS, TARGETS), F.cross_entropy(table[INPUTS].mT, TARGETS, reduction="none"))

    class Stepping(nn.Module):
        def forward(self, ids):
            return {"logits": table[ids]}

        def step(self, ids, cache):
            return table[ids], (cache or 0) + ids.shape[1]

    stepping = fr.open_model(Stepping())
    assert (stepping.name, stepping.source, stepping.has) == ("Stepping", "module", {"logits", "step"})
    assert stepping.step(IDS, stepping.step(IDS)[1])[1] == 24


@pytest.mark.parametrize(
    ("make", "need", "reason"),
    [
        (lambda: our_model(attention={"kind": "multilinear", "cores": 2, "rank": 3}), "attention", "multi-linear"),
        (lambda: our_model(output={"kind": "adaptive", "cutoffs": [20]}), "output_matrix", "adaptive"),
        (lambda: lambda ids: ids, "hidden", "function"),
        (lambda: our_model(fr.MaskedLanguageModel), "step", "masked tokens"),
        (lambda: our_model(fr.Translator), "logits", "two sequences"),
    ],
)
def test_what_a_model_lacks_is_refused_by_name(make, need, reason):
    model = fr.open_model(make())
    assert need not in model.has
    with pytest.raises(InputError, match=f"^my measurement: .*{model.name}.*{reason}"):
        model.require({need}, "my measurement")
    with pytest.raises(InputError, match=reason):
        list(getattr(model, need)(*([] if need == "output_matrix" else [IDS])) or ())


def test_a_module_around_a_model_is_read_as_it_is():
    """What it does to logits counts, though a model of ours is inside."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = our_model().eval()

        def forward(self, ids):
            logits = 2 * self.model(ids).logits
            return logits

    scaled = Scaled()
    model = fr.open_model(scaled)
    assert (model.fullrank_model, model.has) == (None, {"logits"})
    torch.testing.assert_close(model.logits(IDS), scaled(IDS))


def test_saved_models(tmp_path):
    module = our_model().eval()
    module.save(tmp_path / "ours")
    build_words(["\n", "<unk>", *(f"w{i}" for i in range(45))]).save(tmp_path / "ours")
    tiny.save(tiny.gpt2(), tmp_path / "gpt2")
    ours, gpt2 = fr.open_model(tmp_path / "ours"), fr.open_model(str(tmp_path / "gpt2"))
    assert (ours.source, ours.folder, ours.has) == ("saved model", tmp_path / "ours", ALL)
    assert (gpt2.source, gpt2.folder, gpt2.has) == ("Hugging Face", tmp_path / "gpt2", ALL)
    assert (gpt2.max_length, gpt2.vocab_size) == (32, 47)
    assert gpt2.logits(IDS).dtype == torch.float32
    torch.testing.assert_close(ours.logits(IDS), module(IDS).logits)
    without = fr.open_model(tmp_path / "gpt2", tokenizer=False)
    with pytest.raises(InputError, match="has no tokenizer"):
        without.require({"tokenizer"})


def test_text_of_ids():
    text = fr.Text.from_ids(range(10), 3)
    for _ in range(2):  # it can be read again
        assert torch.cat(list(text)).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [row.tolist() for row in text.rows(2)] == [[[0, 1, 2]], [[3, 4, 5]]]
    assert [ids.shape[1] for ids in text.segments()][-1] == 1
    assert torch.cat(list(text.with_length(4))).shape == (2, 4)
    assert torch.equal(torch.cat(list(fr.Text.from_ids(IDS))), IDS)
    with pytest.raises(InputError, match="fewer than 11 tokens"):
        list(text.with_length(11))
    with pytest.raises(InputError, match="whole numbers"):
        fr.Text.from_ids(torch.ones(3))
