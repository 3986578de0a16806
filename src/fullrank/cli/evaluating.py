"""`fullrank eval` of a translation run: perplexity and BLEU, and another run beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fullrank.cli.output import print_json, say
from fullrank.core.errors import InputError


def evaluate_translation(
    run: Path,
    split: str,
    of_segments: Mapping[str, object],
    beam: int | None,
    length_penalty: float | None,
    against: Path | None,
    checkpoint: str,
    device: str,
    kernel: str,
    *,
    json: bool,
) -> None:
    """`of_segments`: options that say how a running text is read, by name; none may be given."""
    if given := [name for name, value in of_segments.items() if value is not None]:
        raise InputError(
            f"{', '.join(given)}: how a running text is read, and {run} translates sentences; its options are --beam and "
            "--length-penalty"
        )
    if against is not None:
        if beam is not None or length_penalty is not None or checkpoint != "best":
            raise InputError("--against compares the final translations that both runs kept: leave out other options")
        _compare(run, against, split, json=json)
        return
    from fullrank.experiments.evaluate import evaluate

    search: dict[str, object] = {}
    if beam is not None:
        search["beams"] = beam
    if length_penalty is not None:
        search["length_penalty"] = length_penalty
    found = evaluate(run, split, checkpoint=checkpoint, search=search, device_name=device, kernel_name=kernel, say=say)
    if json:
        print_json(found)
        return
    print(
        f"{found['run']}: {found['corpus']}, {split}, {found['sentences']:,} sentences, {found['tokens']:,} target tokens"
    )
    print(f"  BLEU                 {found['bleu']:.2f}   {found['bleu_signature']}")
    print(f"  chrF                 {found['chrf']:.2f}   {found['chrf_signature']}")
    if "tokenised_bleu" in found:
        print(f"  tokenised BLEU       {found['tokenised_bleu']:.2f}   {found['tokenised_bleu_label']}")
    print(f"  length ratio         {found['length_ratio']:.3f}")
    print(f"  perplexity per token {found['perplexity']:.4f}")
    print(f"  {found['protocol']}")


def _compare(run: Path, other: Path, split: str, *, json: bool) -> None:
    """Paired bootstrap of two runs' kept translations."""
    from fullrank.reporting import compare_runs

    found = compare_runs([other, run], split)
    if json:
        print_json(found)
        return
    difference = found["against_first"][0]
    print(f"{split}: BLEU {difference['b']:.2f} of {run}, {difference['a']:.2f} of {other}")
    print(
        f"  difference {difference['difference']:+.2f}, 95 % interval {difference['low']:+.2f} to {difference['high']:+.2f}, "
        f"p = {difference['p_value']:.3f} (paired bootstrap, {found['samples']:,} samples of {found['sentences']:,} sentences)"
    )
