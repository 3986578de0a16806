"""Text from a model: `sample` (sampling, greedy) and `beam` (beam search), one token at a time with a cache.

A model is any callable `model(input_ids, cache=..., attention_mask=...)` whose result has `logits` and `cache`; see `reading`.
"""

from fullrank.decoding.beam import Hypotheses as Hypotheses
from fullrank.decoding.beam import beam_search as beam_search
from fullrank.decoding.sample import Sequences as Sequences
from fullrank.decoding.sample import sample as sample
