"""Output losses never wait for a GPU: nothing in them needs its numbers on the host.

Tensors on the device `meta` have no numbers, so that reading one is an error; copies from the host are noted.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fullrank as fr

VOCABULARY, WIDTH = 23, 8
OUTPUTS = {"softmax": {}, "mixture": {"kind": "mixture_of_softmaxes", "mixtures": 3}}
ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


class HostReads(TorchDispatchMode):
    """Notes the operations that read numbers on the host or copy some from it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in (*ASKS, "lift_fresh") or masks:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def step(output, device, smoothing, weighted):
    hidden = torch.randn(2, 5, WIDTH, device=device, requires_grad=True)
    targets = torch.zeros(2, 5, dtype=torch.int64, device=device)
    weights = torch.ones(2, 5, device=device) if weighted else None
    loss, _ = output.loss(hidden, targets, weights, smoothing)
    (loss * 2).backward()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_losses_ask_for_no_number(output, weighted, smoothing):
    config = fr.ModelConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, num_attention_heads=2, output=output)
    with HostReads() as reads:
        step(fr.LanguageModel(config).output.to("meta"), "meta", smoothing, weighted)
    assert reads.names == []
