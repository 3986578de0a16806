"""Two lines of Python that show a leak to a reader of the report, without this package."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fullrank.checking.opening import AsModule
from fullrank.checking.paths import GAIN, TRAINED, CodePath
from fullrank.checking.subject import MASKS, ROWS, SEED, SHORT, Subject, accepted, duplicate, mode
from fullrank.models import cache_argument, logits_in

_EVERY_MATRIX = (
    f"[p.data.mul_({GAIN:g} * len(p) ** 0.5 / p.norm()) for m in model.modules() if not isinstance(m, torch.nn.Embedding) "
    "for p in m.parameters(recurse=False) if p.dim() > 1]"
)
_FORMS = ("m", "m.bool()", "~m.bool()", "torch.zeros(m.shape).masked_fill(m == 0, -torch.inf)")
_EVERY_PARAMETER = "torch.manual_seed(0); [p.data.add_(0.1 * torch.randn_like(p)) for p in model.parameters()]"


def reproduction(subject: Subject, path: CodePath, cut: int) -> str:
    """Two lines of Python, with `model` (and `inputs`) in scope: the largest change of logits before `cut` is printed.

    They have been run on a copy of the model as it was passed, and printed more than rounding; empty where none did.
    """
    for moved in (False, True):  # a gate that starts closed is opened
        for seed in range(SEED, SEED + 3):
            setup, expression = _statements(subject, path, cut, seed)
            if moved:
                setup.insert(1, _EVERY_PARAMETER)
            lines = f"{'; '.join(setup)}\n{expression}"
            if _shows(subject, lines):
                return lines
    return ""


def gradient_shown(subject: Subject, path: CodePath, cut: int, embedding: str) -> str:
    """Two lines that print the largest gradient of logits before `cut` with respect to embeddings from there on."""
    if subject.fixed or subject.sequence or subject.translates:
        return ""
    setup, _ = _statements(subject, path, cut, SEED)
    keep = "(lambda m, i, o: e.append(o.detach().requires_grad_()) or e[-1].clone())"
    shown = f"e[0].grad[:, {cut}:].abs().max()"
    lines = f"""{"; ".join(setup)}; e = []; h = model.get_submodule("{embedding}").register_forward_hook{keep}
y = model(a){_logits(subject)}[:, :{cut}]; h.remove(); (y * torch.randn_like(y)).sum().backward(); print({shown})"""
    return lines if _shows(subject, lines) else ""


def prefix_shown(subject: Subject, size: int, end: int) -> str:
    """Two lines that print how far the logits of `end` tokens are from those of the same tokens in a text of `size`."""
    if subject.fixed or subject.sequence or subject.translates or subject.time_first:
        return ""
    setup, _ = _statements(replace(subject, ids=subject.tokens(ROWS, size, SEED)), CodePath(""), end, SEED)
    call = f"model(a[:1]){_logits(subject)}[:, :{end}] - model(a[:1, :{end}]){_logits(subject)}"
    lines = f"{'; '.join(setup)}\nprint(({call}).abs().max())"
    return lines if _shows(subject, lines) else ""


def _shows(subject: Subject, lines: str) -> bool:
    printed: list[float] = []
    own = duplicate(subject.own)
    scope = {"model": getattr(own, "function", getattr(own, "translator", own))}
    scope["print"] = lambda value: printed.append(float(value))
    scope["inputs"] = subject.given
    try:
        with (
            mode(own, training=own.training),
            torch.enable_grad(),
            warnings.catch_warnings(),
            torch.compiler.set_stance("default"),
        ):
            warnings.simplefilter("ignore")
            exec(lines, scope)
    except Exception:  # a path that the two lines cannot follow
        return False
    return bool(printed) and printed[0] > 1e-4


def _of_inputs(subject: Subject) -> tuple[str, str]:
    """Python for the sequence in the user's `inputs`, and for a call of the model with `x` in its place."""
    if isinstance(subject.given, Tensor):
        return "inputs", "model(x"
    if isinstance(subject.given, Mapping):
        return f'inputs["{subject.sequence}"]', f'model(**{{**inputs, "{subject.sequence}": x}}'
    place = list(accepted(subject.own)).index(subject.sequence)
    return f"inputs[{place}]", f"model(*inputs[:{place}], x, *inputs[{place + 1} :]"


def _logits(subject: Subject) -> str:
    """The attribute or index by which the model's output gives logits."""
    with torch.no_grad():
        out = subject.call(subject.ids)
    part = "[0]" if isinstance(out, tuple | list) else ""
    part = ".logits" if hasattr(out, "logits") else '["logits"]' if isinstance(out, dict) else part
    infinite = bool(logits_in(out).isinf().any())  # whose differences are no numbers
    return f"{part}{'.transpose(0, 1)' * subject.time_first}{'.clamp(-1e30, 1e30)' * infinite}"


def _statements(subject: Subject, path: CodePath, cut: int, seed: int) -> tuple[list[str], str]:
    """Statements that make two texts `a` and `b` and prepare the model, and the expression that prints."""
    size, vocab, half, logits = subject.length, subject.vocab_size, subject.length // 2, _logits(subject)
    rows = 1 if path.how == "packed documents" or path.how.startswith("one row") else ROWS
    setup, more, before = ["import torch"], "", f"[:, :{cut}]"
    if subject.given is not None:
        other = (
            f"torch.randn_like(b[:, {cut}:])" if subject.ids.is_floating_point() else f"(b[:, {cut}:] + 1) % {vocab}"
        )
        setup.append(f"a = {_of_inputs(subject)[0]}; b = a.clone(); b[:, {cut}:] = {other}")
    else:
        device = "" if subject.ids.device.type == "cpu" else f', device="{subject.ids.device}"'
        setup.append(f"torch.manual_seed({seed}); a = torch.randint({vocab}, ({rows}, {size}){device})")
        setup.append(f"b = a.clone(); b[:, {cut}:] = (a[:, {cut}:] + 1) % {vocab}")
    if not isinstance(subject.own, AsModule):
        setup.append(f"model.{'train' if path.training else 'eval'}()")
    if path.attention:
        setup.append(f'model.set_attn_implementation("{path.attention}")')
    if path.attention == "flex_attention":  # the same masks, without a compiler
        setup.append('torch.compiler.set_stance("force_eager")')
    changes = {
        "in bfloat16": "model.bfloat16()",
        "parameters scaled": _EVERY_MATRIX,
        "compiled": 'model = torch.compile(model, backend="aot_eager")',
        "packed documents": f"p = torch.arange({size})[None]; p = p - {half} * (p >= {half}) + {subject.first_position}",
        TRAINED: (
            "model.train(); o = torch.optim.Adam(model.parameters(), 3e-3); [(o.zero_grad(), torch.nn.functional.cross_entropy("
            f"model(t[:, :-1]){logits}.flatten(0, 1), t[:, 1:].flatten()).backward(), o.step()) "
            f"for t in torch.randint({vocab}, (200, 16, {min(size, SHORT + 1)}))]; model.eval()"
        ),
    }
    setup += [changes[path.how]] if path.how in changes else []
    if path.padding:
        flipped = ".flip(1)" if path.padding == "left" else ""
        setup.append(f"m = torch.ones(3, {size}).long(); m[1, -{size // 3}:] = m[2, -{size // 2}:] = 0; m = m{flipped}")
        first = subject.first_position
        positions = "" if first is None else f", position_ids=(m.cumsum(1) - 1).clamp_min(0) + {first}"
        form = _FORMS[MASKS.index(subject.mask_form or MASKS[0])]
        more = f", {subject.mask_name}={form}{positions}"
        before = f"[m.bool() & (torch.arange({size}) < {cut})]"
    elif path.how == "packed documents":
        more = ", position_ids=p"
    call = f"model(x.mT{more})" if subject.time_first else f"model(x{more})"
    if subject.given is not None:
        call = f"{_of_inputs(subject)[1]}{more})"
    elif subject.translates or subject.fixed:
        longest = subject.model.sources.shape[1] if subject.translates else subject.fixed["input_ids"].shape[1]
        setup.append(f"source = torch.randint({vocab}, (3, {longest}))")
        call = f"model(source, {'decoder_input_ids=' if subject.sequence else ''}x{more})"
    elif path.how == "after a cache":
        cache = cache_argument(accepted(subject.model))
        call = f"model(x[:, {half}:], {cache}=model(x[:, :{half}], use_cache=True).{cache})"
        before = f"[:, :{cut - half}]"
    expression = (
        f"x, y = ((torch.manual_seed(1), {call})[1]{logits} for x in (a, b)); print((x - y){before}.abs().max())"
    )
    return setup, expression
