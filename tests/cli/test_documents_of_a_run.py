"""`data.documents`: a training whose texts are documents, measured as each document by itself, checked and exported."""

import pytest
import torch

import fullrank as fr
from cli_runs import SMALL, document, succeeds, write_config, write_text
from fullrank.data import load_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    text = write_text(folder / "text", 60)
    for file in text.glob("*.txt"):  # two sentences a document
        lines = file.read_text(encoding="utf-8").splitlines()
        pairs = [f"{lines[n]}\n{lines[n + 1]}\n" for n in range(0, len(lines) - 1, 2)]
        file.write_text("<doc> " + "<doc> ".join(pairs), encoding="utf-8")
    config = write_config(folder / "my.yaml", text, folder / "cache", steps=12)
    succeeds(
        "train", config, *SMALL, "data.documents=<doc>", "model.position=alibi", "--out", folder / "run", "--quiet"
    )
    return folder / "run"


def test_figures_are_those_of_documents_by_themselves(run):
    """Segments as long as the text: every document begins in the segment that holds it."""
    model = fr.LanguageModel.load(run)
    tokenizer = load_tokenizer(run)
    text = (run.parent / "text" / "test.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    figures = document("eval", run, "--segment-length", len(ids))
    before = [tokenizer.start_id, *ids[:-1]]
    begins = [position for position, token in enumerate(before) if token == model.config.document_token_id]
    nll = 0.0
    with torch.no_grad():
        for start, end in zip([0, *begins], [*begins, len(ids)], strict=True):
            logits = model(torch.tensor([before[start:end]])).logits[0].double()
            nll -= float(logits.log_softmax(-1).gather(1, torch.tensor(ids[start:end])[:, None]).sum())
    assert len(begins) > 2
    assert figures["nll"] == pytest.approx(nll / len(ids), rel=1e-5)


def test_the_check_passes(run):
    succeeds("check", run, "--quick")
