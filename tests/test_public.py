"""The public face: names, what an import costs, and the example of the interface."""

import subprocess
import sys

import pytest

import fullrank as fr


def python(code):
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_importing_costs_nothing():
    """Neither torch nor anything else that is not Python's own."""
    out = python(
        "import sys; before = set(sys.modules); import fullrank; fullrank.__version__; dir(fullrank); fullrank.__all__\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    assert out.strip() == "['fullrank']"


@pytest.mark.parametrize(
    "row", ["mos/table1-ptb", "mos/table1-ptb --row k10", "best/mixers --row mixhead-b data.name=builtin"]
)
def test_no_compiler_is_imported_where_nothing_is_compiled(row):
    """torch._dynamo takes longer to import than torch itself; operators in Python import it on the meta device."""
    out = python(
        "import contextlib, io, sys, fullrank as fr, torch\n"
        "from fullrank.cli import main\n"
        "config = fr.ModelConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)\n"
        "model, ids = fr.LanguageModel(config), torch.arange(8)[None]\n"
        "model.loss(ids, ids).backward()\n"
        "model.generate(ids, max_new_tokens=2)\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main(['info', *{row.split()}, '--json'])\n"
        "print('fullrank.analysis.size' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    assert out.split() == ["True", "False"]


def test_every_public_name_is_there():
    assert set(fr.__all__) == set(dir(fr))
    assert None not in [getattr(fr, name) for name in fr.__all__]
    with pytest.raises(AttributeError, match="module 'fullrank' has no attribute 'LanguageModle'"):
        fr.LanguageModle  # noqa: B018
