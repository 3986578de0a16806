"""Losses of causal and of masked models for every output layer, what counts in them, and how a residual mixture starts."""

import output_equations as equations
import pytest
import torch
from output_equations import DOUBLE

import fullrank as fr
from fullrank.core.errors import InputError
from moving import narrow

V, E = 13, 8
CLUSTERS = {"kind": "adaptive", "cutoffs": [4, 8], "div_val": 2}
MIXTURE = {"kind": "mixture_of_softmaxes", "mixtures": 3}
KINDS = {
    "softmax": {},
    "tied": {"tied": True},
    "sigsoftmax": {"normalize": "sigsoftmax"},
    "mixture": MIXTURE,
    "residual mixture": MIXTURE | {"latent": "residual"},
    "tied mixture": MIXTURE | {"tied": True, "bias": True, "normalize": "sigsoftmax"},
    "adaptive": {"kind": "adaptive", "tied": True},
    "transformer_xl": {"kind": "adaptive", "tied": True, "form": "transformer_xl", "tied_projections": False},
    "untied adaptive": {"kind": "adaptive"},
}
MODELS = {"causal": fr.LanguageModel, "masked": fr.MaskedLanguageModel}


def build(kind="softmax", model="causal", **changes):
    """Parameters are moved from their start, at which priors and latents hardly differ."""
    sizes = {"vocab_size": V, "hidden_size": E, "num_hidden_layers": 1, "num_attention_heads": 2}
    changes |= {"input": CLUSTERS if KINDS[kind].get("kind") == "adaptive" else {}, "output": KINDS[kind]}
    return narrow(MODELS[model], **sizes | changes).train()


def gradients(made, value):
    made.zero_grad()
    value.backward(retain_graph=True)
    return {name: parameter.grad.clone() for name, parameter in made.named_parameters()}


def same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        equations.close(name, actual[name], tensor, 1e-10, 1e-2)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_nll_and_loss_are_the_cross_entropy_of_the_logits(kind, model, kernel):
    """Values and the gradients of every parameter, in training too; targets of -100 count no more than a weight of 0."""
    made = build(kind, model).train(kernel == "auto")
    read, targets = torch.randint(V, (4, 6)), torch.randint(V, (4, 6))
    logits = made(read).logits
    logs = logits.log_softmax(-1)
    if "mixture" in KINDS[kind].get("kind", "") or "adaptive" in KINDS[kind].get("kind", ""):
        assert torch.allclose(logits, logs)
    each = -logs.gather(-1, targets[..., None]).squeeze(-1)
    with fr.kernel(kernel):
        nll = made.nll(read, targets).per_token
        assert torch.allclose(nll, each, atol=1e-12)
        by_parameter = gradients(made, nll.square().sum())
        same(by_parameter, gradients(made, each.square().sum()))
        assert all(float(gradient.abs().max()) > 0 for gradient in by_parameter.values() if gradient.dim() > 1)
        weights = 0.2 - torch.rand(read.shape, dtype=DOUBLE)  # a mean of any signs
        weights[1, 2:] = 0
        ignored = targets.masked_fill(weights > -0.4, -100)
        counted = (ignored != -100).double()
        for smoothing, weighting, ids, share in (
            (0.0, None, targets, None),
            (0.1, weights, targets, weights),
            (0.0, None, ignored, counted),
            (0.1, weights, ignored, weights * counted),
        ):
            expected = equations.mean_loss(logs, targets, share, smoothing)
            parts = made.loss_parts(read, ids, weighting, label_smoothing=smoothing)
            assert abs(float((parts.loss - expected).detach())) < 1e-12
            assert abs(float(parts.nll - equations.mean_loss(logs, targets, share, 0.0).detach())) < 1e-12
            same(gradients(made, parts.loss), gradients(made, expected))
        assert torch.allclose(made.nll(read, ignored).per_token, each * counted)
        assert made.loss(read, torch.full_like(targets, -100)).item() == 0
        assert torch.equal(made.loss(read, targets), made.loss(read, targets.int()))


def test_padding_and_weights_give_the_mean_over_the_tokens():
    """A padded batch has the loss of its texts alone, each token counting once."""
    made = build().eval()
    read, targets = torch.randint(V, (3, 5)), torch.randint(V, (3, 5))
    lengths = (5, 2, 3)
    mask = torch.tensor([[1] * n + [0] * (5 - n) for n in lengths])
    alone = sum(made.nll(read[i : i + 1, :n], targets[i : i + 1, :n]).per_token.sum() for i, n in enumerate(lengths))
    assert torch.allclose(made.loss(read, targets, mask.double(), attention_mask=mask), alone / 10, atol=1e-12)


@pytest.mark.parametrize("memory", [0, 4])
def test_inputs_before_the_targets_are_context(memory):
    """T targets of N inputs: the loss of the last T positions, and the gradients of a loss with weight 0 at the others."""
    made = build("tied", memory_length=memory)
    read, targets = torch.randint(V, (3, 7)), torch.randint(V, (3, 7))
    weights = torch.zeros(3, 7, dtype=DOUBLE)
    weights[:, 3:] = 1
    expected, loss = made.loss(read, targets, weights), made.loss(read, targets[:, 3:])
    assert abs(float((loss - expected).detach())) < 1e-12
    same(gradients(made, loss), gradients(made, expected))
    with pytest.raises(InputError, match="targets"):
        made.loss(read[:, :3], targets)
    with pytest.raises(InputError, match="targets"):
        made.nll(read, targets[:, 3:])  # a figure is of all tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_layer_reads_masked_places_only(kind):
    made = build(kind, "masked")
    shapes = []
    ids = torch.randint(V - 1, (3, 9))
    weights = torch.rand(3, 9) * (torch.rand(3, 9) < 0.4)
    loss = made.output.loss

    def watched(hidden, *arguments):
        shapes.append(tuple(hidden.shape))
        return loss(hidden, *arguments)

    made.output.loss = watched
    made.loss(ids, ids, weights)
    assert shapes == [(1, int((weights != 0).sum()), E)]


@pytest.mark.parametrize("mixtures", [1, 4])
@pytest.mark.parametrize("initializer", ["fairseq", "pytorch", "xavier_uniform", "transformer_xl"])
def test_a_residual_mixture_starts_as_one_softmax_and_its_components_part(initializer, mixtures):
    sizes = {"vocab_size": 23, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    output = {"kind": "mixture_of_softmaxes", "mixtures": mixtures, "latent": "residual"}
    mixed = fr.LanguageModel(fr.ModelConfig(**sizes, initializer=initializer, output=output)).double()
    plain = fr.LanguageModel(fr.ModelConfig(**sizes)).double()
    plain.load_state_dict({name: value for name, value in mixed.state_dict().items() if "mixture" not in name})
    ids = torch.randint(23, (2, 7))
    torch.testing.assert_close(mixed(ids).logits, plain(ids).logits.log_softmax(-1), rtol=1e-12, atol=1e-12)

    mixed.loss(ids[:, :-1], ids[:, 1:]).backward()
    gradients = mixed.output.mixture.latent.weight.grad.view(mixtures, 8, 8)
    assert gradients.abs().amax((1, 2)).min() > 0
    assert all((gradients[0] - other).abs().max() > 1e-3 * gradients[0].abs().max() for other in gradients[1:])
