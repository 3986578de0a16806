"""Fine-tuning of a causal model on a text: losses by transformers itself, resume to the byte, adapters, bad input."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

import fullrank as fr
from fullrank.checking import calls, causality
from fullrank.cli.app import load
from fullrank.config.load import build_any, resolve_arms
from fullrank.core.errors import InputError
from fullrank.data import load_tokenizer
from fullrank.data.tokenizers import PretrainedTokenizer
from fullrank.experiments.run import evaluate
from fullrank.experiments.text_finetuning import TextFinetuning
from fullrank.hf.causal import CausalModel, load_causal, load_tokenizers
from fullrank.training.values import TrainingPosition
from run_files import read_result, resume, train_quietly
from small_runs import outcome
from tiny_causal import tiny_causal, write_text

B = {"mix": "position_wise"}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal")
    text = write_text(folder / "book.txt")
    for kind in ("gpt2", "llama"):
        tiny_causal(folder / kind, text, kind)
    return folder


def settings(files, kind="gpt2", attention=B, **train):
    return {
        "model": {"pretrained": str(files / kind), "attention": dict(attention)},
        "data": {"train": str(files / "book.txt"), "cache": str(files / "cache")},
        "train": {
            "batch_size": 4, "segment_length": 24, "steps": 12, "learning_rate": 1e-2, "warmup_steps": 2, "check": False,
            "log_every_steps": 3, **train,
        },
        "eval": {"every_steps": 6},
    }  # fmt: skip


@pytest.fixture(scope="module")
def finished(files):
    folder = files / "finished"
    train_quietly(settings(files, mixing_learning_rate=0.1, keep_checkpoints=2) | {"eval": {"every_steps": 4}}, folder)
    return folder


def call(*words):
    return CliRunner().invoke(load(), list(map(str, words)), catch_exceptions=False)


# -- losses and figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "attention"), [("gpt2", {}), ("llama", B), ("gpt2", {"mix": "position_independent"})], ids=str
)
def test_the_first_loss_is_that_of_transformers(files, tmp_path, kind, attention):
    """Of a plain model, and of an injected one, which starts equal to it; dropout is off."""
    task = TextFinetuning(build_any(settings(files, kind, attention))).prepare()
    task.build(tmp_path, torch.device("cpu"))
    task.model.eval()
    model = transformers.AutoModelForCausalLM.from_pretrained(files / kind).eval()
    for index in (0, 3):
        batch = task.batches.batch(0, index)
        loss = task.objective(batch, {}, TrainingPosition(1))
        ids = torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1)
        assert torch.equal(ids[:, 1:], batch.targets)
        with torch.no_grad():
            theirs = model(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(loss.value.detach(), theirs, rtol=1e-5, atol=1e-6)
        assert loss.tokens == batch.targets.numel()
    valid = task.evaluate(task.model)
    tokens = np.concatenate([[task.corpus.tokenizer.start_id], task.corpus.ids("valid")])
    nats = 0.0
    for start in range(0, len(tokens) - 1, 24):
        row = torch.from_numpy(tokens[start : start + 25].astype(np.int64))[None]
        with torch.no_grad():
            nats += float(model(input_ids=row, labels=row).loss) * (row.shape[1] - 1)
    assert valid.nll == pytest.approx(nats, rel=1e-5)
    before = json.loads((tmp_path / "before.json").read_text(encoding="utf-8"))["figures"]["valid"]
    assert before["nll"] == pytest.approx(nats / (len(tokens) - 1), rel=1e-5)
    text = (files / "book.txt").read_text(encoding="utf-8")
    sources = task.corpus.details["sources"]
    part = next(source for source in sources if source["split"] == "valid")
    characters = len(text.encode()[part["start"] : part["end"]].decode())
    assert before["bits_per_character"] == pytest.approx(nats / math.log(2) / characters, rel=1e-5)


def test_label_smoothing_and_penalties_are_in_the_loss(files, tmp_path):
    task = TextFinetuning(build_any(settings(files, label_smoothing=0.1, orthogonality=0.5))).prepare()
    task.build(tmp_path, torch.device("cpu"))
    model = task.model.eval()
    batch = task.batches.batch(0, 0)
    loss = task.objective(batch, {}, TrainingPosition(1))
    with torch.no_grad():
        log_p = model.model(batch.inputs).logits.log_softmax(-1)
    nll = -log_p.gather(-1, batch.targets[..., None])[..., 0]
    smoothed = 0.9 * nll - 0.1 * log_p.mean(-1)
    assert loss.nll.item() == pytest.approx(float(nll.sum()), rel=1e-5)
    assert loss.value.item() == pytest.approx(float(smoothed.mean()), rel=1e-4)  # the identity is orthogonal
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".fullrank." in name:
                parameter.add_(0.3)
    assert task.objective(batch, {}, TrainingPosition(1)).value.item() > loss.value.item() + 0.1


def test_tokens_are_those_of_transformers(files):
    words, tokenizer = load_tokenizers(build_any(settings(files)).model)
    text = (files / "book.txt").read_text(encoding="utf-8") * 3 + "\n\n  an indented line\n\n\nthe end"
    assert len(text) > 3 * (1 << 14)
    assert tokenizer.encode(text) == words(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.start_id, tokenizer.eos_id) == (words.bos_token_id, words.eos_token_id)


# -- runs --------------------------------------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_the_model_is_saved_whole(files, finished):
    result = read_result(finished)
    before, after = result["before"]["test"], result["final"]["test"]
    assert before["perplexity"] == pytest.approx(math.exp(before["nll"]))
    assert after["nll"] < before["nll"] - 1
    assert before["tokens"] == after["tokens"]
    model = fr.load_injected(finished / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(files / "gpt2")
    counts = result["parameters"]
    assert counts["mixing"] == 2 * (4 * 4 + 8 * 4)  # L (H^2 + D H)
    assert counts["total"] == plain.num_parameters() + counts["mixing"] == counts["trained"]
    best = CausalModel.load(finished)
    ids = torch.arange(30)[None]
    assert torch.equal(model.eval()(ids).logits, best.model(ids).logits)
    moved = [p for name, p in model.named_parameters() if name.endswith(".weight") and ".fullrank." in name]
    assert all(parameter.abs().sum() > 0 for parameter in moved)
    assert isinstance(load_tokenizer(finished), PretrainedTokenizer)


@pytest.mark.parametrize("adapter", [None, {"r": 2}], ids=["whole", "lora"])
def test_a_resumed_run_is_an_unbroken_one_to_the_byte(files, tmp_path, adapter):
    raw = settings(files, "gpt2", {**B, "cross_head": 0.3}, adapter=adapter, averaging="swa")
    train_quietly(raw, tmp_path / "whole")
    assert train_quietly(raw, tmp_path / "paused", until=7) == {}
    resume(tmp_path / "paused", quiet=True)
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "paused")
    assert read_result(tmp_path / "whole")["before"] == read_result(tmp_path / "paused")["before"]


@pytest.mark.parametrize(("kind", "attention"), [("gpt2", B), ("llama", {})], ids=str)
def test_an_adapter_is_saved_alone_and_gives_the_same_logits(files, tmp_path, kind, attention):
    targets = ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]
    raw = settings(files, kind, attention, adapter={"r": 2, "alpha": 8, "target_modules": targets})
    result = train_quietly(raw, tmp_path)
    assert result["final"]["valid"]["nll"] < result["before"]["valid"]["nll"]
    names = load_file(tmp_path / "checkpoints" / "best" / "model.safetensors").keys()
    assert names
    assert all("lora_" in name or ".modules_to_save." in name for name in names)
    assert result["parameters"]["trained"] < result["parameters"]["total"] / 4
    best = CausalModel.load(tmp_path)
    again = fr.load_injected(tmp_path / "model").eval()
    ids = torch.arange(30)[None]
    logits = best.model(ids).logits
    assert torch.equal(again(ids).logits, logits)
    config = transformers.AutoConfig.from_pretrained(files / kind)
    assert torch.equal(fr.load_injected(tmp_path / "model", config=config).eval()(ids).logits, logits)
    plain = transformers.AutoModelForCausalLM.from_pretrained(files / kind).eval()
    assert not torch.allclose(plain(ids).logits, logits, atol=1e-3)
    torch.testing.assert_close(best.merge()(ids).logits, logits, rtol=1e-4, atol=1e-4)
    with again.disable_adapter():
        torch.testing.assert_close(again(ids).logits, plain(ids).logits)


# -- a run as any other model ------------------------------------------------------------------------------------------


def test_a_run_is_evaluated_generated_from_and_analysed(finished, files):
    result = read_result(finished)
    figures = evaluate(finished, "test")
    assert figures["nll"] == pytest.approx(result["final"]["test"]["nll"], rel=1e-6)
    windows = evaluate(finished, "test", context=16, stride=8)
    assert windows["tokens"] == figures["tokens"]
    assert windows["nll"] != figures["nll"]
    of_book = evaluate(finished, "valid", text=files / "book.txt")
    size = (files / "book.txt").stat().st_size
    assert of_book["bits_per_byte"] == pytest.approx(of_book["nll"] * of_book["tokens"] / math.log(2) / size)
    model = fr.open_model(finished)
    assert model.has == {"logits", "hidden", "attention", "output_matrix", "step", "tokenizer"}
    text = fr.generate(finished, "The cat", max_new_tokens=60, greedy=True)
    ids = torch.tensor([[model.tokenizer.start_id, *model.tokenizer.encode("The cat")]])
    for _ in range(20):
        ids = torch.cat([ids, model.logits(ids)[:, -1:].argmax(-1)], dim=1)
    assert text.startswith(model.tokenizer.decode(ids[0, 1:].tolist()))
    first, second = (fr.generate(source, "The", max_new_tokens=5, beams=3) for source in (finished, model))
    assert first == second
    assert fr.check(model.module, quick=True).passes
    for verb in ("analyze spectrum", "diagnose --texts 4", "check --quick", "report", "average --last 2"):
        process = call(*verb.split(), finished, "--json")
        assert process.exit_code == 0, process.stderr
    assert evaluate(finished, "test", checkpoint="average")["nll"] < result["before"]["test"]["nll"]
    with pytest.raises(InputError, match=r"eval\.memory_length: for models of ours, given 8"):
        evaluate(finished, "test", memory_length=8)


def test_a_run_is_a_model_of_lm_eval(finished):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra `eval`)")
    from fullrank.experiments.lm_eval_model import FullRankLM

    model = FullRankLM(str(finished), device="cpu")
    ids = torch.tensor([[model.words.start_id, *model.words.encode("The cat runs")]])
    nll = fr.open_model(finished).nll(ids[:, :-1], ids[:, 1:])
    (log_prob,) = model.loglikelihood_rolling([SimpleNamespace(args=("The cat runs",))], disable_tqdm=True)
    assert log_prob == pytest.approx(-float(nll.sum()), rel=1e-5)
    (text,) = model.generate_until([SimpleNamespace(args=("The cat", {"max_gen_toks": 5}))], disable_tqdm=True)
    assert "The cat" + text == fr.generate(finished, "The cat", max_new_tokens=5, greedy=True)


def test_the_command_trains_both_arms_on_equal_tokens(files, tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "RARE", False)  # checks are short; what they find is tested in tests/checking
    monkeypatch.setattr(causality, "_STEPS", 5)
    monkeypatch.setattr(causality, "_WORK", 0)
    words = ["train.batch_size=4", "train.segment_length=24", "train.steps=6", "train.learning_rate=1e-2"]
    process = call(
        "finetune", files / "llama", "--text", files / "book.txt", "model.attention.mix=position_wise",
        f"data.cache={files / 'cache'}", *words, "--out", tmp_path / "both", "--quiet", "--json",
    )  # fmt: skip
    assert process.exit_code == 0, process.stderr
    content = json.loads(process.stdout)
    runs = {(run["row"], run["seed"]): run for run in content["runs"]}
    assert runs.keys() == {("plain", 1), ("position_wise", 1)}
    results = [read_result(Path(run["folder"])) for run in content["runs"]]
    assert len({result["tokens_seen"] for result in results}) == 1
    assert len({json.dumps(result["corpus"]["sha256"]) for result in results}) == 1
    measures = {(r["measure"], r["labels"].get("checkpoint")) for r in content["records"]}
    assert {("perplexity", "before"), ("perplexity", "final"), ("bits_per_byte", "before")} <= measures
    assert any(record["measure"] == "bits_per_byte_difference" for record in content["records"])
    first, second = (json.loads(Path(run["folder"], "before.json").read_text()) for run in runs.values())
    assert first["figures"]["test"]["nll"] == pytest.approx(second["figures"]["test"]["nll"], rel=1e-6)
    assert first["check"]["passes"]
    page = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert "Every model was checked before and after training" in page


# -- configurations and bad input --------------------------------------------------------------------------------------


def test_arms_differ_in_what_is_injected_alone(files):
    changes = ["model.attention={mix: position_wise, cross_head: 0.1}", "model.layers=[0]", "train.orthogonality=0.1"]
    plain, arm = resolve_arms(str(files / "gpt2"), files / "book.txt", changes)
    assert (plain.row, arm.row) == ("plain", "position_wise-beta0.1")
    assert plain.config.data == arm.config.data
    assert replace(arm.config.train, orthogonality=0.0) == plain.config.train
    assert [arm.row for arm in resolve_arms("gpt2", files / "book.txt")] == ["plain"]


@pytest.mark.parametrize(("context", "requested", "used"), [(0, 128, 48), (8, 128, 40), (0, 24, 24)])
def test_usual_segments_are_no_longer_than_the_model_reads(files, context, requested, used):
    raw = settings(files, segment_length=requested, context=context, order="contiguous")
    config = TextFinetuning(build_any(raw)).prepare().config
    assert config.train.segment_length == used


def test_models_that_are_none_are_refused(files, tmp_path):
    words = load_tokenizers(build_any(settings(files)).model)[0]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    encoder = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(words), **sizes))
    encoder.save_pretrained(tmp_path / "bert")
    t5 = transformers.T5Config(vocab_size=len(words), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    for name, says in {
        "bert": "no causal model: tokens of BertLMHeadModel see later ones",
        "t5": "no causal model that transformers can load",
        "none": "no such folder",
    }.items():
        config = build_any(settings(files) | {"model": {"pretrained": str(tmp_path / name)}}).model
        with pytest.raises(InputError, match=says):
            load_causal(config)


def test_a_checkpoint_with_mixing_goes_on_with_it_alone(files, finished, tmp_path):
    raw = settings(files, steps=2) | {"model": {"pretrained": str(finished / "model"), "attention": B}}
    result = train_quietly(raw, tmp_path / "on")
    last = read_result(finished)["final"]["test"]["nll"]
    assert result["before"]["test"]["nll"] == pytest.approx(last, rel=1e-6)
    raw["model"] = {"pretrained": str(finished / "model")}
    with pytest.raises(InputError, match=r'to go on with it, set model.attention.mix="position_wise"'):
        train_quietly(raw, tmp_path / "plain")
