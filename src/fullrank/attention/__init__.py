"""Attention as a visible pipeline: project -> route -> attend (score, mask, normalize, mix, dropout, values) -> merge."""
