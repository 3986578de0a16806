"""Runs as models of lm-eval: its requests against code written here, its figures against those of `fullrank eval`."""

import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fullrank as fr
from cli_runs import SMALL, succeeds, write_config, write_text
from fullrank.core.errors import InputError
from fullrank.data import load_tokenizer
from fullrank.experiments.run import evaluate

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra `eval`)")
from fullrank.experiments import lm_eval_model  # noqa: E402
from fullrank.experiments.lm_eval_model import FullRankLM  # noqa: E402

XL = ["model.position=relative", "model.attention.score=relative", "model.memory_length=6"]
RUNS = {
    "word": ["data.sos=true", "data.max_vocabulary=17"],
    "byte": [*XL, "data.tokens=byte", "eval.segment_length=5"],
    "bpe": ["data.tokens=bpe", "data.max_vocabulary=290", "model.position=learned", "model.max_position_embeddings=20"],
}

each_kind = pytest.mark.parametrize("name", ["word", "byte"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of every kind on the same small text, trained for a few steps."""
    folder = write_text(tmp_path_factory.mktemp("lm_eval"), sentences=160)
    folders = {}
    for name, settings in RUNS.items():
        config = write_config(folder / f"{name}.yaml", folder, folder / "cache", steps=8)
        succeeds("train", config, *SMALL, *settings, "--out", folder / name, "--quiet")
        folders[name] = folder / name
    return folders


def requests(*pairs):
    return [SimpleNamespace(args=pair) for pair in pairs]


def model_of(folder, **settings):
    return FullRankLM(path=str(folder), device="cpu", **settings)


def loop(folder, context, continuation, segment):
    """log p(continuation | context) token by token, from logits; without memory the last `segment` tokens are read."""
    tokenizer = load_tokenizer(folder)
    model = fr.LanguageModel.load(folder)
    text = [tokenizer.start_id, *tokenizer.encode(context + continuation)]
    log_prob = 0.0
    greedy = True
    for n in range(1 + len(tokenizer.encode(context)), len(text)):
        memory = None
        with torch.no_grad():
            if model.memory_length:  # all of it, in segments
                for start in range(0, n, segment):
                    out = model(torch.tensor([text[start : min(start + segment, n)]]), memory)
                    memory = out.memory
            else:
                out = model(torch.tensor([text[max(len(text) - 1 - segment, 0) : n]]))
        log_probs = out.logits[0, -1].double().log_softmax(-1)
        log_prob += float(log_probs[text[n]])
        greedy = greedy and int(log_probs.argmax()) == text[n]
    return log_prob, greedy


@each_kind
def test_loglikelihood_equals_a_loop_over_tokens(runs, name):
    long = "the cats sleep in the morning\nthe dogs bark in the evening\nthe birds"
    pairs = [
        ("the cats", " sleep"),
        (long, " sing"),
        ("the dogs bark in the", " morning\n"),
        ("", "the fish"),
        ("the mice hide in", " the evening\nthe cats"),
    ]
    lm = model_of(runs[name], batch_size=3)
    scores = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
    segment = 5 if name == "byte" else 8
    expected = [loop(runs[name], *pair, segment) for pair in pairs]
    for (log_prob, greedy), (by_hand, best) in zip(scores, expected, strict=True):
        assert log_prob == pytest.approx(by_hand, rel=1e-5)
        assert greedy is best


PROTOCOLS = [
    ("word", {"context": 5, "stride": 3}),
    ("byte", {}),
    ("byte", {"streams": 4}),
    ("byte", {"memory_length": 11, "segment_length": 4, "same_length": True, "clamp_length": 7}),
]


def as_eval(folder, settings):
    """The figures of `fullrank eval` with the same settings; its batch size is that of streams."""
    flags = {key: value for key, value in settings.items() if key != "streams"}
    return evaluate(folder, "test", **flags, batch_size=settings.get("streams", 1), device_name="cpu")


@pytest.mark.parametrize(("name", "settings"), PROTOCOLS)
def test_a_document_is_read_as_fullrank_eval_reads_the_split(runs, name, settings):
    text = (runs[name].parent / "test.txt").read_text()
    lm = model_of(runs[name], batch_size=7, **settings)
    (log_prob,) = lm.loglikelihood_rolling(requests((text,)), disable_tqdm=True)
    expected = as_eval(runs[name], settings)
    assert -log_prob / expected["tokens"] == pytest.approx(expected["nll"], rel=1e-6)
    assert lm.get_model_info()["protocol"] == expected["protocol"]


TASK = """
task: whole_split
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: bits_per_byte}]
"""


@pytest.mark.full
def test_lm_eval_says_what_fullrank_eval_says(runs, tmp_path, monkeypatch):
    """Through lm-eval itself, in which `main` registers the model: its task, its counts, its aggregation."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    text = (runs["byte"].parent / "test.txt").read_text()
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}))
    (tmp_path / "task.yaml").write_text(TASK.replace("FILE", str(tmp_path / "text.jsonl")))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    options = {"model_args": {"path": str(runs["byte"])}, "tasks": ["whole_split"], "device": "cpu"}
    results = []

    def evaluate_task():
        results.append(simple_evaluate("fullrank", **options, task_manager=manager, bootstrap_iters=0))

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", evaluate_task)
    lm_eval_model.main()
    figures = results[0]["results"]["whole_split"]
    assert figures["bits_per_byte,none"] == pytest.approx(as_eval(runs["byte"], {})["bits_per_byte"], rel=1e-6)


@each_kind
def test_greedy_texts_are_those_of_fullrank_generate(runs, name):
    prompts = ["the", "in the", "the cat", "", "dog"]
    lm = model_of(runs[name])
    texts = lm.generate_until(
        requests(*[(prompt, {"until": [], "max_gen_toks": 7}) for prompt in prompts]), disable_tqdm=True
    )
    tokenizer = load_tokenizer(runs[name])
    for prompt, text in zip(prompts, texts, strict=True):
        expected = fr.generate(runs[name], prompt, max_new_tokens=7, greedy=True, device_name="cpu")
        assert tokenizer.decode(tokenizer.encode(prompt)) + text == expected


@each_kind
def test_a_text_ends_before_its_first_stop_string(runs, name):
    lm = model_of(runs[name])
    (free,) = lm.generate_until(requests(("the dogs", {"max_gen_toks": 12})), disable_tqdm=True)
    assert len(free) > 4
    stop = free[3:5]
    settings = {"until": ["never", "", stop], "max_gen_toks": 12, "top_k": 0}
    (cut,) = lm.generate_until(requests(("the dogs", settings)), disable_tqdm=True)
    assert cut == free[: free.index(stop)]
    with pytest.raises(InputError, match=r"generation settings num_beams: known are until, .*top_p"):
        lm.generate_until(requests(("the dogs", {"num_beams": 4})), disable_tqdm=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "/nowhere/at/all"}, "no such folder"),
        ({"streams": "many"}, "given 'many'"),
        ({"context": 3}, "a sliding window is for models without memory"),
    ],
)
def test_wrong_arguments_are_refused(runs, settings, message):
    with pytest.raises(InputError, match=message):
        FullRankLM(**{"path": str(runs["byte"]), **settings})


@pytest.mark.parametrize(
    "setting",
    [
        "data: {name: synthetic-translation}\ntrain: {batch_tokens: 400}\n",
        "train: {objective: masked}\n",
        "model: {attention: {kind: multilinear, causal: as_published, cores: 2, rank: 2, not_next_token_perplexity: true}}\n",
    ],
)
def test_runs_that_do_not_predict_the_next_token_are_refused(setting, tmp_path):
    (tmp_path / "config.yaml").write_text(setting)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match=str(tmp_path)):
        FullRankLM(path=str(tmp_path))


def test_the_entry_point_is_the_model():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (point,) = [EntryPoint(*item, "lm_eval.models") for item in project["entry-points"]["lm_eval.models"].items()]
    assert (point.name, point.load()) == ("fullrank", FullRankLM)
