"""Fine-tuning on SQuAD v1.1 and v2: the first and the last token of the answer to a question in its context."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.config.finetune import FinetuneConfig, FinetuneEvalConfig, TaskDataConfig
from fullrank.core.errors import InputError, RunError
from fullrank.data.batches import Encoded, ExampleBatch, by_length, subset
from fullrank.data.squad import NO_ANSWER, Question, SquadSplit, Window, read_squad, squad_windows
from fullrank.evaluation.tasks import squad_scores, squad_v2_scores
from fullrank.experiments.finetuning import tuning_parts
from fullrank.experiments.models import Pretrained, check_length, load_pretrained, padding_of
from fullrank.experiments.task import Parts, Prepared, Say
from fullrank.files import write_json
from fullrank.training.device import device_of
from fullrank.training.values import EvaluationResult, Loss, TrainingPosition

VERSIONS = {"squad": "1.1", "squad-v2": "2.0"}
METRICS = {"1.1": ("f1", "exact_match"), "2.0": ("f1", "exact")}  # each script has a name of its own for it
_MASKED = -1e30  # padding cannot be an answer


@dataclass(frozen=True)
class SquadData:
    """The two public splits."""

    train: SquadSplit
    dev: SquadSplit

    @property
    def sha256(self) -> dict[str, str]:
        return {"train": self.train.sha256, "dev": self.dev.sha256}


@dataclass(frozen=True)
class WindowedSplit:
    """Questions, their windows, and the same windows as inputs of a model."""

    questions: Sequence[Question]
    windows: Sequence[Window]
    encoded: Encoded

    @property
    def targets(self) -> Tensor:
        """(W, 2): the first and the last token of each window's answer."""
        return torch.tensor([(window.start, window.end) for window in self.windows], dtype=torch.int64).reshape(-1, 2)


class SquadTuning:
    """Fine-tuning on SQuAD (`task.Task`)."""

    def check(self, config: FinetuneConfig) -> None:
        if config.eval.test:
            raise InputError(
                "eval.test: the test set of SQuAD is not public; leave it out (predictions.json of the development split is "
                "written in any case)"
            )

    def prepare(
        self, config: FinetuneConfig, identity: Mapping[str, Any], allow_slice: bool, say: Say
    ) -> Prepared[FinetuneConfig, SquadData]:
        data = config.data

        def load(split: str, most: int | None) -> SquadSplit:
            whole = read_squad(data.dir, split, VERSIONS[data.name], cache=data.cache, report=say)
            chosen = subset(len(whole.questions), most, data.subset_seed)
            return dataclasses.replace(whole, questions=[whole.questions[i] for i in chosen])

        read = SquadData(load("train", data.max_train), load("dev", data.max_eval))
        return Prepared(config, read, config.data.name, {"text": read.sha256})

    def parts(self, config: FinetuneConfig, corpus: SquadData, folder: Path, device: torch.device) -> Parts:
        pretrained = load_pretrained(config.model, "answers").to(device)
        train, dev = (windowed(split.questions, config.data, pretrained) for split in (corpus.train, corpus.dev))
        size, options = config.eval.batch_size, config.eval
        null, metrics = corpus.dev.version == "2.0", METRICS[corpus.dev.version]

        def evaluate(model: nn.Module) -> EvaluationResult:
            logits = logits_of(model, dev.encoded, size)
            figures = scores(dev.questions, answers_of(dev, logits, options, null=null), null=null)
            loss = float(_loss(*_padded(logits), dev.targets))
            return EvaluationResult(
                loss * len(dev.windows), len(dev.windows), {name: figures[name] for name in metrics}
            )

        def measure(model: nn.Module) -> dict[str, Any]:
            logits = logits_of(model, dev.encoded, size)
            answers = answers_of(dev, logits, options, null=null)
            write_answers(answers, folder)
            loss = float(_loss(*_padded(logits), dev.targets))
            counts = {"examples": len(dev.questions), "windows": len(dev.windows)}
            return {"dev": {**scores(dev.questions, answers, null=null), "loss": loss, **counts}}

        return tuning_parts(
            config,
            pretrained,
            folder,
            train=train.encoded,
            objective=SpanObjective(pretrained.model, train.targets, device),
            evaluate=evaluate,
            measure=measure,
            metrics=metrics,
            entries={
                "task": config.data.name,
                "title": f"SQuAD v{corpus.dev.version}",
                "slice": {"train": corpus.train.is_slice, "dev": corpus.dev.is_slice},
                "examples": {"train": len(train.questions), "dev": len(dev.questions)},
                "windows": {"train": len(train.windows), "dev": len(dev.windows)},
                "protocol": f"development split, fp32, windows of at most {config.data.max_length} tokens every "
                f"{config.data.doc_stride}, answers of at most {options.max_answer_length} tokens",
                "sha256": corpus.sha256,
            },
        )


class SpanObjective:
    """The mean of two cross-entropies over the positions of a window: of the answer's first and of its last token.

    Where the window does not hold the answer, both are [CLS]. Padding is left out of the softmax, so that the loss of a
    window does not depend on the batch it is in; BERT's script, whose windows are all padded to `max_length`, leaves it in.
    """

    def __init__(self, model: nn.Module, targets: Tensor, device: torch.device) -> None:
        self.model, self.targets, self.device = model, targets, device

    def __call__(self, batch: ExampleBatch, carry: Mapping[str, Tensor], position: TrainingPosition) -> Loss:
        count = len(batch.indices)
        start, end = _logits(self.model, batch, self.device)
        value = _loss(start, end, self.targets[torch.from_numpy(batch.indices)].to(self.device))
        return Loss(value, value.detach() * count, count, read=batch.tokens)


def windowed(questions: Sequence[Question], data: TaskDataConfig, pretrained: Pretrained) -> WindowedSplit:
    """The windows of questions; InputError where the encoder reads fewer tokens than `data.max_length` says."""
    assert data.max_length is not None  # the configuration fills them in for SQuAD
    assert data.doc_stride is not None
    assert data.max_query_length is not None
    check_length(pretrained, data.max_length)
    tokenizer = pretrained.tokenizer
    windows = squad_windows(
        questions,
        tokenizer,
        max_length=data.max_length,
        doc_stride=data.doc_stride,
        max_query_length=data.max_query_length,
    )
    inputs: dict[str, Any] = {
        "input_ids": [window.ids for window in windows],
        "attention_mask": [np.ones(len(window.ids), np.int8) for window in windows],
    }
    if "token_type_ids" in tokenizer.model_input_names:
        inputs["token_type_ids"] = [window.types for window in windows]
    return WindowedSplit(questions, windows, Encoded(inputs, padding_of(tokenizer)))


Logits = list[tuple[NDArray[np.float32], NDArray[np.float32]]]


def logits_of(model: nn.Module, windows: Encoded, batch_size: int) -> Logits:
    """The start and end logits of each window, without padding, in order; in evaluation mode."""
    device, training = device_of(model), model.training
    logits_by_index: dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    lengths = windows.lengths
    model.eval()
    with torch.no_grad():
        for batch in by_length(windows, batch_size):
            start, end = (logits.cpu().numpy() for logits in _logits(model, batch, device))
            for row, index in enumerate(batch.indices.tolist()):
                logits_by_index[index] = start[row, : lengths[index]], end[row, : lengths[index]]
    model.train(training)
    return [logits_by_index[index] for index in range(len(windows))]


def answers_of(split: WindowedSplit, logits: Logits, config: FinetuneEvalConfig, *, null: bool) -> list[Answer]:
    """The answers by the rules of the eval section."""
    return find_answers(
        split.questions,
        split.windows,
        [start for start, _ in logits],
        [end for _, end in logits],
        null=null,
        n_best=config.n_best,
        max_answer_length=config.max_answer_length,
        null_score_diff_threshold=config.null_score_diff_threshold,
    )


def scores(questions: Sequence[Question], answers: Sequence[Answer], *, null: bool) -> dict[str, float]:
    """The scores of the official script, as fractions, like those of every task; `total` is left out.

    In v2 `best_*` are of the best answers that are not empty, whatever `null_score_diff_threshold` made of them.
    """
    references = {question.id: question.answers for question in questions}
    texts = {answer.id: answer.text for answer in answers}
    if null:
        odds = {answer.id: answer.null_odds or 0.0 for answer in answers}
        free = squad_v2_scores({answer.id: answer.best for answer in answers}, references, odds)
        best = {name: value for name, value in free.items() if name.startswith("best_")}
        result = squad_v2_scores(texts, references) | best
    else:
        result = squad_scores(texts, references)
    return {
        name: value if name.endswith(("total", "thresh")) else value / 100
        for name, value in result.items()
        if name != "total"
    }


def _logits(model: nn.Module, batch: ExampleBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Start and end logits (B, N) in fp32, those of padding masked."""
    inputs = {name: tensor.to(device) for name, tensor in batch.inputs.items()}
    output, padded = model(**inputs), inputs["attention_mask"] == 0
    start, end = (logits.float().masked_fill(padded, _MASKED) for logits in (output.start_logits, output.end_logits))
    return start, end


def _loss(start: Tensor, end: Tensor, targets: Tensor) -> Tensor:
    return (F.cross_entropy(start, targets[:, 0]) + F.cross_entropy(end, targets[:, 1])) / 2


def _padded(logits: Logits) -> tuple[Tensor, Tensor]:
    """Start and end logits of all windows (W, N)."""

    def table(side: int) -> Tensor:
        rows = [torch.from_numpy(pair[side]) for pair in logits]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=_MASKED).double()

    return table(0), table(1)


# -- answers from logits ---------------------------------------------------------------------------------------------

N_BEST, MAX_ANSWER_LENGTH = 20, 30
WindowLogits = Sequence[NDArray[np.floating]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible answer: its text and characters [start, end) in the context ("" at 0, 0: no answer), the two logits whose
    sum is its score, and the softmax of the scores over the n best."""

    text: str
    start: int
    end: int
    start_logit: float
    end_logit: float
    probability: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the question `id`.

    `text`: "" says that there is none. `best`: the best answer that is not empty, whatever the threshold.
    `candidates`: the n best, best first. `null_odds`: score of no answer minus score of `best`; None in v1.1.
    """

    id: str
    text: str
    best: str
    candidates: tuple[Candidate, ...]
    null_odds: float | None = None


def find_answers(
    questions: Sequence[Question],
    windows: Sequence[Window],
    start_logits: WindowLogits,
    end_logits: WindowLogits,
    *,
    null: bool = False,
    n_best: int = N_BEST,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    null_score_diff_threshold: float = 0.0,
) -> list[Answer]:
    """One answer for each question, in order.

    `start_logits[w]`, `end_logits[w]` (at least as long as window w; the rest is padding): what the model said of window w.
    A candidate begins at a context token that has most context in its window, ends in the same window no earlier, and has at
    most `max_answer_length` tokens; its score is start logit + end logit, its text is cut from the context as it is written.
    Of candidates with the same text only the best stays. `null` (v2): no answer is a candidate too; its score is the smallest
    sum of the two logits at [CLS] over the question's windows, and it wins if null odds > `null_score_diff_threshold`.
    BERT's script looks only at pairs of the 20 best starts and the 20 best ends of a window; here every span is looked at.
    Raises InputError for logits that do not fit the windows, RunError for logits that are not finite.
    """
    for key, value in (("n_best", n_best), ("max_answer_length", max_answer_length)):
        if value < 1:
            raise InputError(f"{key}={value} is not possible; set it to 1 or more")
    if not len(windows) == len(start_logits) == len(end_logits):
        raise InputError(f"{len(windows)} windows have {len(start_logits)} start and {len(end_logits)} end logits")
    of_question: list[list[int]] = [[] for _ in questions]
    for index, window in enumerate(windows):
        of_question[window.question].append(index)
    answers = []
    for question, indices in zip(questions, of_question, strict=True):
        if not indices:
            raise InputError(f"question {question.id} has no window")
        parts = [_Part(windows[i], start_logits[i], end_logits[i], max_answer_length) for i in indices]
        spans = _best_spans(question.context, parts, n_best)
        answers.append(_answer(question.id, spans, parts if null else [], n_best, null_score_diff_threshold))
    return answers


class _Part:
    """One window and the scores of all spans in it: `scores[s, k]` of context tokens s to s + k, -inf where not allowed."""

    def __init__(
        self, window: Window, start: NDArray[np.floating], end: NDArray[np.floating], max_answer_length: int
    ) -> None:
        self.window, size = window, len(window.ids)
        if len(start) < size or len(end) < size:
            raise InputError(f"a window of {size} tokens has {len(start)} start and {len(end)} end logits")
        # in float64, where the sum of two float32 logits keeps its order
        self.start, self.end = (np.asarray(logits[:size], dtype=np.float64) for logits in (start, end))
        if not (np.isfinite(self.start).all() and np.isfinite(self.end).all()):
            raise RunError(
                "the model's start or end logits are not finite; has training diverged? lower the learning rate"
            )
        num_context = len(window.offsets)
        context = slice(window.first, window.first + num_context)
        width = min(max_answer_length, num_context)
        ends = np.full(num_context + width, -np.inf)  # beyond the window no span ends
        ends[:num_context] = self.end[context]
        starts = np.where(window.max_context, self.start[context], -np.inf)
        shape = num_context, width
        self.scores = starts[:, None] + (
            np.lib.stride_tricks.sliding_window_view(ends, width)[:num_context] if width else np.empty(shape)
        )

    @property
    def null(self) -> tuple[float, float]:
        return float(self.start[NO_ANSWER]), float(self.end[NO_ANSWER])


@dataclass(frozen=True, slots=True)
class _Span:
    text: str
    start: int
    end: int
    start_logit: float
    end_logit: float


def _best_spans(context: str, parts: Sequence[_Part], n_best: int) -> list[_Span]:
    """The `n_best` spans of different text, best first; of equal scores the one that comes first."""
    scores = np.concatenate([part.scores.ravel() for part in parts])
    sizes = np.cumsum([0] + [part.scores.size for part in parts])
    possible = int(np.isfinite(scores).sum())
    wanted = min(possible, 4 * n_best)
    while True:
        spans: dict[str, _Span] = {}
        if wanted:
            least = np.partition(scores, len(scores) - wanted)[len(scores) - wanted]
            places = np.flatnonzero(scores >= least)
            for place in places[np.argsort(-scores[places], kind="stable")]:
                number = int(np.searchsorted(sizes, place, side="right")) - 1
                span = _span(context, parts[number], int(place - sizes[number]))
                if span.text:
                    spans.setdefault(span.text, span)
                if len(spans) == n_best:
                    break
        if len(spans) == n_best or wanted == possible:
            return list(spans.values())
        wanted = min(possible, 8 * wanted)  # the same text stood there many times


def _span(context: str, part: _Part, place: int) -> _Span:
    first, more = divmod(place, part.scores.shape[1])
    start, end = part.window.first + first, part.window.first + first + more
    begin, stop = part.window.characters(start, end)
    return _Span(context[begin:stop], begin, stop, float(part.start[start]), float(part.end[end]))


def _answer(name: str, spans: list[_Span], parts: Sequence[_Part], n_best: int, threshold: float) -> Answer:
    best = spans[0] if spans else None
    text = best.text if best else ""
    odds = None
    if parts:
        start, end = min((part.null for part in parts), key=sum)
        # a context without any token has no span to compare with; as in BERT's script it scores 0
        odds = start + end - (best.start_logit + best.end_logit if best else 0.0)
        spans = sorted([*spans, _Span("", 0, 0, start, end)], key=lambda span: -(span.start_logit + span.end_logit))
        kept = spans[:n_best]
        spans = kept if any(not span.text for span in kept) else [*kept, _Span("", 0, 0, start, end)]
    spans = spans or [_Span("", 0, 0, 0.0, 0.0)]
    scores = np.array([span.start_logit + span.end_logit for span in spans])
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    candidates = tuple(
        Candidate(span.text, span.start, span.end, span.start_logit, span.end_logit, float(share))
        for span, share in zip(spans, shares, strict=True)
    )
    return Answer(name, "" if odds is not None and odds > threshold else text, text, candidates, odds)


def write_answers(answers: Sequence[Answer], folder: str | Path) -> list[Path]:
    """predictions.json, nbest_predictions.json and, for v2, null_odds.json in the official form, each by question id.

    RunError if a file cannot be written.
    """
    contents: dict[str, Mapping[str, object]] = {
        "predictions.json": {answer.id: answer.text for answer in answers},
        "nbest_predictions.json": {
            answer.id: [
                {
                    "text": candidate.text,
                    "probability": candidate.probability,
                    "start_logit": candidate.start_logit,
                    "end_logit": candidate.end_logit,
                }
                for candidate in answer.candidates
            ]
            for answer in answers
        },
    }
    odds = {answer.id: answer.null_odds for answer in answers if answer.null_odds is not None}
    if odds:
        contents["null_odds.json"] = odds
    files = []
    for name, content in contents.items():
        files.append(Path(folder).expanduser() / name)
        write_json(files[-1], content)
    return files
