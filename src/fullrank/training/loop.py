"""The one training loop. It is handed the model and every policy, and knows none of them.

    step = update -> line of metrics -> evaluation -> next phase -> checkpoint        each of the last four when it is due

A run is a function of its configuration and seed: killed at any moment and started again it goes on from the last
checkpoint and writes the same metrics and the same weights, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullrank.config.run import TrainConfig
from fullrank.training.averaging import WeightAverage
from fullrank.training.checkpoint import load_checkpoint, save_checkpoint
from fullrank.training.clock import Clock
from fullrank.training.device import (
    autocast,
    begin_pass,
    check_cuda_graphs,
    compile_blocks,
    device_of,
    explaining,
    outliving,
    peak_memory_mib,
)
from fullrank.training.interrupt import StopRequest, listening, only_one
from fullrank.training.judging import better, cost, look_at
from fullrank.training.notify import Notify
from fullrank.training.plan import Plan, make_plan
from fullrank.training.randomness import seed_everything, undisturbed
from fullrank.training.records import JsonLines, metrics_line, perplexity, timing_line
from fullrank.training.result import result
from fullrank.training.schedule import Schedule
from fullrank.training.state import Counters, Training
from fullrank.training.values import Batches, Evaluate, FitResult, Interrupted, Judging, Objective, Observer, Place
from fullrank.training.window import Window, diverged


def fit(
    model: nn.Module,
    *,
    objective: Objective,
    batches: Batches,
    evaluate: Evaluate,
    optimizer: Optimizer,
    schedule: Schedule,
    options: TrainConfig,
    eval_options: Judging,
    folder: Path,
    observers: Sequence[Observer] = (),
) -> FitResult:
    """Train `model` in the run folder `folder`, from its last checkpoint if it has one; at the end the model holds
    the last weights (the averaged ones when averaging). `load_weights(model, folder / "checkpoints" / "best")` gives the best.

    The objective sees every batch with the carry of the batch before it, {} at the start of an epoch (not of a phase),
    and with its place in training. Evaluation runs in evaluation mode, in the precision of training, without gradients,
    and draws from its own random numbers; `eval.metric` says which is the best.
    RunError: the loss is not a number, or the disk is full. Interrupted: SIGINT or SIGTERM. InputError: a checkpoint
    that is damaged or belongs to another configuration; an evaluation without the score that `eval.metric` names.
    """
    device = device_of(model)
    plan = make_plan(options, eval_options, batches)
    check_cuda_graphs(options, device)
    if options.compile:
        compile_blocks(model, options.cuda_graphs)
    training = Training(
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        average=WeightAverage(model, options, plan.total_steps),
        window=Window(device),
        counters=Counters(batches_per_epoch=batches.batches_per_epoch, metric=eval_options.metric),
    )
    with ExitStack() as stack:
        stack.enter_context(only_one(folder))
        notify = Notify(observers)
        resumed_from = _begin(training, plan, options, folder, notify)
        metrics = JsonLines(folder / "metrics.jsonl", keep=training.counters.metrics_bytes)
        stack.callback(metrics.close)
        if metrics.missing:
            notify.notice(f"{metrics.path} lacks {metrics.missing} bytes that were written before; its curve has a gap")
        timing = JsonLines(folder / "timing.jsonl")
        stack.callback(timing.close)
        run = _Run(training, plan, objective, batches, evaluate, options, device, folder, metrics, timing, notify)
        if not training.counters.finished:
            for observer in observers:
                stack.callback(observer.finish)
                with undisturbed(device):
                    observer.start(step=training.counters.step, total_steps=plan.total_steps)
            stack.enter_context(explaining(options))
            run.to_the_end(stack.enter_context(listening()))
        training.average.settle()
    return result(training.counters, plan, resumed_from)


def _begin(training: Training, plan: Plan, options: TrainConfig, folder: Path, notify: Notify) -> int | None:
    """Restore the last checkpoint and return its step, or start anew."""
    snapshot = load_checkpoint(folder / "checkpoints", notify.notice)
    if snapshot is None:
        seed_everything(options.seed)
        plan.phases.begin(training.counters)
        return None
    last = folder / "checkpoints" / "last"
    training.restore(snapshot, last)
    counters = training.counters
    plan.phases.check(counters, last)
    counters.finished = counters.stopped_early or plan.finished(counters)
    return counters.step


@dataclass
class _Run:
    training: Training
    plan: Plan
    objective: Objective
    batches: Batches
    evaluate: Evaluate
    options: TrainConfig
    device: torch.device
    folder: Path
    metrics: JsonLines
    timing: JsonLines
    notify: Notify

    def to_the_end(self, stop: StopRequest) -> None:
        """Step after step until plan or phases are done, patience is out, or somebody asks for a stop."""
        plan, counters = self.plan, self.training.counters
        self.training.model.train()
        self.parameters = [p for group in self.training.optimizer.param_groups for p in group["params"]]
        self.clock = Clock(self.device, counters)
        while not counters.finished:
            self.update()
            self.notify.advance(counters.step, counters.tokens)
            counters.finished = plan.finished(counters)
            over = plan.phases.over(counters)
            if plan.log_due(counters.step) or over or counters.finished:
                self.log()
            evaluating = plan.evaluation_due(counters.step) or counters.finished
            best, flat = self.judge() if evaluating else (False, False)
            if over or flat:
                self.next_phase()
            keep = self.options.keep_checkpoints if evaluating else None
            if plan.save_due(counters.step) or best or keep or counters.finished or stop.signal:
                self.save(best, keep)
            if stop.signal and not counters.finished:
                raise Interrupted(
                    f"stopped by {stop.signal} after step {counters.step} of {plan.total_steps}; everything is saved in "
                    f"{self.folder}: run `fullrank train {self.folder}` to go on"
                )

    def update(self) -> None:
        """One update of the parameters, from the mean gradient over the tokens of its batches."""
        training, counters = self.training, self.training.counters
        step = counters.step + 1
        loss, tokens = self.gradient(step)
        if self.options.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.parameters, self.options.max_grad_norm)
            loss = loss + 0 * norm  # an infinite gradient counts as an infinite loss
        if not training.window.watch(step, loss):
            self.check_loss()
        rate = training.schedule.rate(step)
        for group in training.optimizer.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        training.average.update(step)
        counters.step = step
        counters.tokens += tokens
        self.clock.step(tokens)

    def gradient(self, step: int) -> tuple[Tensor, int]:
        """Leaves the gradient of the mean loss over all tokens of the step; returns the loss, detached, and the tokens seen.

        How many tokens there are is known when the last batch is done, so each batch counts relative to the first,
        and the sum is scaled in the end: with one batch, or equal ones, by a plain 1 or 1/n.
        """
        training = self.training
        total, first, seen = 0, 0, 0
        loss = torch.zeros((), device=self.device)
        now = self.plan.phases.current(training.counters)
        phase = None if now is None else now.config
        for number, (epoch, index) in enumerate(self.plan.batches_of(step)):
            place = Place(step, number, phase, self.plan.accumulation)
            batch = self.batches.batch(epoch, index)
            begin_pass(self.options)
            with autocast(self.options.precision, self.device):
                part = self.objective(batch, training.carry if index else {}, place)
            training.carry = {name: outliving(tensor, self.options) for name, tensor in part.carry.items()}
            seen += part.seen
            if part.tokens == 0:
                continue
            first = first or part.tokens
            share = part.tokens / first
            (part.value if share == 1 else part.value * share).backward()
            loss = loss + part.value.detach() * share
            training.window.add(part.nll, part.tokens)
            total += part.tokens
        if total > first:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], first / total)
        return loss, seen

    def log(self) -> None:
        """The lines about training since the last ones."""
        training, counters = self.training, self.training.counters
        self.check_loss()
        rate = training.schedule.rate(counters.step)
        nll = training.window.close()
        self.write(split="train", nll=nll, lr=rate)
        speed = self.clock.lap()
        counters.peak_memory_mib = max(counters.peak_memory_mib, peak_memory_mib(self.device))
        line = timing_line(
            step=counters.step,
            seconds=counters.seconds,
            tokens_per_second=speed,
            peak_memory_mib=counters.peak_memory_mib,
        )
        self.timing.write(line)
        self.notify.record(line)

    def judge(self) -> tuple[bool, bool]:
        """Evaluate, tell the schedule; whether this is the best so far, and whether the phase is on its plateau.

        May end training (`train.patience`, which is about all phases together).
        """
        counters = self.training.counters
        self.check_loss()
        self.clock.pause()
        found = look_at(self.training, self.evaluate, self.options)
        self.clock.resume()
        if not found.finite:
            raise diverged("the validation loss", counters.step, self.options, self.kept())
        best = better(counters, found)
        self.write(split="valid", nll=found.nll, scores=found.scores)
        self.training.schedule.observe(cost(counters.metric, found.value(counters.metric)))
        flat = self.plan.phases.observe(counters, perplexity(found.nll))
        patience = self.options.patience
        if patience is not None and counters.since_best >= patience and not counters.finished:
            counters.stopped_early = counters.finished = True
        return best, flat

    def next_phase(self) -> None:
        """The phase ends with this step: what is told of it is told, the next one begins, or training is over."""
        counters, phases = self.training.counters, self.plan.phases
        if self.training.window.tokens:
            self.log()
        if not phases.last(counters):
            self.clock.new_phase()
            phases.next(counters)
        elif not counters.finished:
            counters.stopped_early = counters.finished = True

    def save(self, best: bool, keep: int | None) -> None:
        """A checkpoint of this step, its weights one of `keep` that are kept; unless they are no longer numbers."""
        counters = self.training.counters
        self.check_loss()
        if not all(bool(torch.isfinite(norm)) for norm in torch._foreach_norm([p.detach() for p in self.parameters])):
            raise diverged("a parameter", counters.step, self.options, self.kept())
        self.clock.pause()
        counters.metrics_bytes = self.metrics.sync()
        folder, snapshot = self.folder / "checkpoints", self.training.capture()
        save_checkpoint(folder, snapshot, step=counters.step, best=best, keep_weights=keep)
        self.clock.resume()

    def write(
        self, *, split: str, nll: float, lr: float | None = None, scores: Mapping[str, float] | None = None
    ) -> None:
        """A line of metrics about this step."""
        counters = self.training.counters
        line = metrics_line(
            step=counters.step, split=split, nll=nll, tokens=counters.tokens, lr=lr, phase=counters.phase, scores=scores,
            objective=self.options.objective,
        )  # fmt: skip
        self.metrics.write(line)
        self.notify.record(line)

    def check_loss(self) -> None:
        step = self.training.window.bad_step()
        if step is not None:
            raise diverged("the loss", step, self.options, self.kept())

    def kept(self) -> str:
        last = self.folder / "checkpoints" / "last"
        return f"the last good checkpoint is {last.resolve()}" if last.exists() else "there is no checkpoint yet"
