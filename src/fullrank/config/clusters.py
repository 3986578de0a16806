"""Whether the clusters of an adaptive input or output layer can be: `cutoffs` and `div_val`."""

from __future__ import annotations

from itertools import pairwise


def cluster_problems(
    key: str, cutoffs: list[int] | None, div_val: int | None, vocab_size: int | None, hidden_size: int | None
) -> list[str]:
    """What is wrong with them, `key` being `model.input` or `model.output`; what is None is not known yet."""
    if not cutoffs:
        return [f"{key}.cutoffs: an adaptive layer needs the ids at which its clusters end, as in [20000, 60000]"]
    if not all(type(cutoff) is int for cutoff in cutoffs) or any(a >= b for a, b in pairwise([0, *cutoffs])):
        return [f"{key}.cutoffs: whole numbers above 0 that increase strictly, given {cutoffs}"]
    problems = []
    if vocab_size is not None and cutoffs[-1] >= vocab_size:
        problems.append(
            f"{key}.cutoffs: below model.vocab_size {vocab_size}, which ends the last cluster; given {cutoffs}"
        )
    if div_val is not None and not (type(div_val) is int and div_val >= 1):
        problems.append(f"{key}.div_val: a whole number, 1 or more, given {div_val!r}")
    elif div_val is not None and hidden_size is not None and hidden_size < div_val ** len(cutoffs):
        problems.append(
            f"{key}.div_val: the last of {len(cutoffs) + 1} clusters would have {hidden_size} / {div_val}^{len(cutoffs)} < 1 "
            f"dimensions; lower {key}.div_val or give fewer {key}.cutoffs"
        )
    return problems
