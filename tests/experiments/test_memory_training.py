"""Training with memory, Skip-Retain, phases: the real model in the real loop."""

import pytest
import torch

import fullrank as fr
from fullrank.config.load import build
from fullrank.config.run import PhaseConfig, TrainConfig
from fullrank.core.errors import InputError
from fullrank.core.skip_retain import SkipRetain
from fullrank.data.batches import Streams
from fullrank.experiments.language_model import CausalObjective
from fullrank.training.values import TrainingPosition
from run_files import read_metrics, train_quietly

LAYERS = 4
MODEL = {
    "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "position": "relative", "memory_length": 8,
    "dropout": {"residual": 0.1, "embedding": 0.1},
    "attention": {"score": "relative", "mix": "position_wise", "cross_head": 0.2},
}  # fmt: skip
PLAIN = {**MODEL, "memory_length": 0}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Letters drawn at random, each small and then large: what is masked can be told from the token beside it."""
    folder = tmp_path_factory.mktemp("text")
    generator = torch.Generator().manual_seed(0)
    for split, size in (("train", 6000), ("valid", 900), ("test", 905)):
        drawn = torch.randint(97, 105, (size,), generator=generator).tolist()
        (folder / f"{split}.txt").write_text("".join(c + c.upper() for c in map(chr, drawn)), encoding="utf-8")
    return folder


def configuration(text, model=MODEL, **options):
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


def trained(folder, raw):
    result = train_quietly(raw, folder)
    lines = read_metrics(folder)
    return result, lines, (folder / "checkpoints" / "last" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def plain(text, tmp_path_factory):
    """Training without phases."""
    return trained(tmp_path_factory.mktemp("plain") / "run", configuration(text, steps=20))


def validations(run):
    return [line["nll"] for line in run[1] if line["split"] == "valid"]


def test_skip_retain_with_every_layer_kept_is_ordinary_training(plain, text, tmp_path):
    never = [{"name": "skip_retain", "skip": "uniform", "p": 0.0, "steps": 9}, {"name": "vanilla"}]
    never_skipped = trained(tmp_path / "kept", configuration(text, steps=20, phases=never))
    assert plain[2] == never_skipped[2], "weights differ"
    assert validations(plain) == validations(never_skipped) != []
    assert list(plain[0]["ms_per_step"]) == ["train"]
    assert list(never_skipped[0]["ms_per_step"]) == ["skip_retain", "vanilla"]


def small(**train_options):
    torch.manual_seed(0)
    model = build({"model": {**MODEL, "vocab_size": 30, "dropout": {}, "attention": {"score": "relative"}}}).model
    language_model = fr.LanguageModel(model).train()
    return language_model, CausalObjective(language_model, TrainConfig(**train_options))


def test_the_memory_travels_in_the_carry():
    model, objective = small()
    ids = torch.randint(30, (240,), generator=torch.Generator().manual_seed(2)).numpy()
    streams = Streams(ids, TrainConfig(batch_size=3, segment_length=8), 0)
    carry = {}
    memory = None
    for step in range(4):
        batch = streams.batch(0, step)
        loss = objective(batch, carry, TrainingPosition(step + 1))
        carry = loss.carry
        expected = model.loss_parts(batch.inputs, batch.targets, memory=memory)
        memory = expected.memory
        assert torch.equal(loss.value, expected.loss)
    assert not any(tensor.requires_grad for tensor in carry.values())


def test_the_layers_that_rest_are_those_that_were_drawn():
    phase = PhaseConfig(name="a", skip="not_first", p=0.5)
    model, objective = small(phases=[phase], steps=9, seed=5)
    executed = set()
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, i=i: executed.add(i))
    schedule = SkipRetain("not_first", 0.5, num_layers=LAYERS)
    drawn = set()
    streams = Streams(torch.arange(300).numpy() % 30, TrainConfig(batch_size=3, segment_length=8), 0)
    for step in range(1, 12):
        executed.clear()
        position = TrainingPosition(step, part=step % 2, phase=phase, accumulation=2)
        objective(streams.batch(0, step), {}, position)
        resting = schedule.skipped(5, position.number)
        assert executed == set(range(LAYERS)) - resting
        drawn.add(resting)
    assert len(drawn) > 3


@pytest.mark.parametrize("change", [{"position": "learned"}, {"position": "none", "score": "dense_synthesizer"}])
def test_positions_that_end_are_refused_before_training(text, tmp_path, change):
    model = {**MODEL, "position": change["position"], "attention": {"score": change.get("score", "dot_product")}}
    with pytest.raises(InputError, match=r"max_position_embeddings 1,024.*model\.memory_length to 0"):
        trained(tmp_path / "run", configuration(text, model, steps=5))
