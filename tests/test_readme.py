"""Every Python example of the README, in order and in one namespace, as a reader runs them; sizes and steps are smaller."""

import re
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
SMALLER = {
    "range(300)": "range(25)",
    "hidden_size=128, num_hidden_layers=4": "hidden_size=32, num_hidden_layers=1",
    "BertConfig()": "BertConfig(hidden_size=24, num_attention_heads=2, num_hidden_layers=1, vocab_size=99)",
}


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S))
    for given, smaller in SMALLER.items():
        assert given in code
        code = code.replace(given, smaller)
    names = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    ids, rows, corpus, loss = (cast("Any", names[name]) for name in ("ids", "rows", "corpus", "loss"))
    assert ids.shape == (1, 9 + 200)
    assert ids[0, :9].tolist() == rows[0, :9].tolist()
    assert capsys.readouterr().out.startswith(corpus.tokenizer.decode(ids[0].tolist()))
    assert loss.item() < 4.0  # nats a character; untrained 4.6 and more
    assert (tmp_path / "somewhere" / "model.safetensors").is_file()
    assert cast("Any", names["report"]).passes
