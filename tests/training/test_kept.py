"""Weights kept for averaging: those of the last evaluations, whatever happens; and their mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file
from torch import Tensor
from training_toy import Death, Found, Toy, at_call, die, outcome, train

from fullrank.core.errors import InputError, RunError
from fullrank.training import load_weights
from fullrank.training.kept import kept_checkpoints, mean_weights, write_mean
from fullrank.training.sealed import write_plain, write_tensors


def test_the_weights_of_the_last_evaluations_are_kept(tmp_path: Path) -> None:
    """Evaluations at 4, 8, 12, 16 and the end, 18; checkpoints have another rhythm, and only three are kept."""
    seen: dict[int, dict[str, Tensor]] = {}

    def evaluate(model: Any) -> Found:
        seen[len(seen) + 1] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return Found(1.0 + len(seen), 1)

    rhythm = {"every_steps": 4}
    _, result = train(
        tmp_path, steps=18, save_every_steps=5, keep_checkpoints=3, evaluate=evaluate, eval_options=rhythm
    )
    assert result.best_step == 4
    kept = kept_checkpoints(tmp_path / "checkpoints")
    assert list(kept) == [12, 16, 18]
    for path, weights in zip(kept.values(), (seen[3], seen[4], seen[5]), strict=True):
        assert sorted(file.name for file in path.iterdir()) == ["checkpoint.json", "model.safetensors"]
        model = Toy()
        load_weights(model, path)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_without_the_key_nothing_is_kept(tmp_path: Path) -> None:
    train(tmp_path, steps=10)
    assert not (tmp_path / "checkpoints" / "kept").exists()
    assert kept_checkpoints(tmp_path / "checkpoints") == {}


@pytest.mark.parametrize("number", [7, 13, 19, 23])
def test_a_killed_run_keeps_what_one_never_killed_keeps(number: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 24, "save_every_steps": 5, "keep_checkpoints": 2, "averaging": "ema"}
    options["eval_options"] = {"every_steps": 4}
    train(tmp_path / "whole", **options)
    with pytest.raises(Death):
        train(tmp_path / "killed", **options, objective=at_call(number, die))
    train(tmp_path / "killed", **options)
    assert list(kept_checkpoints(tmp_path / "killed" / "checkpoints")) == [20, 24]
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


def test_a_run_that_falls_back_comes_by_again(tmp_path: Path) -> None:
    """`last` is damaged, so it goes on an evaluation earlier, and dies when it has come by the next one again."""
    options: dict[str, Any] = {"keep_checkpoints": 3, "eval_options": {"every_steps": 4}}
    train(tmp_path / "whole", **options, steps=20)
    train(tmp_path / "run", **options, steps=12)
    with open(tmp_path / "run" / "checkpoints" / "last" / "training.safetensors", "ab") as file:
        file.write(b"x")
    with pytest.raises(Death):
        train(tmp_path / "run", **options, steps=20, objective=at_call(5, die))
    assert list(kept_checkpoints(tmp_path / "run" / "checkpoints")) == [4, 8, 12]
    train(tmp_path / "run", **options, steps=20)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def made(folder: Path, step: int, **tensors: Tensor) -> Path:
    path = folder / "kept" / f"step-{step:08d}"
    path.mkdir(parents=True)
    write_tensors(path / "model.safetensors", tensors)
    write_plain(path, ("model.safetensors",), {"step": step})
    return path


def test_the_mean_is_numpys(tmp_path: Path) -> None:
    """Of each tensor that is no count, in fp64; counts are the last one's; tied tensors stay equal."""
    _, _ = train(tmp_path, steps=20, keep_checkpoints=3, eval_options={"every_steps": 4})
    paths = list(kept_checkpoints(tmp_path / "checkpoints").values())
    found = mean_weights(paths)
    given = [load_file(path / "model.safetensors") for path in paths]
    for name, tensor in found.items():
        values = [weights[name] for weights in given]
        mean = np.mean(values, axis=0, dtype=np.float64).astype(np.float32) if name != "seen" else values[-1]
        assert tensor.numpy().dtype == values[0].dtype
        assert np.array_equal(tensor.numpy(), mean), name
    assert len({int(weights["seen"]) for weights in given}) == 3
    assert torch.equal(found["output.weight"], found["embedding.weight"])
    assert not np.array_equal(given[0]["inner.weight"], given[2]["inner.weight"])


def test_the_mean_of_one_is_itself_and_keeps_types(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(5, 3).bfloat16(),
        "single": torch.randn(7),
        "double": torch.randn(2, dtype=torch.float64),
        "mask": torch.tensor([True, False]),
        "count": torch.tensor(2**53 + 1),
    }
    path = made(tmp_path, 3, **tensors)
    found = mean_weights([path])
    assert found.keys() == tensors.keys()
    assert all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in tensors.items()
    )


def test_small_differences_are_not_lost_in_large_sums(tmp_path: Path) -> None:
    """In fp32 the sum of a hundred numbers near 1 would be off in its last digits."""
    values = torch.rand(100, 50, dtype=torch.float64).float() + 1
    paths = [made(tmp_path, step, w=value) for step, value in enumerate(values)]
    assert torch.equal(mean_weights(paths)["w"], values.double().mean(0).float())


def test_weights_of_another_model_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    first, other = made(tmp_path, 1, w=torch.zeros(2)), made(tmp_path, 2, w=torch.zeros(3))
    with pytest.raises(InputError, match=r"step-00000002 and .*step-00000001 are not of the same model"):
        mean_weights([first, other])
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    with pytest.raises(InputError, match=r"step-00000002 is damaged: model.safetensors does not match its checksum"):
        mean_weights([other])


def test_a_mean_is_written_whole_and_replaces_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write_mean(tmp_path, "average", {"w": torch.zeros(2)}, [1, 2])
    assert write_mean(tmp_path, "average", {"w": torch.ones(2)}, [2, 3]) == place == tmp_path / "average"
    assert mean_weights([place])["w"].tolist() == [1.0, 1.0]
    state = json.loads((place / "checkpoint.json").read_text())["content"]["state"]
    assert state == {"step": 3, "averaged": [2, 3]}

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(RunError, match=r"average could not be written: .*No space left on device; make room"):
        write_mean(tmp_path, "average", {"w": torch.zeros(2)}, [1])
    assert mean_weights([place])["w"].tolist() == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["average"]


@pytest.mark.parametrize(
    "name", ["last", "best", "previous", "kept", "step-00000004", "", ".", "..", "a/b", "../x", ".hidden"]
)
def test_a_mean_takes_no_name_of_something_else(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--out: .* is not the name of an average"):
        write_mean(tmp_path, name, {"w": torch.zeros(2)}, [1])
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="mine is there and is not an average; give another name"):
        write_mean(tmp_path, "mine", {"w": torch.zeros(2)}, [1])
