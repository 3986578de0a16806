"""Table of what public scoring loops count, by `check_scoring`: lm-eval, fairseq, transformers, nanoGPT and ours.

    python -m research.scorers --json research/measured/scorers.json --page docs/scoring.md

lm-eval is the installed one; the others are our code after their documentation, on small random models.
"""

import argparse
import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fullrank as fr
from fullrank.checking import Report
from fullrank.checking.scoring import COUNTS, ONCE, SAME, SUM
from research.markdown import make_table

WINDOW, START = 8, 1
WORDS = ["<unk>", "<bos>", *(f"w{i}" for i in range(3))]
PIECES = [f"{word} " for word in WORDS]
VOCABULARY = len(WORDS)
Score = Callable[[Any], Any]


def gpt2() -> Any:
    """A random GPT-2 with eight positions, moved away from where it starts."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=2, n_positions=WINDOW, vocab_size=VOCABULARY, bos_token_id=START, eos_token_id=START
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def lm_eval_rolling() -> Score:
    """`loglikelihood_rolling`, and the word and byte counts of its wikitext task."""
    import transformers
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<bos>", eos_token="<bos>", pad_token="<bos>"
    )
    lm = HFLM(pretrained=gpt2(), tokenizer=tokenizer, device="cpu", batch_size=4, max_length=WINDOW)

    def score(text: str) -> dict[str, float]:
        with contextlib.redirect_stderr(io.StringIO()):  # its bars
            request = Instance("loglikelihood_rolling", {"page": text}, (text,), 0)
            (found,) = lm.loglikelihood_rolling([request], disable_tqdm=True)
        units = process_results({"page": text}, (found,))
        return {"nll": -found, "words": units["word_perplexity"][1], "bytes": units["byte_perplexity"][1]}

    return score


def fairseq_eval_lm() -> Score:
    """`fairseq-eval-lm --context-window 4`: blocks of 4 tokens behind the 4 before them; the text begins behind an `</s>`."""
    model, context = gpt2().double(), 4

    def score(ids: Tensor) -> dict[str, float]:
        read, nats = torch.cat((torch.tensor([START]), ids[:-1])), []
        for start in range(0, len(ids), WINDOW - context):
            end, first = min(start + WINDOW - context, len(ids)), max(0, start - context)
            with torch.no_grad():
                logits = model(read[None, first:end]).logits[0, start - first :]
            nats.append(-logits.log_softmax(-1).gather(1, ids[start:end, None])[:, 0])
        scores = torch.cat(nats)
        bits = float(scores.mean()) / math.log(2)
        return {"nll": float(scores.sum()), "tokens": len(scores), "perplexity": 2**bits}

    return score


def strided(weights: bool) -> Score:
    """The loop of transformers' page "Perplexity of fixed-length models", with half a window of stride.

    weights: the mean of a window counts as often as it has targets, less one; without, as on the page of 4.35, once.
    """
    model, stride = gpt2().double(), WINDOW // 2

    def score(ids: Tensor) -> dict[str, float]:
        total, tokens, means, end = 0.0, 0, [], 0
        for start in range(0, len(ids), stride):
            previous, end = end, min(start + WINDOW, len(ids))
            labels = ids[start:end].clone()
            labels[: len(labels) - (end - previous)] = -100
            with torch.no_grad():
                # a mean; its first label is not used
                loss = float(model(ids[None, start:end], labels=labels[None]).loss)
            scored = int((labels != -100).sum()) - 1
            total, tokens = total + loss * scored, tokens + scored
            means.append(loss)
            if end == len(ids):
                break
        if weights:
            return {"loss": total / tokens if tokens else math.nan, "tokens": tokens}
        return {"loss": sum(means) / len(means), "tokens": len(ids) - 1}

    return score


def ours(kind: str) -> Score:
    """`fullrank eval`: blocks of eight tokens, or windows of eight of which four are scored."""
    from fullrank.experiments.measure import EvaluationProtocol, figures, measure

    torch.manual_seed(0)
    config = fr.ModelConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = fr.LanguageModel(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    window = {"context": WINDOW // 2, "stride": WINDOW // 2} if kind == "window" else {}
    protocol = EvaluationProtocol(kind=kind, segment_length=WINDOW, **window)  # type: ignore[arg-type]

    def score(ids: Tensor) -> dict[str, float]:
        with torch.no_grad():
            found = measure(model, ids.numpy(), protocol, batch_size=2, start_id=START)
        return {"nll": found.nll, **{key: figures(found)[key] for key in ("tokens", "perplexity")}}

    return score


def nanogpt() -> Score:
    """`estimate_loss`: the mean of the means of random batches."""
    model, batches, rows = gpt2(), 4, 2

    def score(ids: Tensor) -> dict[str, float]:
        losses = []
        for _ in range(batches):
            starts = torch.randint(len(ids) - WINDOW, (rows,)).tolist()
            read = torch.stack([ids[i : i + WINDOW] for i in starts])
            targets = torch.stack([ids[i + 1 : i + 1 + WINDOW] for i in starts])
            with torch.no_grad():
                logits = model(read).logits
            losses.append(float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())))
        return {"loss": sum(losses) / batches, "tokens": batches * rows * WINDOW}

    return score


# name, scorer, what it counts, how windows overlap, denominator; as documented
SCORERS: list[tuple[str, Callable[[], Score], str, str, str]] = [
    ("lm-eval 0.4, loglikelihood_rolling", lm_eval_rolling, "every token",
     "none; the last window reads further back", "words between runs of white space, bytes"),
    ("fairseq-eval-lm, context window", fairseq_eval_lm, "every token, `</s>` too; those of probability 0 are left out",
     "read, not scored", "tokens (loss in bits)"),
    ("transformers, strided loop (page of today)", lambda: strided(True),
     "every token but the first, with less weight from the second window on",
     "read, not scored", "tokens, one less for each window"),
    ("transformers, strided loop (before)", lambda: strided(False), "every token but the first, by windows",
     "read, not scored", "windows: a mean of means"),
    ("fullrank eval, blocks", lambda: ours("blocks"), "every token", "none", "tokens"),
    ("fullrank eval, windows", lambda: ours("window"), "every token", "read, not scored", "tokens"),
    ("nanoGPT, estimate_loss", nanogpt, "random tokens, some several times", "by chance", "batches: a mean of means"),
]  # fmt: skip


def check(name: str, make: Callable[[], Score]) -> Report:
    """`check_scoring` of one of them, on texts that pass its window twice."""
    torch.manual_seed(0)
    if name.startswith("nanoGPT"):  # needs texts that are longer than a window
        texts = [torch.randint(VOCABULARY, (n,)) for n in (40, 29)]
        return fr.check_scoring(make(), texts, vocab_size=VOCABULARY)
    if name.startswith("lm-eval"):
        return fr.check_scoring(make(), vocabulary=PIECES, length=19, window=WINDOW)
    return fr.check_scoring(make(), vocab_size=VOCABULARY, length=19, window=WINDOW)


def make_rows() -> list[dict[str, Any]]:
    """A row of the table for each scorer."""
    rows = []
    for name, make, counted, overlap, denominator in SCORERS:
        report = check(name, make)
        verdicts = {finding.check: finding.verdict for finding in report.findings}
        remarks = [f"{finding.check}: {finding.remark}" for finding in report.findings if finding.remark]
        row = {
            "scorer": name,
            "counts": counted,
            "overlap": overlap,
            "denominator": denominator,
            "first token": describe_first(report, verdicts[ONCE]),
            "deterministic": verdicts[SAME],
            "sums to one": verdicts[SUM],
            "once": verdicts[ONCE],
            "counts true": verdicts[COUNTS],
            "verdict": "passes" if report.passes else "fails",
            "remarks": remarks,
            "calls": report.description["calls"],
        }
        rows.append(row)
        print(f"{name}: {report.counts}")
        for words in remarks:
            print(f"    {words}")
    return rows


def describe_first(report: Report, once: str) -> str:
    """Whether the first token is scored, where each token is scored once."""
    if once == "not applicable":
        return "not tested"
    if once != "passes":
        return "see below"
    return "scored" if report.description["first_token_scored"] else "not scored"


_WORDS = {"passes": "yes", "fails": "**no**", "not applicable": "not tested"}
COLUMNS = {
    "counts": "counts",
    "first token": "first token",
    "overlap": "overlap",
    "deterministic": "deterministic",
    "sums to one": "sums to one",
    "each once": "once",
    "divided by": "denominator",
    "counts are true": "counts true",
}


def make_section(rows: list[dict[str, Any]]) -> str:
    """The table of docs/scoring.md, and the remarks of those that fail or that have some."""
    shown = []
    for row in rows:
        cells = {title: _WORDS.get(row[key], row[key]) for title, key in COLUMNS.items()}
        verdict = "passes" if row["verdict"] == "passes" else "**fails**"
        shown.append({"scorer": row["scorer"], **cells, "verdict": verdict})
    lines = [make_table(shown), ""]
    lines += [f"- *{row['scorer']}*: {'; '.join(row['remarks'])}." for row in rows if row["remarks"]]
    return "\n".join(lines)


MARKS = "<!-- research/scorers.py -->\n", "\n<!-- end -->"


def write_section(page: Path, rows: list[dict[str, Any]]) -> None:
    """Put the table between its marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}{make_section(rows)}{MARKS[1]}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    rows = make_rows()
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if given.page:
        write_section(given.page, rows)


if __name__ == "__main__":
    main()
