"""Folders of strangers: what their files name is a folder or a model of the hub, and never code that is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import fullrank as fr  # noqa: E402
from fullrank.cli import main  # noqa: E402
from fullrank.core.errors import InputError  # noqa: E402
from fullrank.hf.load import load_named, location_of  # noqa: E402
from fullrank.storage import Source  # noqa: E402

KEYS = {"fullrank_config.json": "base_model", "adapter_config.json": "base_model_name_or_path"}
EVIL = "from pathlib import Path\n\nPath(__file__).with_name('ran').touch()\n\n\ndef make():\n    return None\n"


def tiny(folder: Path) -> Any:
    """A GPT-2 of one layer, saved in `folder`."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module that leaves a file where it is imported, and the model `base`."""
    (tmp_path / "evil.py").write_text(EVIL, encoding="utf-8")
    tiny(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def adapter(folder: Path, file: str, base: Any, **keys: Any) -> Path:
    """The description of an adapter without its tensors."""
    about = {
        "architecture": "GPT2LMHeadModel",
        "mix": "none",
        "normalize": "softmax",
        "cross_head": 0.1,
        "layers": None,
    }
    if file == "adapter_config.json":
        about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "target_modules": ["c_attn"]}
    folder.mkdir(exist_ok=True)
    (folder / file).write_text(json.dumps({**about, KEYS[file]: base, **keys}), encoding="utf-8")
    return folder


NO_SOURCE = [
    "python:evil:make", "hf:python:evil:make", "python:python:evil:make", " python:evil:make", "PYTHON:evil:make", "hf:gpt2",
    "evil:make", "~/evil", "../base", "./../base", "base/../base",
    "/nowhere/at/all", "./nowhere", "a\nb", "a\x00b", "", None, 3, [], {},
    ["base"], True, "x" * 100_000 + ":", "hf://a/b", "https://a.b/c", "file:///base",
]  # fmt: skip

DAMAGED = ["", "{", "[]", "3", "null", "[" * 100_000, '{"a":' * 100_000, "\xff", "1" * 5000, '{"base_model": NaN}']
ODD_CONFIGURATIONS = [
    '{"model_type": ["gpt2"]}',
    '{"model_type": "fullrank"}',
    '{"model_type": "gpt2", "n_layer": 1e999}',
    '{"architectures": [3], "model_type": "gpt2"}',
]
ODD_ADAPTERS: list[dict[str, Any]] = [
    {"architecture": "pipeline"},
    {"architecture": 3},
    {"architecture": "RagRetriever"},
    {"mix": [3]},
    {"layers": "all"},
    {"cross_head": "x"},
    {"base_model": "python:evil:make"},
]


@pytest.mark.parametrize("file", KEYS)
@pytest.mark.parametrize("base", NO_SOURCE, ids=lambda base: repr(base)[:24])
def test_a_file_names_no_code(place: Path, file: str, base: Any) -> None:
    folder = adapter(place / "adapter", file, base)
    with pytest.raises(InputError, match=rf"{file}: {KEYS[file]}"):
        load_named(str(folder), torch.float32, causal=True, tokenizer=False)
    assert not (place / "ran").exists()


@pytest.mark.parametrize(
    "words", [["check"], ["analyze", "rank"], ["diagnose"], ["analyze", "heads"], ["eval"], ["export"]]
)
@pytest.mark.parametrize("file", KEYS)
def test_no_command_runs_code_that_a_file_names(
    place: Path, file: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = adapter(place / "adapter", file, "python:evil:make")
    more = {"export": ["--to", "hf", "out"], "diagnose": ["--text", "evil.py"]}.get(words[0], [])
    with pytest.raises(SystemExit) as ended:
        main([*words, str(folder), *more])
    assert (ended.value.code, (place / "ran").exists()) == (2, False)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("file", KEYS)
@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: content[:9])
def test_damaged_descriptions_are_named(place: Path, file: str, content: str) -> None:
    folder = place / "adapter"
    folder.mkdir()
    (folder / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=file):
        load_named(str(folder), torch.float32, causal=True, tokenizer=False)


@pytest.mark.parametrize("content", [*DAMAGED[:6], *ODD_CONFIGURATIONS], ids=lambda content: content[:30])
@pytest.mark.parametrize(
    "words", [["check"], *(pytest.param(words, marks=pytest.mark.full) for words in (["export"], ["analyze", "rank"]))]
)
def test_damaged_configurations_are_one_message(
    place: Path, content: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "base" / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main([*words, str(place / "base"), *(["out", "--to", "fullrank"] if words == ["export"] else [])])
    err = capsys.readouterr().err
    assert ended.value.code == 2, err
    assert "Traceback" not in err
    assert "(--debug shows where)" not in err


@pytest.mark.parametrize("file", KEYS)
def test_a_cycle_of_bases_is_refused(place: Path, file: str) -> None:
    own = adapter(place / "own", file, str(place / "own"))
    with pytest.raises(InputError, match="leads back to this folder"):
        load_named(str(own), torch.float32, causal=True, tokenizer=False)
    adapter(place / "a", file, str(place / "b"))
    adapter(place / "b", file, str(place / "link"))
    (place / "link").symlink_to(place / "a")
    with pytest.raises(InputError, match="leads back to this folder"):
        load_named(str(place / "a"), torch.float32, causal=True, tokenizer=False)


def test_peft_imports_no_module_that_a_file_names(place: Path) -> None:
    pytest.importorskip("peft")
    folder = adapter(
        place / "base", "adapter_config.json", str(place / "base"), megatron_config={"a": 1}, megatron_core="evil"
    )
    with pytest.raises(InputError, match=r"adapter_config\.json: megatron_config"):
        location_of(str(folder))  # of fine-tuning, where transformers would load it
    other = adapter(place / "other", "adapter_config.json", "base", megatron_config={"a": 1}, megatron_core="evil")
    (place / "base" / "adapter_config.json").unlink()
    with pytest.raises(InputError, match=r"adapter_config\.json: megatron_config"):
        load_named(str(other), torch.float32, causal=True, tokenizer=False)
    assert not (place / "ran").exists()


def test_a_configuration_names_no_kernel_of_the_hub(place: Path) -> None:
    file = place / "base" / "config.json"
    about = json.loads(file.read_text(encoding="utf-8"))
    for key in ("attn_implementation", "_attn_implementation"):
        file.write_text(json.dumps(about | {key: "someone/kernel"}), encoding="utf-8")
        with pytest.raises(InputError, match=r"attn_implementation names code, 'someone/kernel'"):
            load_named(str(place / "base"), torch.float32, causal=True, tokenizer=False)


def test_remote_code_is_not_run(place: Path) -> None:
    file = place / "base" / "config.json"
    about = json.loads(file.read_text(encoding="utf-8"))
    code = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "model_type": "own"}
    file.write_text(json.dumps(about | code), encoding="utf-8")
    (place / "base" / "evil.py").write_text(EVIL, encoding="utf-8")
    with pytest.raises(InputError, match="base"):
        load_named(str(place / "base"), torch.float32, causal=True, tokenizer=False)
    assert not [*place.rglob("ran")]


def test_a_folder_and_a_hub_name_are_sources(place: Path) -> None:
    file = place / "adapter" / "adapter_config.json"
    (place / "adapter" / "inner").mkdir(parents=True)
    for name, location in (
        ("gpt2", "gpt2"),
        ("meta-llama/Llama-2-7b.v1_x", "meta-llama/Llama-2-7b.v1_x"),
        (str(place / "base"), str(place / "base")),
        ("./inner", str(place / "adapter" / "inner")),
    ):
        assert Source.from_file(name, file, "base_model_name_or_path").location == location


def test_an_adapter_that_was_saved_from_a_relative_folder_is_loaded_from_anywhere(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "sub").mkdir()
    monkeypatch.chdir(place / "sub")
    model = fr.inject(transformers.GPT2LMHeadModel.from_pretrained("../base"), mix="position_wise")
    fr.save_adapter(model, place / "adapter")
    monkeypatch.chdir(place.parent)
    ids = torch.tensor([[1, 2, 3]])
    loaded = load_named(str(place / "adapter"), torch.float32, causal=True, tokenizer=False).module
    torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("keys", ODD_ADAPTERS, ids=str)
def test_odd_adapters_are_refused_in_python_too(place: Path, keys: dict[str, Any]) -> None:
    folder = adapter(place / "adapter", "fullrank_config.json", str(place / "base"), **keys)
    with pytest.raises(InputError):
        fr.load_injected(folder)
    assert not (place / "ran").exists()
