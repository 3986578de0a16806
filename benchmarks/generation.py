"""Generation against GPT-2 of transformers with its cache: 128 tokens after prompts of 32, 6 x 384, 5,000 words.

Greedy for one text, and the 50 likeliest tokens for 8 texts. Ours is plain and with Mixhead B. Models are random and not
alike, so their texts are not compared.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from candidates import FORWARD, Candidate, Comparison, Pass, Settings, explain_missing
from train_step import GPT2, MIXES, Size, make_model

PEER = "transformers"


@dataclass(frozen=True)
class Call:
    """New tokens after a prompt, drawn from the `top_k` likeliest; None: greedy."""

    model: Size
    prompt: int
    new: int
    top_k: int | None

    def __str__(self) -> str:
        how = "greedy" if self.top_k is None else f"top-k {self.top_k}"
        return f"{how}, texts {self.model.batch}, {self.prompt} + {self.new} tokens"

    def draw_prompts(self, settings: Settings) -> Tensor:
        prompts, _ = self.model.draw(settings, self.prompt, torch.Generator().manual_seed(1))
        return prompts


def _make_ours(mix: str, settings: Settings, backward: bool, call: Call) -> Pass:
    torch.manual_seed(0)
    model = make_model(call.model, mix, **GPT2).eval().to(settings.torch_device)
    prompts = call.draw_prompts(settings)
    options = {"temperature": 0.0} if call.top_k is None else {"top_k": call.top_k, "seed": 1}
    generate = partial(model.generate, prompts, max_new_tokens=call.new, **options)
    return Pass(generate, {}, None, backward, settings)


def _make_peer(settings: Settings, backward: bool, call: Call) -> Pass:
    import transformers

    size = call.model
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=size.vocabulary,
        n_positions=size.length,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        bos_token_id=0,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).eval().to(settings.torch_device)
    prompts = call.draw_prompts(settings)
    generate = partial(
        model.generate,
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=call.new,
        min_new_tokens=call.new,
        pad_token_id=0,
        do_sample=call.top_k is not None,
        top_k=call.top_k,
    )
    return Pass(generate, {}, None, backward, settings)


MODEL = Size(6, 384, 6, 1, 512, 5000, 4 * 384)
CALLS = (
    Call(MODEL, 32, 128, None),
    Call(replace(MODEL, batch=8), 32, 128, 50),
)


def compare(settings: Settings) -> list[Comparison]:
    """Compare plain and mixed models of ours with GPT-2 of transformers."""
    comparisons = []
    for call in CALLS:
        candidates = [
            Candidate("plain", partial(_make_ours, "none"), "plain", (PEER,)),
            Candidate("Mixhead B", partial(_make_ours, MIXES["B"]), "Mixhead B", (PEER,)),
            Candidate(PEER, _make_peer, PEER, absent=explain_missing("transformers")),
        ]
        tiny_model = replace(call.model, layers=1, vocabulary=60)
        tiny = replace(call, model=tiny_model, prompt=4, new=4)
        tokens = call.model.batch * call.new
        comparisons.append(Comparison(call, tiny, call.new, candidates, (FORWARD,), tokens))
    return comparisons
