"""Text from a model: `sample` (sampling, greedy) and `beam_search`, one token at a time with a cache."""

from fullrank.decoding.beam import Hypotheses as Hypotheses
from fullrank.decoding.beam import beam_search as beam_search
from fullrank.decoding.sample import Sequences as Sequences
from fullrank.decoding.sample import sample as sample
