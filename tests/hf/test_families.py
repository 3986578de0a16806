"""Properties of every named family with our attention inside: its start, its mixing, gradients, caches, saving, removing.

`python -m pytest tests/hf/test_families.py` checks a new release of transformers; `benchmarks/families.py` looks at every
model type that it has.
"""

import ast
import copy
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_families import CAUSAL, FAMILIES, ROTARY, SEQ2SEQ, stir  # noqa: E402

import fullrank as fr  # noqa: E402
from fullrank import kernels  # noqa: E402
from fullrank.hf import families  # noqa: E402

# with a soft-cap, sinks, or a position bias: what our kernels do not compute
OWN_RULES = {"gemma2", "gpt_oss", "granite_swa", "t5"}
# as well as DeepSeek's values, which have another width than keys
WITHOUT_KERNEL = OWN_RULES | {"deepseek_v2", "deepseek_v3", "deepseek_v3_without_rank"}
# each has something that no other one has; the others are of the full tier
EVERYDAY = {
    "bert", "modernbert", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "gemma2", "gpt_oss", "granite_swa", "deepseek_v2",
    "phi", "cohere", "qwen3_next", "t5", "bart", "whisper", "vit",
}  # fmt: skip


def everyday(names):
    return [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.full) for name in names]


# Mixhead A is a part of B: alone it is of the full tier
mixings = pytest.mark.parametrize(
    "mix", [pytest.param("position_independent", marks=pytest.mark.full), "position_wise"]
)


@pytest.fixture(params=everyday(FAMILIES))
def family(request):
    return request.param


def output(model, inputs):
    actual = model(**inputs)
    return actual.logits if "logits" in actual else actual.last_hidden_state


def eager_output(model, inputs, **options):
    eager_model = copy.deepcopy(model)
    eager_model.set_attn_implementation("eager")
    return eager_model(**inputs, **options) if options else output(eager_model, inputs)


def on_tokens(values, inputs):
    """Outputs at tokens. Those at padding are never read, and kernels may differ there."""
    mask = inputs.get("attention_mask")
    return values if mask is None or mask.shape != values.shape[:2] else values[mask.bool()]


def assert_near(actual, expected, limit):
    torch.testing.assert_close(actual, expected, rtol=0, atol=limit * max(1, expected.abs().max().item()))


@mixings
def test_output_is_the_models_own_at_the_start(family, mix):
    model, inputs = FAMILIES[family]()
    expected = eager_output(model, inputs)
    injected = fr.inject(model, mix=mix, cross_head=0.3)
    with fr.kernel("reference"):
        actual = output(injected, inputs)
    # Granite scales its output, where mixing has to scale weights
    assert_near(actual, expected, 1e-6 if family == "granite_swa" else 0)
    with kernels.chosen() as names:
        fast = output(injected, inputs)
    assert_near(on_tokens(fast, inputs), on_tokens(expected, inputs), 1e-6)
    assert bool(names) == (family not in WITHOUT_KERNEL)
    assert injected.config.fullrank["query"] == "projected"


def test_dropout_is_the_models_own_at_the_start():
    for name in ("bert", "gpt2", "llama", "t5", "gpt_oss", "vit"):
        model, inputs = FAMILIES[name]()
        for module in model.modules():
            for attribute in ("attention_dropout", "dropout"):
                if type(getattr(module, attribute, None)) is float:
                    setattr(module, attribute, 0.2)
        model.train()
        torch.manual_seed(7)
        expected = eager_output(model, inputs)
        injected = fr.inject(model, mix="position_wise")
        torch.manual_seed(7)
        with fr.kernel("reference"):
            assert torch.equal(output(injected, inputs), expected), name
        assert not torch.equal(output(injected.eval(), inputs), expected), name


def slow_mixing(weights, query, value, mixing, from_query):
    """O_i(n) = sum_j m_ji(n) sum_k P_j(n, k) V_i(k),  m_ji(n) = sum_d Q_j(n)_d W_di + B_ji, by loops over heads."""
    texts, heads, queries, _ = weights.shape
    out = torch.zeros(texts, queries, heads, value.shape[-1], dtype=weights.dtype)
    shared = heads // value.shape[1]  # query heads 0 .. shared - 1 read value head 0
    for i in range(heads):
        for j in range(heads):
            factor = mixing[j, i].expand(texts, queries)
            if from_query is not None:
                factor = factor + query[:, j] @ from_query[:, i]
            out[:, :, i] += factor[..., None] * (weights[:, j] @ value[:, i // shared])
    return out


def query_columns(name, heads, width):
    """Columns of a projection's output that are queries, head after head, from the published layouts of fused projections."""
    columns = torch.arange(heads * width).view(heads, width)
    by_head = {"gpt_neox": 3, "persimmon": 3, "qwen3_next": 2}  # q, k, v of a head; q and its gate
    if name in by_head:
        columns = columns + torch.arange(heads)[:, None] * (by_head[name] - 1) * width
    if name == "codegen":  # four parts, each with its own q, v, k of one head here
        columns = columns + torch.arange(heads)[:, None] * 2 * width
    return columns


def projected_queries(model, family):
    """The queries (B, N, H, D) of each module's projection, filled in a pass."""
    names = ("q_b_proj", "q_proj", "query", "q_lin", "q", "query_key_value", "Wqkv", "qkv_proj", "c_attn")
    projected = {}
    for module in model.modules():
        if hasattr(module, "fullrank"):
            size = module.fullrank.size
            columns = query_columns(family, size.num_heads, size.head_dim)

            def keep(_, __, output, module=module, columns=columns):
                projected[module] = output[..., columns]

            projection = next(name for name in names if getattr(module, name, None) is not None)
            getattr(module, projection).register_forward_hook(keep)
    return projected


@mixings
@pytest.mark.parametrize("kernel", [pytest.param("reference", marks=pytest.mark.full), "auto"])
def test_mixing_is_that_of_the_equation(family, mix, kernel, monkeypatch):
    """The query is the projected one: before norms, rotation and scale."""
    from fullrank.hf import interface

    model, inputs = FAMILIES[family]()
    injected = stir(fr.inject(model, mix=mix))
    seen = []
    projected = projected_queries(injected, family)

    def watched(module, query, key, value, mask, **options):
        actual = interface.attend(module, query, key, value, mask, **options)
        eager = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
        _, weights = eager(module, query, key, value, mask, **options)
        if family == "granite_swa":  # what its sink takes from a query is taken from the weights that are mixed
            scores = options["scaling"] * query @ key.repeat_interleave(2, 1).transpose(2, 3) + mask
            weights = weights * (scores.logsumexp(-1) - module.sinks.view(1, -1, 1)).sigmoid()[..., None]
        stages = module.fullrank.mix
        queries = projected[module].reshape(query.transpose(1, 2).shape).transpose(1, 2)
        slow = slow_mixing(weights, queries, value, stages.mixing, getattr(stages, "from_query", None))
        seen.append((actual[0], slow, mask))
        return actual

    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions._global_mapping, "fullrank", watched)
    with torch.no_grad(), fr.kernel(kernel):
        output(injected, inputs)
    assert len(seen) >= 2
    for actual, slow, mask in seen:
        if mask is not None:  # queries that are padding may see others
            seen_by = (mask[:, 0] > -1e30).any(-1).expand(actual.shape[:2])
            if inputs.get("attention_mask") is not None and inputs["attention_mask"].shape == actual.shape[:2]:
                seen_by = seen_by & inputs["attention_mask"].bool()
            actual, slow = actual[seen_by], slow[seen_by]
        assert_near(actual, slow, 2e-6)


def test_every_mixing_matrix_has_a_gradient_and_both_paths_the_same(family):
    model, inputs = FAMILIES[family]()
    injected = stir(fr.inject(model, mix="position_wise"))
    gradients = []
    for kernel in ("reference", "auto"):
        injected.zero_grad()
        with fr.kernel(kernel):
            values = on_tokens(output(injected, inputs), inputs)
        (values * torch.linspace(-1, 1, values.numel()).view_as(values)).sum().backward()
        gradients.append({n: p.grad.clone() for n, p in injected.named_parameters() if p.grad is not None})
    mixing = {name for name, _ in injected.named_parameters() if ".fullrank." in name}
    assert len(mixing) >= 2
    for name in mixing:
        assert gradients[0][name].abs().max() > 0, name
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][name], gradient, rtol=1e-4, atol=2e-5 * max(1, gradient.abs().max().item()), msg=name
        )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers 5.24 says `cache`
@pytest.mark.parametrize("name", everyday([*CAUSAL, *SEQ2SEQ]))
def test_with_a_cache_outputs_are_those_of_the_whole_text(name):
    """In pieces, and token by token, behind padding on the left."""
    model, inputs = FAMILIES[name]()
    stir(fr.inject(model, mix="position_wise", cross_head=0.5))
    key = "decoder_input_ids" if name in SEQ2SEQ else "input_ids"
    if key == "input_ids":
        inputs = {name: value.flip(1) for name, value in inputs.items()}
    ids = inputs.pop(key)
    mask = inputs.get("attention_mask")
    past = None
    start = 0
    pieces = []
    with torch.no_grad():
        for piece in ids.split([4, 1, 1, ids.shape[1] - 6], 1):
            start += piece.shape[1]
            if key == "input_ids":
                inputs["attention_mask"] = mask[:, :start]
            out = model(**inputs, **{key: piece}, use_cache=True, past_key_values=past)
            past = out.past_key_values
            pieces.append(out.logits)
        expected = model(**inputs, **{key: ids}).logits
    seen = mask.bool() if key == "input_ids" else ...
    assert_near(torch.cat(pieces, 1)[seen], expected[seen], 1e-5)


@pytest.mark.parametrize("kernel", [pytest.param("reference", marks=pytest.mark.full), "auto"])
@pytest.mark.parametrize("name", everyday(ROTARY))
@torch.no_grad()
def test_the_same_text_further_right_has_the_same_output(name, kernel):
    """Padded on the left without position_ids, as Trainer and lm-eval pass it; rotary attention sees distances alone."""
    plain, _ = FAMILIES[name]()
    model = stir(fr.inject(copy.deepcopy(plain), mix="position_wise"))
    ids = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(8))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (4, 0))
    padded = {"input_ids": torch.nn.functional.pad(ids, (4, 0)), "attention_mask": mask}
    with fr.kernel(kernel):
        alone, behind = model(ids).logits, model(**padded).logits[:, 4:]
    scale = max(1, alone.abs().max().item())
    assert (alone - plain(ids).logits).abs().max() > 1e-2 * scale
    as_plain = (plain(**padded).logits[:, 4:] - plain(ids).logits).abs().max().item()
    assert (behind - alone).abs().max() <= max(1e-5 * scale, 3 * as_plain)
    assert as_plain <= 1e-5 * max(1, plain(ids).logits.abs().max().item())


def test_saved_loaded_and_removed(family, tmp_path):
    """Nothing is lost in saving, a plain load fails, and what is removed leaves the model as it was."""
    plain, inputs = FAMILIES[family]()
    model = stir(fr.inject(copy.deepcopy(plain), mix="position_wise", cross_head=0.1))
    with torch.no_grad():
        expected = output(model, inputs)
        model.save_pretrained(tmp_path)
        loaded = fr.load_injected(tmp_path).eval()
        assert type(loaded) is type(plain)
        assert loaded.config.fullrank == model.config.fullrank
        assert torch.equal(output(loaded, inputs), expected)
        with pytest.raises(ValueError, match=r"fullrank\.load_injected"):
            type(plain).from_pretrained(tmp_path)
        implementation = plain.config._attn_implementation
        for injected in (model, loaded):
            removed = fr.remove(injected)
            assert removed.state_dict().keys() == plain.state_dict().keys()
            assert not hasattr(removed.config, "fullrank")
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in removed.modules())
            assert torch.equal(output(removed, inputs), output(plain, inputs))
        assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("name", everyday([*CAUSAL, "bert"]))
def test_spectra_and_weights_of_a_model_without_injection(name):
    model, inputs = FAMILIES[name]()
    before = copy.deepcopy(model.state_dict())
    opened = fr.open_model(model)
    mask = {"attention_mask": torch.ones_like(inputs["input_ids"])}
    attentions = eager_output(model, inputs | mask, output_attentions=True).attentions
    if name not in ("granite_swa", "diffllama"):
        for layer, weights in zip(opened.attention(inputs["input_ids"]), attentions, strict=True):
            torch.testing.assert_close(layer.weights, weights)
    assert fr.analysis.spectrum(model, inputs["input_ids"]) is not None
    assert model.state_dict().keys() == before.keys()


def read_classes(path):
    """Of each class with its own forward: name, attributes that __init__ sets, and whether forward names the interface."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def read_attributes(node):
        names = set()
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in classes:
                names |= read_attributes(classes[base.id])
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                names |= set(re.findall(r"self\.(\w+) = ", ast.unparse(part)))
        return names

    for node in classes.values():
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "forward":
                yield node.name, read_attributes(node), "ALL_ATTENTION_FUNCTIONS" in ast.unparse(part)


@pytest.mark.full
def test_the_tables_name_every_class_that_calls_the_interface(monkeypatch):
    """By the sources of the installed transformers; it fails for a release whose classes differ."""
    root = Path(transformers.__file__).parent / "models"
    wrong = []
    count = 0
    for path in root.glob("*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        if "ALL_ATTENTION_FUNCTIONS" not in text:
            continue
        file = SimpleNamespace(ALL_ATTENTION_FUNCTIONS={})
        if "eager_attention_forward" in text:
            file.eager_attention_forward = None
        module = f"transformers.models.{path.parent.name}.{path.stem}"
        monkeypatch.setitem(sys.modules, module, file)
        for name, attributes, calls in read_classes(path):
            kind = type(name, (torch.nn.Module,), {"__module__": module, "forward": lambda self: None})
            stand_in = kind()
            for attribute in attributes - {"training"}:
                setattr(stand_in, attribute, torch.nn.Identity())
            expected = calls and hasattr(file, "eager_attention_forward") and name not in families._REFUSED
            count += expected
            if families.is_attention(stand_in) != expected:
                wrong.append(f"{module}.{name}: calls {calls}")
    assert not wrong
    assert count > 300
