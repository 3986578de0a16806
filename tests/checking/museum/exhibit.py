"""What an exhibit is, and ways to see its leak with torch alone."""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import leaky_models as leaky
import torch
from torch import Tensor, nn

LENGTH, CUT = 67, 43
Run = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Exhibit:
    """A leak with its public link, and a control that is the same without the fault.

    moved: how far logits move that must not move, computed with torch alone. fails: names of all checks that find the leak.
    layer: the first that leaks. full: needs the slow checks (training, compilation). length: of the texts, in tokens.
    inputs: makes example inputs of a model that reads more than token ids. remark: what the check says where, as documented,
    it only makes a remark and does not fail.
    """

    name: str
    link: str
    leaking: Callable[[], nn.Module]
    control: Callable[[], nn.Module]
    moved: Callable[[nn.Module], float]
    fails: frozenset[str]
    layer: str = "blocks.1.attention"
    full: bool = False
    length: int | None = 37
    inputs: Callable[[], Any] = lambda: None
    remark: str = ""


def future(*ways):
    """Names of checks for later tokens: "perturbation, training" is "future, by perturbation, training"."""
    return frozenset(f"future, by {way}" for way in ways)


PREFIX = {"future, prefix = whole"}
SCALED = future("perturbation, parameters scaled")
ONES = future("perturbation, with a mask of ones", "perturbation, with a mask of ones, training")
LEFT = future("perturbation, with padding on the left", "perturbation, with padding on the left, training")
EVERY_WAY = future(*(f"{by}, {mode}" for by in ("perturbation", "gradient") for mode in ("evaluation", "training")))
BY_PERTURBATION = future("perturbation, evaluation", "perturbation, training")


def with_block(attention=None, **parts):
    """A function that makes a model with other parts in its second block: attention, feed_forward, norm."""

    def make():
        torch.manual_seed(3)
        model = leaky.Model({} if attention is None else {1: attention()})
        for name, part in parts.items():
            setattr(model.blocks[1], name, part())
        return model

    return make


class Switched(leaky.Model):
    """Its attention is computed in the way that `config._attn_implementation` names, "eager" to begin with."""

    def __init__(self, attention, other="sdpa"):
        torch.manual_seed(3)
        config = types.SimpleNamespace(_attn_implementation="eager", vocab_size=leaky.VOCABULARY)
        super().__init__({1: attention(config)})
        self.config = config
        self.other = other

    def set_attn_implementation(self, implementation):
        if implementation not in ("eager", self.other):
            raise ValueError(f"{implementation}: this model has eager and {self.other}")
        self.config._attn_implementation = implementation


def tokens():
    return torch.randint(1, leaky.VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(7))


def plainly(model, ids, **options):
    out = model(ids, **options)
    logits = getattr(out, "logits", out)
    return logits


def later(run=plainly, *, training=False, cut=CUT):
    """Every token from `cut` on becomes another one; the logits before it are compared."""

    def moved(model):
        ids = tokens()
        return difference(run, model.train(training), ids, _changed(ids, slice(cut, None)), slice(None, cut))

    return moved


def another_document(run):
    """Every token before `CUT` becomes another one; the logits from there on, those of another text, are compared."""

    def moved(model):
        ids = tokens()
        return difference(run, model.eval(), ids, _changed(ids, slice(None, CUT)), slice(CUT, None))

    return moved


def another_row(training=False):
    """The first row becomes another text; the logits of the second are compared."""

    def moved(model):
        ids = tokens()
        changed = torch.cat((_changed(ids[:1], slice(None)), ids[1:]))
        return difference(lambda m, x: plainly(m, x)[1:], model.train(training), ids, changed, slice(None))

    return moved


def gradient(model):
    """The largest gradient of logits before `CUT` with respect to embeddings from there on."""
    model = model.double().eval()
    embedded = []
    hook = model.embedding.register_forward_hook(lambda module, args, out: embedded.append(out))
    logits = plainly(model, tokens())[:, :CUT]
    hook.remove()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
    (slope,) = torch.autograd.grad((logits * weights).sum(), embedded)
    return float(slope[:, CUT:].abs().max())


def difference(run, model, ids, changed, positions):
    """The largest difference between the logits of `ids` and of `changed` at `positions`."""
    model = model.double()
    logits = []
    with torch.no_grad():
        for text in (ids, changed):
            torch.manual_seed(5)  # of dropout
            logits.append(run(model, text)[:, positions].double())
    return float((logits[0] - logits[1]).nan_to_num(0.0).abs().max())  # of logits that are -inf in both


def _changed(ids, positions):
    changed = ids.clone()
    changed[:, positions] = 1 + ids[:, positions] % (leaky.VOCABULARY - 1)
    return changed
