"""A training step of small models against nanoGPT's, and generation against GPT-2 of transformers.

python benchmarks/small_models.py [--rounds 9] [--threads 1] [--only step | generation] [--json FILE]

step        forward, backward, clipping and AdamW of one batch of characters; ours with Mixhead A and B, and with the
            positions and the separate table that a newcomer gets, beside nanoGPT's form of GPT-2 (`GPT`)
generation  greedy for one text, and the 50 likeliest tokens for 8 texts, after prompts of 32 tokens
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fullrank as fr
from closer import parse, save, table
from timing import Run

PEER = "nanoGPT"
MIXING = {"plain": "none", "Mixhead A": "position_independent", "Mixhead B": "position_wise"}


@dataclass(frozen=True)
class Size:
    """A model of so many layers, width and heads, and a batch of texts of so many tokens."""

    layers: int
    width: int
    heads: int
    texts: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.width}, {self.heads} heads, {self.texts} x {self.tokens}"


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, keys, values = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, keys, values)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.merge(y.transpose(1, 2).flatten(2))
        return x + self.shrink(F.gelu(self.grow(self.norms[1](x))))


class GPT(nn.Module):
    """Logits (B, N, V) of the next token, as in nanoGPT: GPT-2 with a tied table.

    It starts as GPT-2 does: N(0, 0.02^2), and what is added to the residual stream less.
    """

    def __init__(self, vocabulary: int, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                added = name.endswith(("merge.weight", "shrink.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * size.layers) if added else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


# a training step

VOCABULARY = 65  # characters of nanoGPT's Shakespeare
SIZES = (Size(6, 384, 6, 16, 256), Size(4, 128, 4, 12, 64), Size(2, 64, 4, 8, 128))


def make_model(size: Size, mix: str = "none", position: str = "learned", tied: bool = True) -> fr.LanguageModel:
    """A model of ours of the size of the peer's; with the defaults its parameters are as many."""
    config = fr.ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        hidden_act="gelu",
        position=position,
        max_position_embeddings=size.tokens,
        attention=fr.AttentionConfig(mix=mix),
        output=fr.OutputConfig(tied=tied),
    )
    return fr.LanguageModel(config)


def make_step(model: Any, size: Size) -> Run:
    """One update of `model`: its `loss`, the gradients clipped to norm 1, AdamW."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(VOCABULARY, (2, size.texts, size.tokens), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)

    def step() -> None:
        model.loss(inputs, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def time_steps(size: Size, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    models: dict[str, Any] = {PEER: GPT(VOCABULARY, size)}
    models |= {name: make_model(size, mix) for name, mix in MIXING.items()}
    assert len({sum(p.numel() for p in models[name].parameters()) for name in (PEER, "plain")}) == 1
    models["rotary, untied"] = make_model(size, position="rotary", tied=False)
    steps = {name: make_step(model, size) for name, model in models.items()}
    several = max(1, 2 * 10**8 // (size.layers * size.width**2 * size.texts * size.tokens))
    runs = {name: repeat(step, several) for name, step in steps.items()}
    return table(f"{several} training steps: {size}", runs, PEER, rounds)


def repeat(run: Run, count: int) -> Run:
    def several() -> None:
        for _ in range(count):
            run()

    return several


# generation

GENERATED = Size(6, 384, 6, 8, 512)
WORDS, PROMPT, NEW = 5000, 32, 128


def make_generators(texts: int, top_k: int | None) -> dict[str, Run]:
    """Ours, plain and with Mixhead B, and GPT-2 of transformers with its cache: `NEW` tokens after each of `texts` prompts."""
    import transformers

    size, prompt = GENERATED, torch.randint(WORDS, (texts, PROMPT), generator=torch.Generator().manual_seed(1))
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=size.tokens, n_embd=size.width, n_layer=size.layers, n_head=size.heads,
            bos_token_id=0, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    chosen: dict[str, Any] = {"do_sample": False} if top_k is None else {"do_sample": True, "top_k": top_k}
    mask = torch.ones_like(prompt)

    def run_theirs() -> None:
        theirs.generate(prompt, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0, **chosen)

    runs: dict[str, Run] = {"transformers": run_theirs}
    for name in ("plain", "Mixhead B"):
        config = fr.ModelConfig(
            vocab_size=WORDS, hidden_size=size.width, num_hidden_layers=size.layers, num_attention_heads=size.heads,
            intermediate_size=4 * size.width, hidden_act="gelu", position="learned", max_position_embeddings=size.tokens,
            attention=fr.AttentionConfig(mix=MIXING[name]), output=fr.OutputConfig(tied=True),
        )  # fmt: skip
        runs[name] = make_generator(fr.LanguageModel(config).eval(), prompt, top_k)
    return runs


def make_generator(model: fr.LanguageModel, prompt: Tensor, top_k: int | None) -> Callable[[], Tensor]:
    options: dict[str, Any] = {"temperature": 0.0} if top_k is None else {"top_k": top_k, "seed": 1}
    return lambda: model.generate(prompt, max_new_tokens=NEW, **options)


def time_generation(texts: int, top_k: int | None, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    how = "greedy" if top_k is None else f"top-k {top_k}"
    title = f"generation: {how}, texts {texts}, {PROMPT} + {NEW} tokens, 6 x 384, {WORDS:,} words"
    return table(title, make_generators(texts, top_k), "transformers", rounds, warm_up=1)


def main() -> None:
    given = parse(__doc__, only={"choices": ["step", "generation"]})
    results: dict[str, Any] = {}
    if given.only in (None, "step"):
        results |= {f"step, {size}": time_steps(size, given.rounds) for size in SIZES}
    if given.only in (None, "generation"):
        results["greedy, 1 text"] = time_generation(1, None, given.rounds)
        results["top-k 50, 8 texts"] = time_generation(8, 50, given.rounds)
    save(given.json, "small models", given.rounds, results)


if __name__ == "__main__":
    main()
