"""Transformer-XL equals the implementation of transformers 4.35.2 (transfo_xl_reference.json), and reads its files."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

import transfo_xl_reference as reference  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from fullrank.core.errors import ConfigError, InputError  # noqa: E402
from fullrank.hf import TransfoXLConfig, TransfoXLLMHeadModel, TransfoXLModel, TransfoXLTokenizer  # noqa: E402

OLD = json.loads(reference.FILE.read_text(encoding="utf-8"))
PAGE = Path(__file__).parents[2] / "docs" / "transformer_xl.md"
IDS, NEXT = reference.SEGMENTS


def model_of(case, dtype=torch.float64, **settings):
    """The model of a case, with the parameters of the reference."""
    model = TransfoXLLMHeadModel(TransfoXLConfig(**reference.SIZES | reference.CASES[case] | settings)).eval()
    reference.fill(model)
    return model.to(dtype)


@pytest.mark.parametrize("case", OLD["cases"])
@torch.no_grad()
def test_outputs_are_those_of_the_old_code(case):
    assert list(OLD["cases"]) == list(reference.CASES)
    old = OLD["cases"][case]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        for name, value in reference.outputs(model_of(case, dtype)).items():
            if old[name] is None:
                assert value is None
                continue
            expected = torch.tensor(old[name], dtype=torch.float64)
            error = (value.double().flatten() - expected).abs() / expected.abs().clamp_min(1)
            assert error.max() < tolerance, (name, dtype)


@pytest.mark.parametrize("case", OLD["cases"])
def test_texts_are_those_of_the_old_code(case):
    model = model_of(case, torch.float32)
    for name, beams in (("greedy", 1), ("beams", 3)):
        written = model.generate(IDS, max_new_tokens=5, do_sample=False, num_beams=beams)
        assert written[:, 5:].tolist() == OLD["cases"][case][name]


def test_a_text_goes_on_after_the_memory_of_another_call():
    model = model_of("div_val 2, same length, clamped")
    mems = model(IDS).mems
    assert [mem.shape for mem in mems] == [(4, 2, 12)] * 2
    assert not any(mem.requires_grad for mem in mems)
    written = model.generate(NEXT, mems=mems, max_new_tokens=3, do_sample=False)
    text = NEXT
    for _ in range(3):  # token by token, with the memory
        out = model(text if text is NEXT else text[:, -1:], mems=mems)
        text, mems = torch.cat((text, out.logits[:, -1:].argmax(-1)), 1), out.mems
    assert torch.equal(written, text)
    with pytest.raises(ValueError, match="attention_mask"):
        model.generate(IDS, attention_mask=torch.ones_like(IDS))
    with pytest.raises(ValueError, match="stateful"):
        model.generate(IDS, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("case", ["div_val 1, projections untied", "div_val 4, projections tied", "no clusters"])
def test_losses_are_those_of_the_scores(case):
    model = model_of(case)
    labels = IDS.clone()
    labels[0, 2] = labels[1, 4] = -100
    log_p = model(IDS).logits
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(2, 5, dtype=torch.float64))
    expected = torch.nn.functional.nll_loss(log_p[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    out = model(IDS, labels=labels)
    torch.testing.assert_close(out.losses, expected)
    torch.testing.assert_close(out.loss, expected.sum() / 6)
    assert out.prediction_scores is None
    wanted = torch.autograd.grad(expected.sum() / 6, list(model.parameters()))
    for (name, _), one, other in zip(
        model.named_parameters(), torch.autograd.grad(out.loss, list(model.parameters())), wanted, strict=True
    ):
        torch.testing.assert_close(one, other, msg=name)
    assert model(IDS, labels=torch.full_like(IDS, -100)).loss == 0


def test_nothing_depends_on_a_later_token():
    model = model_of("div_val 2, same length, clamped")
    changed = IDS.clone()
    changed[:, 3] = torch.tensor([2, 6])
    before, after = model(IDS).logits, model(changed).logits
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])


# -- files of old models ---------------------------------------------------------------------------------------------


def test_the_layout_is_that_of_the_published_model():
    with torch.device("meta"):
        model = TransfoXLLMHeadModel(TransfoXLConfig())
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes["transformer.pos_emb.inv_freq"] = [512]  # the old code saved what follows from d_model
    layers = {
        name.replace(".layers.0.", f".layers.{i}."): shape
        for name, shape in OLD["wt103"]["shapes"].items()
        for i in range(18)
    }
    assert shapes == layers
    assert len(shapes) == OLD["wt103"]["tensors"] == 257
    assert model.num_parameters() == OLD["wt103"]["parameters"] == 285_205_322


def old_folder(folder, case, kind):
    """A folder as transformers 4.35 wrote it: pytorch_model.bin has tied tensors twice, safetensors once."""
    model = model_of(case, torch.float32)
    folder.mkdir(exist_ok=True)
    state = OrderedDict(model.state_dict()) | {"transformer.pos_emb.inv_freq": torch.ones(6)}
    if kind == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        from safetensors.torch import save_file

        tied = model.all_tied_weights_keys
        save_file({name: tensor for name, tensor in state.items() if name not in tied}, folder / "model.safetensors")
    settings = model.config.to_dict() | {"adaptive": True, "attn_type": 0, "init": "normal", "sample_softmax": -1}
    settings |= {
        "tgt_len": 128,
        "ext_len": 0,
        "tie_weight": True,
        "task_specific_params": {"text-generation": {"max_length": 250}},
    }
    settings |= {"transformers_version": "4.35.2", "torch_dtype": "float32"}
    del settings["proj_share_all_but_first"], settings["dtype"]
    if settings["tie_word_embeddings"]:
        del settings["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(settings))
    return model


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
@pytest.mark.parametrize("case", ["div_val 1, projections tied", "div_val 4, all untied", "one pair of biases"])
def test_old_folders_load(tmp_path, case, kind):
    model = old_folder(tmp_path / "old", case, kind)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "old")
    assert type(loaded) is TransfoXLLMHeadModel
    assert len(list(loaded.parameters())) == len(list(model.parameters()))  # tied tensors are one
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    loaded.save_pretrained(tmp_path / "new")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new", mem_len=6)
    assert len(list(again.parameters())) == len(list(model.parameters()))
    longer = model_of(case, torch.float32, mem_len=6)
    assert torch.equal(again(IDS).logits, longer(IDS).logits)
    inner = AutoModel.from_pretrained(tmp_path / "new")
    assert type(inner) is TransfoXLModel
    assert torch.equal(inner(IDS).last_hidden_state, model.transformer(IDS).last_hidden_state)


def test_what_cannot_be_used_is_refused_by_name():
    with pytest.raises(ConfigError) as error:
        TransfoXLConfig(vocab_size=20, cutoffs=[9, 5], d_embed=8, mem_len=0)
    keys = [problem.partition(":")[0] for problem in error.value.problems]
    assert keys == ["cutoffs", "div_val", "same_length"]
    model = model_of("plain")
    for inputs, words in (
        ({"input_ids": torch.tensor([[13]])}, r"input_ids: an index from 0 to 12 .* given 13"),
        ({"input_ids": IDS, "labels": IDS + 9}, r"labels: an index from 0 to 12"),
        ({"input_ids": IDS, "mems": model(IDS[:1]).mems}, r"mems: 2 tensors \(M, 2, 12\), given \[\(4, 1, 12\)"),
    ):
        with pytest.raises(InputError, match=words):
            model(**inputs)
    with pytest.raises(InputError, match="keeps its 13 tokens, given 14"):
        model.resize_token_embeddings(14)


# -- words -----------------------------------------------------------------------------------------------------------


def vocabulary(folder, kind="txt"):
    """A vocabulary file as an old release or the published model has it."""
    path = folder / f"vocab.{kind}"
    words = {"idx2sym": reference.WORDS, "sym2idx": OrderedDict((word, i) for i, word in enumerate(reference.WORDS))}
    if kind == "txt":
        path.write_text("\n".join(reference.WORDS), encoding="utf-8")
    elif kind == "pkl":
        path.write_bytes(pickle.dumps(words))
    else:
        torch.save(words, path, _use_new_zipfile_serialization=kind == "pt")
        assert zipfile.is_zipfile(path) == (kind == "pt")
    return path


def test_words_are_those_of_the_old_tokenizer(tmp_path):
    pytest.importorskip("sacremoses")
    tokenizer = TransfoXLTokenizer(str(vocabulary(tmp_path)))
    tokenizer.save_pretrained(tmp_path / "saved")
    TransfoXLConfig(**reference.SIZES).save_pretrained(tmp_path / "saved")
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert type(one) is TransfoXLTokenizer
        assert one.get_vocab() == {word: i for i, word in enumerate(reference.WORDS)}
        for text, old in zip(reference.TEXTS, OLD["tokenizer"], strict=True):
            assert one(text).input_ids == old["ids"]
            assert one.decode(old["ids"]) == old["text"]


def test_text_that_is_already_words_needs_no_moses(tmp_path):
    tokenizer = TransfoXLTokenizer(str(vocabulary(tmp_path)), moses=False, lower_case=True)
    ids = tokenizer("The state @-@ of <formula> 23 @,@ 000 unheard <eos>").input_ids
    assert tokenizer.decode(ids) == "the state @-@ of <formula> 23 @,@ 000 <unk> <eos>"


@pytest.mark.parametrize("kind", ["bin", "pt", "pkl"])
def test_a_pickle_is_refused(tmp_path, kind):
    with pytest.raises(InputError, match=r"is a pickle, which may run any code .* docs/transformer_xl.md"):
        TransfoXLTokenizer(str(vocabulary(tmp_path, kind)), moses=False)


def test_files_that_are_no_vocabulary_are_named(tmp_path):
    (tmp_path / "vocab.txt").write_text("a\n\nb\n")
    with pytest.raises(InputError, match=r"vocab.txt: line 2 holds no word"):
        TransfoXLTokenizer(str(tmp_path / "vocab.txt"), moses=False)
    (tmp_path / "vocab.txt").write_text("a\nb 12\n<S>\n")
    with pytest.raises(InputError, match="<unk>, <eos> is no word of it"):
        TransfoXLTokenizer(str(tmp_path / "vocab.txt"), moses=False)
    assert TransfoXLTokenizer(str(tmp_path / "vocab.txt"), moses=False, unk_token="a", eos_token="<S>")(
        "b c"
    ).input_ids == [1, 0]
    with pytest.raises(InputError, match=r"there is no vocab.txt"):
        TransfoXLTokenizer(moses=False)


def test_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("sacremoses")
    monkeypatch.chdir(tmp_path)
    settings = {"vocab_size": len(reference.WORDS), "eos_token_id": 0}
    model_of("div_val 4, projections tied", torch.float32, **settings).save_pretrained("transfo-xl-wt103")
    vocabulary(tmp_path / "transfo-xl-wt103", "bin")
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    names = {"texts": reference.TEXTS}
    exec(compile(code, PAGE.name, "exec"), names)
    assert (tmp_path / "converted" / "vocab.txt").read_text(encoding="utf-8").split() == reference.WORDS
    assert isinstance(names["text"], str)
    assert names["mems"][0].shape == (4, 1, 12)
    assert (tmp_path / "converted" / "model.safetensors").is_file()
