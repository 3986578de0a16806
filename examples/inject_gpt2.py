"""Mixed heads in a GPT-2-like model: train it plain, inject, train the mixing alone, save and load. Offline, half a minute.

python examples/inject_gpt2.py [--steps 60]
"""

from __future__ import annotations

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fullrank as fr

LENGTH = 64
BATCH = 16


def train(model: GPT2LMHeadModel, text: torch.Tensor, steps: int) -> None:
    """Train by AdamW; what was injected has a learning rate of its own and is never decayed towards zero."""
    groups = fr.parameter_groups(model, learning_rate=3e-3, mixing_learning_rate=2e-2, weight_decay=0.01)
    optimizer = torch.optim.AdamW(groups)
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,))
        ids = torch.stack([text[start : start + LENGTH] for start in starts])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def measure_loss(model: GPT2LMHeadModel, text: torch.Tensor) -> float:
    """Return the nats per byte of the first blocks of a text."""
    ids = text[: 32 * LENGTH].view(32, LENGTH)
    return float(model(ids, labels=ids).loss)


def main(steps: int) -> None:
    torch.manual_seed(0)
    # the language reference that comes with Python, as bytes
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    train_text = text[:-20_000]
    test_text = text[-20_000:]
    config = GPT2Config(vocab_size=256, n_positions=2 * LENGTH, n_embd=64, n_layer=2, n_head=4, eos_token_id=10)
    model = GPT2LMHeadModel(config)
    train(model, train_text, 2 * steps)
    print(f"plain:    {measure_loss(model, test_text):.4f} nats per byte, {model.num_parameters():,} parameters")

    ids = test_text[None, :LENGTH]
    before = model(ids).logits
    fr.inject(model, mix="position_wise")
    change = (model(ids).logits - before).abs().max()
    print(f"injected: {measure_loss(model, test_text):.4f}, largest change of a logit {change:.1e}")

    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".fullrank." in name
    mixing = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    train(model, train_text, steps)
    print(f"trained:  {measure_loss(model, test_text):.4f}, {mixing} mixing parameters alone")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = fr.load_injected(folder).eval()
    print(f"loaded:   the same logits: {torch.equal(loaded(ids).logits, model(ids).logits)}")
    written = loaded.generate(ids[:, :16], max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist()
    print(f"writes:   {bytes(written).decode('utf-8', 'replace')!r}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--steps", type=int, default=60, help="of the mixing; the plain model is trained twice as long"
    )
    main(options.parse_args().steps)
