"""Tensors that have to be equal but for rounding."""

import torch


def close(actual, expected, message="", tolerance=1e-10):
    """Assert that two values have one shape and differ by at most `tolerance`, relative to the largest number or to 1."""
    actual, expected = torch.as_tensor(actual).detach(), torch.as_tensor(expected).detach()
    assert actual.shape == expected.shape, (message, actual.shape, expected.shape)
    scale = max(1.0, float(expected.abs().max()))
    difference = float((actual - expected).abs().max())
    assert difference <= tolerance * scale, f"{message} is off by {difference:.2e}"


def all_close(actual, expected, tolerance):
    """Compare each tensor of one dictionary with that of the other."""
    for name, tensor in expected.items():
        close(actual[name], tensor, name, tolerance)


def agree(actual, expected, leaves, tolerance=1e-9, cotangent=None):
    """Compare values, and gradients of a cotangent, a random one if none is given, with respect to the named leaves, in the
    dtype of each."""
    close(actual, expected, "the output", tolerance)
    if cotangent is None:
        cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    gradients, expected_gradients = (
        torch.autograd.grad(out, [*leaves.values()], cotangent.to(out.dtype), retain_graph=True)
        for out in (actual, expected)
    )
    for (name, leaf), gradient, expected_gradient in zip(leaves.items(), gradients, expected_gradients, strict=True):
        assert gradient.dtype == leaf.dtype, name
        close(gradient, expected_gradient, f"the gradient of {name}", tolerance)
