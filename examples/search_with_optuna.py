"""Search for a learning rate and a dropout with Optuna: every trial reads the same tokens, poor ones stop early.

pip install optuna
python examples/search_with_optuna.py my.yaml --trials 12 --steps 800 --out runs/search
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import optuna

from fullrank.config.load import resolve
from fullrank.core.errors import RunError
from fullrank.experiments.run import train


def suggest_settings(trial: optuna.Trial) -> list[str]:
    """Draw the settings of a trial. Put your own keys here."""
    learning_rate = trial.suggest_float("train.learning_rate", 1e-4, 1e-2, log=True)
    dropout = trial.suggest_float("model.dropout.residual", 0.0, 0.4, step=0.05)
    return [f"train.learning_rate={learning_rate:.3g}", f"model.dropout.residual={dropout:.2f}"]


def validation_nll(folder: Path) -> float:
    """Return the lowest validation loss of a run so far, in nats per token."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return min(line["nll"] for line in lines if line["split"] == "valid")


def search(config: str, steps: int, trials: int, out: Path) -> optuna.Trial:
    """Return the best of `trials` trainings of at most `steps` updates each. None of them reads the test text."""
    quarter = steps // 4
    equal_terms = [f"train.steps={steps}", f"eval.every_steps={quarter}"]

    def objective(trial: optuna.Trial) -> float:
        settings = suggest_settings(trial)
        trial.set_user_attr("settings", settings)
        run = resolve(config, overrides=[*equal_terms, *settings])
        folder = out / f"trial-{trial.number}"
        for step in (quarter, 2 * quarter, steps):
            train(run, folder, until=step, quiet=True)  # goes on where it paused
            trial.report(validation_nll(folder), step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return validation_nll(folder)

    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=1),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=quarter, reduction_factor=2),
    )
    study.optimize(objective, n_trials=trials, catch=RunError)  # a training that diverges is a failed trial
    return study.best_trial


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a recipe or a YAML file")
    parser.add_argument("--steps", type=int, default=800, help="updates of a whole training")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/search"), help="a new folder")
    options = parser.parse_args()
    best = search(options.config, options.steps, options.trials, options.out)
    print(f"best: {best.value:.4f} nats per token of validation text, trial {best.number}")
    print(
        shlex.join(["fullrank", "train", options.config, f"train.steps={options.steps}", *best.user_attrs["settings"]])
    )
