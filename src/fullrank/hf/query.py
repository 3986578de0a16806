"""Which query an attention module hands to its attention function: position-wise mixing reads that one."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from typing import Any

from torch import nn

from fullrank.hf.finding import dispatcher

_SCALES = ("scaling", "scale", "scale_factor", "softmax_scale")
_ROTATING = ("rotary", "rope")
_NORMS = ("q_norm", "q_layernorm", "q_layer_norm", "query_layernorm", "qk_norm")  # of heads
_SWITCHES = ("use_rope", "use_rotary", "apply_rotary")  # where layers differ


def query_of(module: nn.Module) -> str:
    """ "projected", or what was done to the projected query before: "normalized", "rotated", "scaled", joined by " and ".

    It is read off the module's code, so that it is known before the first pass.
    """
    method = dispatcher(type(module))
    assert method is not None
    names = method.__code__.co_names
    done = []
    if any(name in _NORMS and getattr(module, name, None) is not None for name in names):
        done.append("normalized")
    if any(word in name.lower() for name in names for word in _ROTATING) and _rotates(module):
        done.append("rotated")
    if _scales_query(method):
        done.append("scaled")
    return " and ".join(done) or "projected"


def queries_of(modules: dict[str, Any]) -> str | dict[str, str]:
    """The same of all modules: one word if they agree, otherwise a word for each name."""
    found = {name: query_of(module) for name, module in modules.items()}
    return next(iter(found.values())) if len(set(found.values())) == 1 else found


def _rotates(module: nn.Module) -> bool:
    return all(getattr(module, switch, True) is not False for switch in _SWITCHES)


def _scales_query(method: types.FunctionType) -> bool:
    """Whether something with a `q` in its name is multiplied by the module's scale."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            written = " ".join(ast.unparse(target) for target in targets)
            product = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult) and _is_scale(node.value)
            if "q" in written and (product or any(_product_with_scale(part) for part in ast.walk(node.value))):
                return True
    return False


def _product_with_scale(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and (_is_scale(node.left) or _is_scale(node.right))
    )


def _is_scale(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in _SCALES
