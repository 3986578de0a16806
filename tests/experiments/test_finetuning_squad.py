"""Fine-tuning on SQuAD: the loss from its equation, figures from the files of predictions, and a span that can be learned."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fullrank.config.finetune import FinetuneEvalConfig, TaskDataConfig
from fullrank.config.load import build_any
from fullrank.data.tasks import Question, Window, choose_windows, read_task
from fullrank.evaluation.tasks import squad_scores
from fullrank.experiments.finetuning import SquadFinetuning, find_answers, logits_by_example
from fullrank.training.values import TrainingPosition
from run_files import read_metrics, train_quietly
from tiny_encoder import WORDS, tiny_encoder


def write_squad(folder, version, *, train=48, dev=16, seed=0):
    """Files in which the answer is the colour in the context; in v2 some contexts have none."""
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("dev", dev)):
        paragraphs = []
        for number in range(count):
            words = list(generator.choice(WORDS[:8], size=generator.integers(6, 20)))
            entry = {"id": f"{split}{number}", "question": "a cat", "answers": []}
            if version == "2.0":
                entry["is_impossible"] = bool(generator.random() < 0.4)
            if not entry.get("is_impossible"):
                position = int(generator.integers(1, len(words)))
                words[position] = str(generator.choice(["red", "blue"]))
                start = len(" ".join([*words[:position], ""]))
                entry["answers"] = [{"text": words[position], "answer_start": start}]
                if split == "dev":
                    longer = {
                        "text": " ".join(words[position - 1 : position + 1]),
                        "answer_start": start - 1 - len(words[position - 1]),
                    }
                    entry["answers"].append(longer)
            paragraphs.append({"context": " ".join(words), "qas": [entry]})
        content = {"version": version, "data": [{"title": "made", "paragraphs": paragraphs}]}
        (folder / f"{split}-v{version}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squad")
    tiny_encoder(folder / "encoder", dropout=0.0)
    write_squad(folder / "squad", "1.1")
    write_squad(folder / "squad", "2.0", seed=1)
    return folder


def settings(files, name="squad", **train):
    return {
        "model": {"pretrained": str(files / "encoder"), "attention": {"mix": "position_wise"}},
        "data": {"name": name, "dir": str(files), "max_length": 16, "doc_stride": 4},
        "train": {"batch_size": 8, "epochs": 1, "learning_rate": 3e-3, **train},
    }


def test_the_loss_is_the_mean_of_two_cross_entropies_whatever_the_padding(files):
    config = build_any(settings(files, group_by_length=False))
    task = SquadFinetuning(config).prepare()
    torch.manual_seed(config.train.seed)
    task.build(Path("unused"), torch.device("cpu"))
    model = task.model
    train = task.splits["train"]
    batch = task.batches.batch(0, 0)
    lengths = [len(train.windows[i].ids) for i in batch.indices]
    assert min(lengths) < max(lengths)
    assert len(train.windows) > len(train.source)
    logits = logits_by_example(model, train.encoded, 1000, task.compute_logits)
    losses = []
    for i in batch.indices:
        window = train.windows[i]
        ids, types = (torch.from_numpy(part)[None].long() for part in (window.ids, window.types))
        with torch.no_grad():
            output = model(input_ids=ids, token_type_ids=types)
        alone = torch.cat([output.start_logits, output.end_logits])
        torch.testing.assert_close(logits[i][:, : len(window.ids)], alone, rtol=0, atol=1e-5)
        for row, target in zip(alone, (window.start, window.end), strict=True):
            losses.append(math.log(sum(math.exp(value) for value in row.tolist())) - float(row[target]))
    loss = task.objective(batch, {}, TrainingPosition(1))
    assert loss.value.item() == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(loss.nll) == pytest.approx(len(batch.indices) * np.mean(losses), rel=1e-5)
    assert (loss.tokens, loss.read) == (8, sum(lengths))
    assert any(window.start == 0 for window in train.windows)
    loss.value.backward()
    assert model.qa_outputs.weight.grad.abs().sum() > 0


def answers_of(files, name):
    split = read_task(TaskDataConfig(name=name, dir=str(files)), "dev")
    return {question.id: question.answers for question in split.rows}


def test_a_span_is_learned_and_figures_are_those_of_the_predictions(files, tmp_path):
    raw = settings(files, epochs=8, learning_rate=1e-2)
    result = train_quietly(raw, tmp_path / "run")
    predictions = json.loads((tmp_path / "run" / "predictions.json").read_text())
    final = result["final"]["dev"]
    scores = squad_scores(predictions, answers_of(files, "squad"))
    assert {metric: final[metric] for metric in scores} == pytest.approx(scores)
    assert final["examples"] == 16 < final["windows"] == result["windows"]["dev"]
    assert scores["exact_match"] > 0.8  # one word of the context is right
    assert result["metrics"] == ["f1", "exact_match"]
    assert result["slice"] == {"train": True, "dev": True}
    assert (result["task"], result["title"]) == ("squad", "SQuAD v1.1")
    last = read_metrics(tmp_path / "run")[-1]
    assert last["f1"] == pytest.approx(final["f1"])


def test_version_2_says_when_there_is_no_answer(files, tmp_path):
    raw = settings(files, "squad-v2", epochs=8, learning_rate=1e-2)
    final = train_quietly({**raw, "eval": {"null_score_diff_threshold": 0.5}}, tmp_path / "run")["final"]["dev"]
    predictions = json.loads((tmp_path / "run" / "predictions.json").read_text())
    answers = answers_of(files, "squad-v2")
    scores = squad_scores(predictions, answers, v2=True)
    assert {metric: final[metric] for metric in scores} == pytest.approx(scores)
    share = sum(not texts for texts in answers.values()) / len(answers)
    assert scores["exact"] > share > 0  # better than answering none of the questions


def draw_question(generator, number, num_tokens, room, first=4, step=2, alphabet="ab"):
    """A question whose context has one-letter words, and its windows."""
    context = " ".join(generator.choice(list(alphabet), size=num_tokens))
    question = Question(f"q{number}", "t", context, "?", (), (), impossible=True)
    starts = range(0, max(num_tokens - room, 0) + step, step)
    parts = [(start, min(start + room, num_tokens)) for start in starts]
    best = choose_windows(parts, num_tokens)
    offsets = np.arange(2 * num_tokens, dtype=np.int32).reshape(-1, 2)
    windows = []
    for index, (start, end) in enumerate(parts):
        zeros = np.zeros(first + end - start + 1, np.int32)
        windows.append(Window(question=number, ids=zeros, types=zeros.astype(np.int8), first=first, offsets=offsets[start:end],
                              max_context=best[start:end] == index, start=0, end=0))  # fmt: skip
    return question, windows


def logits_of(generator, windows, padding=3):
    return [generator.normal(size=(2, len(window.ids) + padding)).astype(np.float32) for window in windows]


def brute_force(question, windows, logits, longest):
    """Every allowed span, best first: (text, score)."""
    spans = []
    for window, (start, end) in zip(windows, logits, strict=True):
        for i in range(len(window.offsets)):
            for j in range(i, len(window.offsets)):
                if j - i + 1 <= longest and window.max_context[i]:
                    text = question.context[window.offsets[i][0] : window.offsets[j][1]]
                    spans.append((text, float(start[window.first + i]) + float(end[window.first + j])))
    spans.sort(key=lambda pair: -pair[1])
    best = {}
    for text, score in spans:
        best.setdefault(text, score)
    return list(best.items())


@pytest.mark.parametrize("alphabet", ["a", "ab", "abcdefghijkl"])
@pytest.mark.parametrize("longest", [1, 3, 30])
def test_the_best_answer_against_brute_force(alphabet, longest):
    generator = np.random.default_rng(longest)
    questions = []
    windows = []
    for number, (num_tokens, room) in enumerate([(1, 5), (9, 5), (30, 7), (60, 16), (12, 40)]):
        question, its_windows = draw_question(generator, number, num_tokens, room, alphabet=alphabet)
        questions.append(question)
        windows += its_windows
    logits = logits_of(generator, windows)
    answers = find_answers(questions, windows, logits, FinetuneEvalConfig(max_answer_length=longest), is_v2=False)
    assert list(answers) == [question.id for question in questions]
    for number, question in enumerate(questions):
        of_question = [pair for pair in zip(windows, logits, strict=True) if pair[0].question == number]
        assert answers[question.id] == brute_force(question, *zip(*of_question, strict=True), longest)[0][0]


def test_no_answer_is_the_smallest_score_of_cls_and_wins_above_the_threshold():
    generator = np.random.default_rng(0)
    question, windows = draw_question(generator, 0, 20, 6, alphabet="abcdefghijklmnopq")
    logits = logits_of(generator, windows)
    null = min(float(start[0]) + float(end[0]) for start, end in logits)
    text, score = brute_force(question, windows, logits, 30)[0]
    for threshold, expected in ((null - score + 0.01, text), (null - score - 0.01, "")):
        options = FinetuneEvalConfig(null_score_diff_threshold=threshold)
        assert find_answers([question], windows, logits, options, is_v2=True) == {"q0": expected}
