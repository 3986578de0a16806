"""Hugging Face: our mechanisms in their models, our models in their tools."""
