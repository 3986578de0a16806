"""Training with memory, Skip-Retain, phases and a teacher: the real model in the real loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fullrank as fr
from fullrank.config.load import build
from fullrank.config.recipe import Resolved
from fullrank.config.training import PhaseConfig, TrainConfig
from fullrank.core.errors import InputError
from fullrank.core.skip_retain import SkipRetain
from fullrank.data.batches import Streams
from fullrank.experiments.little_data import Distillation
from fullrank.experiments.objective import CausalObjective
from fullrank.experiments.run import train
from fullrank.experiments.run_folder import teacher_of
from fullrank.seal import read_identity
from fullrank.training import TrainingPosition

LAYERS = 4
MODEL = {
    "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "position": "relative", "memory_length": 8,
    "dropout": {"residual": 0.1, "embedding": 0.1},
    "attention": {"score": "relative", "mix": "position_wise", "cross_head": 0.2},
}  # fmt: skip
PLAIN = {**MODEL, "memory_length": 0}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    generator = torch.Generator().manual_seed(0)
    for split, size in (("train", 6000), ("valid", 200), ("test", 200)):
        drawn = torch.randint(97, 105, (size,), generator=generator).tolist()
        (folder / f"{split}.txt").write_text("".join(c + c.upper() for c in map(chr, drawn)), encoding="utf-8")
    return folder


def configuration(text: Path, model: Mapping[str, Any] = MODEL, **options: Any) -> dict[str, Any]:
    files = {split: str(text / f"{split}.txt") for split in ("train", "valid", "test")}
    return {
        "model": dict(model),
        "data": {"name": "text", "tokens": "byte", "cache": str(text / "cache"), **files},
        "train": {
            "batch_size": 4, "segment_length": 8, "learning_rate": 0.01, "threads": 1, "device": "cpu",
            "log_every_steps": 10, **options,
        },
        "eval": {"every_steps": 20, "batch_size": 4},
    }  # fmt: skip


def trained(folder: Path, raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], bytes]:
    result = train(Resolved(build(raw), "test"), folder, quiet=True, say=lambda _: None)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return result, lines, (folder / "checkpoints" / "last" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]], bytes]:
    """Training without phases."""
    return trained(tmp_path_factory.mktemp("plain") / "run", configuration(text, steps=20))


def test_skip_retain_with_every_layer_kept_is_ordinary_training(plain: Any, text: Path, tmp_path: Path) -> None:
    never = [{"name": "skip_retain", "skip": "uniform", "p": 0.0, "steps": 9}, {"name": "vanilla"}]
    kept = trained(tmp_path / "kept", configuration(text, steps=20, phases=never))
    assert plain[2] == kept[2], "weights differ"
    valid = [[line["nll"] for line in run[1] if line["split"] == "valid"] for run in (plain, kept)]
    assert valid[0] == valid[1]
    assert list(plain[0]["ms_per_step"]) == ["train"]
    assert list(kept[0]["ms_per_step"]) == ["skip_retain", "vanilla"]


def small(**train_options: Any) -> tuple[fr.LanguageModel, CausalObjective]:
    torch.manual_seed(0)
    model = build({"model": {**MODEL, "vocab_size": 30, "dropout": {}, "attention": {"score": "relative"}}}).model
    made = fr.LanguageModel(model).train()
    return made, CausalObjective(made, TrainConfig(**train_options))


def test_the_memory_travels_in_the_carry() -> None:
    model, objective = small()
    ids = torch.randint(30, (240,), generator=torch.Generator().manual_seed(2)).numpy()
    streams = Streams(ids, batch_size=3, segment_length=8, start_id=0)
    carry: Mapping[str, torch.Tensor] = {}
    memory = None
    for step in range(4):
        batch = streams.batch(0, step)
        found = objective(batch, carry, TrainingPosition(step + 1))
        carry = found.carry
        expected = model.loss_parts(batch.inputs, batch.targets, memory=memory)
        memory = expected.memory
        assert torch.equal(found.value, expected.loss)
    assert not any(tensor.requires_grad for tensor in carry.values())


def test_the_layers_that_rest_are_those_that_were_drawn() -> None:
    phase = PhaseConfig(name="a", skip="not_first", p=0.5)
    model, objective = small(phases=[phase], steps=9, seed=5)
    ran: set[int] = set()
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.add(i))
    schedule, seen = SkipRetain("not_first", 0.5, num_layers=LAYERS), set()
    streams = Streams(torch.arange(300).numpy() % 30, batch_size=3, segment_length=8, start_id=0)
    for step in range(1, 12):
        ran.clear()
        place = TrainingPosition(step, part=step % 2, phase=phase, accumulation=2)
        objective(streams.batch(0, step), {}, place)
        resting = schedule.skipped(5, place.number)
        assert ran == set(range(LAYERS)) - resting
        seen.add(resting)
    assert len(seen) > 3


@pytest.mark.parametrize("change", [{"position": "learned"}, {"position": "none", "score": "dense_synthesizer"}])
def test_positions_that_end_are_refused_before_training(text: Path, tmp_path: Path, change: dict[str, str]) -> None:
    model = {**MODEL, "position": change["position"], "attention": {"score": change.get("score", "dot_product")}}
    with pytest.raises(InputError, match=r"max_position_embeddings 1,024.*model\.memory_length to 0"):
        trained(tmp_path / "run", configuration(text, model, steps=5))


# -- distillation ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "elder"
    trained(folder, configuration(text, steps=3))
    return folder


def taught(text: Path, teacher: Path, model: Mapping[str, Any] = MODEL, **options: Any) -> dict[str, Any]:
    return configuration(
        text, model, steps=10, distill={"run": str(teacher), "weight": 0.25, "temperature": 2.0}, **options
    )


@pytest.mark.parametrize("memory", [8, pytest.param(0, marks=pytest.mark.full)], ids=["memory", "context"])
def test_the_loss_has_a_share_of_the_teachers_cross_entropy(
    memory: int, text: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.75 CE(targets, p) + 0.25 T^2 CE(q_T, p_T) of both models by themselves, batch after batch, in fp64."""
    if memory == 0:
        trained(teacher := tmp_path / "elder", configuration(text, PLAIN, steps=2))
    vocabulary = fr.LanguageModel.load(teacher).config.vocab_size
    plain = {"dropout": {}, "attention": {"score": "relative"}, "memory_length": memory, "vocab_size": vocabulary}
    config = build(taught(text, teacher, {**MODEL, **plain}, **({} if memory else {"context": 3})))
    identity = read_identity(teacher)
    identity["teacher"] = teacher_of(str(teacher), identity)
    student = fr.LanguageModel(config.model).double().train()
    objective = CausalObjective(student, config.train, identity)
    other = objective.parts["distill"].model.double()
    monkeypatch.setattr(Distillation, "CHUNK", 5)  # in the middle of a row
    ids = torch.randint(vocabulary, (240,), generator=torch.Generator().manual_seed(2)).numpy()
    streams = Streams(ids, batch_size=3, segment_length=8, start_id=0, context=config.train.context)
    carry: Mapping[str, torch.Tensor] = {}
    memories: list[Any] = [None, None]
    for step in range(4):
        batch = streams.batch(0, step)
        found = objective(batch, carry, TrainingPosition(step + 1))
        carry = found.carry
        logits = []
        for i, model in enumerate((student, other)):
            out = model(batch.inputs, memories[i])
            memories[i] = out.memory
            logits.append(out.logits[:, -batch.targets.shape[1] :].flatten(0, 1))
        kept = torch.ones_like(batch.targets) if batch.weights is None else batch.weights
        hard = F.cross_entropy(logits[0], batch.targets.flatten(), reduction="none")
        soft = 4 * F.cross_entropy(logits[0] / 2, torch.softmax(logits[1] / 2, -1), reduction="none")
        expected = ((0.75 * hard + 0.25 * soft) * kept.flatten()).sum() / kept.sum()
        assert torch.allclose(found.value, expected, rtol=1e-12)
        assert torch.allclose(torch.as_tensor(found.nll), (hard * kept.flatten()).sum(), rtol=1e-12)
    assert any(name.startswith("distill.") for name in carry) == bool(memory)
    assert not any(parameter.requires_grad for parameter in other.parameters())
