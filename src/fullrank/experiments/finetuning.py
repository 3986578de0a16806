"""The task of fine-tuning: a pretrained encoder with our attention injected, on GLUE or on SQuAD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fullrank.config.finetune import FinetuneConfig
from fullrank.core.errors import InputError
from fullrank.data.examples import ExampleBatches, choose_subset
from fullrank.experiments.benchmark import EncodedSplit, ExampleObjective, logits_by_example
from fullrank.experiments.glue import GlueBenchmark, predict_labels
from fullrank.experiments.pretrained import PretrainedEncoder, load_pretrained
from fullrank.experiments.run_folder import open_any
from fullrank.experiments.squad import SquadBenchmark
from fullrank.experiments.task import Parts, Prepared, Say, Task, choose_own_rows
from fullrank.training.checkpoint import load_weights
from fullrank.training.distributed import rank
from fullrank.training.optimizer import Groups, parameter_groups
from fullrank.training.values import Counters, EvaluationOptions, EvaluationResult

Benchmark = GlueBenchmark | SquadBenchmark  # how examples are read, encoded and scored


class Finetuning(Task[FinetuneConfig, dict[str, Any]]):
    """Fine-tuning on a task of GLUE or on SQuAD. Its data are splits by name."""

    def prepare(
        self, config: FinetuneConfig, identity: Mapping[str, Any], allow_slice: bool, say: Say
    ) -> Prepared[FinetuneConfig, dict[str, Any]]:
        benchmark = benchmark_of(config)
        splits = {}
        for name in benchmark.list_splits(say):
            source = benchmark.read(name, say)
            most = config.data.max_train if name == "train" else config.data.max_eval
            rows = choose_subset(len(source), most, config.data.subset_seed)
            splits[name] = source if len(rows) == len(source) else source.take(rows)
        checksums = {name: source.sha256 for name, source in splits.items()}
        return Prepared(config, splits, config.data.label, {"text": checksums})

    def parts(self, data: Prepared[FinetuneConfig, dict[str, Any]], folder: Path, device: torch.device) -> Parts:
        import transformers

        config, benchmark = data.config, benchmark_of(data.config)
        pretrained = load_encoder(benchmark)
        model = pretrained.model.to(device)
        splits = {name: benchmark.encode(pretrained, source) for name, source in data.corpus.items()}
        train, dev = splits["train"], splits["dev"]
        batches = ExampleBatches(
            train.encoded,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            group_by_length=config.train.group_by_length,
            share=choose_own_rows(),
        )
        options = config.train.options(batches.batches_per_epoch)
        # null: once, at the end, which comes by itself
        every_epochs = config.eval.every_epochs or (None if config.eval.every_steps else float(2**31))

        def measure(model: nn.Module, split: EncodedSplit, written: Path | None = None) -> dict[str, float]:
            logits = logits_by_example(model, split.encoded, config.eval.batch_size, benchmark.compute_logits)
            return benchmark.score(split, logits, written)

        def evaluate(model: nn.Module) -> EvaluationResult:
            figures, rows = measure(model, dev), len(dev.encoded)
            return EvaluationResult(figures["loss"] * rows, rows, {name: figures[name] for name in benchmark.metrics})

        def finish(done: Counters) -> dict[str, Any]:
            if config.eval.checkpoint == "best" and done.best_step != done.step:
                load_weights(model, folder / "checkpoints" / "best")
            model.eval()
            figures = {name: measure(model, split, folder) for name, split in splits.items() if name != "train"}
            if config.train.keep_model and rank() == 0:
                model.save_pretrained(folder / "model")
                pretrained.tokenizer.save_pretrained(folder / "model")
            parameters = dict(model.named_parameters())
            return {
                "kind": "finetuning",
                "parameters": {
                    "total": model.num_parameters(),
                    "mixing": sum(parameters[name].numel() for name in mixing_names(model)),
                    "fresh": sum(parameters[name].numel() for name in pretrained.fresh if name in parameters),
                },
                "final": figures,
                "metrics": list(benchmark.metrics),
                "checkpoint": config.eval.checkpoint,
                "best": {"step": done.best_step, benchmark.metrics[0]: done.best_metric},
                "task": config.data.label,
                "title": benchmark.title,
                "slice": {name: split.source.is_slice for name, split in splits.items()},
                "examples": {name: len(split.source) for name, split in splits.items()},
                **({"windows": {name: len(split.windows) for name, split in splits.items()}} if dev.windows else {}),
                "protocol": benchmark.protocol,
                "sha256": data.identity["text"],
            }

        return Parts(
            model,
            ExampleObjective(model, train.targets, benchmark.compute_logits, benchmark.compute_loss, config.train),
            batches,
            evaluate,
            options,
            EvaluationOptions(config.eval.every_steps, every_epochs, benchmark.metrics[0]),
            lambda: groups_of(model, options.weight_decay, config.train.mixing_scale, options.optimizer == "muon"),
            finish,
            {"transformers": transformers.__version__},
            pretrained.remark,
        )


def benchmark_of(config: FinetuneConfig) -> Benchmark:
    """The benchmark that `data.name` says."""
    return SquadBenchmark(config) if config.data.answers else GlueBenchmark(config)


def mixing_names(model: nn.Module) -> set[str]:
    """The names of the injected parameters."""
    return {name for name, _ in model.named_parameters() if ".fullrank." in f".{name}"}


def groups_of(model: nn.Module, weight_decay: float, mixing_scale: float, muon: bool = False) -> Groups:
    """The usual parameter groups, and one of mixing parameters: another learning rate, and no decay."""
    names = mixing_names(model)
    injected = {id(p) for name, p in model.named_parameters() if name in names}
    groups = parameter_groups(model, weight_decay, muon)
    mixing = [p for group in groups for p in group["params"] if id(p) in injected]
    groups = [{**group, "params": [p for p in group["params"] if id(p) not in injected]} for group in groups]
    groups.append({"params": mixing, "weight_decay": 0.0, "scale": mixing_scale})
    return [group for group in groups if group["params"]]


# -- a finished run, read again --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reopened:
    """The model of a finished run of GLUE, and its development split."""

    model: Any
    benchmark: GlueBenchmark
    split: EncodedSplit

    def predict(self, model: nn.Module) -> np.ndarray:
        """Predictions of `model` for the examples, (T,)."""
        size, compute = self.benchmark.config.eval.batch_size, self.benchmark.compute_logits
        return predict_labels(torch.stack(logits_by_example(model, self.split.encoded, size, compute)))


def reopen(folder: Path, say: Say) -> Reopened:
    """The run in `folder` as it was measured at its end; InputError for SQuAD, and where no model was kept."""
    config, identity = open_any(folder)
    if not isinstance(config, FinetuneConfig) or config.data.answers:
        raise InputError(f"{folder}: no run of GLUE")
    if not (folder / "model").is_dir():
        raise InputError(f"{folder}: holds no model/; fine-tune it with train.keep_model: true")
    model = replace(config.model, pretrained=str(folder / "model"), revision=None)
    config = replace(config, model=model)
    benchmark = GlueBenchmark(config)
    pretrained = load_encoder(benchmark)
    dev = Finetuning().prepare(config, identity, True, say).corpus["dev"]
    return Reopened(pretrained.model, benchmark, benchmark.encode(pretrained, dev))


def load_encoder(benchmark: Benchmark) -> PretrainedEncoder:
    """The encoder with the output layer of a benchmark."""
    return load_pretrained(
        benchmark.config.model, benchmark.kind, num_labels=benchmark.outputs, labels=benchmark.labels
    )
