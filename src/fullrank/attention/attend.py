"""The two ways to attend: weighted values, and a three-way tensor without weights."""

from fullrank.attention.multilinear import MultiLinear as MultiLinear
from fullrank.attention.weighted import WeightedValues as WeightedValues
