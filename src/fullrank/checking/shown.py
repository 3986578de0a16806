"""Two lines of Python that show a leak to a reader of the report, without this package."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fullrank.checking.copies import AsModule, duplicate, list_arguments, mode
from fullrank.checking.paths import AUTOCAST, CACHE, COMPILED, GAIN, PACKED, SCALED, TRAINED, TYPES, CodePath
from fullrank.checking.subject import MASKS, ROWS, SEED, SHORT, Subject
from fullrank.forward import cache_argument, logits_in

_EVERY_MATRIX = (
    f"[p.data.mul_({GAIN:g} * len(p) ** 0.5 / p.norm()) for m in model.modules() if not isinstance(m, torch.nn.Embedding) "
    "for p in m.parameters(recurse=False) if p.dim() > 1]"
)
_MASK_FORMS = ("m", "m.bool()", "~m.bool()", "torch.zeros(m.shape).masked_fill(m == 0, -torch.inf)")
_EVERY_PARAMETER = "torch.manual_seed(0); [p.data.add_(0.1 * torch.randn_like(p)) for p in model.parameters()]"


def show_leak(subject: Subject, path: CodePath, cut: int) -> str:
    """Two lines of Python, with `model` (and `inputs`) in scope: the largest change of logits before `cut` is printed.

    They have been run on a copy of the model as it was passed, and printed more than rounding; empty where none did.
    """
    for seed in (SEED, SEED + 1, SEED + 2, -SEED, -SEED - 1, -SEED - 2):
        setup = write_setup(subject, path, cut, abs(seed))
        if seed < 0:  # a gate that starts closed is opened
            setup.insert(1, _EVERY_PARAMETER)
        call, before = write_call(subject, path, cut)
        expression = f"x, y = ((torch.manual_seed({path.seed}), {call})[1]{write_logits(subject)} for x in (a, b)); "
        lines = f"{'; '.join(setup)}\n{expression}print((x - y){before}.abs().max())"
        if is_shown(subject, lines):
            return lines
    return ""


def show_prefix(subject: Subject, size: int, end: int) -> str:
    """Two lines that print how far the logits of `end` tokens are from those of the same tokens in a text of `size`."""
    if subject.fixed or subject.sequence or subject.time_first:
        return ""
    longer = replace(subject, ids=subject.tokens(ROWS, size, SEED))
    setup, logits = write_setup(longer, CodePath(), end, SEED), write_logits(subject)
    call = f"model(a[:1]){logits}[:, :{end}] - model(a[:1, :{end}]){logits}"
    lines = f"{'; '.join(setup)}\nprint(({call}).abs().max())"
    return lines if is_shown(subject, lines) else ""


def is_shown(subject: Subject, lines: str) -> bool:
    """The lines print more than rounding."""
    printed: list[float] = []
    own = duplicate(subject.own)
    scope = {"model": own.function if isinstance(own, AsModule) else own, "inputs": subject.given}
    scope["print"] = lambda value: printed.append(float(value))
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


def write_logits(subject: Subject) -> str:
    """The attribute or index by which the model's output gives logits."""
    with torch.no_grad():
        out = subject.call(subject.ids)
    part = "[0]" if isinstance(out, tuple | list) else ""
    part = ".logits" if hasattr(out, "logits") else '["logits"]' if isinstance(out, dict) else part
    infinite = bool(logits_in(out).isinf().any())  # whose differences are no numbers
    return f"{part}{'.transpose(0, 1)' * subject.time_first}{'.clamp(-1e30, 1e30)' * infinite}"


def write_setup(subject: Subject, path: CodePath, cut: int, seed: int) -> list[str]:
    """Statements that make two texts `a` and `b` and prepare the model."""
    size, vocab = subject.length, subject.vocab_size
    rows = 1 if path.how == PACKED or path.is_one_row else ROWS
    other = f"(b[:, {cut}:] + 1) % {vocab}" if subject.reads_tokens else f"torch.randn_like(b[:, {cut}:])"
    device = "" if subject.ids.device.type == "cpu" else f', device="{subject.ids.device}"'
    texts = f"torch.manual_seed({seed}); a = torch.randint({vocab}, ({rows}, {size}){device})"
    if subject.given is not None:
        texts = f"a = {write_inputs(subject)[0]}"
    setup = ["import torch", texts, f"b = a.clone(); b[:, {cut}:] = {other}"]
    if not isinstance(subject.own, AsModule):
        setup.append(f"model.{'train' if path.training else 'eval'}()")
    if path.attention:
        setup.append(f'model.set_attn_implementation("{path.attention}")')
    if path.attention == "flex_attention":  # the same masks, without a compiler
        setup.append('torch.compiler.set_stance("force_eager")')
    if path.padding:
        flipped = ".flip(1)" if path.padding == "left" else ""
        setup.append(f"m = torch.ones(3, {size}).long()")
        if path.padding != "ones":
            setup.append(f"m[1, -{size // 3}:] = m[2, -{size // 2}:] = 0; m = m{flipped}")
    if subject.fixed and subject.given is None:
        setup.append(f"source = torch.randint({vocab}, (3, {subject.fixed['input_ids'].shape[1]}))")
    half, text = size // 2, min(size, SHORT + 1)
    changes = {
        SCALED: _EVERY_MATRIX,
        COMPILED: 'model = torch.compile(model, backend="aot_eager")',
        PACKED: f"p = torch.arange({size})[None]; p = p - {half} * (p >= {half}) + {subject.first_position}",
        TRAINED: (
            "model.train(); o = torch.optim.Adam(model.parameters(), 3e-3); [(o.zero_grad(), torch.nn.functional.cross_entropy("
            f"model(t[:, :-1]){write_logits(subject)}.flatten(0, 1), t[:, 1:].flatten()).backward(), o.step()) "
            f"for t in torch.randint({vocab}, (200, 16, {text}))]; model.eval()"
        ),
        **{how: f"model.to({dtype})" for how, dtype in TYPES.items()},
        AUTOCAST: 'model = torch.autocast("cpu", torch.bfloat16)(model)',
    }
    return [*setup, changes[path.how]] if path.how in changes else setup


def write_call(subject: Subject, path: CodePath, cut: int) -> tuple[str, str]:
    """A call of the model with the text `x`, and the part of its logits that stands before the cut."""
    half, more, before = subject.length // 2, "", f"[:, :{cut}]"
    if path.padding:
        first, form = subject.first_position, _MASK_FORMS[MASKS.index(subject.mask_form or MASKS[0])]
        positions = (
            ""
            if first is None or path.padding == "ones"
            else f", position_ids=(m.cumsum(1) - 1).clamp_min(0) + {first}"
        )
        more = f", {subject.mask_name}={form}{positions}"
        before = f"[m.bool() & (torch.arange({subject.length}) < {cut})]"
    elif path.how == PACKED:
        more = ", position_ids=p"
    elif path.how == CACHE and not subject.fixed:
        cache = cache_argument(list_arguments(subject.model))
        call = f"model(x[:, {half}:], {cache}=model(x[:, :{half}], use_cache=True).{cache})"
        return call, f"[:, :{cut - half}]"
    if subject.given is not None:
        return f"{write_inputs(subject)[1]}{more})", before
    if subject.fixed:
        return f"model(source, {'decoder_input_ids=' if subject.sequence else ''}x{more})", before
    return f"model({'x.mT' if subject.time_first else 'x'}{more})", before


def write_inputs(subject: Subject) -> tuple[str, str]:
    """Python for the sequence in the user's `inputs`, and for a call of the model with `x` in its place."""
    if isinstance(subject.given, Tensor):
        return "inputs", "model(x"
    if isinstance(subject.given, Mapping):
        return f'inputs["{subject.sequence}"]', f'model(**{{**inputs, "{subject.sequence}": x}}'
    place = list(list_arguments(subject.own)).index(subject.sequence)
    return f"inputs[{place}]", f"model(*inputs[:{place}], x, *inputs[{place + 1} :]"
