"""Causal language modelling: a configuration becomes corpus, model and training, and ends in figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullrank.attention.kernels import kernel
from fullrank.config.recipe import Resolved
from fullrank.config.schema import NOT_NEXT_TOKEN, RunConfig
from fullrank.data import Blocks, Corpus, Streams, load_corpus, prepare, unigram_perplexity
from fullrank.errors import ConfigError, FullRankError, InputError
from fullrank.evaluation.perplexity import Evaluation, figures
from fullrank.evaluation.protocol import EvaluationProtocol, Flags, final_protocol, judging_protocol
from fullrank.files import write_json
from fullrank.model.language_model import LanguageModel
from fullrank.model.size import parameters_by_part
from fullrank.tasks.environment import environment
from fullrank.tasks.measuring import check_length, check_training_length, measure
from fullrank.tasks.objective import CausalObjective
from fullrank.tasks.run_folder import absolute, check_place, claim, is_run, open_run
from fullrank.training.device import choose_device, prepare_machine
from fullrank.training.interrupt import only_one
from fullrank.training.loop import fit
from fullrank.training.observers import make_observers
from fullrank.training.optimizer import make_optimizer, parameter_groups
from fullrank.training.plan import make_plan
from fullrank.training.randomness import seed_everything
from fullrank.training.schedule import make_schedule

Say = Callable[[str], None]


def with_vocabulary(config: RunConfig, corpus: Corpus) -> RunConfig:
    """`config` with `model.vocab_size` known; ConfigError if a given one is too small for the corpus."""
    size, given = len(corpus.tokenizer), config.model.vocab_size
    if given is not None and given < size:
        raise ConfigError(
            f"model.vocab_size: {given}, but {corpus.label} has {size} entries; set it to null or at least {size}, "
            "or make the vocabulary smaller with data.max_vocabulary or data.min_count"
        )
    return config if given else dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def train(
    resolved: Resolved, folder: Path, *, kernel_name: str = "auto", quiet: bool = False, say: Say = print
) -> dict[str, Any]:
    """Train what `resolved` says in `folder` (continuing a run that was stopped there) and return its `result.json`."""
    config = dataclasses.replace(resolved.config, data=absolute(resolved.config.data))
    final_protocol(config)  # a fault in it is told before any work
    check_place(folder)
    known = open_run(folder)[1] if is_run(folder) else {}
    corpus = _kept(known) or prepare(config.data, allow_slice=resolved.scale != "paper", report=say)
    config = with_vocabulary(config, corpus)
    identity = {
        "name": resolved.row or folder.name,
        "recipe": resolved.recipe,
        "row": resolved.row,
        "scale": resolved.scale,
        "paper": resolved.paper,
        "kernel": kernel_name,
        "vocabulary": corpus.tokenizer.fingerprint,
        "text": {split: info.sha256 for split, info in corpus.splits.items()},
        "prepared": str(corpus.folder.resolve()),
    }
    with only_one(folder, lend=True), kernel(kernel_name):
        if claim(folder, config, identity):
            finished = _finished(folder)
            if finished is not None:
                say(f"{folder}: already finished")
                return finished
        corpus.tokenizer.save(folder)
        if config.model.sees_future:
            say(f"{folder}: its perplexity is {NOT_NEXT_TOKEN}")
        return _train(config, identity, corpus, folder, quiet)


def _kept(identity: Mapping[str, Any]) -> Corpus | None:
    """The prepared corpus that a run was started on, if it is still there and whole: its text may be gone by now."""
    try:
        corpus = load_corpus(Path(identity["prepared"]))
    except (KeyError, FullRankError):
        return None
    same = {split: info.sha256 for split, info in corpus.splits.items()} == identity.get("text")
    return corpus if same else None


def resume(folder: Path, *, quiet: bool = False, say: Say = print) -> dict[str, Any]:
    """Go on with the run in `folder` exactly where it stopped."""
    config, identity = open_run(folder)
    resolved = Resolved(config, identity["recipe"], identity["row"], identity["scale"], identity["paper"])
    return train(resolved, folder, kernel_name=identity.get("kernel", "auto"), quiet=quiet, say=say)


def _finished(folder: Path) -> dict[str, Any] | None:
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result


def training_batches(config: RunConfig, corpus: Corpus) -> Blocks | Streams:
    """What training reads: blocks in a new order every epoch, or contiguous streams (`train.order`)."""
    options, ids, start = config.train, corpus.ids("train"), corpus.tokenizer.start_id
    size, length = options.batch_size, options.segment_length
    if options.order == "shuffled":
        return Blocks(ids, batch_size=size, segment_length=length, start_id=start, shuffle=True, seed=options.seed)
    return Streams(ids, batch_size=size, segment_length=length, start_id=start)


def _check_positions(model: LanguageModel, stream: int) -> None:
    """InputError where positions go on through a memory beyond the last one that the model has."""
    if model.memory_length and model.max_length is not None and stream > model.max_length:
        raise InputError(
            f"with memory, positions go on through a whole stream of {stream:,} tokens, but this model's (learned ones, a "
            f"synthesizer's, or those of model.attention.output_map: pairs) end at model.max_position_embeddings "
            f"{model.max_length:,}; choose position relative, rotary, sinusoidal or none with another score, or "
            "model.attention.output_map: decayed, or set model.memory_length to 0"
        )


def _train(config: RunConfig, identity: dict[str, Any], corpus: Corpus, folder: Path, quiet: bool) -> dict[str, Any]:
    options, judging = config.train, config.eval
    device = prepare_machine(options)
    seed_everything(options.seed)
    model = LanguageModel(config.model).to(device)
    _check_positions(model, corpus.splits["train"].tokens // options.batch_size)
    batches = training_batches(config, corpus)
    watched, judged, reported = (
        corpus.ids("valid")[: judging.max_tokens],
        judging_protocol(config),
        final_protocol(config),
    )
    check_training_length(model, options.segment_length, corpus.splits["train"].tokens)
    check_length(model, judged, len(watched))
    for split in ("valid", "test"):
        check_length(model, reported, corpus.splits[split].tokens)

    def judge(model: nn.Module) -> Evaluation:
        start = corpus.tokenizer.start_id
        return measure(model, watched, judged, batch_size=judging.batch_size, start_id=start, device=device)

    done = fit(
        model,
        objective=CausalObjective(model, options),
        batches=batches,
        evaluate=judge,
        optimizer=make_optimizer(options.optimizer, parameter_groups(model, options.weight_decay), options),
        schedule=make_schedule(options, make_plan(options, judging, batches).total_steps),
        options=options,
        eval_options=judging,
        folder=folder,
        observers=make_observers(
            folder, track=options.track, config=dataclasses.asdict(config), label=str(identity["name"]), quiet=quiet
        ),
    )

    def measured(checkpoint: str) -> dict[str, Any]:
        saved = LanguageModel.load(folder, checkpoint).to(device)
        return {
            split: _figures(saved, corpus, split, reported, judging.batch_size, device) for split in ("valid", "test")
        }

    final = measured("best")
    last = final if done.best_step == done.steps else measured("last")
    parts = parameters_by_part(model)
    result = {
        **{key: identity[key] for key in ("name", "recipe", "row", "scale", "paper", "kernel")},
        "seed": options.seed,
        "parameters": parts,
        "mixing_parameters": parts["mixing"],
        "final": final,
        "last": last,
        "best": {
            "step": done.best_step,
            "nll": done.best_nll,
            "protocol": judged.in_words(),
            "next_token": judged.next_token,
        },
        "protocol": reported.in_words(),
        "protocol_settings": dataclasses.asdict(reported),
        "corpus": describe(corpus),
        "steps": done.steps,
        "epochs": done.epochs,
        "tokens_seen": done.tokens,
        "stopped_early": done.stopped_early,
        "tokens_per_second": done.tokens_per_second,
        "ms_per_step": done.ms_per_step_by_phase,
        "wall_seconds": done.seconds,
        "peak_memory_mib": done.peak_memory_mib,
        "environment": environment(device, options.precision),
    }
    write_json(folder / "result.json", result)
    return result


def describe(corpus: Corpus) -> dict[str, Any]:
    """What `result.json` says about the text."""
    return {
        "name": corpus.name,
        "label": corpus.label,
        "is_slice": corpus.is_slice,
        "tokens": {split: info.tokens for split, info in corpus.splits.items()},
        "sha256": {split: info.sha256 for split, info in corpus.splits.items()},
        "vocabulary": len(corpus.tokenizer),
        "fingerprint": corpus.tokenizer.fingerprint,
        "unigram_perplexity": {split: unigram_perplexity(corpus, split) for split in ("valid", "test")},
        "details": dict(corpus.details),
    }


def _figures(
    model: LanguageModel,
    corpus: Corpus,
    split: str,
    protocol: EvaluationProtocol,
    batch_size: int,
    device: torch.device,
) -> dict[str, Any]:
    """What is reported of a split. A word model scores `<unk>` for words it lacks, so bits per character would flatter it."""
    info, tokenizer, ids = corpus.splits[split], corpus.tokenizer, corpus.ids(split)
    found = measure(model, ids, protocol, batch_size=batch_size, start_id=tokenizer.start_id, device=device)
    begun = None if tokenizer.sos_id is None else int((ids == tokenizer.sos_id).sum())
    if tokenizer.kind == "word":
        return figures(found, words=found.tokens - (begun or 0), line_starts=begun)
    return figures(found, words=info.words, characters=info.characters, bytes=info.bytes, line_starts=begun)


def corpus_of(folder: Path, split: str, say: Say = print) -> Corpus:
    """The corpus that the run in `folder` was started on, as it was prepared then, or prepared again.

    Raises InputError if it has no such split, or if the vocabulary or that split is not what it was.
    """
    config, identity = open_run(folder)
    corpus = _kept(identity) or prepare(config.data, allow_slice=True, report=say)
    if split not in corpus.splits:
        raise InputError(f"--split: '{split}' is not a split; {corpus.label} has {', '.join(corpus.splits)}")
    if corpus.tokenizer.fingerprint != identity["vocabulary"]:
        raise InputError(
            f"{folder} was trained with another vocabulary than {corpus.label} has now; has the text changed?"
        )
    if corpus.splits[split].sha256 != identity["text"].get(split):
        raise InputError(f"the {split} text of {corpus.label} is not the one that {folder} was started with")
    return corpus


def evaluate(
    folder: Path,
    split: str,
    *,
    checkpoint: str = "best",
    flags: Flags | None = None,
    device_name: str = "auto",
    kernel_name: str = "auto",
    say: Say = print,
) -> dict[str, Any]:
    """Perplexity of the run in `folder` on `split`, with the protocol it was measured by: the run's, or as `flags` say."""
    config, _ = open_run(folder)
    protocol, flags = final_protocol(config, flags), flags or Flags()
    corpus = corpus_of(folder, split, say)
    device = choose_device(device_name, "--device")
    model = LanguageModel.load(folder, checkpoint).to(device)
    with kernel(kernel_name):
        measured = _figures(model, corpus, split, protocol, flags.batch_size or config.eval.batch_size, device)
    return {
        "run": str(folder),
        "split": split,
        **measured,
        "protocol": protocol.in_words(),
        "protocol_settings": dataclasses.asdict(protocol),
        "checkpoint": checkpoint,
        "corpus": corpus.label,
        "kernel": kernel_name,
    }
