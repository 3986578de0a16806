"""Text from a model, one token at a time with a cache: `sample` (sampling, greedy), `beam_search`, and `generate` over both."""

from fullrank.decoding.beam import Hypotheses as Hypotheses
from fullrank.decoding.beam import beam_search as beam_search
from fullrank.decoding.continuation import MemoryReader as MemoryReader
from fullrank.decoding.continuation import generate as generate
from fullrank.decoding.continuation import reader_of as reader_of
from fullrank.decoding.continuation import window_of as window_of
from fullrank.decoding.sample import Sequences as Sequences
from fullrank.decoding.sample import sample as sample
