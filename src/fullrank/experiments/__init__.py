"""Experiments: the one way from a configuration to a result."""
