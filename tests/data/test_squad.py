"""SQuAD files: what is read from them, where they are found, and one clear message for each fault."""

import copy
import hashlib
import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from fullrank.core.errors import InputError, RunError
from fullrank.data.squad import Question, SquadSplit, read_squad

CONTEXT = "  The Rhine rises in Switzerland. Überall flows the Rhine."
V1 = {
    "version": "1.1",
    "data": [
        {
            "title": "Rhine",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {
                            "id": "a",
                            "question": "Where does it rise?",
                            "answers": [
                                {"text": "Switzerland", "answer_start": CONTEXT.index("Switz")},
                                {"text": "in Switzerland", "answer_start": CONTEXT.index("in Switz")},
                            ],
                        },
                        {
                            "id": "b",
                            "question": "What flows?",
                            "answers": [{"text": "Rhine", "answer_start": CONTEXT.rindex("Rhine")}],
                        },
                    ],
                }
            ],
        }
    ],
}
V2 = copy.deepcopy(V1) | {"version": "v2.0"}
for entry in V2["data"][0]["paragraphs"][0]["qas"]:
    entry["is_impossible"] = False
V2["data"][0]["paragraphs"][0]["qas"].append(
    {
        "id": "c",
        "question": "How deep is it?",
        "answers": [],
        "plausible_answers": [{"text": "Rhine", "answer_start": 6}],
        "is_impossible": True,
    }
)


def written(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_every_field(tmp_path):
    file = written(tmp_path / "mine.json", V1)
    split = read_squad(file, "dev")
    assert split.questions == [
        Question(
            "a", "Rhine", CONTEXT, "Where does it rise?", ("Switzerland", "in Switzerland"), (21, 18), impossible=False
        ),
        Question("b", "Rhine", CONTEXT, "What flows?", ("Rhine",), (52,), impossible=False),
    ]
    assert read_squad(str(file), "dev").questions == split.questions
    assert (split.source, split.sha256) == (str(file), hashlib.sha256(file.read_bytes()).hexdigest())
    assert (split.version, split.split, split.published, split.is_slice) == ("1.1", "dev", 10_570, True)


def test_version_2_has_questions_without_an_answer(tmp_path):
    questions = read_squad(written(tmp_path / "mine.json", V2), "train", "2.0").questions
    assert [(question.id, question.impossible, question.answers) for question in questions] == [
        ("a", False, ("Switzerland", "in Switzerland")),
        ("b", False, ("Rhine",)),
        ("c", True, ()),
    ]


@pytest.mark.parametrize(
    ("version", "split", "count"),
    [("1.1", "train", 87_599), ("1.1", "dev", 10_570), ("2.0", "train", 130_319), ("2.0", "dev", 11_873)],
)
def test_as_many_as_were_published_is_no_slice(version, split, count):
    question = Question("a", "", "x", "?", ("x",), (0,), impossible=False)
    assert not SquadSplit(version, split, [question] * count, "f", "0").is_slice
    assert SquadSplit(version, split, [question] * (count - 1), "f", "0").is_slice


def test_the_official_name_comes_first_then_a_slice(tmp_path):
    with pytest.raises(InputError, match=r"no dev-v1\.1\.json and no dev-v1\.1\.slice\.json"):
        read_squad(tmp_path, "dev")
    written(tmp_path / "dev-v2.0.slice.json", V2)
    with pytest.raises(InputError, match=r"no dev-v1\.1\.json"):
        read_squad(tmp_path, "dev")
    any_slice = written(tmp_path / "dev.part.slice.json", V1)
    assert read_squad(tmp_path, "dev").source == str(any_slice)
    written(tmp_path / "dev.other.slice.json", V1)
    with pytest.raises(InputError, match=r"several slices .*: dev\.other\.slice\.json, dev\.part\.slice\.json"):
        read_squad(tmp_path, "dev")
    named = written(tmp_path / "dev-v1.1.slice.json", V1)
    assert read_squad(tmp_path, "dev").source == str(named)
    (tmp_path / "squad").mkdir()
    inner = written(tmp_path / "squad" / "dev-v1.1.slice.json", V1)
    assert read_squad(tmp_path, "dev").source == str(inner)
    whole = written(tmp_path / "dev-v1.1.json", V1)
    assert read_squad(tmp_path, "dev").source == str(whole)
    assert read_squad(tmp_path, "dev", "2.0").source == str(tmp_path / "dev-v2.0.slice.json")


def at(content, *path):
    for key in path:
        content = content[key]
    return content


PARAGRAPH = ("data", 0, "paragraphs", 0)
FIRST = (*PARAGRAPH, "qas", 0)


def without(*path):
    content = copy.deepcopy(V1)
    del at(content, *path[:-1])[path[-1]]
    return content


def with_(value, *path, base=V1):
    content = copy.deepcopy(base)
    at(content, *path[:-1])[path[-1]] = value
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ("  \n", "the file is empty"),
        (json.dumps(V1)[:200], "no valid JSON at line 1, column .*it ends too early"),
        (json.dumps(V1)[:-1], "it ends too early"),
        (json.dumps(V1)[:-3], "it ends too early"),
        ("id\tquestion\n", "no valid JSON at line 1, column 1; is it a SQuAD file"),
        ("[" * 100_000, "no valid JSON|nested too deeply"),
        ("[]", r"the file is \[\], not a JSON object"),
        ("3", "the file is 3, not a JSON object"),
        ({"version": "1.1", "data": []}, "no question in it"),
        (without("data"), "data is missing"),
        (with_({}, "data"), r"data: Input should be a valid list, given \{\}"),
        (without("data", 0, "paragraphs"), r"data\[0\]\.paragraphs is missing"),
        (without(*PARAGRAPH, "context"), r"paragraphs\[0\]\.context is missing"),
        (without(*PARAGRAPH, "qas"), r"paragraphs\[0\]\.qas is missing"),
        (without(*FIRST, "id"), r"qas\[0\]\.id is missing"),
        (without(*FIRST, "question"), r"qas\[0\]\.question is missing"),
        (without(*FIRST, "answers"), r"qas\[0\]\.answers is missing"),
        (without(*FIRST, "answers", 1, "text"), r"qas\[0\]\.answers\[1\]\.text is missing"),
        (without(*FIRST, "answers", 0, "answer_start"), r"qas\[0\]\.answers\[0\]\.answer_start is missing"),
        (
            with_("17", *FIRST, "answers", 0, "answer_start"),
            "answer_start: Input should be a valid integer, given '17'",
        ),
        (
            with_(True, *FIRST, "answers", 0, "answer_start"),
            "answer_start: Input should be a valid integer, given True",
        ),
        (with_(None, *FIRST, "question"), "question: Input should be a valid string, given None"),
        (with_(20, *FIRST, "answers", 0, "answer_start"), "answer_start 20 does not point at its answer 'Switzerland'"),
        (with_(-1, *FIRST, "answers", 0, "answer_start"), "answer_start -1 does not point"),
        (with_(9999, *FIRST, "answers", 0, "answer_start"), "answer_start 9999 does not point .* but at ''"),
        (with_("", *FIRST, "answers", 0, "text"), "does not point"),
        (with_([], *FIRST, "answers"), "question a has no answer; only SQuAD 2.0"),
        (with_("b", *FIRST, "id"), "two questions have the id b"),
        (V2, "a file of SQuAD 2.0, but 1.1 is asked for; set data.name=squad-v2"),
        (V2 | {"version": "?"}, "a file of SQuAD 2.0, but 1.1 is asked for"),
    ],
)
def test_faults_of_a_file(tmp_path, content, message):
    file = written(tmp_path / "bad.json", content)
    with pytest.raises(InputError, match=message) as caught:
        read_squad(file, "train")
    assert str(caught.value).startswith(str(file))


def test_faults_of_version_2(tmp_path):
    def fails(content, message):
        with pytest.raises(InputError, match=message):
            read_squad(written(tmp_path / "bad.json", content), "train", "2.0")

    fails(V1, r"a file of SQuAD 1\.1, but 2\.0 is asked for; set data\.name=squad,")
    fails(with_(True, *FIRST, "is_impossible", base=V2), "question a is marked is_impossible, and yet has an answer")
    fails(with_([], *FIRST, "answers", base=V2), "question a has no answer and is not marked is_impossible")
    fails(with_("no", *FIRST, "is_impossible", base=V2), "is_impossible: Input should be a valid boolean, given 'no'")


def test_faults_of_what_is_asked_for(tmp_path):
    with pytest.raises(InputError, match="splits train and dev, not 'test'"):
        read_squad(tmp_path, "test")
    with pytest.raises(InputError, match=r"versions 1\.1 and 2\.0, not '3'"):
        read_squad(tmp_path, "dev", "3")
    with pytest.raises(InputError, match=r"absent\.json: cannot be read"):
        read_squad(tmp_path / "absent.json", "dev")
    (tmp_path / "latin.json").write_bytes(b'{"data": "\xfc"}')
    with pytest.raises(InputError, match="not UTF-8 text at byte 10"):
        read_squad(tmp_path / "latin.json", "dev")


def hub(monkeypatch, rows):
    asked = []

    def load_dataset(name, **settings):
        asked.append({"name": name, **settings})
        if isinstance(rows, Exception):
            raise rows
        return rows

    module = ModuleType("datasets")
    module.__spec__ = ModuleSpec("datasets", None)
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_the_hub(monkeypatch, tmp_path):
    rows = [
        {"id": "a", "title": "t", "context": "xy z", "question": "q", "answers": {"text": ["z"], "answer_start": [3]}},
        {"id": "b", "title": "t", "context": "xy z", "question": "p", "answers": {"text": [], "answer_start": []}},
    ]
    asked, told = hub(monkeypatch, rows), []
    split = read_squad(None, "dev", "2.0", cache=tmp_path, report=told.append)
    assert {key: asked[0][key] for key in ("name", "split", "cache_dir")} == {
        "name": "rajpurkar/squad_v2",
        "split": "validation",
        "cache_dir": str(tmp_path / "hub"),
    }
    assert split.questions == [
        Question("a", "t", "xy z", "q", ("z",), (3,), impossible=False),
        Question("b", "t", "xy z", "p", (), (), impossible=True),
    ]
    assert (split.source, split.is_slice) == ("rajpurkar/squad_v2", True)
    assert "from the Hugging Face hub" in told[0]
    assert "SQuAD 2.0 (slice): dev has 2 questions, published are 11,873" in told[1]
    with pytest.raises(InputError, match="question b has no answer"):
        read_squad(None, "train", "1.1")
    assert (asked[1]["name"], asked[1]["split"], asked[1]["cache_dir"]) == ("rajpurkar/squad", "train", None)
    assert asked[1]["revision"] != asked[0]["revision"]


def test_no_hub(monkeypatch):
    hub(monkeypatch, ConnectionError("no route"))
    with pytest.raises(
        RunError, match=r"ConnectionError: no route.* or give a local folder that holds train-v1\.1\.json"
    ):
        read_squad(None, "train")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"folder that holds dev-v2\.0\.json.*pip install 'fullrank\[hf\]'"):
        read_squad(None, "dev", "2.0")


@pytest.mark.parametrize(("split", "questions", "articles"), [("train", 3939, 17), ("dev", 700, 3)])
def test_the_real_slices(corpora, split, questions, articles):
    found = read_squad(corpora, split)
    assert found.source == str(corpora / "squad" / f"{split}-v1.1.slice.json")
    assert (len(found.questions), found.is_slice) == (questions, True)
    assert len({question.title for question in found.questions}) == articles
