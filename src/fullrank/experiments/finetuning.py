"""The task of fine-tuning: a pretrained encoder with our attention injected, on GLUE or on SQuAD."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.config.finetune import GLUE, SQUAD, FinetuneConfig, FinetuneEvalConfig
from fullrank.config.run import list_corpora
from fullrank.core.draws import evaluating
from fullrank.core.errors import InputError, RunError
from fullrank.data.padded_batches import Encoded, ExampleBatch, ExampleBatches, batches_by_length, choose_subset
from fullrank.data.tasks import NO_ANSWER, Question, TaskSplit, Window, read_task, squad_windows
from fullrank.evaluation.tasks import glue_scores, squad_scores
from fullrank.experiments.pretrained import PretrainedEncoder, load_pretrained, padding_of
from fullrank.experiments.task import Rates, Task, begin_pass, finish_loss
from fullrank.files import Entries, write_json
from fullrank.training.checkpoint import load_weights
from fullrank.training.device import device_of, merge_shares, rank, share_of_process
from fullrank.training.values import Carry, Counters, EvaluationOptions, EvaluationResult, Loss, TrainingPosition

_MASKED = -1e30  # padding cannot be an answer


# -- what GLUE and SQuAD share -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedSplit:
    """A split as a model reads it.

    targets: a row for each encoded example. windows: of SQuAD.
    """

    source: TaskSplit
    encoded: Encoded
    targets: Tensor
    windows: Sequence[Window] = ()


def logits_by_example(
    model: nn.Module, examples: Encoded, batch_size: int, compute_logits: Callable[[nn.Module, ExampleBatch], Tensor]
) -> list[Tensor]:
    """Compute the logits of each example, in evaluation mode.

    Args:
        model: encoder with its output layer.
        examples: examples, encoded.
        batch_size: examples at a time.
        compute_logits: computes the logits of a batch.

    Returns:
        Logits of each example, in order, on the CPU.
    """
    batches = list(batches_by_length(examples.lengths.tolist(), batch_size))
    logits_here = []
    with evaluating(model):
        for number in share_of_process(len(batches)):
            indices = batches[number]
            batch = ExampleBatch(examples.rows(indices), torch.tensor(indices))
            logits_here.append(compute_logits(model, batch).cpu())
    by_example: dict[int, Tensor] = {}
    for indices, logits in zip(batches, merge_shares(logits_here), strict=True):
        by_example.update(zip(indices, logits, strict=True))
    return [by_example[index] for index in range(len(examples))]


# -- the task ----------------------------------------------------------------------------------------------------------


class Finetuning(Task):
    """Fine-tuning on a task of GLUE or on SQuAD. Its data are splits by name.

    `objective` is the mean loss of labelled examples, plus the penalties of Mixhead Eq. 16 and Eq. 20.
    """

    packages = ("transformers",)
    kind = "classification"
    outputs = 2
    labels: Sequence[str] | None = None
    # what each benchmark says by itself
    title: str
    metrics: Sequence[str]
    protocol: str
    encode: Any
    compute_logits: Any
    compute_loss: Any
    score: Any

    def prepare(self, recorded: Mapping[str, Any] | None = None, *, allow_slice: bool = True) -> Self:
        data = self.config.data
        self.corpus = {}
        for name in list_corpora()[data.name].published:
            source = read_task(data, name)
            most = data.max_train if name == "train" else data.max_eval
            self.corpus[name] = source.take(choose_subset(len(source), most, data.subset_seed))
        self.identity = {"text": {name: source.sha256 for name, source in self.corpus.items()}}
        return self

    def describe(self) -> Entries:
        """Describe the data of the task."""
        return {
            "name": self.config.data.name,
            "is_slice": any(source.is_slice for source in self.corpus.values()),
            "splits": {name: source.describe() for name, source in self.corpus.items()},
        }

    def build(self, folder: Path, device: torch.device) -> None:
        from fullrank.hf.causal import use_own_products
        from fullrank.hf.load import find_longest_text

        config = self.config
        self.pretrained = pretrained = load_pretrained(config.model, self.kind, self.outputs, self.labels)
        limit = find_longest_text(pretrained.model)
        if limit is not None and config.data.max_length > limit:
            raise InputError(
                f"data.max_length: this encoder reads at most {limit} tokens, given {config.data.max_length}"
            )
        self.model = pretrained.model.to(device)
        use_own_products(self.model)
        self.splits = {name: self.encode(pretrained, source) for name, source in self.corpus.items()}
        self.batches = ExampleBatches(self.splits["train"].encoded, config.train)
        self.options = config.train.options(self.batches.batches_per_epoch)
        every_steps = config.eval.every_steps
        # null: once, at the end, which comes by itself
        every_epochs = config.eval.every_epochs or (None if every_steps else float(2**31))
        self.eval_options = EvaluationOptions(every_steps, every_epochs, self.metrics[0])

    def objective(self, batch: ExampleBatch, carry: Carry, position: TrainingPosition) -> Loss:
        from fullrank.hf.interface import traced

        trace = begin_pass(self.options, batch)
        with traced(trace):
            logits = self.compute_logits(self.model, batch)
        value = self.compute_loss(logits, self.splits["train"].targets[batch.indices].to(logits.device))
        return finish_loss(value, value.detach(), batch, trace, self.options)

    def score_split(self, model: nn.Module, name: str, folder: Path | None = None) -> Any:
        """Measure the figures of a split.

        Args:
            model: encoder with its output layer.
            name: name of the split.
            folder: the model's predictions are written there; None: nowhere.

        Returns:
            Figures by name.
        """
        split = self.splits[name]
        logits = logits_by_example(model, split.encoded, self.config.eval.batch_size, self.compute_logits)
        return self.score(split, logits, folder)

    def evaluate(self, model: nn.Module) -> EvaluationResult:
        figures = self.score_split(model, "dev")
        rows = len(self.splits["dev"].encoded)
        return EvaluationResult(figures["loss"] * rows, rows, {name: figures[name] for name in self.metrics})

    def measure(self, counters: Counters, folder: Path) -> Entries:
        from fullrank.hf.load import quiet

        config: FinetuneConfig = self.config
        model = self.model
        if config.eval.checkpoint == "best" and counters.best_step != counters.step:
            load_weights(model, folder / "checkpoints" / "best")
        model.eval()
        figures = {name: self.score_split(model, name, folder) for name in self.splits if name != "train"}
        if config.train.keep_model and rank() == 0:
            with quiet():
                model.save_pretrained(folder / "model")
                self.pretrained.tokenizer.save_pretrained(folder / "model")
        fresh = [p for name, p in model.named_parameters() if name in self.pretrained.fresh]
        windows = {name: len(split.windows) for name, split in self.splits.items()}
        return {
            "kind": "finetuning",
            "parameters": {
                "total": model.num_parameters(),
                "mixing": count_numbers(find_mixing(model).values()),
                "fresh": count_numbers(fresh),
            },
            "final": figures,
            "metrics": list(self.metrics),
            "checkpoint": config.eval.checkpoint,
            "best": {"step": counters.best_step, self.metrics[0]: counters.best_metric},
            "task": config.data.label,
            "title": self.title,
            "slice": {name: source.is_slice for name, source in self.corpus.items()},
            "examples": {name: len(source) for name, source in self.corpus.items()},
            **({"windows": windows} if windows["dev"] else {}),
            "protocol": self.protocol,
            "sha256": self.identity["text"],
        }

    def choose_rates(self, model: nn.Module) -> Rates:
        return rate_mixing(model, self.config.train.mixing_scale)


def find_mixing(model: nn.Module) -> dict[str, nn.Parameter]:
    """Find the injected parameters by their names."""
    return {name: p for name, p in model.named_parameters() if ".fullrank." in f".{name}"}


def count_numbers(parameters: Iterable[nn.Parameter]) -> int:
    """Count the numbers in parameters."""
    return sum(parameter.numel() for parameter in parameters)


def rate_mixing(model: nn.Module, scale: float) -> Rates:
    """Return the learning rate of injected parameters, as a factor on that of all others."""
    return {parameter: {"scale": scale} for parameter in find_mixing(model).values()}


# -- GLUE --------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class GlueFinetuning(Finetuning):
    """A task of GLUE: sentences, or pairs of them, with a label or a number."""

    def __post_init__(self) -> None:
        self.task = GLUE[self.config.data.task]
        self.title = self.task.title
        self.labels = self.task.labels
        self.metrics = self.task.metrics
        self.outputs = self.task.outputs
        self.protocol = f"development split, fp32, at most {self.config.data.max_length} tokens"

    def encode(self, pretrained: PretrainedEncoder, source: TaskSplit) -> EncodedSplit:
        texts, labels = zip(*source.rows, strict=True)
        encoded = encode(pretrained, texts, self.config.data.max_length)
        targets = torch.tensor(labels, dtype=torch.float32 if self.labels is None else torch.int64)
        return EncodedSplit(source, encoded, targets)

    def compute_logits(self, model: nn.Module, batch: ExampleBatch) -> Tensor:
        logits: Tensor = model(**batch.to(device_of(model)).inputs).logits
        return logits.float()

    def compute_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean cross-entropy of the labels; of a task of numbers (STS-B), the mean squared error."""
        if self.labels is None:
            return F.mse_loss(logits[:, 0], targets)
        return F.cross_entropy(logits, targets)

    def score(self, split: EncodedSplit, logits: list[Tensor], folder: Path | None) -> dict[str, float]:
        """Score a split.

        Args:
            split: encoded examples.
            logits: logits of each of its examples.
            folder: its predictions are written there, a line for each example; None: nowhere.

        Returns:
            Metrics of the task, the loss, and the number of examples.
        """
        table = torch.stack(logits)
        labels = split.targets.numpy()
        predictions = (table[:, 0] if self.labels is None else table.argmax(-1)).numpy()
        if folder is not None and rank() == 0:
            columns = np.column_stack([np.arange(len(labels)), labels, predictions])
            path = folder / f"predictions-{split.source.split}.tsv"
            header = "index\tlabel\tprediction"
            np.savetxt(path, columns, fmt="%d\t%g\t%.6g", header=header, comments="")
        targets = split.targets.double() if self.labels is None else split.targets
        loss = float(self.compute_loss(table.double(), targets))
        return {**glue_scores(self.task, predictions, labels), "loss": loss, "examples": len(split.source)}


def encode(pretrained: PretrainedEncoder, texts: Sequence[tuple[str, ...]], max_length: int) -> Encoded:
    """Encode texts with the special tokens of the encoder.

    Of a pair that is too long, the longer side loses tokens first.

    Args:
        pretrained: the encoder with its tokenizer.
        texts: texts, or pairs of them.
        max_length: most tokens of a text or pair, special ones among them.

    Returns:
        Token ids with their masks, and the values that pad them.

    Raises:
        InputError: `max_length` leaves no room for a text.
    """
    sides = [list(side) for side in zip(*texts, strict=True)]
    tokenizer = pretrained.tokenizer
    special = tokenizer.num_special_tokens_to_add(pair=len(sides) == 2)
    least = special + len(sides)
    if max_length < least:
        raise InputError(
            f"data.max_length: at least {least}, of which {special} are special tokens of this encoder, given {max_length}"
        )
    encoded = tokenizer(*sides, truncation="longest_first", max_length=max_length, return_attention_mask=True)
    names = [name for name in encoded if name in ("input_ids", "token_type_ids", "attention_mask")]
    return Encoded({name: encoded[name] for name in names}, padding_of(tokenizer))


# -- SQuAD -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class SquadFinetuning(Finetuning):
    """SQuAD v1.1 and v2: questions whose answer is a span of a context, which is read in windows."""

    kind = "answers"

    def __post_init__(self) -> None:
        config = self.config
        self.version = SQUAD[config.data.name]
        self.title = f"SQuAD v{self.version}"
        self.metrics = ("f1", "exact" if self.version == "2.0" else "exact_match")  # named as in each version's script
        self.protocol = (
            f"development split, fp32, windows of at most {config.data.max_length} tokens every {config.data.doc_stride}, "
            f"answers of at most {config.eval.max_answer_length} tokens"
        )

    def encode(self, pretrained: PretrainedEncoder, source: TaskSplit) -> EncodedSplit:
        data = self.config.data
        tokenizer = pretrained.tokenizer
        keys = ("max_length", "doc_stride", "max_query_length")
        windows = squad_windows(source.rows, tokenizer, **{key: getattr(data, key) for key in keys})
        inputs: dict[str, Any] = {
            "input_ids": [window.ids for window in windows],
            "attention_mask": [np.ones(len(window.ids), np.int8) for window in windows],
        }
        if "token_type_ids" in tokenizer.model_input_names:
            inputs["token_type_ids"] = [window.types for window in windows]
        targets = torch.tensor([(window.start, window.end) for window in windows], dtype=torch.int64)
        return EncodedSplit(source, Encoded(inputs, padding_of(tokenizer)), targets, windows)

    def compute_logits(self, model: nn.Module, batch: ExampleBatch) -> Tensor:
        """Compute start and end logits (B, 2, N), those of padding masked."""
        inputs = batch.to(device_of(model)).inputs
        output = model(**inputs)
        padded = inputs["attention_mask"] == 0
        return torch.stack([output.start_logits, output.end_logits], 1).float().masked_fill(padded[:, None], _MASKED)

    def compute_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean of two cross-entropies over the positions of a window: of the answer's first and of its last token.

        Padding is left out of the softmax, so that the loss of a window does not depend on the batch it is in. BERT's
        script, whose windows are all padded to `max_length`, leaves it in.
        """
        start, end = logits.unbind(1)
        return (F.cross_entropy(start, targets[:, 0]) + F.cross_entropy(end, targets[:, 1])) / 2

    def score(self, split: EncodedSplit, logits: list[Tensor], folder: Path | None) -> dict[str, float]:
        """Score a split.

        Args:
            split: questions with their windows.
            logits: start and end logits of each of its windows.
            folder: its answers are written there; None: nowhere.

        Returns:
            Metrics of SQuAD, the loss, and the numbers of examples and windows.
        """
        questions = split.source.rows
        is_v2 = self.version == "2.0"
        answers = find_answers(questions, split.windows, [row.numpy() for row in logits], self.config.eval, is_v2)
        if folder is not None and rank() == 0:
            write_json(folder / "predictions.json", answers)
        references = {question.id: question.answers for question in questions}
        scores = squad_scores(answers, references, v2=is_v2)
        table = nn.utils.rnn.pad_sequence([row.T for row in logits], batch_first=True, padding_value=_MASKED)
        loss = float(self.compute_loss(table.double().transpose(1, 2).contiguous(), split.targets))
        return {**scores, "loss": loss, "examples": len(questions), "windows": len(split.windows)}


Scored = tuple[Window, NDArray[np.float64]]  # a window with its start and end logits


def find_answers(
    questions: Sequence[Question],
    windows: Sequence[Window],
    logits: Sequence[NDArray[np.floating]],
    options: FinetuneEvalConfig,
    is_v2: bool,
) -> dict[str, str]:
    """Find the answer to each question.

    A candidate begins at a context token that has most context in its window, ends in the same window no earlier, and
    has at most `max_answer_length` tokens. Its score is start logit + end logit. Its text is cut from the context as it
    is written. In v2 no answer is a candidate too. Its score is the smallest sum of the two logits at [CLS] over the
    question's windows, and it wins if it is better than the best answer by more than `null_score_diff_threshold`.
    BERT's script looks only at pairs of the 20 best starts and the 20 best ends of a window. Here every span is looked
    at.

    Args:
        questions: questions with their contexts.
        windows: windows of all contexts, each with the number of its question.
        logits: start and end logits (2, N) of each window. N is at least its length, and the rest is padding.
        options: the eval section.
        is_v2: whether a question may have no answer.

    Returns:
        Answers by the ids of the questions; "" says that there is none.

    Raises:
        RunError: a logit is not finite.
    """
    by_question: list[list[Scored]] = [[] for _ in questions]
    for window, table in zip(windows, logits, strict=True):
        # in float64, where the sum of two float32 logits keeps its order
        inside = np.asarray(table[:, : len(window.ids)], dtype=np.float64)
        if not np.isfinite(inside).all():
            raise RunError(
                "the model's start or end logits are not finite; has training diverged? lower train.learning_rate"
            )
        by_question[window.question].append((window, inside))
    answers = {}
    for question, scored in zip(questions, by_question, strict=True):
        text, score = _find_best_span(question.context, scored, options.max_answer_length)
        if is_v2:
            null = min(float(table[:, NO_ANSWER].sum()) for _, table in scored)
            # a context without any token has no span to compare with; as in BERT's script it scores 0
            text = "" if null - score > options.null_score_diff_threshold else text
        answers[question.id] = text
    return answers


def _find_best_span(context: str, scored: Sequence[Scored], max_answer_length: int) -> tuple[str, float]:
    """Find the best span with a text, its text and its score; of equal scores the first. "" and 0 where there is none."""
    best = ""
    highest = -np.inf
    for window, (start, end) in scored:
        count = len(window.offsets)
        tokens = slice(window.first, window.first + count)
        starts = np.where(window.max_context, start[tokens], -np.inf)
        scores = starts[:, None] + end[tokens]  # of tokens s to e at [s, e]
        is_span = np.triu(np.tri(count, k=max_answer_length - 1, dtype=bool))
        scores[~is_span] = -np.inf
        while count and scores.max() > highest:
            first, last = divmod(int(scores.argmax()), count)
            text = context[window.offsets[first, 0] : window.offsets[last, 1]].strip()
            if text:
                best = text
                highest = float(scores[first, last])
            else:
                scores[first, last] = -np.inf
    return (best, highest) if best else ("", 0.0)
