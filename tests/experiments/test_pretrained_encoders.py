"""Encoders for `model.pretrained`: other families, checkpoints of other tasks, and injected ones."""

import pytest
import torch
from tests.tiny_encoder import SPECIAL, WORDS, tiny_encoder, tiny_tokenizer

from fullrank.config.finetune import GLUE, GraftConfig, PretrainedConfig
from fullrank.experiments.finetuning import encode, logits_by_example
from fullrank.experiments.pretrained import load_pretrained

transformers = pytest.importorskip("transformers")

TEXTS = ["the cat", "a red dog sleeps", "old bird not sings the blue a", "cat"]


def load(folder, num_labels=2, **graft):
    config = PretrainedConfig(pretrained=str(folder), attention=GraftConfig(**graft))
    return load_pretrained(config, "classification", num_labels=num_labels)


def tiny_gpt2(folder, **tokenizer):
    tiny_tokenizer(folder, **tokenizer)
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=4, n_positions=32, bos_token_id=None,
                                     eos_token_id=None)  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("padding", [False, True])
def test_a_decoder_is_read_at_the_last_token_of_each_text(tmp_path, padding):
    """In a batch of several lengths the logits are those of each text by itself, without any padding."""
    decoder = load(tiny_gpt2(tmp_path, padding=padding, end=True))
    encoded = encode(decoder, [(text,) for text in TEXTS], 16)
    together = logits_by_example(decoder.model, encoded, 4, lambda model, batch: model(**batch.inputs).logits)
    ids = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    with torch.no_grad():
        rows = [torch.tensor([*map(ids.get, text.split())])[None] for text in TEXTS]
        alone = [decoder.model(row).logits[0] for row in rows]
    torch.testing.assert_close(together, alone)
    assert torch.stack(together).std(0).min() > 0


def test_a_checkpoint_of_another_task_gives_its_encoder_and_a_new_output_layer(tmp_path):
    tiny_encoder(tmp_path)
    of_mnli = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    of_mnli.save_pretrained(tmp_path)
    encoder = load(tmp_path, num_labels=2)
    assert encoder.model.config.num_labels == 2
    assert encoder.fresh == ("classifier.bias", "classifier.weight")
    for name, parameter in of_mnli.bert.named_parameters():
        assert torch.equal(encoder.model.bert.get_parameter(name), parameter)
    assert load(tmp_path, num_labels=3).fresh == ()


FAMILIES = {
    "bert": ("Bert", {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}),
    "roberta": ("Roberta", {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}),
    "distilbert": ("DistilBert", {"dim": 16, "n_layers": 1, "n_heads": 4, "hidden_dim": 16}),
    "gpt2": ("GPT2", {"n_embd": 16, "n_layer": 1, "n_head": 4, "bos_token_id": None, "eos_token_id": None}),
}  # fmt: skip


def classifier(folder, names, family="bert", **settings):
    """A model of random weights whose output layer has labels of these names."""
    tiny_tokenizer(folder)
    prefix, sizes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=20, pad_token_id=0, id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)}, **sizes, **settings,
    )  # fmt: skip
    model = getattr(transformers, f"{prefix}ForSequenceClassification")(config).eval()
    with torch.no_grad():  # biases are zero, and permuted too
        for name, parameter in model.named_parameters():
            parameter += 0.3 * torch.randn_like(parameter) * name.endswith("bias")
    model.save_pretrained(folder)
    return model


def opened(folder, task):
    return load_pretrained(
        PretrainedConfig(pretrained=str(folder)), "classification", num_labels=task.outputs, labels=task.labels
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_layer_of_the_right_shape_is_kept(tmp_path, family):
    saved = classifier(tmp_path, ["a", "b", "c"], family)
    loaded = opened(tmp_path, GLUE["mnli"])
    texts = torch.tensor([[2, 5, 9, 3], [2, 6, 7, 3]])
    assert torch.equal(loaded.model(input_ids=texts).logits, saved(input_ids=texts).logits)
    assert loaded.fresh == ()
    assert list(loaded.model.config.id2label.values()) == list(GLUE["mnli"].labels)


@pytest.mark.parametrize("task", ["mnli", "stsb"])
def test_the_problem_is_that_of_the_task(tmp_path, task):
    classifier(tmp_path, ["a", "b", "c"], problem_type="multi_label_classification")
    config = opened(tmp_path, GLUE[task]).model.config
    assert config.problem_type == ("regression" if task == "stsb" else "single_label_classification")
