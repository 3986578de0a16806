"""Small translators with every parameter away from its start, the mechanisms they are made of, and what they read."""

import functools

import torch

import fullrank as fr
import moving
from moving import moved

WIDE = torch.float64
SOURCE, TARGET, WIDTH, HEADS, P = 13, 11, 12, 3, 16  # vocabularies, and the most positions
SIZES = {
    "vocab_size": TARGET, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": 14, "max_position_embeddings": P, "scale_embedding": True,
}  # fmt: skip

PAIRS = {"kind": "multilinear", "cores": 2, "rank": 5}
DECAYED = PAIRS | {"output_map": "decayed", "decays": 3}
CLUSTERED = {"kind": "adaptive", "cutoffs": [4, 8], "div_val": 2}
MIXED = {"kind": "mixture_of_softmaxes", "mixtures": 3}
A, B = {"mix": "position_independent"}, {"mix": "position_wise"}

# what differs from a plain model: `attention` everywhere; that of the `encoder`, `decoder` or `cross` alone; other keys
MECHANISMS = {
    "plain": {},
    "post-norm": {"norm": "post"},
    "A": {"attention": A},
    "B": {"attention": B, "norm": "post"},
    "A in the encoder, B in the decoder": {"encoder": A, "decoder": B},
    "B in cross only": {"cross": B},
    "random mixing": {"attention": {"mix": "random"}},
    "average": {"attention": {"mix": "average"}},
    "sigsoftmax": {"attention": {"normalize": "sigsoftmax"}},
    "sigsoftmax with B": {"attention": B | {"normalize": "sigsoftmax"}},
    "cross-head": {"attention": B | {"cross_head": 0.5}},
    "learned positions": {"position": "learned"},
    "rotary positions": {"position": "rotary", "attention": B},
    "relative positions": {"position": "relative", "attention": {"score": "relative"}},
    "relative positions with B, own biases": {
        "position": "relative", "attention": B | {"score": {"name": "relative", "shared_biases": False}},
    },
    "relative positions, clamped": {
        "position": "relative", "attention": {"score": {"name": "relative", "clamp_length": 3}},
    },
    "no positions": {"position": "none"},
    "dense synthesizer": {"attention": {"score": "dense_synthesizer"}},
    "random synthesizer": {"attention": {"score": "random_synthesizer"}},
    "random synthesizer with B": {"attention": B | {"score": "random_synthesizer"}},
    "multi-linear encoder": {"encoder": PAIRS},
    "multi-linear encoder, decayed": {"encoder": DECAYED},
    "multi-linear decoder": {"decoder": PAIRS},
    "multi-linear decoder, decayed": {"decoder": DECAYED},
    "multi-linear cross": {"cross": PAIRS},
    "multi-linear everywhere": {"attention": PAIRS},
    "position term": {"position": "relative", "attention": PAIRS | {"score": "relative"}},
    "mixture": {"output": MIXED},
    "adaptive, tied": {"input": CLUSTERED, "output": CLUSTERED | {"tied": True}, "encoder_keys": {"vocab_size": TARGET}},
    "tied": {"output": {"tied": True}},
    "tied mixture": {"output": MIXED | {"tied": True}},
    "one table": {"output": {"tied": True}, "encoder_keys": {"vocab_size": TARGET, "share_embedding": True}},
    "one adaptive table": {
        "input": CLUSTERED, "output": CLUSTERED | {"tied": True},
        "encoder_keys": {"vocab_size": TARGET, "share_embedding": True},
    },
    "other depths": {"encoder_keys": {"num_hidden_layers": 3}, "decoder_keys": {"num_hidden_layers": 1}},
}  # fmt: skip
# those that differ in one attention, a table or a size that only translators have; tests/properties has all stages
FEW = [
    "plain", "A in the encoder, B in the decoder", "B in cross only", "cross-head", "relative positions with B, own biases",
    "random synthesizer with B", "multi-linear encoder, decayed", "multi-linear decoder", "multi-linear cross",
    "one adaptive table", "other depths",
]  # fmt: skip
WEIGHTED = {
    name: keys for name, keys in MECHANISMS.items() if "multi-linear" not in name and "position term" not in name
}


def config(mechanism="plain", **changes):
    """The configuration of a mechanism; `changes` are keys like those above, laid over it."""
    keys = dict(MECHANISMS[mechanism])
    for key, value in changes.items():
        before = keys.get(key)
        keys[key] = before | value if isinstance(before, dict) and isinstance(value, dict) else value
    general = keys.pop("attention", {})
    stages = {}
    for part in ("encoder", "decoder", "cross"):
        attention = keys.pop(part, None)
        stages[part] = None if attention is None else fr.AttentionConfig(**attention)
    encoder = {"vocab_size": SOURCE, "attention": stages["encoder"]} | keys.pop("encoder_keys", {})
    decoder = {"attention": stages["decoder"], "cross": stages["cross"]} | keys.pop("decoder_keys", {})
    for part, config_class in (("input", fr.InputConfig), ("output", fr.OutputConfig)):
        if part in keys:
            keys[part] = config_class(**keys[part])
    return fr.ModelConfig(
        **SIZES | keys,
        attention=fr.AttentionConfig(**general),
        encoder=fr.EncoderConfig(**encoder),
        decoder=fr.DecoderConfig(**decoder),
    )


def built(mechanism="plain", seed=2, **changes):
    """A translator at its start, in double precision."""
    moving.seed(seed)
    return fr.Translator(config(mechanism, **changes)).double().eval()


def translator(mechanism="plain", **changes):
    """A translator with every parameter away from its start."""
    return moved(built(mechanism, **changes))


@functools.cache
def shared(mechanism):
    """`translator(mechanism)`, made once, for tests that only read it."""
    return translator(mechanism)


def tokens(vocabulary, rows, length, seed=5):
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed + 100 * length))


def sentences(model, rows=3, source=7, target=5):
    """Ids of both languages."""
    source_vocabulary = model.encoder.config.vocab_size
    return tokens(source_vocabulary, rows, source), tokens(TARGET, rows, target, seed=6)


def padding(lengths, longest, side):
    """(B, longest), 1 for tokens."""
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return mask.flip(1) if side == "left" else mask
