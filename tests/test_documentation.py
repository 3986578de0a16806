"""Pages of the documentation: their examples run as readers run them, and their tables are those of the results."""

import ast
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from xml.etree import ElementTree

import pytest
import torch

import fullrank as fr
from research import combinations

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[1]


def read_page(name):
    return (ROOT / name).read_text(encoding="utf-8")


SMALLER = {
    "range(300)": "range(25)",
    "hidden_size=128, num_hidden_layers=4": "hidden_size=32, num_hidden_layers=1",
    "BertConfig()": "BertConfig(hidden_size=24, num_attention_heads=2, num_hidden_layers=1, vocab_size=99)",
}


def test_the_examples_of_the_readme_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", read_page("README.md"), re.S))
    for words, smaller in SMALLER.items():
        assert words in code
        code = code.replace(words, smaller)
    names = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    ids, rows, corpus, loss = (cast("Any", names[name]) for name in ("ids", "rows", "corpus", "loss"))
    assert ids.shape == (1, 9 + 200)
    assert ids[0, :9].tolist() == rows[0, :9].tolist()
    assert capsys.readouterr().out.startswith(corpus.tokenizer.decode(ids[0].tolist()))
    assert loss.item() < 4.0  # nats a character; untrained 4.6 and more
    assert (tmp_path / "somewhere" / "model.safetensors").is_file()
    assert cast("Any", names["report"]).passes


LEAKING = """

def test_a_leak(leak_check):
    model = MyModel()
    model.layer.register_forward_hook(lambda module, args, out: out + out.mean(1, keepdim=True))
    leak_check(model)
"""


def test_the_leak_checks_of_the_page(pytester):
    page = read_page("docs/leak_check.md")
    blocks = re.findall(r"<!-- a test -->\n```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    pytester.makepyfile(test_leaks="\n".join(blocks) + LEAKING)
    plugin = () if _installed() else ("-p", "fullrank.testing.plugin")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--strict-markers", *plugin, "--junitxml=out.xml")
    result.assert_outcomes(passed=2, failed=1)
    assert "It enters at layer." in result.stdout.str()
    verdicts = {}
    for case in ElementTree.parse(pytester.path / "out.xml").iter("testcase"):
        for entry in case.iterfind(".//property[@name='fullrank.future, by perturbation, training']"):
            verdicts[case.get("name")] = entry.get("value")
    assert verdicts == {"test_leaks": "passes", "test_a_leak": "fails"}


def _installed():
    """True in an environment that was made after the plugin, and so knows it."""
    return any(entry.value == "fullrank.testing.plugin" for entry in entry_points(group="pytest11"))


ALONE = """
import sys
for name in ("numpy", "scipy", "yaml", "typer", "rich", "safetensors", "matplotlib", "transformers", "tokenizers"):
    sys.modules[name] = None
import warnings
warnings.simplefilter("ignore")
import torch
import fullrank as fr
model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
assert fr.check(model, quick=True).passes
assert fr.check_scoring(lambda ids: torch.full((len(ids),), 2.0794415416798357), vocab_size=8).passes
"""


@pytest.mark.full
def test_checks_need_torch_alone():
    subprocess.run([sys.executable, "-c", ALONE], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_the_score_function_of_the_page_passes(monkeypatch):
    code = re.search(r"```python\n(.+?)```", read_page("docs/scoring.md"), flags=re.DOTALL)
    rows = torch.randn(5, 5)
    project = ModuleType("my_project")
    model = lambda ids: rows[ids]  # noqa: E731
    model.eval = lambda: model
    project.load = lambda: model
    monkeypatch.setitem(sys.modules, "my_project", project)
    names = {}
    exec(code[1], names)
    assert fr.check_scoring(names["score"], vocab_size=5, length=19).passes


def test_the_combinations_are_what_configurations_say():
    assert read_page("docs/combinations.md") == combinations.write_page(), "python -m research.combinations"


EQUATION = re.compile(
    r"^\| (?P<equation>.+?) \| (?P<paper>.+?) \| \[`(?P<name>[\w.]+)`\]\(\.\./(?P<file>[\w/]+\.py)#L(?P<line>\d+)\) \|$",
    re.M,
)
EQUATIONS = read_page("docs/mental_model.md").partition("<!-- equations")[2].partition("<!-- end of equations")[0]


def test_the_table_has_all_equations():
    assert len(EQUATION.findall(EQUATIONS)) == EQUATIONS.count("\n|") - 2 == 27


@pytest.mark.parametrize("row", list(EQUATION.finditer(EQUATIONS)), ids=lambda row: row["name"])
def test_an_equation_stands_where_the_table_says(row):
    """In one definition of at most 120 lines."""
    body = ast.parse(read_page(row["file"])).body
    for part in row["name"].split("."):
        definition = next(
            node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
        )
        body = definition.body
    assert definition.lineno == int(row["line"])
    assert definition.end_lineno - definition.lineno < 120


# decorators of functions whose docstrings the command line shows, and of kernels that share their arguments
HELPS = ("verb", "triton")


def list_public(body):
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield from list_public(node.body) if isinstance(node, ast.ClassDef) else [node]


@pytest.mark.parametrize("folder", sorted((ROOT / "src" / "fullrank").glob("*/")), ids=lambda folder: folder.name)
def test_public_functions_describe_three_arguments_or_more(folder):
    """Ruff sees that `Args` has every argument, once there is such a section. A method may have its contract's docstring."""
    without = []
    for path in folder.rglob("*.py"):
        for function in list_public(ast.parse(path.read_text(encoding="utf-8")).body):
            count = len([argument for argument in ast.walk(function.args) if isinstance(argument, ast.arg)])
            is_method = function.args.args and function.args.args[0].arg in ("self", "cls")
            docstring = ast.get_docstring(function) or "Args:"  # of a contract
            is_help = any(ast.unparse(name).startswith(HELPS) for name in function.decorator_list)
            if count - bool(is_method) >= 3 and not is_help and "Args:" not in docstring:
                without.append(f"{path.name}: {function.name}")
    assert without == []
