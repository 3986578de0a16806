"""SQuAD v1.1 and v2 as a benchmark to fine-tune on: the first and the last token of the answer to a question in its context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.config.finetune import FinetuneConfig, FinetuneEvalConfig
from fullrank.core.errors import RunError
from fullrank.data.corpora import SQUAD
from fullrank.data.examples import Encoded, ExampleBatch
from fullrank.data.invented import invented_questions
from fullrank.data.squad import NO_ANSWER, Question, SquadSplit, Window, read_squad, squad_windows
from fullrank.evaluation.tasks import best_thresholds, squad_scores, squad_v2_scores
from fullrank.experiments.benchmark import EncodedSplit, inputs_of
from fullrank.experiments.pretrained import PretrainedEncoder, check_length, padding_of
from fullrank.experiments.task import Say
from fullrank.files import write_json
from fullrank.training.distributed import rank

METRICS: Mapping[str, tuple[str, ...]] = {
    "1.1": ("f1", "exact_match"),
    "2.0": ("f1", "exact"),
}  # each script has a name of its own for it
_MASKED = -1e30  # padding cannot be an answer


class SquadBenchmark:
    """Questions whose answer is a span of a context, which is read in windows."""

    kind: Literal["classification", "answers"] = "answers"
    labels: tuple[str, ...] | None = None
    outputs = 2
    test_splits: tuple[str, ...] = ()

    def __init__(self, config: FinetuneConfig) -> None:
        self.config, self.version = config, SQUAD[config.data.name]
        self.title, self.metrics = f"SQuAD v{self.version}", METRICS[self.version]
        self.protocol = (
            f"development split, fp32, windows of at most {config.data.max_length} tokens every {config.data.doc_stride}, "
            f"answers of at most {config.eval.max_answer_length} tokens"
        )

    def list_splits(self, say: Say) -> list[str]:
        return ["train", "dev"]

    def read(self, split: str, say: Say) -> SquadSplit:
        data = self.config.data
        if data.invented:
            return invented_questions(split, self.version)
        return read_squad(data.dir, split, self.version, cache=data.cache, report=say)

    def encode(self, pretrained: PretrainedEncoder, source: SquadSplit) -> EncodedSplit:
        data, tokenizer = self.config.data, pretrained.tokenizer
        check_length(pretrained, data.max_length)
        assert data.max_length is not None  # the configuration fills them in
        assert data.doc_stride is not None
        assert data.max_query_length is not None
        windows = squad_windows(
            source.questions,
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
        targets = torch.tensor([(window.start, window.end) for window in windows], dtype=torch.int64)
        return EncodedSplit(source, Encoded(inputs, padding_of(tokenizer)), targets, windows)

    def compute_logits(self, model: nn.Module, batch: ExampleBatch) -> Tensor:
        """Start and end logits (B, 2, N), those of padding masked."""
        inputs = inputs_of(model, batch)
        output, padded = model(**inputs), inputs["attention_mask"] == 0
        return torch.stack([output.start_logits, output.end_logits], 1).float().masked_fill(padded[:, None], _MASKED)

    def compute_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean of two cross-entropies over the positions of a window: of the answer's first and of its last token.

        Padding is left out of the softmax, so that the loss of a window does not depend on the batch it is in; BERT's script,
        whose windows are all padded to `max_length`, leaves it in.
        """
        start, end = logits.unbind(1)
        return (F.cross_entropy(start, targets[:, 0]) + F.cross_entropy(end, targets[:, 1])) / 2

    def score(self, split: EncodedSplit, logits: list[Tensor], folder: Path | None) -> dict[str, float]:
        assert split.targets is not None
        questions, is_v2 = split.source.questions, self.version == "2.0"
        answers = find_answers(questions, split.windows, [row.numpy() for row in logits], self.config.eval, is_v2)
        if folder is not None and rank() == 0:
            write_answers(answers, folder)
        references = {question.id: question.answers for question in questions}
        texts = {answer.id: answer.text for answer in answers}
        if is_v2:
            scores = squad_v2_scores(texts, references)
            odds = {answer.id: answer.null_odds or 0.0 for answer in answers}
            # of the answers that are not empty, whatever the threshold made of them
            scores |= best_thresholds({answer.id: answer.best for answer in answers}, references, odds)
        else:
            scores = squad_scores(texts, references)
        table = nn.utils.rnn.pad_sequence([row.T for row in logits], batch_first=True, padding_value=_MASKED)
        loss = float(self.compute_loss(table.double().transpose(1, 2).contiguous(), split.targets))
        return {**scores, "loss": loss, "examples": len(questions), "windows": len(split.windows)}


# -- answers from logits ---------------------------------------------------------------------------------------------


ScoredWindows = Sequence[tuple[Window, NDArray[np.float64]]]  # windows of one question, and their logits (2, N)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible answer ("": no answer). Its score is the sum of the two logits.

    probability: softmax of the scores of the n best.
    """

    text: str
    probability: float
    start_logit: float
    end_logit: float

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
    logits: Sequence[NDArray[np.floating]],
    options: FinetuneEvalConfig,
    is_v2: bool,
) -> list[Answer]:
    """One answer for each question, in order.

    `logits[w]` (2, N): start and end logits of window w, where N is at least its length; the rest is padding.
    A candidate begins at a context token that has most context in its window, ends in the same window no earlier, and has at
    most `max_answer_length` tokens; its score is start logit + end logit, its text is cut from the context as it is written.
    Of candidates with the same text only the best stays. In v2 no answer is a candidate too; its score is the smallest
    sum of the two logits at [CLS] over the question's windows, and it wins if null odds > `null_score_diff_threshold`.
    BERT's script looks only at pairs of the 20 best starts and the 20 best ends of a window; here every span is looked at.
    Raises RunError for logits that are not finite.
    """
    by_question: list[list[tuple[Window, NDArray[np.float64]]]] = [[] for _ in questions]
    for window, table in zip(windows, logits, strict=True):
        # in float64, where the sum of two float32 logits keeps its order
        inside = np.asarray(table[:, : len(window.ids)], dtype=np.float64)
        if not np.isfinite(inside).all():
            raise RunError(
                "the model's start or end logits are not finite; has training diverged? lower train.learning_rate"
            )
        by_question[window.question].append((window, inside))
    return [
        _choose_answer(question, scored, options, is_v2)
        for question, scored in zip(questions, by_question, strict=True)
    ]


def _choose_answer(
    question: Question,
    scored: ScoredWindows,
    options: FinetuneEvalConfig,
    is_v2: bool,
) -> Answer:
    distinct: dict[str, Candidate] = {}
    for candidate in _rank_spans(question.context, scored, options.max_answer_length):
        if candidate.text:
            distinct.setdefault(candidate.text, candidate)
        if len(distinct) == options.n_best:
            break
    candidates = list(distinct.values())
    best = text = candidates[0].text if candidates else ""
    odds = None
    if is_v2:
        nulls = [Candidate("", 0.0, *table[:, NO_ANSWER].tolist()) for _, table in scored]
        null = min(nulls, key=lambda candidate: candidate.score)
        # a context without any token has no span to compare with; as in BERT's script it scores 0
        odds = null.score - (candidates[0].score if candidates else 0.0)
        candidates = sorted([*candidates, null], key=lambda candidate: -candidate.score)
        listed = candidates[: options.n_best]
        candidates = listed if null in listed else [*listed, null]
        text = "" if odds > options.null_score_diff_threshold else best
    candidates = candidates or [Candidate("", 0.0, 0.0, 0.0)]
    shares = np.exp([candidate.score - candidates[0].score for candidate in candidates])
    shares /= shares.sum()
    weighted = zip(candidates, shares.tolist(), strict=True)
    candidates = [replace(candidate, probability=share) for candidate, share in weighted]
    return Answer(question.id, text, best, tuple(candidates), odds)


def _rank_spans(context: str, scored: ScoredWindows, max_answer_length: int) -> Iterator[Candidate]:
    """All allowed spans of a question, best first; of equal scores the one that comes first."""
    most = max(len(window.offsets) for window, _ in scored)
    longest = max(1, min(max_answer_length, most))
    tables = []
    for window, (start, end) in scored:
        tokens = slice(window.first, window.first + len(window.offsets))
        starts = np.where(window.max_context, start[tokens], -np.inf)
        ends = np.concatenate([end[tokens], np.full(longest, -np.inf)])  # beyond the window no span ends
        reach = np.lib.stride_tricks.sliding_window_view(ends, longest)[: len(starts)]
        tables.append(starts[:, None] + reach)  # of tokens s to s + k at [s, k]
    scores = np.concatenate(tables).ravel()
    owners = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    firsts = np.concatenate([np.arange(len(table)) for table in tables])
    allowed = np.flatnonzero(np.isfinite(scores))
    for place in allowed[np.argsort(-scores[allowed], kind="stable")].tolist():
        row, more = divmod(place, longest)
        (window, (start, end)), first = scored[owners[row]], int(firsts[row])
        text = context[window.offsets[first, 0] : window.offsets[first + more, 1]].strip()
        at = window.first + first
        yield Candidate(text, 0.0, float(start[at]), float(end[at + more]))


def write_answers(answers: Sequence[Answer], folder: Path) -> None:
    """predictions.json, nbest_predictions.json and, for v2, null_odds.json in the official form, each by question id.

    RunError if a file cannot be written.
    """
    write_json(folder / "predictions.json", {answer.id: answer.text for answer in answers})
    listed = {answer.id: [asdict(candidate) for candidate in answer.candidates] for answer in answers}
    write_json(folder / "nbest_predictions.json", listed)
    odds = {answer.id: answer.null_odds for answer in answers if answer.null_odds is not None}
    if odds:
        write_json(folder / "null_odds.json", odds)
