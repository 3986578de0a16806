"""Injected models in other people's tools: Trainer, PEFT, activation checkpointing, the compiler, halves, static caches."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_families import FAMILIES  # noqa: E402

import fullrank as fr  # noqa: E402
from fullrank import kernels  # noqa: E402
from fullrank.core.errors import InputError  # noqa: E402


def stir(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".fullrank." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def mixing_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".fullrank." in name}


@pytest.mark.filterwarnings("ignore")
def test_trainer_trains_mixing_and_never_decays_it(tmp_path):
    pytest.importorskip("accelerate")
    model, inputs = FAMILIES["bert"]()
    stir(fr.inject(model, mix="position_wise", cross_head=0.2))
    rows = [{key: value[i] for key, value in inputs.items()} | {"labels": inputs["input_ids"][i]} for i in range(3)]
    options = {
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 3,
    }
    arguments = transformers.TrainingArguments(tmp_path, max_steps=2, weight_decay=0.5, learning_rate=1e-2, **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    before = mixing_of(model)
    decayed = set(trainer.get_decay_parameter_names(model))
    assert not any(".fullrank." in name for name in decayed)
    plain = transformers.BertForMaskedLM(model.config.__class__(hidden_size=32, num_attention_heads=4))
    expected = {name for name, _ in plain.named_parameters() if "bias" not in name and "LayerNorm" not in name}
    assert set(trainer.get_decay_parameter_names(plain)) >= expected - {"cls.predictions.decoder.weight"}
    trainer.train()
    after = mixing_of(model)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    mixing = {id(p) for name, p in model.named_parameters() if ".fullrank." in name}
    for group in trainer.optimizer.param_groups:
        assert group["weight_decay"] == 0 or not mixing & {id(p) for p in group["params"]}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_checkpointed_layers_draw_the_same_permutation_and_the_same_dropout(reentrant):
    model, inputs = FAMILIES["bert"]()
    stir(fr.inject(model, mix="position_wise", cross_head=0.5)).train()
    assert model.config.attention_probs_dropout_prob > 0
    gradients = []
    for checkpointed in (False, True):
        again = copy.deepcopy(model)
        if checkpointed:
            again.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                again.enable_input_require_grads()
        for seed in range(4):
            torch.manual_seed(seed)
            again(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append({name: p.grad for name, p in again.named_parameters() if p.grad is not None})
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
    again = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
    assert torch.equal(again(**inputs).logits, expected)
    with again.disable_adapter():
        torch.testing.assert_close(again(**inputs).logits, base(**inputs).logits)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(**inputs).logits, expected, rtol=1e-4, atol=1e-5)


def adapter_of(model, folder, **options):
    """Train an adapter of PEFT on a model, save it, and return the adapted model with the warnings of saving."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], r=2, **options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                parameter.normal_()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adapted.eval().save_pretrained(folder)
    return adapted, "".join(str(warning.message) for warning in said)


LOADERS = {
    "peft": lambda model, folder: peft.PeftModel.from_pretrained(model, folder),
    "transformers": lambda model, folder: (model.load_adapter(folder), model)[1],
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("injected", [{"mix": "position_wise"}, {"mix": "average"}, {"output": "mixture_of_softmaxes"}])
def test_an_adapter_names_injection_where_its_base_has_none(tmp_path, injected, loader):
    """PEFT alone leaves out keys that a model does not have, without a word; its configuration now makes it warn."""
    base, inputs = FAMILIES["bert"]()
    model = stir(fr.inject(copy.deepcopy(base), **injected))
    adapted, said = adapter_of(model, tmp_path, modules_to_save=["fullrank"])
    assert "fullrank" not in said
    assert "- fullrank\n" in (tmp_path / "README.md").read_text()
    with pytest.warns(UserWarning, match="fullrank.inject on the base model"):
        LOADERS[loader](copy.deepcopy(base), tmp_path)
    again = LOADERS[loader](fr.inject(copy.deepcopy(base), **injected), tmp_path).eval()
    assert torch.equal(again(**inputs).logits, adapted(**inputs).logits)
    with pytest.raises(InputError, match=r"an adapter of PEFT; call fullrank\.inject"):
        fr.load_injected(tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("excluded", [["layer.1.attention.self.query"], r".*\.1\..*query"])
def test_modules_that_an_adapter_excludes_stay_excluded(tmp_path, excluded):
    base, inputs = FAMILIES["bert"]()
    model = stir(fr.inject(copy.deepcopy(base), mix="position_wise"))
    adapted, _ = adapter_of(model, tmp_path, modules_to_save=["fullrank"], exclude_modules=excluded)
    again = LOADERS["peft"](fr.inject(copy.deepcopy(base), mix="position_wise"), tmp_path).eval()
    wrapped = {key.partition(".lora_A")[0] for key in again.state_dict() if "lora_A" in key}
    assert wrapped == {"base_model.model.bert.encoder.layer.0.attention.self.query"}
    assert torch.equal(again(**inputs).logits, adapted(**inputs).logits)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("injected", [{"mix": "position_wise"}, {"mix": "random"}, {"output": "mixture_of_softmaxes"}])
def test_an_adapter_without_mixing_is_named_in_saving_and_loading(tmp_path, injected):
    base, inputs = FAMILIES["bert"]()
    adapted, said = adapter_of(stir(fr.inject(copy.deepcopy(base), **injected)), tmp_path / "peft")
    assert "without modules_to_save=['fullrank']" in said
    fresh = fr.inject(copy.deepcopy(base), **injected)
    with pytest.warns(UserWarning, match=r"modules_to_save=\['fullrank'\]"):
        loaded = LOADERS["peft"](fresh, tmp_path / "peft")
    assert not torch.allclose(loaded.eval()(**inputs).logits, adapted(**inputs).logits)
    with pytest.warns(UserWarning, match="fullrank.inject on the base model"):
        LOADERS["peft"](copy.deepcopy(base), tmp_path / "peft")
    fr.save_adapter(adapted.get_base_model(), tmp_path / "ours")
    fresh = fr.load_adapter(copy.deepcopy(base), tmp_path / "ours")
    again = LOADERS["peft"](fresh, tmp_path / "peft").eval()  # a warning would be an error
    assert torch.equal(again(**inputs).logits, adapted(**inputs).logits)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_of_a_saved_injected_model_needs_no_mixing_of_its_own(tmp_path):
    base, inputs = FAMILIES["bert"]()
    stir(fr.inject(base, mix="position_wise")).save_pretrained(tmp_path / "base")
    adapted, said = adapter_of(fr.load_injected(tmp_path / "base"), tmp_path / "peft")
    assert "fullrank" not in said
    again = LOADERS["peft"](fr.load_injected(tmp_path / "base"), tmp_path / "peft").eval()
    assert torch.equal(again(**inputs).logits, adapted(**inputs).logits)
    trained = fr.load_injected(tmp_path / "base")
    adapted = peft.get_peft_model(trained, peft.LoraConfig(target_modules=["query"]))
    trained.bert.encoder.layer[0].attention.self.fullrank.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"holds nothing of .*layer\.0\.attention\.self\.fullrank"):
        adapted.save_pretrained(tmp_path / "trained")


@pytest.mark.filterwarnings("ignore")
def test_prompts_of_peft_hold_no_mixing_either(tmp_path):
    model = fr.inject(FAMILIES["llama"]()[0], mix="position_wise")
    adapted = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.warns(UserWarning, match="holds nothing of"):
        adapted.save_pretrained(tmp_path)
    fresh = fr.inject(FAMILIES["llama"]()[0], mix="position_wise")
    with pytest.warns(UserWarning, match="saved without modules_to_save"):
        peft.PeftModel.from_pretrained(fresh, tmp_path)


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


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_bf16_is_as_near_to_fp32_as_without_injection(name):
    model, inputs = FAMILIES[name]()
    mask = inputs["attention_mask"].bool() if name != "t5" else ...
    expected = model(**inputs).logits[mask]
    own = copy.deepcopy(model).to(torch.bfloat16)
    own.set_attn_implementation("eager")
    error = (own(**inputs).logits[mask].float() - expected).abs().mean()
    fr.inject(model.to(torch.bfloat16), mix="position_wise")
    for kernel in ("auto", "reference"):
        with fr.kernel(kernel):
            actual = model(**inputs).logits[mask]
        assert actual.dtype == torch.bfloat16
        assert (actual.float() - expected).abs().mean() < 1.5 * error


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # transformers 5.24 says `cache`
@pytest.mark.parametrize("mix", ["position_independent", "position_wise"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
def test_a_step_of_decoding_is_that_of_the_definition(name, mix):
    model, inputs = FAMILIES[name]()
    stir(fr.inject(model, mix=mix))
    key = "decoder_input_ids" if name == "bart" else "input_ids"
    if name != "bart":
        inputs = {key: value.flip(1) for key, value in inputs.items()}  # padded on the left
    ids, before = inputs.pop(key), dict(inputs)
    if name != "bart":
        before["attention_mask"] = inputs["attention_mask"][:, :-1]
    steps = []
    for kernel in ("reference", "auto"):
        with torch.no_grad(), fr.kernel(kernel):
            past = model(**before, **{key: ids[:, :-1]}, use_cache=True).past_key_values
            steps.append(model(**inputs, **{key: ids[:, -1:]}, past_key_values=past).logits)
    torch.testing.assert_close(steps[1], steps[0], rtol=0, atol=1e-6 * max(1, steps[0].abs().max().item()))


def test_a_static_cache_generates_the_same():
    model, inputs = FAMILIES["llama"]()
    stir(fr.inject(model, mix="position_wise"))
    inputs = {key: value.flip(1) for key, value in inputs.items()}
    results = [
        model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False, disable_compile=True, **options)
        for options in ({}, {"cache_implementation": "static"})
    ]
    assert torch.equal(*results)


def test_a_kernel_by_name_computes_it_or_refuses():
    model, inputs = FAMILIES["bert"]()
    stir(fr.inject(model, mix="position_wise"))
    with fr.kernel("blocks"):
        actual = model(**inputs).logits
    with fr.kernel("reference"):
        torch.testing.assert_close(actual, model(**inputs).logits, rtol=0, atol=1e-5)
    with fr.kernel("sdpa"), pytest.raises(InputError, match="sdpa"):
        model(**inputs)


def test_masks_of_every_kind_keep_their_meaning():
    """A mask given whole: causal, padding, or neither; the fast path is taken where a layout can say it."""
    model, inputs = FAMILIES["llama"]()
    stir(fr.inject(model, mix="position_independent"))
    ids, low = inputs["input_ids"], torch.finfo(torch.float32).min
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


def test_a_mask_that_was_written_into_is_read_again():
    from fullrank.hf.interface import layout_of

    mask = torch.zeros(1, 1, 4, 4)
    query = torch.zeros(1, 1, 4, 2)
    assert layout_of(mask, query, query).unrestricted
    mask[..., 1:] = torch.finfo(torch.float32).min
    assert layout_of(mask, query, query).key_mask.tolist() == [[True, False, False, False]]


def test_sigsoftmax_is_that_of_the_equation():
    model, inputs = FAMILIES["bert"]()
    layer = model.bert.encoder.layer[0].attention.self
    seen = {}
    layer.register_forward_hook(lambda module, given, actual: seen.update(x=given[0], out=actual[0]))
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
