"""Our models in Trainer: resuming, padded batches, evaluating and generating."""

from collections import Counter

import pytest
import torch
from paired_models import VOCABULARY, XL, pair, small, tokens
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

import fullrank as fr
from fullrank.data import build_bytes, build_characters, build_words, rank_entries, train_bpe
from fullrank.hf.tokenizer import tokenizer_of_vocabulary

DROPPING = fr.DropoutConfig(embedding=0.1, attention=0.2, residual=0.1)


def rows(count=16):
    """Texts of 6 tokens."""
    return [{"input_ids": ids, "labels": ids} for ids in tokens(count, 6, seed=9)]


def trainer(model, folder, **options):
    settings = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 0.05,
        "lr_scheduler_type": "constant", "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "dataloader_pin_memory": False, "seed": 5,
    }  # fmt: skip
    arguments = TrainingArguments(**settings | options)
    return Trainer(model=model, args=arguments, train_dataset=rows(), eval_dataset=rows(4))


def hf_model_of(config):
    return pair(config)[0]


def test_resuming_is_bitwise_equal(tmp_path):
    """With dropout and stochastic heads, a tied output and activation checkpointing."""
    config = small(dropout=DROPPING, attention={"mix": "position_wise", "cross_head": 0.5}, output={"tied": True})
    checkpointing = "activation" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient"  # by version
    saving = {"save_strategy": "steps", "save_steps": 2, f"{checkpointing}_checkpointing": True}
    uninterrupted = trainer(hf_model_of(config), tmp_path / "uninterrupted", **saving)
    uninterrupted.train()
    resumed = trainer(hf_model_of(config), tmp_path / "resumed", **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "uninterrupted" / "checkpoint-2"))
    start = hf_model_of(config).state_dict()
    for name, tensor in uninterrupted.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert any(not torch.equal(tensor, start[name]) for name, tensor in uninterrupted.model.state_dict().items())


def padding_runs():
    text = "a b <unk> zz\nc \u00e9 \x00 a\n" * 5
    words = Counter(build_words(["<unk>", "\n"]).cut(text))
    return {
        "word": build_words(rank_entries(words, min_count=6)),
        "character": build_characters(rank_entries(Counter(text), min_count=6)),
        "byte": build_bytes(),
        "bpe": train_bpe([text], size=270),
    }


@pytest.mark.parametrize("kind", padding_runs())
@pytest.mark.parametrize("side", ["right", "left"])
def test_every_token_of_a_padded_batch_is_a_target(kind, side):
    """Unknown words, line ends and the byte 0 as well; the mean loss is that of the texts one by one."""
    vocabulary = padding_runs()[kind]
    tokenizer = tokenizer_of_vocabulary(vocabulary)
    assert tokenizer.padding_side == "right"
    tokenizer.padding_side = side
    texts = ["a b unseen\nc a b \x00\n", "zz", "\u00e9 a\n"]
    config = small(vocab_size=len(vocabulary), output={"tied": False})
    torch.manual_seed(3)
    model = fr.FullRankForCausalLM(fr.FullRankConfig.of(config, pad_token_id=tokenizer.pad_token_id)).train()
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=False)([tokenizer(text) for text in texts])
    ids = [vocabulary.encode(text) for text in texts]
    assert all(tokenizer.pad_token_id not in row for row in ids)
    targets = sum(map(len, ids))
    counts = (batch["labels"] != -100).sum() - len(texts)  # the first token of a text is read only
    assert counts == targets
    first = vocabulary.start_id
    alone = sum(model.model.nll(torch.tensor([[first, *row[:-1]]]), torch.tensor([row])).per_token.sum() for row in ids)
    torch.testing.assert_close(model(**batch).loss, alone / targets)
    torch.testing.assert_close(model(**batch, num_items_in_batch=targets).loss, alone / targets)


def test_evaluating_and_generating_after_training(tmp_path):
    """Trainer turns `use_cache` off for good; a memory stays on."""
    model = hf_model_of(small(memory_length=4, **XL))
    working = trainer(model, tmp_path)
    working.train()
    assert model.config.use_cache is False
    input_ids = torch.stack([row["input_ids"] for row in rows(4)])
    our_model = fr.LanguageModel(model.model.config)
    our_model.load_state_dict(model.model.state_dict())
    expected = our_model.eval().nll(input_ids[:, :-1], input_ids[:, 1:]).per_token.mean()
    assert working.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-4)
    prediction = working.predict(rows(4)).predictions
    assert prediction.shape == (4, 6, VOCABULARY)
    prompt = tokens(1, 7)
    after = model.eval().generate(prompt, max_new_tokens=6, do_sample=False)
    model.config.use_cache = True
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), after)
