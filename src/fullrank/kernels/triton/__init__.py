"""The Triton kernels of weighted attention with mixed heads."""
