"""SQuAD v1.1 and v2 as a benchmark to fine-tune on: the first and the last token of the answer to a question in its context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.config.finetune import SQUAD, FinetuneConfig, FinetuneEvalConfig
from fullrank.core.errors import RunError
from fullrank.data.examples import Encoded, ExampleBatch
from fullrank.data.invented import make_questions
from fullrank.data.tasks import NO_ANSWER, Question, SquadSplit, Window, read_squad, squad_windows
from fullrank.evaluation.tasks import squad_scores, squad_v2_scores
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
            return make_questions(split, self.version)
        return read_squad(data.dir, split, self.version, cache=data.cache, report=say)

    def encode(self, pretrained: PretrainedEncoder, source: SquadSplit) -> EncodedSplit:
        data, tokenizer = self.config.data, pretrained.tokenizer
        check_length(pretrained, data.max_length)
        keys = ("max_length", "doc_stride", "max_query_length")
        windows = squad_windows(source.questions, tokenizer, **{key: getattr(data, key) for key in keys})
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
        questions, is_v2 = split.source.questions, self.version == "2.0"
        answers = find_answers(questions, split.windows, [row.numpy() for row in logits], self.config.eval, is_v2)
        if folder is not None and rank() == 0:
            write_json(folder / "predictions.json", answers)
        references = {question.id: question.answers for question in questions}
        scores = squad_v2_scores(answers, references) if is_v2 else squad_scores(answers, references)
        table = nn.utils.rnn.pad_sequence([row.T for row in logits], batch_first=True, padding_value=_MASKED)
        loss = float(self.compute_loss(table.double().transpose(1, 2).contiguous(), split.targets))
        return {**scores, "loss": loss, "examples": len(questions), "windows": len(split.windows)}


# -- answers from logits ---------------------------------------------------------------------------------------------

ScoredWindows = Sequence[tuple[Window, NDArray[np.float64]]]  # windows of one question, and their logits (2, N)


def find_answers(
    questions: Sequence[Question],
    windows: Sequence[Window],
    logits: Sequence[NDArray[np.floating]],
    options: FinetuneEvalConfig,
    is_v2: bool,
) -> dict[str, str]:
    """The answer to each question by its id; "" says that there is none.

    `logits[w]` (2, N): start and end logits of window w, where N is at least its length; the rest is padding.
    A candidate begins at a context token that has most context in its window, ends in the same window no earlier, and has at
    most `max_answer_length` tokens; its score is start logit + end logit, its text is cut from the context as it is written.
    In v2 no answer is a candidate too; its score is the smallest sum of the two logits at [CLS] over the question's windows,
    and it wins if it is better than the best answer by more than `null_score_diff_threshold`.
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
    answers = {}
    for question, scored in zip(questions, by_question, strict=True):
        text, score = _find_best_span(question.context, scored, options.max_answer_length)
        if is_v2:
            null = min(float(table[:, NO_ANSWER].sum()) for _, table in scored)
            # a context without any token has no span to compare with; as in BERT's script it scores 0
            text = "" if null - score > options.null_score_diff_threshold else text
        answers[question.id] = text
    return answers


def _find_best_span(context: str, scored: ScoredWindows, max_answer_length: int) -> tuple[str, float]:
    """Text and score of the best span with a text; of equal scores the first. "" and 0 where there is none."""
    best, highest = "", -np.inf
    for window, (start, end) in scored:
        count = len(window.offsets)
        tokens = slice(window.first, window.first + count)
        starts = np.where(window.max_context, start[tokens], -np.inf)
        scores = starts[:, None] + end[tokens]  # of tokens s to e at [s, e]
        lengths = np.arange(count) - np.arange(count)[:, None] + 1
        scores[(lengths < 1) | (lengths > max_answer_length)] = -np.inf
        while count and scores.max() > highest:
            first, last = divmod(int(scores.argmax()), count)
            text = context[window.offsets[first, 0] : window.offsets[last, 1]].strip()
            if text:
                best, highest = text, float(scores[first, last])
            else:
                scores[first, last] = -np.inf
    return (best, highest) if best else ("", 0.0)
