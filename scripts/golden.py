"""A golden record of what the library computes, and the comparison of a later state of the code with it.

    python scripts/golden.py record DIR [--only SECTION ...]
    python scripts/golden.py check DIR [--only SECTION ...] [--lines N]

`record` writes one file for each section into DIR; `check` computes everything again, prints what differs by name and exits
with 1 if anything does. Sections: parameters, attention, models, json, runs, export. Use one thread (OMP_NUM_THREADS=1) and
the same machine for both. The public interface alone is used (`import fullrank as fr`, `python -m fullrank`, run folders,
recipe names), so that the record outlives any move of the code beneath it; what could differ between two states is in the
part `Adapters`.

Tensors are compared with a tolerance relative to max(1, max|expected|), texts and hashes exactly, JSON value by value. A key
or an entry that is new is reported and is no difference; one that is lost is.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

import fullrank as fr

EXACT = 0.0
FP64, FP32 = 1e-12, 1e-6
Settings = dict[str, Any]


# -- Adapters: the only places where two states of the code may be called differently ---------------------------------


def part(name: str, settings: Settings) -> Any:
    """A section of a configuration: of its class where there is one, a dictionary where sections are accepted as such."""
    kind = getattr(fr, name, None)
    return settings if kind is None else kind(**settings)


def model_config(settings: Settings) -> fr.ModelConfig:
    """`fr.ModelConfig` from nested dictionaries, as `config show --json` prints them."""
    sections = {"attention": "AttentionConfig", "cross": "AttentionConfig", "input": "InputConfig"}
    sections |= {
        "output": "OutputConfig",
        "dropout": "DropoutConfig",
        "encoder": "EncoderConfig",
        "decoder": "DecoderConfig",
    }

    def typed(values: Settings) -> Settings:
        return {
            key: part(sections[key], typed(value)) if key in sections and isinstance(value, dict) else value
            for key, value in values.items()
        }

    return fr.ModelConfig(**typed(settings))


def cached_logits(model: nn.Module, pieces: list[Tensor], mask: Tensor | None = None) -> Tensor:
    """Logits of a text that is read piece by piece with a cache of keys and values; mask (B, N) of the whole text."""
    cache, logits, end = model.new_cache(), [], 0
    for piece in pieces:
        end += piece.shape[1]
        own = {} if mask is None else {"attention_mask": mask[:, end - piece.shape[1] : end]}
        out = model(piece, cache=cache, **own)
        cache = out.cache
        logits.append(out.logits)
    return torch.cat(logits, 1)


# -- The record -------------------------------------------------------------------------------------------------------


class Record:
    """Named values with the tolerance they are compared at."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[Any, float]] = {}

    def add(self, name: str, value: Any, tolerance: float = EXACT) -> None:
        if name in self.entries:
            raise ValueError(f"{name} is recorded twice")
        self.entries[name] = (value.detach().clone() if isinstance(value, Tensor) else value, tolerance)

    def gradients(self, name: str, module: nn.Module, tolerance: float = FP64) -> None:
        """The gradients of all parameters, which are taken away; a parameter without one counts as zero."""
        for key, parameter in module.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.add(f"{name}/grad/{key}", gradient, tolerance)
            parameter.grad = None


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a JSON value with their paths."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def compare_json(expected: Any, actual: Any) -> tuple[list[str], list[str]]:
    """What differs (values, lost keys), and which keys are new."""
    old, new = dict(leaves(expected)), dict(leaves(actual))
    wrong = [f"{key}: {old[key]!r} -> {new[key]!r}" for key in old.keys() & new.keys() if old[key] != new[key]]
    wrong += [f"key lost: {key} (was {old[key]!r})" for key in old.keys() - new.keys()]
    return sorted(wrong), sorted(f"key gained: {key} = {new[key]!r}" for key in new.keys() - old.keys())


def compare_tensors(expected: Tensor, actual: Tensor, tolerance: float) -> str | None:
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return f"{tuple(expected.shape)} {expected.dtype} -> {tuple(actual.shape)} {actual.dtype}"
    if expected.numel() == 0 or torch.equal(expected, actual):
        return None
    known = torch.where(expected == actual, 0.0, (expected - actual).abs().double())  # of equal infinities, none
    finite = expected[expected.isfinite()].abs()
    allowed = tolerance * max(1.0, float(finite.max()) if finite.numel() else 0.0)
    worst = float(known.nan_to_num(float("inf")).max())
    return None if worst <= allowed else f"differs by {worst:.3g}, allowed {allowed:.3g}"


def compare_texts(expected: str, actual: str) -> str:
    """Two texts that differ; of lines of JSON, also by how much their numbers do."""
    lines = list(itertools.zip_longest(expected.splitlines(), actual.splitlines(), fillvalue="(no line)"))
    number, (old, new) = next((i, pair) for i, pair in enumerate(lines) if pair[0] != pair[1] or i == len(lines) - 1)
    changed = sum(a != b for a, b in lines)
    return f"{changed} of {len(lines)} lines differ; first, line {number + 1}:\n      {old[:300]}\n      {new[:300]}"


def compare(expected: tuple[Any, float], actual: tuple[Any, float]) -> tuple[list[str], list[str]]:
    """What differs between two entries, and what is only new."""
    (old, _), (new, tolerance) = expected, actual
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        message = compare_tensors(old, new, tolerance)
        return ([message] if message else []), []
    if isinstance(old, str) and isinstance(new, str):
        return ([] if old == new else [compare_texts(old, new)]), []
    return compare_json(old, new)


# -- Random but fixed things ------------------------------------------------------------------------------------------


def generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def noise(name: str, *shape: int) -> Tensor:
    """fp64 normal numbers that depend on the name and the shape alone."""
    return torch.randn(*shape, generator=generator(name), dtype=torch.float64)


def ids(name: str, *shape: int, vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, shape, generator=generator(name))


def digest(module: nn.Module) -> dict[str, str]:
    """A hash of the bits of every parameter and buffer."""
    state = module.state_dict()
    return {
        name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16] for name, tensor in state.items()
    }


def move(module: nn.Module, scale: float = 0.2) -> nn.Module:
    """fp64, every parameter away from its start by an amount that its name decides: no mixing is the identity any more."""
    module.double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.add_(noise(name, *parameter.shape), alpha=scale)
    return module


def started(make: Callable[[], nn.Module], record: Record, name: str) -> nn.Module:
    """A module in fp64 away from its start, which is recorded bit for bit."""
    torch.manual_seed(7)
    module = make()
    record.add(f"{name}/start", digest(module))
    record.add(f"{name}/random state after the start", torch.rand(1))
    return move(module).eval()


# -- The command line -------------------------------------------------------------------------------------------------


def in_process(*words: str) -> str:
    """What `python -m fullrank WORDS` prints, run within this process: the start of hundreds of processes is saved."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = ["fullrank", *words]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            runpy.run_module("fullrank", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"fullrank {' '.join(words)}: exit status {end.code}") from end
    finally:
        sys.argv = before
    return printed.getvalue()


def as_json(*words: str) -> Any:
    return json.loads(in_process(*words, "--json"))


def command(*words: object, text: str = "") -> str:
    """The same in a process of its own."""
    called = [sys.executable, "-m", "fullrank", *map(str, words)]
    done = subprocess.run(called, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(called[1:])}: exit status {done.returncode}\n{done.stderr}")
    return done.stdout


# -- Section: parameters of every row of every recipe -----------------------------------------------------------------


def with_vocabulary(model: Settings) -> Settings:
    """Sizes that a run takes from its data, filled in."""
    cutoffs = [*(model["input"].get("cutoffs") or []), *(model["output"].get("cutoffs") or [])]
    sized = model if model["vocab_size"] else {**model, "vocab_size": max([0, *cutoffs]) + 1000}
    if sized.get("encoder") and not sized["encoder"].get("vocab_size") and not sized["encoder"].get("share_embedding"):
        sized = {**sized, "encoder": {**sized["encoder"], "vocab_size": sized["vocab_size"] + 7}}
    return sized


def shapes(config: Settings, translates: bool) -> dict[str, str]:
    """Names, shapes and dtypes of the state of the model of a resolved configuration; of fine-tuning, nothing is built."""
    if "pretrained" in config["model"]:
        return {}
    kind = fr.LanguageModel
    if config["train"]["objective"] == "masked":
        kind = fr.MaskedLanguageModel
    elif translates:
        kind = fr.Translator
    with torch.device("meta"):
        state = kind(model_config(with_vocabulary(config["model"]))).state_dict()
    return {name: f"{list(tensor.shape)} {tensor.dtype}" for name, tensor in state.items()}


def parameters(record: Record) -> None:
    """Every row at every scale, built on the meta device; counts of `info` at the largest one, which needs no corpus."""
    pairs = ("parallel", "multi30k-de-en", "iwslt14-de-en", "wmt16-en-de", "synthetic-translation")
    known: dict[str, dict[str, str]] = {}
    for recipe in as_json("recipes", "list"):
        for row, scale in itertools.product(recipe["rows"], recipe["scales"]):
            chosen = (recipe["name"], "--row", row, "--scale", scale)
            config = as_json("config", "show", *chosen)
            translates = config["data"]["name"] in pairs
            key = json.dumps([config["model"], config["train"].get("objective"), translates], sort_keys=True)
            if key not in known:
                known[key] = shapes(config, translates)
            record.add(f"{recipe['name']}/{row}/{scale}", known[key])
            if scale == recipe["scales"][0] and scale != "tiny":
                record.add(f"{recipe['name']}/{row}/info", as_json("info", *chosen)["parameters"])


# -- Section: attention layers ----------------------------------------------------------------------------------------

SCORES: dict[str, Any] = {
    "dot_product": "dot_product",
    "relative": "relative",
    "relative, clamped": {"name": "relative", "clamp_length": 3},
    "relative, as published": {"name": "relative", "as_published": True},
    "dense_synthesizer": "dense_synthesizer",
    "dense_synthesizer, idle keys": {"name": "dense_synthesizer", "keep_key_projection": True},
    "random_synthesizer": "random_synthesizer",
}
NORMALIZERS = ("softmax", "sigsoftmax")
MIXINGS = ("none", "position_independent", "position_wise", "random", "average")


def multilinear_kinds() -> Iterator[tuple[str, Settings]]:
    for cores, weights, score in itertools.product((1, 3), ("softmax", "free"), ("dot_product", "relative")):
        for causal in ("masked", "as_published"):
            plain = {"kind": "multilinear", "rank": 5, "cores": cores, "core_weights": weights, "causal": causal}
            yield f"multilinear {cores} {weights} {score} {causal}", {**plain, "score": score}
    for cores, decays, weights in itertools.product((1, 3), (1, 4), ("softmax", "free")):
        decayed = {"kind": "multilinear", "rank": 5, "cores": cores, "core_weights": weights}
        yield f"multilinear {cores} {weights} decayed {decays}", {**decayed, "output_map": "decayed", "decays": decays}


def weighted_kinds() -> Iterator[tuple[str, Settings]]:
    for (name, score), normalize, mix in itertools.product(SCORES.items(), NORMALIZERS, MIXINGS):
        yield f"{name} {normalize} {mix}", {"score": score, "normalize": normalize, "mix": mix}
    yield "dot_product without biases", {"mix": "position_wise", "bias": False}


def call_attention(record: Record, name: str, layer: nn.Module, rows: int, tokens: int, source_tokens: int = 0) -> None:
    """Outputs and all gradients in fp64, outputs in fp32, of self-attention or over another source."""
    x = noise(f"x {rows} {tokens}", rows, tokens, 15).requires_grad_()
    source = noise(f"source {rows}", rows, source_tokens, 15).requires_grad_() if source_tokens else None
    out = layer(x) if source is None else layer(x, source)
    record.add(f"{name}/output", out, FP64)
    out.backward(noise("cotangent", *out.shape))
    record.add(f"{name}/grad of x", x.grad, FP64)
    if source is not None:
        record.add(f"{name}/grad of source", source.grad, FP64)
    record.gradients(name, layer)
    with torch.no_grad():
        layer.float()
        single = layer(x.float()) if source is None else layer(x.float(), source.float())
    record.add(f"{name}/fp32 output", single, FP32)


def attention(record: Record) -> None:
    for name, settings in [*weighted_kinds(), *multilinear_kinds()]:
        multilinear = settings.get("kind") == "multilinear"
        sizes = {"hidden_size": 15, "max_position_embeddings": 40}
        sizes |= {} if multilinear else {"num_attention_heads": 3, "head_dim": 6}

        def make(settings: Settings = settings, sizes: Settings = sizes) -> nn.Module:
            return fr.Attention(part("AttentionConfig", settings), **sizes)

        layer = started(make, record, name)
        weights = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
        for kernel, (rows, tokens) in itertools.product(("auto", "reference"), ((2, 7), (1, 37))):
            layer.double().load_state_dict(weights)
            with fr.kernel(kernel):
                call_attention(record, f"{name}/{kernel}/{tokens}", layer, rows, tokens)
        if not multilinear and "relative" not in name and not name.startswith("random"):
            layer.double().load_state_dict(weights)
            call_attention(record, f"{name}/over a source", layer, 2, 5, 9)
    for score, mix in itertools.product(("dot_product", "relative", "dense_synthesizer"), ("none", "position_wise")):
        name = f"training with cross-head and dropout/{score} {mix}"
        config = part("AttentionConfig", {"score": score, "mix": mix, "cross_head": 0.5})
        sizes = {"hidden_size": 15, "num_attention_heads": 3, "head_dim": 6, "max_position_embeddings": 40}
        layer = started(
            lambda config=config, sizes=sizes: fr.Attention(config, **sizes, dropout=0.3), record, name
        ).train()
        torch.manual_seed(11)
        for call in range(4):
            out = layer(noise("x", 2, 7, 15))
            record.add(f"{name}/output {call}", out, FP64)
            out.sum().backward()
            record.gradients(f"{name}/{call}", layer)


# -- Section: models --------------------------------------------------------------------------------------------------

VOCABULARY = 31
CLUSTERS = {"cutoffs": [7, 15], "div_val": 2}
MIXTURE = {"kind": "mixture_of_softmaxes", "mixtures": 3}
FACTORS: dict[str, dict[str, Settings]] = {
    "score": {
        **{p: {"position": p} for p in ("sinusoidal", "learned", "rotary", "none")},
        "relative": {"position": "relative", "attention": {"score": "relative"}},
        "relative, own biases": {
            "position": "relative",
            "attention": {"score": {"name": "relative", "shared_biases": False, "clamp_length": 4}},
        },
        "dense_synthesizer": {"position": "sinusoidal", "attention": {"score": "dense_synthesizer"}},
        "random_synthesizer": {"position": "learned", "attention": {"score": "random_synthesizer"}},
    },
    "mix": {mix: {"attention": {"mix": mix}} for mix in MIXINGS},
    "normalize": {normalize: {"attention": {"normalize": normalize}} for normalize in NORMALIZERS},
    "bias": {"with": {}, "without": {"attention": {"bias": False}, "mlp_bias": False}},
    "input": {"token": {}, "adaptive": {"input": {"kind": "adaptive", **CLUSTERS}}},
    "output": {
        "softmax": {},
        "sigsoftmax": {"output": {"kind": "softmax", "normalize": "sigsoftmax"}},
        "tied": {"output": {"kind": "softmax", "tied": True}},
        "adaptive, fairseq": {"output": {"kind": "adaptive", **CLUSTERS, "form": "fairseq"}},
        "adaptive, transformer_xl": {"output": {"kind": "adaptive", **CLUSTERS, "form": "transformer_xl"}},
        "adaptive, tied": {"output": {"kind": "adaptive", "tied": True}},
        "mixture": {"output": {**MIXTURE, "latent_dropout": 0.2}},
        "mixture, tied": {"output": {**MIXTURE, "tied": True, "bias": True, "epsilon": 1e-8}},
        "mixture, adaptive": {"output": {**MIXTURE, **CLUSTERS}},
        "mixture, sigsoftmax": {"output": {**MIXTURE, "normalize": "sigsoftmax"}},
    },
    "memory": {
        "none": {},
        "short": {"memory_length": 5},
        "same length": {"memory_length": 5, "same_length": True},
        "zeros": {"memory_length": 6, "memory_start": "zeros"},
    },
    "norm": {"pre": {}, "post": {"norm": "post"}, "post, final": {"norm": "post", "final_norm": True}},
    "initializer": {name: {"initializer": name} for name in ("fairseq", "transformer_xl", "pytorch", "xavier_uniform")},
    "activation": {name: {"hidden_act": name} for name in ("relu", "gelu", "swiglu")},
    "scale": {"no": {}, "yes": {"scale_embedding": True}},
    "dropout": {"free": {}, "locked": {"dropout": {"locked": True}}, "not on weights": {"dropout": {"attention": 0.0}}},
}
BASE: Settings = {
    "vocab_size": VOCABULARY,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "head_dim": 6,
    "intermediate_size": 10,
    "max_position_embeddings": 40,
    "position": "sinusoidal",
    "attention": {"cross_head": 0.3},
    "dropout": {"embedding": 0.1, "attention": 0.1, "activation": 0.1, "residual": 0.1, "output": 0.1},
    "input": {"kind": "token"},
    "output": {"kind": "softmax", "tied": False},
}


def laid(base: Settings, *layers: Settings) -> Settings:
    """Settings laid over each other, sections merged."""
    merged = dict(base)
    for key, value in itertools.chain.from_iterable(layer.items() for layer in layers):
        merged[key] = laid(merged.get(key) or {}, value) if isinstance(value, dict) else value
    return merged


def legal(names: dict[str, str]) -> bool:
    """A tied output shares the matrices of an input of its own kind. Factors that are not named do not count."""
    adaptive = names.get("output") == "adaptive, tied"
    wanted = "adaptive" if adaptive else "token"
    return "tied" not in names.get("output", "") or names.get("input", wanted) == wanted


def pairs_of(names: dict[str, str]) -> set[tuple[str, ...]]:
    return {(*a, *b) for a, b in itertools.combinations(names.items(), 2)}


def pairwise_models() -> Iterator[tuple[str, Settings]]:
    """Models in which every legal pair of two factors' values occurs: each is the best of random candidates."""
    rng, missing = random.Random(0), set[tuple[str, ...]]()
    for one, other in itertools.combinations(FACTORS, 2):
        missing |= {(one, a, other, b) for a in FACTORS[one] for b in FACTORS[other] if legal({one: a, other: b})}
    while missing:
        candidates = [{factor: rng.choice(list(values)) for factor, values in FACTORS.items()} for _ in range(150)]
        best = max(filter(legal, candidates), key=lambda names: len(pairs_of(names) & missing))
        if missing & pairs_of(best):
            missing -= pairs_of(best)
            yield "; ".join(best.values()), laid(BASE, *(FACTORS[factor][value] for factor, value in best.items()))


def record_losses(
    record: Record, name: str, model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor, **more: Any
) -> None:
    """Logits, nll and loss with all gradients in evaluation mode, then in training mode with its random draws."""
    logits = model(*inputs, **more).logits
    nll = model.nll(*inputs, targets, **more).per_token
    record.add(f"{name}/logits", logits, FP64)
    record.add(f"{name}/nll", nll, FP64)
    ((logits * noise("logits", *logits.shape)).sum() + (nll * noise("nll", *nll.shape)).sum()).backward()
    record.gradients(f"{name}/logits and nll", model)
    weights = noise("weights", *targets.shape).abs()
    for mode in ("evaluation", "training"):
        model.train(mode == "training")
        torch.manual_seed(11)
        if isinstance(model, fr.Translator):
            loss = model.loss(*inputs, targets, weights=weights, label_smoothing=0.1, **more)
        else:
            loss = model.loss(*inputs, targets, weights, label_smoothing=0.1, **more)
        record.add(f"{name}/loss, {mode}", loss, FP64)
        loss.backward()
        record.gradients(f"{name}/loss, {mode}", model)
    record.add(f"{name}/random state after training", torch.rand(1))
    model.eval()


def record_segments(record: Record, name: str, model: nn.Module, text: Tensor, targets: Tensor) -> None:
    """Memory over segments whose layers rest in turn, with gradients and without; the loss of the last one."""
    for grad in (True, False):
        memory = None
        with torch.set_grad_enabled(grad):
            for number, skip in enumerate([(), (1,), (0, 2), ()]):
                segment = text[:, number * 5 : number * 5 + 5]
                out = model(segment, memory, skip=skip)
                record.add(f"{name}/segment {number}, {'with' if grad else 'without'} gradients", out.logits, FP64)
                before, memory = memory, out.memory
        if grad:
            out.logits.backward(noise("segments", *out.logits.shape))
            record.gradients(f"{name}/last segment", model)
            model.loss(segment, targets[:, -5:], memory=before).backward()
            record.gradients(f"{name}/loss of the last segment", model)


def record_language_model(record: Record, name: str, settings: Settings) -> None:
    config = model_config(settings)
    model = started(lambda: fr.LanguageModel(config), record, name)
    record.add(f"{name}/parameters", model.num_parameters())
    text = ids("text", 2, 20, vocab_size=VOCABULARY)
    targets = ids("targets", 2, 20, vocab_size=VOCABULARY)
    record_losses(record, name, model, (text[:, :9],), targets[:, :9])
    if settings.get("memory_length"):
        record_segments(record, name, model, text, targets)
    if settings["attention"].get("causal") == "as_published":
        return
    left = torch.arange(9) >= torch.tensor([[0], [4]])
    with torch.no_grad():
        record.add(f"{name}/padded on the left", model(text[:, :9], attention_mask=left).logits, FP64)
        pieces = [text[:, :4], *text[:, 4:9].split(1, 1)]
        record.add(f"{name}/with a cache", cached_logits(model, pieces), FP64)
        record.add(f"{name}/with a cache, padded", cached_logits(model, pieces, left), FP64)


def record_trace(record: Record, name: str, settings: Settings) -> None:
    """Attention weights, mixings, and the two penalties with their gradients."""
    model = move(fr.LanguageModel(model_config(settings))).eval()
    trace = fr.Trace()
    model(ids("text", 2, 9, vocab_size=VOCABULARY), trace=trace)
    for number, layer in enumerate(trace.layers):
        record.add(f"{name}/weights {number}", layer.weights, FP64)
        record.add(f"{name}/mixed weights {number}", layer.mixed, FP64)
        record.add(f"{name}/mixing {number}", layer.mixing, FP64)
    penalties = {"overlap": fr.overlap(trace), "orthogonality": fr.orthogonality(trace)}
    for penalty, value in penalties.items():
        record.add(f"{name}/{penalty}", value, FP64)
    sum(penalties.values()).backward()
    record.gradients(f"{name}/penalties", model)


def multilinear_models() -> Iterator[tuple[str, Settings]]:
    flat = laid(BASE, {"attention": {"cross_head": 0.0}, "dropout": {"attention": 0.0}})
    outputs = itertools.cycle(FACTORS["output"][kind] for kind in ("softmax", "adaptive, fairseq", "mixture"))
    for (name, attention), output, start in zip(
        multilinear_kinds(), outputs, itertools.cycle(FACTORS["initializer"].values()), strict=False
    ):
        position = "relative" if attention.get("score") == "relative" else "sinusoidal"
        own = {"not_next_token_perplexity": True} if attention.get("causal") == "as_published" else {}
        memory = {} if own else {"memory_length": 5}
        yield name, laid(flat, {"attention": {**attention, **own}, "position": position}, memory, output, start)


def translators() -> Iterator[tuple[str, Settings]]:
    two = laid(BASE, {"num_hidden_layers": 2, "encoder": {"vocab_size": 23}, "decoder": {}})
    wise, xl = {"mix": "position_wise", "cross_head": 0.2}, FACTORS["score"]["relative"]
    multilinear = {"kind": "multilinear", "rank": 5, "cross_head": 0.0}
    yield "plain", two
    yield "no dropout of weights", laid(two, {"attention": {"mix": "position_wise"}, "dropout": {"attention": 0.0}})
    yield (
        "shared embedding, tied",
        laid(two, {"encoder": {"vocab_size": None, "share_embedding": True}, "output": {"tied": True}}),
    )
    yield "mixed everywhere", laid(two, {"attention": {"mix": "position_wise", "normalize": "sigsoftmax"}})
    yield "mixed in the encoder", laid(two, {"encoder": {"attention": {"mix": "position_independent"}}})
    yield "mixed in the decoder", laid(two, {"decoder": {"attention": wise, "num_hidden_layers": 3}})
    yield "mixed across", laid(two, {"decoder": {"cross": wise}})
    yield "as released", laid(two, {"attention": wise, "decoder": {"released_cross": True, "released_decoding": True}})
    yield "relative", laid(two, xl, {"norm": "post", "initializer": "transformer_xl"})
    yield "learned, mixture", laid(two, {"position": "learned"}, FACTORS["output"]["mixture"])
    yield (
        "rotary, adaptive",
        laid(two, {"position": "rotary", "initializer": "pytorch"}, FACTORS["output"]["adaptive, fairseq"]),
    )
    yield "multilinear decoder", laid(two, {"decoder": {"attention": {**multilinear, "output_map": "decayed"}}})
    yield "multilinear encoder", laid(two, {"encoder": {"attention": multilinear}})


def masked_models() -> Iterator[tuple[str, Settings]]:
    names = ("sinusoidal", "relative", "dense_synthesizer", "learned", "rotary", "random_synthesizer")
    outputs = ("softmax", "tied", "mixture", "adaptive, fairseq", "mixture, adaptive", "sigsoftmax")
    for score, output, mix in zip(names, outputs, [*MIXINGS, "position_wise"], strict=True):
        chosen = (FACTORS["score"][score], FACTORS["output"][output], FACTORS["mix"][mix])
        yield f"{score}; {output}; {mix}", laid(BASE, *chosen)
    flat = {
        "attention": {"kind": "multilinear", "rank": 5, "cores": 2, "cross_head": 0.0},
        "dropout": {"attention": 0.0},
    }
    yield "multilinear", laid(BASE, flat)


def vocabulary_layers(record: Record) -> None:
    """The input and output layers by themselves, every kind of output with every normaliser's gradients."""
    layers = {
        "AdaptiveSoftmax": {"kind": "adaptive", **CLUSTERS},
        "MixtureOfSoftmaxes": MIXTURE,
    }
    hidden, targets = noise("hidden", 2, 9, 12), ids("targets", 2, 9, vocab_size=VOCABULARY)
    for kind, settings in layers.items():
        config = part("OutputConfig", settings)
        name = f"alone/{kind}"
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 12}
        layer = started(lambda kind=kind, config=config, sizes=sizes: getattr(fr, kind)(config, **sizes), record, name)
        record.add(f"{name}/logits", layer(hidden), FP64)
        nll = layer.nll(hidden, targets)
        record.add(f"{name}/nll", nll, FP64)
        nll.backward(noise("nll", *nll.shape))
        record.gradients(name, layer)
    read = part("InputConfig", {"kind": "adaptive", **CLUSTERS})
    layer = started(
        lambda: fr.AdaptiveInput(read, vocab_size=VOCABULARY, hidden_size=12), record, "alone/AdaptiveInput"
    )
    record.add("alone/AdaptiveInput/vectors", layer(targets), FP64)


def models(record: Record) -> None:
    for name, settings in pairwise_models():
        record_language_model(record, f"language/{name}", settings)
    for name, settings in multilinear_models():
        record_language_model(record, f"language/{name}", settings)
    for mix in MIXINGS:
        record_trace(record, f"trace/{mix}", laid(BASE, FACTORS["score"]["relative"], FACTORS["mix"][mix]))
    source, written = ids("source", 2, 7, vocab_size=23), ids("written", 2, 9, vocab_size=VOCABULARY)
    targets = ids("targets", 2, 9, vocab_size=VOCABULARY)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    for name, settings in translators():
        config = model_config(settings)
        model = started(lambda config=config: fr.Translator(config), record, f"translator/{name}")
        record_losses(record, f"translator/{name}", model, (source, written), targets)
        record_losses(record, f"translator/{name}/padded", model, (source, written), targets, attention_mask=mask)
    for name, settings in masked_models():
        config = model_config(settings)
        model = started(lambda config=config: fr.MaskedLanguageModel(config), record, f"masked/{name}")
        record_losses(record, f"masked/{name}", model, (written,), targets)
        right = torch.arange(9) < torch.tensor([[9], [5]])
        record_losses(record, f"masked/{name}/padded", model, (written,), targets, attention_mask=right)
    for schedule, p in [("none", None), ("linear", None), *((n, 0.3) for n in ("uniform", "not_first", "not_last"))]:
        skipping = fr.SkipRetain(schedule, p, num_layers=6)
        record.add(f"skip/{schedule}", [sorted(skipping.skipped(3, step)) for step in range(200)])
    vocabulary_layers(record)


# -- Section: JSON of the command line --------------------------------------------------------------------------------

INFO = [
    ("mixhead/table1-vanilla", "b"), ("mixhead/table1-baevski", "a-sigsoftmax"), ("mixhead/table1-transformer-xl", "plain"),
    ("mixhead/table1-synthesizer", "random"), ("mixhead/table4", "h32-b-released"), ("mixhead/table6", "b"),
    ("mos/table2", "k5"), ("skip-cross-head/table1", "context3800"), ("tensorized/table2-ptb", "core2"),
    ("tensorized/table3", "decayed"),
]  # fmt: skip
SHOWN = [
    ("demo/builtin", "multilinear"), ("mixhead/table2-vanilla", "b-sigsoftmax"), ("mos/table1-ptb", "k10-d300"),
    ("skip-cross-head/table5", "phase1-phase2"), ("mixhead/table5", "cola-b"),
]  # fmt: skip


def schema_keys(schema: dict[str, Any], node: Any, path: str, found: set[str]) -> set[str]:
    """The keys a schema allows, with the words they may have, however it is divided into definitions and unions."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    found.update(
        f"{path} = {word!r}" for word in [*node.get("enum", []), *([node["const"]] if "const" in node else [])]
    )
    for choice in itertools.chain.from_iterable(node.get(word, []) for word in ("anyOf", "oneOf", "allOf")):
        schema_keys(schema, choice, path, found)
    if isinstance(node.get("items"), dict):
        schema_keys(schema, node["items"], f"{path}[]", found)
    for key, inner in node.get("properties", {}).items():
        found.add(f"{path}.{key}")
        schema_keys(schema, inner, f"{path}.{key}", found)
    return found


def json_documents(record: Record) -> None:
    record.add("recipes list", {recipe["name"]: recipe for recipe in as_json("recipes", "list")})
    for options in ([], ["--finetune"]):
        schema = json.loads(in_process("config", "schema", *options))
        record.add(
            " ".join(["config schema", *options]), dict.fromkeys(sorted(schema_keys(schema, schema, "", set())), True)
        )
    for recipe, row in INFO:
        record.add(f"info {recipe} {row}", as_json("info", recipe, "--row", row))
    for recipe, row in SHOWN:
        record.add(f"config show {recipe} {row}", as_json("config", "show", recipe, "--row", row))
        record.add(f"recipes show {recipe}", as_json("recipes", "show", recipe))


# -- Section: tiny runs through the command line ----------------------------------------------------------------------

SMALL_MODEL: Settings = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24, "position": "sinusoidal",
    "dropout": {"residual": 0.1}, "attention": {"mix": "none"},
}  # fmt: skip
TRAIN: Settings = {
    "steps": 8,
    "batch_size": 4,
    "segment_length": 12,
    "device": "cpu",
    "threads": 1,
    "log_every_steps": 2,
}
PHASES = [{"name": "skipping", "skip": "linear", "steps": 5}, {"name": "all", "steps": 4}]
MEMORY = {"position": "relative", "memory_length": 10, "attention": {"score": "relative", "cross_head": 0.4}}
RUNS: dict[str, Settings] = {
    "builtin": {"data": {"name": "builtin", "max_tokens": 20000}},
    "memory": {"model": MEMORY, "train": {"steps": None, "phases": PHASES, "optimizer": "adam", "schedule": "cosine"}},
    "mixture": {"model": {"output": MIXTURE, "attention": {"mix": "position_wise"}}, "train": {"optimizer": "sgd"}},
    "multilinear": {
        "model": {"attention": {"kind": "multilinear", "rank": 6, "cores": 2}, "max_position_embeddings": 16}
    },
    "masked": {"model": {"position": "learned"}, "train": {"objective": "masked", "order": "shuffled"}},
    "translation": {
        "model": {"attention": {"mix": "position_independent"}, "output": {"tied": True}},
        "data": {"name": "synthetic-translation"},
        "train": {"batch_tokens": 256, "label_smoothing": 0.1, "warmup_steps": 3, "schedule": "inverse_sqrt"},
    },
}
RESULT = (
    "parameters",
    "final",
    "last",
    "best",
    "steps",
    "epochs",
    "tokens_seen",
    "protocol",
    "protocol_settings",
    "corpus",
)


def write_text(folder: Path) -> Settings:
    """A made-up text in three files, and the data section that reads it."""
    rng, words = (
        random.Random(0),
        ["the", "cat", "dog", "bird", "sleeps", "barks", "sings", "in", "morning", "evening", "then"],
    )
    paths = {}
    for split, lines in (("train", 300), ("valid", 30), ("test", 30)):
        text = "\n".join(" ".join(rng.choices(words, k=rng.randint(4, 9))) for _ in range(lines)) + "\n"
        path = folder / f"{split}.txt"
        path.write_text(text, encoding="utf-8")
        paths[split] = str(path)
    return {"name": "text", **paths}


def train(folder: Path, name: str) -> Path:
    """The run of that name, in a folder of its own with a cache of its own."""
    plain = {"model": SMALL_MODEL, "train": TRAIN, "eval": {"every_steps": 4, "max_sentences": 5, "beams": 2}}
    settings = laid(plain, RUNS[name])
    settings["data"] = {**settings.get("data", write_text(folder)), "cache": str(folder / "cache")}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    command("train", folder / f"{name}.yaml", "--out", folder / name, "--quiet")
    return folder / name


def portable(value: Any, folder: Path) -> Any:
    """JSON without the names of temporary folders."""
    return json.loads(json.dumps(value).replace(str(folder), "FOLDER"))


def runs(record: Record) -> None:
    kinds = {"masked": fr.MaskedLanguageModel, "translation": fr.Translator}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        for name in RUNS:
            run = train(folder, name)
            record.add(f"{name}/metrics.jsonl", (run / "metrics.jsonl").read_text(encoding="utf-8"))
            model = kinds.get(name, fr.LanguageModel).load(run, "last")
            for key, tensor in model.state_dict().items():
                record.add(f"{name}/weights/{key}", tensor)
            result = json.loads((run / "result.json").read_text(encoding="utf-8"))
            record.add(f"{name}/result.json", portable({key: result[key] for key in RESULT if key in result}, folder))
            record.add(f"{name}/files", {str(file): True for file in sorted(os.listdir(run))})
        for name, options in (
            ("memory", ["--memory-length", "17", "--segment-length", "5"]),
            ("translation", ["--beam", "3"]),
        ):
            words = ["eval", folder / name, *options, "--json"]
            record.add(f"{name}/eval", portable(json.loads(command(*words)), folder))
        prompt = ["--prompt", "the cat", "--max-new-tokens", 12]
        record.add("memory/generate", command("generate", folder / "memory", *prompt, "--seed", 3))
        record.add("mixture/generate", command("generate", folder / "mixture", *prompt, "--beam", 3))
        sources = (
            (folder / "translation" / "tokenizer" / "source" / "vocabulary.txt").read_text(encoding="utf-8").split()
        )
        lines = " ".join(sources[2:7]) + "\n" + " ".join(sources[5:8]) + "\n"
        record.add("translation/translate", command("translate", folder / "translation", text=lines))


# -- Section: a model exported to Hugging Face ------------------------------------------------------------------------


def export(record: Record) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        os.environ["HF_MODULES_CACHE"] = str(folder / "modules")
        import transformers

        run = train(folder, "mixture")
        command("export", run, folder / "exported", "--to", "hf")
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(folder / "exported", trust_remote_code=True, dtype=torch.float64).eval()
        text = ids("text", 2, 11, vocab_size=12)
        mask = torch.ones_like(text)
        mask[1, :4] = 0
        with torch.no_grad():
            record.add("logits", model(text).logits, FP64)
            record.add("logits, padded", model(text, attention_mask=mask).logits, FP64)
            written = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=8, do_sample=False)
        record.add("generated", written)


# -- Verbs ------------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Record], None]] = {
    "parameters": parameters,
    "attention": attention,
    "models": models,
    "json": json_documents,
    "runs": runs,
    "export": export,
}


def check(file: Path, record: Record, shown: int) -> bool:
    """Print what differs from the recorded section, `shown` lines of it and counts by group; true if nothing does."""
    expected: dict[str, tuple[Any, float]] = torch.load(file, weights_only=True)
    lines, groups = [], Counter[str]()
    for name, entry in expected.items():
        problems, gained = compare(entry, record.entries[name]) if name in record.entries else (["entry lost"], [])
        lines += [f"DIFFERS  {name}: {problem}" for problem in problems]
        lines += [f"new  {name}: {key}" for key in gained]
        groups.update({"/".join(name.split("/")[:2]): 1} if problems else {})
    lines += [f"new  {name}" for name in record.entries.keys() - expected.keys()]
    for line in lines[:shown]:
        print(f"  {line}")
    if len(lines) > shown:
        print(f"  ... and {len(lines) - shown} more (--lines N); differences by group:")
        for group, count in groups.items():
            print(f"    {count:5}  {group}")
    print(f"  {groups.total()} of {len(expected)} entries differ")
    return not groups


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["record", "check"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--lines", type=int, default=40, help="of differences shown for each section")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    print(f"fullrank of {Path(fr.__file__).parent}")
    alike = True
    for section in asked.only:
        start, record, file = time.perf_counter(), Record(), asked.folder / f"{section}.pt"
        print(f"{section}:", flush=True)
        SECTIONS[section](record)
        if asked.verb == "record":
            torch.save(record.entries, file)
            print(f"  {len(record.entries)} entries, {file.stat().st_size / 2**20:.1f} MiB")
        else:
            alike &= check(file, record, asked.lines)
        print(f"  {time.perf_counter() - start:.0f} s", flush=True)
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
