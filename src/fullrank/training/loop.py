"""The training loop, which is given the model and every policy.

    step = update -> line of metrics -> evaluation -> next phase -> checkpoint        each of the last four when it is due

Killed at any moment and started again it writes the same metrics and the same weights, byte for byte.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullrank.config.run import EvalConfig, TrainConfig
from fullrank.core.draws import evaluating
from fullrank.core.errors import Interrupted, RunError
from fullrank.training.checkpoint import (
    Clock,
    RunningLoss,
    TrainingState,
    WeightAverage,
    load_checkpoint,
    save_checkpoint,
)
from fullrank.training.device import (
    Signals,
    TrainingPasses,
    all_gather,
    all_reduce,
    autocast,
    begin_draws,
    catch_signals,
    checkpoint_blocks,
    compile_blocks,
    device_of,
    end_draws,
    explain_failures,
    full_tensor,
    is_sharded,
    peak_memory_mib,
    rank,
    seed_everything,
    world_size,
)
from fullrank.training.observers import JsonLines, metrics_line, perplexity
from fullrank.training.optimizer import make_schedule
from fullrank.training.values import (
    Batches,
    Counters,
    Evaluate,
    EvaluationOptions,
    Objective,
    Observer,
    TrainingPosition,
    cost,
    make_plan,
)

logger = logging.getLogger("fullrank")
SAVE_SECONDS = 300.0  # most time between two checkpoints, where `train.save_every_steps` says nothing


@dataclass(kw_only=True)
class Training(TrainingState):
    """Training of `model` in the run folder `folder`, from its last checkpoint if it has one.

    The caller holds the lock of the folder. seal: what checkpoints state of the run (`seal.seal_run`).
    engines: the names of the kernels that compute, filled as they are used; checkpoints keep them.
    The objective is called with every batch, the carry of the batch before it ({} at the start of an epoch, not of a phase),
    and its position in training; before that all generators are seeded from seed, pass and process.
    """

    model: nn.Module
    objective: Objective
    batches: Batches
    evaluate: Evaluate
    optimizer: Optimizer
    options: TrainConfig
    eval_options: EvalConfig | EvaluationOptions
    folder: Path
    seal: Mapping[str, Any] = field(default_factory=dict)
    observers: Sequence[Observer] = ()
    engines: Set[str] = frozenset()

    def __post_init__(self) -> None:
        model = self.model
        options = self.options
        self.plan = make_plan(options, self.eval_options, self.batches)
        if options.activation_checkpointing:
            checkpoint_blocks(model)
        if options.compile:
            compile_blocks(model)
        self.device = device_of(model)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.average = WeightAverage(model, options, self.plan.total_steps)
        self.schedule = make_schedule(options, self.plan.total_steps)
        self.running = RunningLoss(self.device)
        self.counters = Counters()
        self.carry = {}
        self.passes = TrainingPasses(model, self.objective)
        self.metrics: JsonLines | None = None  # of the process that writes
        self.timing: JsonLines | None = None

    def fit(self, until: int | None = None) -> Counters:
        """Train to the end, or pause after update `until`, and return the counters.

        The schedules are those of the whole training.
        The model then holds the last weights (the averaged ones when averaging); `load_weights(model, folder / "checkpoints" /
        "best")` gives the best.

        Raises:
            RunError: a loss or a parameter is not finite, memory runs out, or the disk is full.
            Interrupted: SIGINT or SIGTERM asked for the end.
            InputError: a checkpoint is damaged or belongs to another configuration.
        """
        with ExitStack() as stack:
            self.resume(stack)
            counters = self.counters
            if not counters.finished:
                for observer in self.observers:
                    stack.callback(observer.finish)
                    observer.start(step=counters.step, total_steps=self.plan.total_steps)
                stack.enter_context(explain_failures(self.options))
                stack.callback(end_draws)
                self.run(stack.enter_context(catch_signals()), math.inf if until is None else until)
            self.average.swap()
        return counters

    def resume(self, stack: ExitStack) -> None:
        """Restore the last checkpoint, or start anew; then open metrics.jsonl, cut to what it says, and timing.jsonl."""
        last = self.folder / "checkpoints" / "last"
        snapshot = load_checkpoint(last.parent, self.notice)
        if snapshot is None:
            seed_everything(self.options.seed)
            self.plan.begin_phase(self.counters)
        else:
            self.restore(snapshot, last)
            self.counters.finished = self.counters.stopped_early or self.plan.is_finished(self.counters)
        if rank() == 0:
            self.metrics = JsonLines(self.folder / "metrics.jsonl", keep=self.counters.metrics_bytes)
            stack.callback(self.metrics.close)
            if self.metrics.sync() < self.counters.metrics_bytes:
                self.notice(
                    f"{self.metrics.path} was cut or deleted: its lines before step {self.counters.step} are lost"
                )
            self.timing = JsonLines(self.folder / "timing.jsonl")
            stack.callback(self.timing.close)

    def run(self, signals: Signals, until: float) -> None:
        """Make steps until the plan is done, patience is out, or a signal or `until` asks for a stop."""
        plan = self.plan
        counters = self.counters
        self.model.train()
        self.clock = Clock(self.device, counters)
        self.saved_at = time.monotonic()
        while not counters.finished and counters.step < until:
            self.update(signals)
            counters.engines = sorted({*counters.engines, *self.engines})
            for observer in self.observers:
                observer.advance(counters.step)
            counters.finished = plan.is_finished(counters)
            phase_over = plan.phase_over(counters)
            if counters.step % self.options.log_every_steps == 0 or phase_over or counters.finished:
                self.log()
            evaluating = plan.evaluation_due(counters.step) or counters.finished
            is_best, on_plateau = self.evaluate_model() if evaluating else (False, False)
            if phase_over or on_plateau:
                self.begin_next_phase()
            keep = self.options.keep_checkpoints if evaluating else None
            is_due = plan.save_due(counters.step) or self.is_late or is_best or bool(keep) or counters.finished
            if is_due or self.is_ending or counters.step >= until:
                self.save(keep)
            if self.is_ending and not counters.finished:
                raise Interrupted(
                    f"stopped by {signals.signal or 'a signal'} after step {counters.step} of {plan.total_steps}; everything "
                    f"is saved in {self.folder}"
                )

    def update(self, signals: Signals) -> None:
        """Update the parameters once, from the mean gradient over the tokens of its batches.

        Processes exchange two flags with the loss: one of them was asked to end (`is_ending`), or finds by its clock that a
        checkpoint is due (`is_late`). So all of them decide alike.
        """
        counters = self.counters
        step = counters.step + 1
        loss, nll, tokens, seen = self.gradient(step)
        self.is_ending = signals.signal is not None
        self.is_late = self.options.save_every_steps is None and time.monotonic() - self.saved_at > SAVE_SECONDS
        if world_size() > 1:
            flags = torch.tensor([self.is_ending, self.is_late], dtype=torch.float64, device=self.device)
            sums = all_reduce(torch.cat((loss.double().view(1) / world_size(), nll.view(1), flags)))
            loss = sums[0]
            nll = sums[1]
            self.is_ending, self.is_late = (flag > 0 for flag in sums[2:].tolist())
        if self.options.max_grad_norm is not None:
            norm = full_tensor(nn.utils.clip_grad_norm_(self.parameters, self.options.max_grad_norm))
            loss = loss + 0 * norm  # an infinite gradient counts as an infinite loss
        self.running.add(step, loss, nll, tokens)
        if self.device.type == "cpu":  # on a GPU it is checked later, so that no step waits
            self.check_loss()
        scale = seen / self.plan.tokens_per_step if self.options.rate_by_length else 1.0
        for group in self.optimizer.param_groups:
            rate = self.schedule.scale_rate(step, group.get("peak", 1.0))
            group["lr"] = rate * scale * group.get("scale", 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.average.update(step)
        counters.step = step
        counters.tokens += seen
        self.clock.step(seen)

    def gradient(self, step: int) -> tuple[Tensor, Tensor, int, int]:
        """Accumulate the gradient of the mean loss over all tokens of the step, and return loss, nats, tokens, and tokens seen.

        The number of tokens is known after the last batch only. So each batch has its tokens over those of the first as weight,
        and the sum is scaled at the end: by 1 with one batch, by 1/n with n equal ones.
        """
        tokens = 0
        first_tokens = 0
        seen = 0
        loss = torch.zeros((), device=self.device)
        nll = torch.zeros((), dtype=torch.float64, device=self.device)
        phase = self.plan.phase(self.counters)
        indices = self.plan.batches_of(step)
        for number, (epoch, index) in enumerate(indices):
            position = TrainingPosition(step, number, phase, self.options.gradient_accumulation_steps)
            batch = self.batches.batch(epoch, index)
            if world_size() > 1:
                batch = batch.share(rank(), world_size())
            begin_draws(self.options.seed, position.number)
            with self.passes.gradients(last=number == len(indices) - 1):
                with autocast(self.options.precision, self.device):
                    result = self.passes(batch, self.carry if index else {}, position)
                self.carry = {name: tensor.detach() for name, tensor in result.carry.items()}
                seen += result.seen
                if result.tokens == 0 and not result.value.requires_grad:
                    continue
                first_tokens = first_tokens or result.tokens
                weight = result.tokens / first_tokens if first_tokens else 0.0
                (result.value if weight == 1 else result.value * weight).backward()
            loss = loss + result.value.detach() * weight
            nll = nll + result.nll
            tokens += result.tokens
        end_draws()
        if tokens > first_tokens:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], first_tokens / tokens)
        return loss, nll, tokens, seen

    def log(self) -> None:
        """Write the lines about training since the last ones."""
        counters = self.counters
        self.check_loss()
        if self.running.tokens:  # a masked model may have met no masked token since the last line
            self.write(split="train", nll=self.running.take_mean(), lr=self.schedule.scale_rate(counters.step))
        speed = self.clock.lap()
        counters.peak_memory_mib = max(counters.peak_memory_mib, peak_memory_mib(self.device))
        line = {
            "step": counters.step,
            "seconds": round(counters.seconds, 3),
            "tokens_per_second": round(speed, 1),
            "peak_memory_mib": round(counters.peak_memory_mib, 1),
        }
        self.record(line, self.timing)

    def evaluate_model(self) -> tuple[bool, bool]:
        """Evaluate, give the schedule the result, and return (best so far, phase on its plateau).

        Ends training after `train.patience` evaluations without improvement, counted over all phases.
        """
        counters = self.counters
        self.check_loss()
        self.clock.pause()
        model = self.model
        metric = self.eval_options.metric
        precision = autocast(self.options.precision, self.device)
        with self.average.apply(), self.passes.gather_parameters(), evaluating(model), precision:
            result = self.evaluate(model)
        nll = result.nll / result.tokens
        if not all(math.isfinite(value) for value in (nll, *result.scores.values())):
            raise self.explain_divergence("the validation loss", counters.step)
        value = {"loss": nll, **result.scores}[metric]
        is_best = counters.note_evaluation(nll, metric, value)
        self.write(split="valid", nll=nll, scores=result.scores)
        self.schedule.observe(cost(metric, value))
        on_plateau = self.plan.note_perplexity(counters, perplexity(nll))
        patience = self.options.patience
        if patience is not None and counters.since_best >= patience and not counters.finished:
            counters.stopped_early = counters.finished = True
        self.clock.resume()
        return is_best, on_plateau

    def begin_next_phase(self) -> None:
        """End the phase with this step: log its last lines, then begin the next one, or end training."""
        counters = self.counters
        if self.running.tokens:
            self.log()
        if not self.plan.is_in_last_phase(counters):
            self.clock.begin_phase()
            self.plan.begin_phase(counters)
        elif not counters.finished:
            counters.stopped_early = counters.finished = True

    def save(self, keep: int | None) -> None:
        """Save a checkpoint of this step, and keep its weights as one of `keep`; RunError if they are not finite."""
        counters = self.counters
        self.clock.pause()
        self.check_loss()
        tensors: list[Any] = [p.detach() for p in self.parameters]
        norms = torch._foreach_norm([tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors])
        if any(all_gather(not all(bool(torch.isfinite(norm)) for norm in norms))):
            raise self.explain_divergence("a parameter", counters.step)
        if self.metrics is not None:
            counters.metrics_bytes = self.metrics.sync()
        with self.average.apply():
            snapshot = replace(self.capture(), run=self.seal)
            save_checkpoint(self.folder / "checkpoints", snapshot, keep)
        self.saved_at = time.monotonic()
        self.clock.resume()

    def write(self, **figures: Any) -> None:
        """Write a line of metrics about this step; figures: `split`, `nll` and others of `metrics_line`."""
        counters = self.counters
        objective = self.options.objective
        line = metrics_line(counters.step, counters.tokens, counters.phase, objective=objective, **figures)
        self.record(line, self.metrics)

    def record(self, line: Mapping[str, Any], file: JsonLines | None) -> None:
        """Write a line to a file, in the process that writes, and show it to the observers."""
        if file is not None:
            file.write(line)
        for observer in self.observers:
            observer.record(line)

    def notice(self, text: str) -> None:
        for observer in self.observers:
            observer.notice(text)
        if not self.observers:
            logger.warning(text)

    def check_loss(self) -> None:
        step = self.running.bad_step()
        if step is not None:
            raise self.explain_divergence("the loss", step)

    def explain_divergence(self, quantity: str, step: int) -> RunError:
        options = self.options
        last = self.folder / "checkpoints" / "last"
        clip = "none" if options.max_grad_norm is None else str(options.max_grad_norm)
        bf16 = " or set train.precision=fp32" if options.precision == "bf16" else ""
        intact = f"the last good checkpoint is {last.resolve()}" if last.exists() else "there is no checkpoint yet"
        return RunError(
            f"{quantity} at step {step} is not a finite number: lower train.learning_rate (now {options.learning_rate:g}), "
            f"raise train.warmup_steps (now {options.warmup_steps}), lower train.max_grad_norm (now {clip}){bf16}; {intact}"
        )
