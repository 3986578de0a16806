"""Two lines of Python that show a leak to a reader of the report, without this package."""

from __future__ import annotations

import torch

from fullrank.checking.copies import AsModule, duplicate, mode
from fullrank.checking.paths import CodePath
from fullrank.checking.subject import ROWS, SEED, Subject


def show_leak(subject: Subject, path: CodePath, cut: int) -> str:
    """Two lines, with `model` in scope, that print the largest change of logits before `cut`.

    Empty for models of other inputs, on other paths than plain evaluation and training, and where they print no more than
    rounding: they have been run on a copy of the model as it was passed.
    """
    if subject.fixed or subject.sequence or path != CodePath(path.name, path.training):
        return ""
    with torch.no_grad():
        out = subject.call(subject.ids)
    logits = ".logits" if hasattr(out, "logits") else '["logits"]' if isinstance(out, dict) else ""
    logits = "[0]" if isinstance(out, tuple | list) and not logits else logits
    words, train = subject.vocab_size, "train" if path.training else "eval"
    lines = (
        f"import torch; torch.manual_seed({SEED}); a = torch.randint({words}, ({ROWS}, {subject.length})); b = a.clone(); "
        f"b[:, {cut}:] = (a[:, {cut}:] + 1) % {words}{'' if isinstance(subject.own, AsModule) else f'; model.{train}()'}\n"
        f"x, y = ((torch.manual_seed(1), model(ids))[1]{logits} for ids in (a, b)); "
        f"print((x - y)[:, :{cut}].nan_to_num().abs().max())"
    )
    printed: list[float] = []
    own = duplicate(subject.own)
    scope = {"model": own.function if isinstance(own, AsModule) else own}
    scope["print"] = lambda value: printed.append(float(value))
    try:
        with mode(own, training=own.training), torch.device(subject.ids.device):
            exec(lines, scope)
    except Exception:  # a model that the two lines cannot call
        return ""
    return lines if printed[0] > 1e-4 else ""
