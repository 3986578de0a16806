"""Tensors that have to be equal but for rounding."""

import torch


def close(given, expected, message="", tolerance=1e-10):
    """Assert that two values have one shape and differ by at most `tolerance`, relative to the largest number or to 1."""
    given, expected = torch.as_tensor(given).detach(), torch.as_tensor(expected).detach()
    assert given.shape == expected.shape, (message, given.shape, expected.shape)
    off, scale = float((given - expected).abs().max()), max(1.0, float(expected.abs().max()))
    assert off <= tolerance * scale, f"{message} is off by {off:.2e}"


def all_close(given, expected, tolerance):
    """Compare each tensor of one dictionary with that of the other."""
    for name, tensor in expected.items():
        close(given[name], tensor, name, tolerance)


def agree(found, expected, leaves, tolerance=1e-9):
    """Compare values, and gradients of a random cotangent with respect to the named leaves, in the dtype of each."""
    close(found, expected, "the output", tolerance)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad(out, [*leaves.values()], cotangent.to(out.dtype), retain_graph=True)
        for out in (found, expected)
    )
    for (name, leaf), one, other in zip(leaves.items(), ours, theirs, strict=True):
        assert one.dtype == leaf.dtype, name
        close(one, other, f"the gradient of {name}", tolerance)
