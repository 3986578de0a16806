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

from fullrank.config.finetune import FinetuneConfig, TaskDataConfig
from fullrank.core.errors import InputError, RunError
from fullrank.data.corpora import SQUAD
from fullrank.data.examples import Encoded, ExampleBatch, subset
from fullrank.data.invented import invented_questions
from fullrank.data.squad import NO_ANSWER, Question, SquadSplit, Window, read_squad, squad_windows
from fullrank.evaluation.tasks import squad_scores, squad_v2_scores
from fullrank.experiments.finetuning import ExampleObjective, inputs_of, logits_by_example, tuning_parts
from fullrank.experiments.pretrained import PretrainedEncoder, check_length, load_pretrained, padding_of
from fullrank.experiments.task import Parts, Prepared, Say, Task
from fullrank.files import write_json
from fullrank.training.values import EvaluationResult

METRICS = {"1.1": ("f1", "exact_match"), "2.0": ("f1", "exact")}  # each script has a name of its own for it
_MASKED = -1e30  # padding cannot be an answer


@dataclass(frozen=True)
class WindowedSplit:
    """Questions, their windows, and the same windows as inputs of a model."""

    questions: Sequence[Question]
    windows: Sequence[Window]
    encoded: Encoded

    @property
    def targets(self) -> Tensor:
        """(W, 2): the first and the last token of each window's answer; both are [CLS] where the window does not hold it."""
        return torch.tensor([(window.start, window.end) for window in self.windows], dtype=torch.int64).reshape(-1, 2)


class SquadTuning(Task[FinetuneConfig, dict[str, SquadSplit]]):
    """Fine-tuning on SQuAD. Its data are the two public splits."""

    def prepare(
        self, config: FinetuneConfig, identity: Mapping[str, Any], allow_slice: bool, say: Say
    ) -> Prepared[FinetuneConfig, dict[str, SquadSplit]]:
        data = config.data

        def load(split: str, most: int | None) -> SquadSplit:
            version = SQUAD[data.name]
            if data.invented:
                whole = invented_questions(split, version)
            else:
                whole = read_squad(data.dir, split, version, cache=data.cache, report=say)
            chosen = subset(len(whole.questions), most, data.subset_seed)
            return dataclasses.replace(whole, questions=[whole.questions[i] for i in chosen])

        splits = {"train": load("train", data.max_train), "dev": load("dev", data.max_eval)}
        checksums = {name: split.sha256 for name, split in splits.items()}
        return Prepared(config, splits, data.label, {"text": checksums})

    def parts(self, data: Prepared[FinetuneConfig, dict[str, SquadSplit]], folder: Path, device: torch.device) -> Parts:
        config, corpus, version = data.config, data.corpus, SQUAD[data.config.data.name]
        pretrained = load_pretrained(config.model, "answers")
        pretrained.model.to(device)
        train, dev = (windowed(corpus[name].questions, config.data, pretrained) for name in ("train", "dev"))
        options, null, metrics = config.eval, version == "2.0", METRICS[version]

        def answered(model: nn.Module) -> tuple[list[Answer], dict[str, float]]:
            logits = logits_of(model, dev.encoded, options.batch_size)
            answers = find_answers(
                dev.questions,
                dev.windows,
                [start for start, _ in logits],
                [end for _, end in logits],
                null=null,
                n_best=options.n_best,
                max_answer_length=options.max_answer_length,
                null_score_diff_threshold=options.null_score_diff_threshold,
            )
            return answers, {**scores(dev.questions, answers, null=null), "loss": _mean_loss(logits, dev.targets)}

        def evaluate(model: nn.Module) -> EvaluationResult:
            figures, count = answered(model)[1], len(dev.windows)
            return EvaluationResult(figures["loss"] * count, count, {name: figures[name] for name in metrics})

        def measure(model: nn.Module) -> dict[str, Any]:
            answers, figures = answered(model)
            write_answers(answers, folder)
            return {"dev": {**figures, "examples": len(dev.questions), "windows": len(dev.windows)}}

        return tuning_parts(
            data,
            pretrained,
            folder,
            train=train.encoded,
            objective=ExampleObjective(pretrained.model, train.targets, _logits, _loss, config.train),
            evaluate=evaluate,
            measure=measure,
            metrics=metrics,
            entries={
                "title": f"SQuAD v{version}",
                "slice": {name: split.is_slice for name, split in corpus.items()},
                "examples": {"train": len(train.questions), "dev": len(dev.questions)},
                "windows": {"train": len(train.windows), "dev": len(dev.windows)},
                "protocol": f"development split, fp32, windows of at most {config.data.max_length} tokens every "
                f"{config.data.doc_stride}, answers of at most {options.max_answer_length} tokens",
            },
        )


def windowed(questions: Sequence[Question], data: TaskDataConfig, pretrained: PretrainedEncoder) -> WindowedSplit:
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


def logits_of(
    model: nn.Module, windows: Encoded, batch_size: int
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """The start and end logits of each window, without padding, in order; in evaluation mode."""
    rows = zip(logits_by_example(model, windows, batch_size, _logits), windows.lengths, strict=True)
    return [(start[:length].numpy(), end[:length].numpy()) for (start, end), length in rows]


def _logits(model: nn.Module, batch: ExampleBatch) -> Tensor:
    """Start and end logits (B, 2, N) in fp32, those of padding masked."""
    inputs = inputs_of(model, batch)
    output, padded = model(**inputs), inputs["attention_mask"] == 0
    return torch.stack([output.start_logits, output.end_logits], 1).float().masked_fill(padded[:, None], _MASKED)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of two cross-entropies over the positions of a window: of the answer's first and of its last token.

    Padding is left out of the softmax, so that the loss of a window does not depend on the batch it is in; BERT's script,
    whose windows are all padded to `max_length`, leaves it in.
    """
    start, end = logits.unbind(1)
    return (F.cross_entropy(start, targets[:, 0]) + F.cross_entropy(end, targets[:, 1])) / 2


def _mean_loss(logits: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]], targets: Tensor) -> float:
    rows = [torch.from_numpy(np.stack(pair, 1)) for pair in logits]  # (N, 2)
    table = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=_MASKED).double()
    return float(_loss(table.transpose(1, 2).contiguous(), targets))


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
    probability: float = 0.0

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
    by_question: list[list[_ScoredWindow]] = [[] for _ in questions]
    for window, start, end in zip(windows, start_logits, end_logits, strict=True):
        by_question[window.question].append(_ScoredWindow(window, start, end, max_answer_length))
    answers = []
    for question, scored in zip(questions, by_question, strict=True):
        if not scored:
            raise InputError(f"question {question.id} has no window")
        candidates = _best_candidates(question.context, scored, n_best)
        best = text = candidates[0].text if candidates else ""
        odds = None
        if null:
            none = min((one.null for one in scored), key=lambda candidate: candidate.score)
            # a context without any token has no span to compare with; as in BERT's script it scores 0
            odds = none.score - (candidates[0].score if candidates else 0.0)
            candidates = sorted([*candidates, none], key=lambda candidate: -candidate.score)
            candidates = candidates[:n_best] if none in candidates[:n_best] else [*candidates[:n_best], none]
            text = "" if odds > null_score_diff_threshold else best
        candidates = candidates or [Candidate("", 0, 0, 0.0, 0.0)]
        shares = np.exp([candidate.score - max(c.score for c in candidates) for candidate in candidates])
        with_shares = zip(candidates, (shares / shares.sum()).tolist(), strict=True)
        listed = tuple(dataclasses.replace(candidate, probability=share) for candidate, share in with_shares)
        answers.append(Answer(question.id, text, best, listed, odds))
    return answers


class _ScoredWindow:
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
        width = max(1, min(max_answer_length, num_context))
        ends = np.concatenate([self.end[context], np.full(width, -np.inf)])  # beyond the window no span ends
        starts = np.where(window.max_context, self.start[context], -np.inf)
        self.scores = starts[:, None] + np.lib.stride_tricks.sliding_window_view(ends, width)[:num_context]

    @property
    def null(self) -> Candidate:
        """No answer, as this window scores it."""
        return Candidate("", 0, 0, float(self.start[NO_ANSWER]), float(self.end[NO_ANSWER]))

    def candidate(self, context: str, place: int) -> Candidate:
        """The span of `scores.flat[place]`."""
        first, more = divmod(place, self.scores.shape[1])
        start, end = self.window.first + first, self.window.first + first + more
        begin, stop = self.window.characters(start, end)
        return Candidate(context[begin:stop], begin, stop, float(self.start[start]), float(self.end[end]))


def _best_candidates(context: str, windows: Sequence[_ScoredWindow], n_best: int) -> list[Candidate]:
    """The `n_best` spans of different text, best first; of equal scores the one that comes first."""
    scores = np.concatenate([window.scores.ravel() for window in windows])
    begins = np.cumsum([0] + [window.scores.size for window in windows])
    possible = int(np.isfinite(scores).sum())
    wanted = min(possible, 4 * n_best)
    while True:
        candidates: dict[str, Candidate] = {}
        if wanted:
            least = np.partition(scores, len(scores) - wanted)[len(scores) - wanted]
            places = np.flatnonzero(scores >= least)
            for place in places[np.argsort(-scores[places], kind="stable")]:
                number = int(np.searchsorted(begins, place, side="right")) - 1
                candidate = windows[number].candidate(context, int(place - begins[number]))
                if candidate.text:
                    candidates.setdefault(candidate.text, candidate)
                if len(candidates) == n_best:
                    break
        if len(candidates) == n_best or wanted == possible:
            return list(candidates.values())
        wanted = min(possible, 8 * wanted)  # the same text stood there many times


def write_answers(answers: Sequence[Answer], folder: str | Path) -> list[Path]:
    """predictions.json, nbest_predictions.json and, for v2, null_odds.json in the official form, each by question id.

    RunError if a file cannot be written.
    """
    keys = ("text", "probability", "start_logit", "end_logit")
    contents: dict[str, dict[str, Any]] = {
        "predictions.json": {answer.id: answer.text for answer in answers},
        "nbest_predictions.json": {
            answer.id: [{key: getattr(candidate, key) for key in keys} for candidate in answer.candidates]
            for answer in answers
        },
        "null_odds.json": {answer.id: answer.null_odds for answer in answers if answer.null_odds is not None},
    }
    files = {Path(folder).expanduser() / name: content for name, content in contents.items() if content}
    for file, content in files.items():
        write_json(file, content)
    return list(files)
