"""Listing, showing and checking configurations imports no torch, nor does refusing them; one process for all verbs."""

import subprocess
import sys

VERBS = [
    ["--help"],
    ["recipes", "list"],
    ["recipes", "show", "mos/table1-ptb"],
    ["config", "show", "mixhead/table1-vanilla", "--row", "b"],
]
# a wrong key, value, path, recipe, row or option, and what the error names
REFUSED = [
    (["train", "none.yaml"], "none.yaml"),
    (["train", "text.yaml"], "nofile.txt"),
    (["train", "mixhead/table1-vanilla", "train.learning_rat=1"], "train.learning_rate"),
    (["train", "mixhead/table1-vanilla", "model.attention.mix=b"], "position_wise"),
    (["train", "mixhead/table1-vanilla", "--row", "c"], "--row"),
    (["train", "mixhead/table1-vanilla", "data.name=pbt"], "ptb"),
    (["eval", "nofolder"], "nofolder"),
    (["reproduce", "table2"], "mos/table2"),
    (["finetune", "mixhead/table6", "train.learning_rat=1"], "train.learning_rate"),
    (["init", "nofile.txt"], "nofile.txt"),
    (["info", "mixhead/table1-vanilla", "hiden_size=3"], "model.hidden_size"),
]
FILES = {"text.yaml": "{data: {name: text, train: nofile.txt}, train: {steps: 3}}"}
PROGRAM = """
import contextlib, io, sys
from fullrank.cli import main
for verb, status, name in VERBS:
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            main(verb)
    except SystemExit as stopped:
        assert (stopped.code or 0) == status, (verb, err.getvalue())
    assert name.removeprefix("--") in err.getvalue(), (verb, err.getvalue())
    assert not {"torch", "transformers", "matplotlib"} & set(sys.modules), verb
"""


def _without_torch(verbs, folder=None):
    program = f"VERBS = {verbs}\n{PROGRAM}"
    process = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_verbs_about_configurations_import_no_torch():
    _without_torch([(verb, 0, "") for verb in VERBS])


def test_bad_input_is_refused_before_torch_is_imported(tmp_path):
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    _without_torch([(verb, 2, name) for verb, name in REFUSED], tmp_path)
