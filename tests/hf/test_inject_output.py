"""A mixture of softmaxes injected into GPT-2 (tied), Llama (untied) and BERT (tied, with biases; a masked model)."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_families import FAMILIES, LENGTH, VOCABULARY  # noqa: E402

import fullrank as fr  # noqa: E402
from fullrank.core.errors import ConfigError, InputError  # noqa: E402

MOS = "mixture_of_softmaxes"
CONFIG = fr.OutputConfig(kind=MOS, mixtures=3)
NAMES = ["gpt2", "llama", "bert"]
INPUTS = FAMILIES["bert"]()[1]


def labels():
    """The texts, of which one token of the first and the padding do not count."""
    targets = INPUTS["input_ids"].masked_fill(INPUTS["attention_mask"] == 0, -100)
    targets[0, 3] = -100
    return targets


def plain(name):
    """A model in double precision, without dropout, so that training and evaluation compute the same."""
    model = FAMILIES[name]()[0].double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def stirred(model):
    """Latent states and prior away from their start."""
    torch.manual_seed(1)
    for parameter in model.get_output_embeddings().fullrank.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def reference(model, **inputs):
    """log p (B, N, V) by the equation, each softmax on its own."""
    head = model.get_output_embeddings()
    head_inputs = []
    hook = head.register_forward_pre_hook(lambda _, args: head_inputs.append(args[0]))
    model(**inputs)
    hook.remove()
    (g,) = head_inputs
    latents = head.fullrank
    width = g.shape[-1]
    p = 0.0
    prior = torch.softmax(g @ latents.prior.weight.T, -1)
    for k in range(prior.shape[-1]):
        rows = slice(k * width, (k + 1) * width)
        h = g + torch.tanh(g @ latents.latent.weight[rows].T + latents.latent.bias[rows])
        scores = h @ head.weight.T + (0 if head.bias is None else head.bias)
        p = p + prior[..., k, None] * torch.softmax(scores, -1)
    return p.log()


def reference_loss(model, name, targets):
    return loss_of(reference(model, **INPUTS), name, targets)


def loss_of(log_p, name, targets):
    if name != "bert":
        log_p, targets = log_p[:, :-1], targets[:, 1:]
    counted = targets != -100
    return -log_p[counted].gather(1, targets[counted][:, None]).mean()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer", [MOS, CONFIG, {"kind": MOS, "mixtures": 1}])
def test_it_starts_as_the_old_layer(name, layer):
    model = plain(name)
    state = torch.get_rng_state()
    injected = fr.inject(copy.deepcopy(model), output=layer)
    assert torch.equal(torch.get_rng_state(), state)
    expected = torch.log_softmax(model(**INPUTS).logits, -1)
    for mode in (False, True):
        torch.testing.assert_close(injected.train(mode)(**INPUTS).logits, expected, rtol=0, atol=1e-12)
    expected = model.train()(**INPUTS, labels=labels()).loss.double()
    torch.testing.assert_close(injected(**INPUTS, labels=labels()).loss.double(), expected, rtol=1e-6, atol=0)
    assert {name.rpartition(".fullrank.")[2] for name in injected.state_dict().keys() - model.state_dict().keys()} == {
        "latent.weight", "latent.bias", "prior.weight",
    }  # fmt: skip
    tied = name != "llama"
    assert (injected.get_output_embeddings().weight is injected.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("name", NAMES)
def test_logits_losses_and_all_gradients_are_those_of_the_equation(name):
    model = stirred(fr.inject(plain(name), output=CONFIG))
    targets = labels()
    with torch.no_grad():
        actual = model.eval()(**INPUTS, labels=targets)
        torch.testing.assert_close(actual.logits, reference(model, **INPUTS), rtol=0, atol=1e-12)
        expected = reference_loss(model, name, targets)
        torch.testing.assert_close(actual.loss.double(), expected, rtol=1e-6, atol=0)  # transformers' own, in fp32
        torch.testing.assert_close(actual.logits.exp().sum(-1), torch.ones(3, LENGTH, dtype=torch.float64))
    loss = loss_of(model.train()(**INPUTS).logits, name, targets)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    (3 * loss).backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    (3 * reference_loss(model, name, targets)).backward()
    assert len(gradients) > 10
    for key, parameter in model.named_parameters():
        expected = parameter.grad
        assert (key in gradients) == (expected is not None), key
        if expected is not None:
            torch.testing.assert_close(gradients[key], expected, rtol=0, atol=1e-10, msg=key)
    assert all(p.grad.abs().max() > 0 for p in model.get_output_embeddings().parameters())


@pytest.mark.parametrize("name", NAMES)
def test_saved_loaded_and_removed(tmp_path, name):
    """Alone and beside the other mechanisms."""
    base = FAMILIES[name]()[0]
    base.save_pretrained(tmp_path / "base")
    for number, others in enumerate(({}, {"mix": "position_wise", "cross_head": 0.5, "layers": [1]})):
        model = type(base).from_pretrained(tmp_path / "base")
        stirred(fr.inject(model, output=CONFIG, **others))
        expected = model.eval()(**INPUTS).logits
        model.save_pretrained(tmp_path / f"injected{number}")
        with pytest.raises(ValueError, match=r"fullrank\.load_injected"):
            type(model).from_pretrained(tmp_path / f"injected{number}")
        loaded = fr.load_injected(tmp_path / f"injected{number}").eval()
        assert type(loaded) is type(model)
        assert torch.equal(loaded(**INPUTS).logits, expected)
        assert loaded.config.fullrank == model.config.fullrank
        tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        assert tied == (name != "llama")
        assert torch.equal(copy.deepcopy(model)(**INPUTS).logits, expected)
        removed = fr.remove(model)
        assert torch.equal(removed(**INPUTS).logits, base(**INPUTS).logits)
        assert removed.state_dict().keys() == base.state_dict().keys()
        assert type(removed.get_output_embeddings()) is torch.nn.Linear
        assert not hasattr(removed.config, "fullrank")


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_evaluates_it(tmp_path):
    model = stirred(fr.inject(FAMILIES["gpt2"]()[0], output=CONFIG))
    rows = [{"input_ids": ids, "labels": ids} for ids in INPUTS["input_ids"]]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, learning_rate=0.01, report_to=[], use_cpu=True, disable_tqdm=True,
        gradient_accumulation_steps=2, per_device_train_batch_size=1, save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert trainer.predict(rows).predictions.shape == (3, LENGTH, VOCABULARY)


@pytest.mark.parametrize(("output", "message"), [
    ("adaptive", "mixture_of_softmaxes.*AdaptiveConfig"), ({"kind": MOS, "mixtures": 0}, "mixtures"),
    ({"kind": MOS, "tied": True}, "and no other key"), (3, "output"),
])  # fmt: skip
def test_another_output_is_a_clear_error(output, message):
    model = FAMILIES["gpt2"]()[0]
    with pytest.raises((InputError, ConfigError), match=message):
        fr.inject(model, output=output)
    assert not hasattr(model.config, "fullrank")


def test_a_replaced_vocabulary_layer_is_refused():
    """Hugging Face makes a new layer for another vocabulary, and the mixture would be lost without a word."""
    model = fr.inject(plain("llama"), output=CONFIG)
    model.resize_token_embeddings(VOCABULARY + 3)
    with pytest.raises(InputError, match=r"became a Linear after injection.*resize first"):
        model(INPUTS["input_ids"])


def test_removed_from_a_model_leaves_no_check():
    model = fr.remove(fr.inject(plain("llama"), output=CONFIG))
    model.resize_token_embeddings(VOCABULARY + 3)
    assert model(INPUTS["input_ids"]).logits.shape[-1] == VOCABULARY + 3
