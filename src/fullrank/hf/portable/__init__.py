"""Modelling code that is copied beside exported weights: torch, transformers and nothing of this package."""
