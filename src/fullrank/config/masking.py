"""What a configuration must not ask for where tokens are masked (`train.objective: masked`), and the words for its figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fullrank.config.running import RunConfig
    from fullrank.config.training import TrainConfig

# what is said of every figure of a model that predicts masked tokens
MASKED_TOKEN = "a masked-token perplexity, not comparable with next-token perplexity"


def objective_problems(train: TrainConfig) -> list[str]:
    """Faults in what `train` says about the objective and about masking."""
    problems: list[str] = []
    if train.objective not in ("causal", "masked", "labels"):
        problems.append(f"train.objective: 'causal' or 'masked', given '{train.objective}'")
    if not 0 < train.mlm_probability < 1:
        problems.append(f"train.mlm_probability: between 0 and 1, given {train.mlm_probability}")
    replaced, drawn = train.mask_replace_prob, train.random_replace_prob
    for key, value in (("mask_replace_prob", replaced), ("random_replace_prob", drawn)):
        if not 0 <= value <= 1:
            problems.append(f"train.{key}: a probability from 0 to 1, given {value}")
    if not problems and replaced + drawn > 1 + 1e-9:
        problems.append(
            f"train.random_replace_prob: together with train.mask_replace_prob at most 1; given {drawn} and {replaced}"
        )
    if train.objective == "masked":
        problems += [
            f"train.phases.{phase.name}.skip: layers rest for the sake of their memory, and with train.objective: masked "
            f"there is none; given '{phase.skip}', allowed is 'none'"
            for phase in train.phases
            if phase.skip != "none"
        ]
    return problems


def masked_problems(run: RunConfig) -> list[str]:
    """What of a run does not go with `train.objective: masked`."""
    if run.translates:
        return [
            f"train.objective: masked reads text of one language, and data.name: {run.data.name} has sentence pairs; choose "
            "another corpus, or objective: causal"
        ]
    problems = run.model.problems_of_masked()
    problems += [
        f"eval.{key}: says how next tokens are read, and with train.objective: masked there are none; given "
        f"{getattr(run.eval, key)}, leave it out"
        for key in ("context", "stride", "memory_length", "same_length", "clamp_length")
        if getattr(run.eval, key)
    ]
    return problems
