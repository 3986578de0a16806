"""docs/hugging_face.md: its blocks run one after the other, with a tiny BERT under the name of the real one and a tiny run."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import fullrank as fr
from cli_runs import succeeds
from tiny_encoder import tiny_encoder

PAGE = (Path(__file__).parents[2] / "docs" / "hugging_face.md").read_text(encoding="utf-8")
TINY = (
    "train mixhead/table1-vanilla --row b --scale tiny --out runs/demo/b --quiet train.steps=2 eval.every_steps=2 "
    "data.name=text data.train=train.txt data.valid=valid.txt data.test=valid.txt data.cache=cache"
)


def write_words(file, number):
    words = [f"w{int(n)}" for n in torch.randint(400, (number,))]
    file.write_text("\n".join(" ".join(words[i : i + 10]) for i in range(0, number, 10)) + "\n", encoding="utf-8")


@pytest.mark.full
def test_the_blocks_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    tiny_encoder(tmp_path / "bert-base-uncased")
    write_words(Path("train.txt"), 3000)
    write_words(Path("valid.txt"), 300)
    succeeds(*shlex.split(TINY))
    blocks = re.findall(r"```(python|sh)\n(.+?)```", PAGE, flags=re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python"] * 4 + ["sh", "python"]
    ids = torch.randint(5, 12, (1, 9))
    space = {"__name__": "page", "ids": ids, "batch": {"input_ids": ids, "labels": torch.tensor([1])}}
    for number, (kind, code) in enumerate(blocks):
        if kind == "sh":
            for line in code.splitlines():
                succeeds(*shlex.split(line, comments=True)[1:])
            continue
        if number == 1:  # an injected model, as the sentence before the block has it
            fr.inject(space["model"], mix="position_wise")
        exec(compile(code, f"block {number}", "exec"), space)
    assert isinstance(space["model"], fr.LanguageModel)
    assert torch.equal(space["model"].eval()(ids).logits, fr.LanguageModel.load("runs/demo/b").eval()(ids).logits)
