"""Injected models in other people's tools: PEFT, activation checkpointing, the compiler, static caches, masks."""

import copy

import paired_models
import peft
import pytest
import torch
from tiny_families import FAMILIES, stir
from transformers.pytorch_utils import Conv1D

import fullrank as fr
import hugging_face_models as tiny
from fullrank import kernels
from fullrank.core.embedding import Linear
from fullrank.core.errors import InputError
from fullrank.hf.causal import TransposedLinear, use_own_products


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_checkpointed_layers_draw_the_same_permutation_and_the_same_dropout(reentrant):
    model, inputs = FAMILIES["bert"]()
    stir(fr.inject(model, mix="position_wise", cross_head=0.5)).train()
    assert model.config.attention_probs_dropout_prob > 0
    gradients = []
    for checkpointed in (False, True):
        trained = copy.deepcopy(model)
        if checkpointed:
            trained.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                trained.enable_input_require_grads()
        for seed in range(4):
            torch.manual_seed(seed)
            trained(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append({name: p.grad for name, p in trained.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore")
def test_peft_keeps_mixing_beside_lora(tmp_path):
    base, inputs = FAMILIES["bert"]()
    config = peft.LoraConfig(target_modules=["query", "value"], modules_to_save=["fullrank"], r=2)
    model = peft.get_peft_model(fr.inject(copy.deepcopy(base), mix="position_wise", cross_head=0.1), config)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sum(".fullrank." in name for name in trained) == 4
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    groups = fr.parameter_groups(model, learning_rate=1e-3, mixing_learning_rate=0.1, weight_decay=0.1)
    assert [len(group["params"]) for group in groups if group["lr"] == 0.1] == [4]
    model.eval().save_pretrained(tmp_path)
    expected = model(**inputs).logits
    assert not torch.allclose(expected, base(**inputs).logits)
    fresh = fr.inject(copy.deepcopy(base), mix="position_wise", cross_head=0.1)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
    assert torch.equal(loaded(**inputs).logits, expected)
    with loaded.disable_adapter():
        torch.testing.assert_close(loaded(**inputs).logits, base(**inputs).logits)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(**inputs).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "adapter", [peft.LoraConfig(target_modules="all-linear"), peft.PromptTuningConfig(num_virtual_tokens=3)]
)
def test_peft_trains_and_generates_with_our_own_models(adapter):
    adapter.task_type = "CAUSAL_LM"
    hf_model, input_ids = paired_models.pair(paired_models.CAUSAL["memory"])[0], paired_models.tokens()
    model = peft.get_peft_model(hf_model, adapter)
    mask = torch.ones_like(input_ids)
    model(input_ids, attention_mask=mask, labels=input_ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert model.generate(input_ids=input_ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4).shape == (2, 11)


@pytest.mark.filterwarnings("ignore")
def test_peft_before_injection_is_refused_with_the_right_order():
    wrapped = peft.get_peft_model(FAMILIES["bert"]()[0], peft.LoraConfig(target_modules=["query"], r=2))
    before = set(wrapped.state_dict())
    for model in (wrapped, wrapped.base_model.model):
        with pytest.raises(InputError, match=r"first, then get_peft_model with modules_to_save=\['fullrank'\]"):
            fr.inject(model, mix="position_wise")
    assert set(wrapped.state_dict()) == before
    fr.inject(wrapped, cross_head=0.5)  # which has no parameters to lose


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("bert", "gpt2", "t5"))]
)
@pytest.mark.full
def test_compiled_in_one_graph_is_the_same(name):
    """A mask of padding breaks no graph."""
    if torch.__version__ < ("2.11" if name == "t5" else "2.9"):
        pytest.skip(f"the compiler of torch {torch.__version__} breaks the graph of this model")
    model, inputs = FAMILIES[name]()
    assert not inputs["attention_mask"].all()
    stir(fr.inject(model, mix="position_wise", cross_head=0.5))
    with torch.no_grad():
        with fr.kernel("reference"):
            expected = model(**inputs).logits
        torch.compiler.reset()
        actual = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_a_static_cache_generates_the_same():
    model, inputs = FAMILIES["llama"]()
    stir(fr.inject(model, mix="position_wise"))
    inputs = {key: value.flip(1) for key, value in inputs.items()}
    results = [
        model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False, disable_compile=True, **options)
        for options in ({}, {"cache_implementation": "static"})
    ]
    assert torch.equal(*results)


def test_masks_of_every_kind_keep_their_meaning():
    """A mask (N, N): causal, with padding, or another one; a kernel runs where a layout can express the mask."""
    model, inputs = FAMILIES["llama"]()
    stir(fr.inject(model, mix="position_independent"))
    ids = inputs["input_ids"]
    low = torch.finfo(torch.float32).min
    length = ids.shape[1]
    causal = torch.full((length, length), low).triu(1).expand(3, 1, -1, -1)
    both = causal.masked_fill(torch.arange(length) > 7, low)
    odd = causal.clone()
    odd[:, :, 6, 3] = low
    biased = causal + torch.linspace(0, 1, length)
    for mask, fast in ((causal, True), (both, True), (odd, False), (biased, False)):
        with fr.kernel("reference"):
            expected = model(input_ids=ids, attention_mask=mask).logits
        with kernels.chosen() as names:
            actual = model(input_ids=ids, attention_mask=mask).logits
        assert bool(names) == fast
        shown = slice(0, 8) if mask is both else slice(None)
        torch.testing.assert_close(actual[:, shown], expected[:, shown], rtol=0, atol=1e-5)


def test_sigsoftmax_is_that_of_the_equation():
    model, inputs = FAMILIES["bert"]()
    layer = model.bert.encoder.layer[0].attention.self
    seen = {}
    layer.register_forward_hook(lambda _, arguments, outputs: seen.update(x=arguments[0], out=outputs[0]))
    fr.inject(model, normalize="sigsoftmax")
    for kernel in ("reference", "auto"):
        with fr.kernel(kernel), torch.no_grad():
            model(**inputs)
        x = seen["x"].double()
        heads = [torch.nn.functional.linear(x, p.weight.double(), p.bias.double()).unflatten(-1, (4, 8)).transpose(1, 2)
                 for p in (layer.query, layer.key, layer.value)]  # fmt: skip
        scores = heads[0] @ heads[1].transpose(2, 3) / 8**0.5
        raw = scores.exp() * scores.sigmoid() * inputs["attention_mask"][:, None, None]
        expected = (raw / raw.sum(-1, keepdim=True) @ heads[2]).transpose(1, 2).flatten(2)
        torch.testing.assert_close(seen["out"].double(), expected, rtol=0, atol=1e-5)


IDS = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(8))


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_projection_that_peft_replaces_hands_over_with_its_adapter():
    model = stir(fr.inject(FAMILIES["llama"]()[0], mix="position_wise"))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["fullrank"], r=2))
    for name, parameter in wrapped.named_parameters():
        if "lora" in name:
            parameter.normal_()
    wrapped.eval()
    trace = fr.Trace()
    attention = wrapped.base_model.model.model.layers[0].self_attn
    states = {}
    attention.q_proj.register_forward_hook(lambda _, __, output: states.update(query=output))
    with fr.traced(trace):
        expected = wrapped(IDS).logits
    query = states["query"].unflatten(-1, (4, -1))
    mix = attention.fullrank.mix
    torch.testing.assert_close(trace.layers[0].mixing, query @ mix.from_query + mix.mixing)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    fr.remove(merged)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in merged.modules())


def test_an_adapter_without_peft_says_how_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "fullrank.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(InputError, match="base_model_name_or_path: the model that it adapts, given None"):
        fr.load_injected(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "none"}')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"LoRA needs peft; install it"):
        fr.load_injected(tmp_path)


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.llama])
def test_own_products_change_no_number_and_no_name(make):
    model = make().eval()
    ids = torch.arange(12).reshape(2, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(ids).logits
    use_own_products(model)
    kinds = {type(module) for module in model.modules()}
    assert kinds & {Linear, TransposedLinear}
    assert not kinds & {torch.nn.Linear, Conv1D}
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-6, atol=1e-6)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    mixture = fr.inject(model, output="mixture_of_softmaxes")
    torch.testing.assert_close(mixture(ids).logits, expected.log_softmax(-1), rtol=1e-5, atol=1e-5)
