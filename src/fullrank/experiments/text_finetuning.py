"""The task of fine-tuning on a text: a language model's, whose model and tokens are pretrained."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullrank.checking import check
from fullrank.comparison.runs import SPLITS
from fullrank.config.finetune import TextFinetuneConfig, TextTrainConfig
from fullrank.core.errors import InputError
from fullrank.data import Tokenizer
from fullrank.experiments.finetuning import count_numbers, find_mixing, rate_mixing
from fullrank.experiments.language_model import LanguageModelTask
from fullrank.experiments.task import Rates
from fullrank.files import Entries, read_json, write_json
from fullrank.hf.causal import MODEL, CausalModel, adapt, explain, load_causal, load_tokenizers
from fullrank.hf.load import quiet, read_part
from fullrank.training.device import all_gather, rank

logger = logging.getLogger(__name__)

BEFORE = "before.json"  # in the run folder: figures and checks of the model before training


class TextFinetuning(LanguageModelTask):
    """Fine-tuning of a causal model on a text."""

    model_class: Any = CausalModel

    def check(self) -> None:
        """Check nothing, as nothing is known of the model before it is loaded."""

    def read_tokenizer(self) -> Tokenizer:
        return load_tokenizers(self.config.model)[1]

    def with_sizes(self) -> TextFinetuneConfig:
        """Return the configuration with segments of the usual length shortened to what the model reads.

        Another length stays.
        """
        config: TextFinetuneConfig = self.config
        with explain(config.model) as options:
            model_config = read_part("AutoConfig", config.model.pretrained, **options)
        train = config.train
        room = getattr(model_config.get_text_config(), "max_position_embeddings", math.inf) - train.context
        if train.segment_length == TextTrainConfig().segment_length and 0 < room < train.segment_length:
            logger.info(f"train.segment_length: {room}, with train.context all that {config.model.pretrained} reads")
            train = dataclasses.replace(train, segment_length=int(room))
        return dataclasses.replace(config, train=train)

    def make_model(self) -> CausalModel:
        """Load the pretrained model, injected and with an adapter where that is asked for.

        Raises InputError for blocks too long for it.
        """
        config: TextFinetuneConfig = self.config
        model = adapt(load_causal(config.model), config.train.adapter)
        read = config.train.segment_length + config.train.context
        if model.max_length is not None and read > model.max_length:
            raise InputError(
                f"train.segment_length: {config.model.pretrained} reads at most {model.max_length:,} tokens, given {read:,}"
            )
        return model

    def build(self, folder: Path, device: torch.device) -> None:
        super().build(folder, device)
        model = self.model
        if not all_gather((folder / BEFORE).is_file())[0]:
            figures = {split: self.figures(model, split, self.protocol(split)) for split in SPLITS}
            if rank() == 0:
                write_json(folder / BEFORE, {"figures": figures, "check": self.check_model(model)})
        if rank() == 0 and model.adapted is None:
            model.model.config.save_pretrained(folder / MODEL)  # by which checkpoints are loaded

    @property
    def packages(self) -> Sequence[str]:  # type: ignore[override]
        return ["transformers"] if self.config.train.adapter is None else ["transformers", "peft"]

    def choose_rates(self, model: nn.Module) -> Rates:
        return rate_mixing(model, self.config.train.mixing_scale)

    def count_parameters(self) -> dict[str, int]:
        model = self.model
        copies = [p for name, p in model.named_parameters() if ".original_module." in name]  # that PEFT keeps
        return {
            "total": model.num_parameters() - count_numbers(copies),
            "mixing": count_numbers(p for p in find_mixing(model).values() if p.requires_grad),
            "trained": count_numbers(p for p in model.parameters() if p.requires_grad),
        }

    def finish(self, model: CausalModel, folder: Path) -> Entries:
        """Check the best model and save it; return the entries `before` and `check`."""
        before = read_json(folder / BEFORE)
        if self.config.train.keep_model and rank() == 0:
            words, _ = load_tokenizers(self.config.model)
            with quiet():
                model.save(folder / MODEL, words)
        after = self.check_model(model)
        return {
            **super().finish(model, folder),
            "pretrained": self.config.model.pretrained,
            "before": before["figures"],
            "check": {"before": before["check"], "after": after},
        }

    def check_model(self, model: CausalModel) -> Entries | None:
        """Check the model as `fullrank check --quick` does; None where `train.check` is off."""
        if not self.config.train.check:
            return None
        with quiet(), torch.random.fork_rng(devices=[]):
            report = check(model.model, quick=True)
        verdicts = {finding.check: finding.verdict for finding in report.findings}
        return {"passes": report.passes, "headline": report.headline, "checks": verdicts}
