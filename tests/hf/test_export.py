"""`fullrank export`: a run as a folder that Hugging Face reads, also in a process that has no `fullrank`."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `hf`")

from safetensors.torch import load_file, save_file

import fullrank as fr
from closeness import close
from fullrank.config.load import to_yaml
from fullrank.config.run import DataConfig, EvalConfig, RunConfig, TrainConfig
from fullrank.core import registry
from fullrank.core.errors import InputError
from fullrank.core.mixers import AverageHeads
from fullrank.core.registry import register, unregister
from fullrank.data import build_words
from fullrank.hf.export import code_files, export_run
from moving import moved

WORDS = ["\n", "<unk>", "the", "cat", "dog", "sleeps", "barks", "."]

# reads folders and ids, writes logits and greedy continuations; nothing of ours may be imported
ALONE = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fullrank":
            raise ImportError("fullrank must not be imported")

sys.meta_path.insert(0, Forbidden())
import torch, transformers
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
work, *jobs = sys.argv[1:]
inputs = load_file(work + "/inputs.safetensors")
actual = {}
for job in jobs:
    name, auto = job.split(":")
    model = getattr(transformers, auto).from_pretrained(work + "/" + name, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    ids = inputs[name]
    if name == "again":
        model.save_pretrained(work + "/once-more")
        model = getattr(transformers, auto).from_pretrained(work + "/once-more", trust_remote_code=True)
    with torch.no_grad():
        actual[name] = model(ids).logits
    if name + ".read" in inputs:
        tokenizer = transformers.AutoTokenizer.from_pretrained(work + "/" + name)
        actual[name + ".read"] = tokenizer("the cat sleeps .\\nthe bird", return_tensors="pt").input_ids
    if auto == "AutoModelForCausalLM" and model.config.fullrank["attention"].get("causal") != "as_published":
        wrote = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        actual[name + ".text"] = wrote[:, ids.shape[1]:].contiguous()
assert not [name for name in sys.modules if name.partition(".")[0] == "fullrank"]
save_file(actual, work + "/actual.safetensors")
"""


def figures(**more):
    """A `result.json` with figures that nobody measured."""
    return {
        "name": "b", "recipe": "/home/somebody/secret/run.yaml", "row": None, "scale": "tiny", "seed": 7,
        "parameters": {"total": 12345, "attention": 345, "embedding": 12000},
        "final": {"valid": {"nll": 2.5, "perplexity": 12.25, "tokens": 1000},
                  "test": {"nll": 2.6, "perplexity": 13.5, "tokens": 2000}},
        "last": {"valid": {"nll": 2.75, "perplexity": 15.75, "tokens": 1000}},
        "protocol": "consecutive blocks of 8 tokens",
        "corpus": {"name": "ptb", "label": "ptb (a local slice)", "is_slice": True, "tokens": {"train": 5000}},
        "steps": 60, "tokens_seen": 1920,
        "environment": {"fullrank": "0.1.0", "commit": "abc123", "torch": "2.13.0", "python": "3.11.7"},
    } | more  # fmt: skip


def write_language_run(folder, result=None, attention=None, evaluation=None, **model):
    """A run folder as training leaves it, with two checkpoints; gives the model of the best one."""
    sizes = {
        "vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 20, "max_position_embeddings": 16,
    }  # fmt: skip
    config = fr.ModelConfig(**sizes | model, attention=fr.AttentionConfig(**attention or {}))
    torch.manual_seed(0)
    language_model = fr.LanguageModel(config).double().eval()
    language_model.save(folder / "checkpoints" / "last")
    moved(language_model, 0.4).save(folder / "checkpoints" / "best")
    data = DataConfig(name="text", train="train.txt", valid="valid.txt", test="test.txt")
    options = TrainConfig(segment_length=config.max_position_embeddings)
    settings = RunConfig(model=config, data=data, train=options, eval=EvalConfig.from_dict(evaluation or {}))
    (folder / "config.yaml").write_text(to_yaml(settings), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"recipe": "run.yaml", "row": None}), encoding="utf-8")
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    build_words(WORDS).save(folder)
    return language_model


@pytest.fixture
def run(tmp_path):
    write_language_run(tmp_path / "run", figures(), {"mix": "position_wise"})
    return tmp_path / "run"


MULTILINEAR = {"kind": "multilinear", "cores": 2, "rank": 5}
CLUSTERED = {"kind": "adaptive", "cutoffs": [3, 5], "div_val": 2}
# language models with every score, normaliser, mixing, position, input and output: (model, attention)
KINDS = {
    "memory": ({"memory_length": 4, "position": "relative"}, {"score": "relative", "mix": "position_wise"}),
    "mixture": ({"output": fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=3, tied=True), "position": "rotary"},
                {"normalize": "sigsoftmax", "mix": "position_independent", "pattern": "strided", "stride": 2}),
    "clusters": ({"input": fr.InputConfig(**CLUSTERED), "output": fr.OutputConfig(**CLUSTERED), "position": "learned"},
                 {"score": "dense_synthesizer", "mix": "average"}),
    "synthesizer": ({"norm": "post", "hidden_act": "swiglu", "position": "none",
                     "input": fr.InputConfig(kind="tensor_train", rank=3)},
                    {"score": "random_synthesizer", "mix": "random"}),
    "multilinear": ({}, MULTILINEAR),
    "mixers": ({"position": "rotary"},
               {"mix_qkv": "interleaved", "mix_scores": "talking_heads", "mix": "differential", "gate": "elementwise"}),
    "mixers of tokens": ({"position": "rotary"},
                         {"mix_qkv": "knocking", "mix_scores": "multi_token", "mix": "dynamic", "gate": "exclusive"}),
    "decayed": ({"memory_length": 3, "position": "none"}, MULTILINEAR | {"output_map": "decayed"}),
}  # fmt: skip


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A folder that holds an export of every kind, and the models themselves, in double precision."""
    work = tmp_path_factory.mktemp("exported")
    models = {}
    for name, (settings, attention) in KINDS.items():
        models[name] = write_language_run(work / "runs" / name, None, attention, **settings)
    masked = fr.MaskedLanguageModel(fr.ModelConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1)).double().eval()
    moved(masked).save(work / "runs" / "masked")
    models["masked"] = masked
    for name in models:
        export_run(work / "runs" / name, work / name)
    return work, models


IDS = torch.tensor([[2, 5, 3, 7, 4, 2], [6, 6, 2, 3, 7, 5]])


@pytest.mark.full
def test_a_process_without_the_package_computes_the_same(exported):
    """All kinds. Language models also generate text, and a model that is saved in that process is read again."""
    work, models = exported
    with torch.no_grad():
        expected = {name: model(IDS).logits for name, model in models.items()}
    inputs = dict.fromkeys(models, IDS)
    jobs = [f"{name}:AutoModelForCausalLM" for name in KINDS]
    for name in KINDS:
        expected[f"{name}.text"] = written(models[name])
    shutil.copytree(work / "mixture", work / "again", dirs_exist_ok=True)
    jobs += ["again:AutoModelForCausalLM", "masked:AutoModelForMaskedLM"]
    inputs |= {"again": IDS, "memory.read": torch.zeros(1)}
    expected |= {"again": expected["mixture"], "again.text": expected["mixture.text"]}
    expected["memory.read"] = torch.tensor([[0, 2, 3, 5, 7, 0, 2, 1]])  # behind the `<eos>` that a text begins after
    actual = alone(work, jobs, inputs)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.endswith((".text", ".read")):
            assert torch.equal(actual[name], tensor), name
        else:
            close(actual[name], tensor, name)


@torch.no_grad()
def written(model):
    """Five tokens that `model` finds most probable, one after the other."""
    state = model.new_memory() if model.memory_length else None
    new_ids = IDS
    text = []
    for _ in range(5):
        out = model(new_ids, state) if model.memory_length else model(torch.cat((IDS, *text), 1))
        state = out.memory
        new_ids = out.logits[:, -1:].argmax(-1)
        text.append(new_ids)
    return torch.cat(text, 1)


def alone(work, jobs, inputs):
    """Results of the exported folders in a process that cannot import `fullrank`."""
    save_file({name: ids.clone() for name, ids in inputs.items()}, work / "inputs.safetensors")
    settings = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(work / "modules"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, str(work), *jobs],
        capture_output=True, text=True, timeout=600, env=os.environ | settings, cwd=work, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return load_file(work / "actual.safetensors")


def test_with_the_package_no_remote_code_is_needed(tmp_path):
    import transformers

    model = write_language_run(tmp_path / "run", None, {"mix": "position_wise"}, memory_length=3)
    ids = torch.randint(2, len(WORDS), (2, 6))
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(export_run(tmp_path / "run", tmp_path / "out"))
    assert type(hf_model).__module__ == "fullrank.hf.classes"
    with torch.no_grad():
        close(hf_model(ids).logits, model(ids).logits)
    hf_model.save_pretrained(tmp_path / "again")  # what our classes save is read, too
    assert torch.equal(fr.LanguageModel.load(tmp_path / "again")(ids).logits, model(ids).logits)


def test_it_is_read_as_a_model_of_ours(run, tmp_path):
    """Both checkpoints and a masked model: the same configuration and tensors."""
    fr.MaskedLanguageModel(fr.ModelConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1)).save(tmp_path / "masked")
    for folder, kind, checkpoint in (
        (run, fr.LanguageModel, "best"), (run, fr.LanguageModel, "last"), (tmp_path / "masked", fr.MaskedLanguageModel, "best"),
    ):  # fmt: skip
        out = export_run(folder, tmp_path / f"{kind.__name__}-{checkpoint}", checkpoint)
        expected, loaded = kind.load(folder, checkpoint), kind.load(out)
        assert loaded.config == expected.config
        for name, tensor in expected.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
    assert json.loads((out / "config.json").read_text())["mask_token_id"] == 8
    assert not (out / "generation_config.json").exists()


# -- what is refused ------------------------------------------------------------------------------------------------------


def test_a_stage_of_ones_own_is_refused():
    register("mix", "theirs")(AverageHeads)
    try:
        with pytest.raises(InputError, match=r"model\.attention\.mix: 'theirs' is a stage of your own.* --import"):
            code_files(fr.ModelConfig(vocab_size=9, attention=fr.AttentionConfig(mix="theirs")))
    finally:
        unregister("mix", "theirs")


def test_the_code_imports_torch_transformers_and_itself():
    """The files of core are copied as they are; the two files that loaders read import all others."""
    config = fr.ModelConfig(vocab_size=9, attention=fr.AttentionConfig(mix="average"))
    files = code_files(config)
    core = Path(registry.__file__).parent
    for path in core.glob("[!_]*.py"):
        assert files[path.name] == path.read_text(encoding="utf-8")
    allowed = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= allowed, name
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert str(node.module).partition(".")[0] in allowed, f"{name} imports {node.module}"
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                assert f"{node.module}.py" in files, f"{name} imports {node.module}"
    for file in ("configuration_fullrank.py", "modeling_fullrank.py"):
        mentioned = {f"{name}.py" for name in re.findall(r"^\s*from \.(\w+) import", files[file], flags=re.MULTILINE)}
        assert mentioned >= files.keys() - {"configuration_fullrank.py", "modeling_fullrank.py"}
