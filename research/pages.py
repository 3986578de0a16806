"""Make docs/results and docs/which.md from the ledger, the claims, the benchmarks and the census. No figure is typed by hand.

python -m research.pages --add RUNS        add finished runs to the ledger, then make the pages
python -m research.pages                   make the pages
python -m research.pages --check           write nothing; fail if a page is not what its sources say
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullrank.comparison.runs import find_runs
from fullrank.config.load import flatten, read_yaml
from fullrank.core.errors import FullRankError, InputError
from fullrank.files import read_json, write_text
from research import LEDGER, RESEARCH, RESULTS, census, leaderboard, ngrams, read_json_lines, which
from research import ledger as book
from research import markdown as md
from research.claims import VERDICTS, Side, Verdict, judge, read_claims
from research.ledger import SPLITS, Row, figures_of
from research.which import describe_difference, name_figure

HEAD = "<!-- Made by `python -m research.pages`; change the ledger or the claims, not this page. -->"
CLAIM_ROW = re.compile(r"^\| \d+\. (?P<table>[^|]+) \| (?P<claim>[^|]+) \| .*", re.MULTILINE)
INTRODUCTION = """The [ledger](ledger.csv) has a row for every finished run, written from its folder by
`python -m research.train` or `python -m research.pages --add`; `python -m research.pages` makes these pages from it. A verdict
compares two rows over their common seeds. It is *too early* for one where a row is worse than counting 4-grams of the same
text, or still gains 1 % in the last tenth of its training. It is *open* with fewer than three seeds, where the learning rate
of a row was not bracketed (a lower and a higher one are worse), or where the difference may be chance: p-values are corrected
within a page by Holm's rule, and the deviation is pooled over the rows of a recipe, but for rows that deviate more than the
others by Cochran's test. Else a claim is *supported here* or *contradicted here*, or there is *no difference that matters*:
the 95 % interval lies within 0.5 %. Figures compare in size with a paper's at scale `paper` only."""


def make_pages(ledger: Path = LEDGER, research: Path = RESEARCH) -> dict[str, str]:
    """Make every page, by the name of its file."""
    rows = book.read_ledger(ledger)
    lines = ngrams.read_lines(research / "ngrams.csv")
    pages: dict[str, Iterator[str] | list[str]] = {}
    index = []
    papers = []
    cited: dict[str, tuple[str, Verdict]] = {}
    for path in sorted((research / "claims").glob("*.yaml")):
        title, claims = read_claims(path)
        verdicts = judge(claims, rows, lines)
        rows_of_paper = [row for row in rows if row["recipe"].startswith(f"{path.stem}/")]
        papers.append(path.stem)
        cited |= link_claims(path.stem, verdicts, cited)
        pages[f"{path.stem}.md"] = [
            f"# {md.prose(title)}",
            *describe_claims(verdicts),
            "## Runs",
            *describe_runs(rows_of_paper),
        ]
        counts = Counter(verdict.word for verdict in verdicts)
        counted = {word: str(counts[word]) for word in VERDICTS}
        index.append({"paper": f"[{md.prose(title)}]({path.stem}.md)", **counted, "runs": str(len(rows_of_paper))})
    others = [row for row in rows if row["recipe"].partition("/")[0] not in papers]
    text = "Runs of recipes that belong to no paper's claims."
    pages["other_runs.md"] = ["# Other runs", text, *describe_runs(others)]
    pages["leaderboard.md"] = leaderboard.make_page(rows, ngrams.read_values(research / "ngrams.csv"))
    links = [
        "- [Leaderboard](leaderboard.md): the best rows on each text, with their commands",
        f"- [Other runs](other_runs.md): {len(others)}",
    ]
    if (research / "benchmarks.yaml").exists():
        pages["benchmarks.md"] = describe_benchmarks(research)
        links.append("- [Benchmarks](benchmarks.md): speed and memory against peers")
    if (research / "census.jsonl").exists():
        checked = read_json_lines(research / "census.jsonl")
        pages["census.md"] = census.make_page(checked, read_yaml(research / "census_notes.yaml"))
        links.append(f"- [Census](census.md): the check of {len(checked)} classes of transformers")
    pages["README.md"] = ["# Results", INTRODUCTION, "## Claims", md.make_table(index), "## Others", "\n".join(links)]
    further: dict[str, str] = {}
    if (research / "which.yaml").exists():
        further |= which.make_pages(research, cited)
        pages[which.PAGE] = [further.pop(which.PAGE)]
    texts = {name: "\n\n".join(filter(None, [HEAD, *pieces])) + "\n" for name, pieces in pages.items()}
    claim_rows = find_claim_rows("\n".join(texts[f"{paper}.md"] for paper in papers))
    for path in sorted((research.parent / "docs" / "mechanisms").glob("*.md")):
        further[f"../mechanisms/{path.name}"] = renew_claim_rows(
            path.read_text(encoding="utf-8"), claim_rows, path.name
        )
    return texts | further


def write_pages(results: Path = RESULTS, research: Path = RESEARCH, *, check: bool = False) -> list[str]:
    """Write pages that changed.

    Args:
        results: folder of the pages and of the ledger.
        research: folder of claims, plans and measured figures.
        check: write nothing.

    Returns:
        Their names.

    Raises:
        InputError: a page would change, and `check` is set.
    """
    pages = make_pages(results / "ledger.csv", research)
    changed = []
    for name, page in pages.items():
        file = results / name
        if not file.exists() or file.read_text(encoding="utf-8") != page:
            changed.append(name)
    if check and changed:
        raise InputError(
            f"{', '.join(changed)}: not what the ledger and the claims say; run `python -m research.pages`"
        )
    for name in changed:
        write_text(results / name, pages[name])
    return changed


# -- claims -----------------------------------------------------------------------------------------------------------


def describe_claims(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield a table of all verdicts, then what each rests on."""
    yield "## Claims"
    names = list_names(verdicts)
    table = []
    for name, verdict in zip(names, verdicts, strict=True):
        table.append({
            "claim": name, "the paper says": md.prose(verdict.claim.claim),
            "recipe": md.code(verdict.claim.recipe) if verdict.comparison else "",
            "verdict": f"**{verdict.word}**", "difference [95 %]": describe_difference(verdict),
        })  # fmt: skip
    yield md.make_table(table)
    for name, verdict in zip(names, verdicts, strict=True):
        yield f"### {name}: {md.prose(verdict.claim.claim)}"
        yield "\n".join(f"- {line}" for line in describe_verdict(verdict))


def find_claim_rows(text: str) -> dict[tuple[str, str], str]:
    """Find the rows of tables of claims, by the claim's table in the paper and its words."""
    return {(match["table"], match["claim"]): match[0] for match in CLAIM_ROW.finditer(text)}


def renew_claim_rows(text: str, current: Mapping[tuple[str, str], str], page: str) -> str:
    """Renew the rows of claims that a page of docs quotes.

    Args:
        text: the page.
        current: rows as they are now, by the claim's table in the paper and its words.
        page: name of the page.

    Returns:
        The page with the current rows.

    Raises:
        InputError: it quotes a claim that is no more.
    """
    for claim, row in find_claim_rows(text).items():
        if claim not in current:
            raise InputError(f"docs/mechanisms/{page}: quotes a claim that research/claims has not: {', '.join(claim)}")
        text = text.replace(row, current[claim])
    return text


def list_names(verdicts: Sequence[Verdict]) -> list[str]:
    """List the names of verdicts: a number and the claim's table in the paper."""
    return [f"{place}. {md.prose(verdict.claim.table)}" for place, verdict in enumerate(verdicts, start=1)]


def link_claims(page: str, verdicts: Sequence[Verdict], known: Collection[str]) -> dict[str, tuple[str, Verdict]]:
    """Link verdicts from docs, by the key of their claim.

    Args:
        page: name of the paper.
        verdicts: those of its claims.
        known: keys of claims of other papers.

    Returns:
        Link and verdict by key.

    Raises:
        InputError: another claim has the key.
    """
    links: dict[str, tuple[str, Verdict]] = {}
    for name, verdict in zip(list_names(verdicts), verdicts, strict=True):
        key = verdict.claim.key
        if key and (key in known or key in links):
            raise InputError(f"{page}.yaml: another claim has the key {key}")
        if key:
            links[key] = (f"results/{page}.md#{md.make_anchor(f'{name}: {md.prose(verdict.claim.claim)}')}", verdict)
    return links


def describe_verdict(verdict: Verdict) -> Iterator[str]:
    """Yield what a verdict rests on: the difference, both sides, texts and protocols, commands."""
    claim = verdict.claim
    comparison = verdict.comparison
    estimate = verdict.estimate
    yield f"**{verdict.word}**: {md.prose(verdict.reason)}"
    if claim.remark:
        yield md.prose(claim.remark)
    if comparison is None:
        return
    if estimate is not None:
        words = f"{name_figure(claim)}, {claim.direction} is claimed"
        words = f"{words}, difference in %" if claim.statistic == "deviation" else words
        pooled = f"; deviation of a run {md.show(estimate.deviation)}" if estimate.deviation is not None else ""
        yield (
            f"{words}: {describe_difference(verdict)}; seeds {md.show_seeds(comparison.seeds)}{pooled}; p = "
            f"{md.show(estimate.p_value)}, corrected {md.show(verdict.adjusted)}"
        )
    sides = (comparison.than, comparison.better)
    texts = set()
    for side in sides:
        yield describe_side(side)
        texts |= {md.prose(f"{row['corpus']}; {row[f'protocol.{claim.split}']}") for row in side.runs.values()}
    yield from sorted(texts)
    for side in sides:
        yield md.code(side.command)


def describe_side(side: Side) -> str:
    """Describe the figures of the runs of one side."""
    if not side.runs:
        return f"{md.code(side.row)}: not trained yet with these settings"
    figures = list(side.figures.values())
    tokens = {row["tokens_seen"] or 0 for row in side.runs.values()}
    each = f"{md.show_spread(figures)} ({', '.join(map(md.show, figures))})"
    counts = " or ".join(f"{count:,}" for count in sorted(tokens))
    return f"{md.code(side.row)}: {each}, {counts} tokens; seeds {md.show_seeds(side.runs)}"


# -- runs -------------------------------------------------------------------------------------------------------------


def describe_runs(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table of runs that differ only in their seed, then the protocols of their figures."""
    measured = []
    for row in rows:
        measured += [row[f"protocol.{split}"] for split in SPLITS if figures_of(row, split)]
    protocols = list(dict.fromkeys(measured))
    yield md.make_table([describe_group(group, protocols) for group in book.group_by_setting(rows)])
    yield "\n".join(f"{place}. {md.prose(words)}" for place, words in enumerate(protocols, start=1))


def describe_group(group: Sequence[Row], protocols: Sequence[str]) -> dict[str, str]:
    """Describe runs that differ only in their seed by a line of the table. A figure has the number of its protocol."""
    first = group[0]
    settings = first["settings"]
    changed = ", ".join(f"{key}={value}" for key, value in (settings or {}).items())
    changed = "not recorded" if settings is None else md.prose(changed)
    measured = []
    for split in SPLITS:
        for measure in list(figures_of(first, split))[:1]:
            figures = [figures_of(row, split)[measure] for row in group]
            place = protocols.index(first[f"protocol.{split}"]) + 1
            note = ", not of next tokens" if first["next_token"] == "no" else ""
            measured.append(f"{split} {md.readable(measure)} {md.show_spread(figures)} [{place}]{note}")
    seconds = [row["wall_seconds"] for row in group]
    return {
        "recipe": f"{md.code(first['recipe'])} {first['scale']}",
        "row": first["row"],
        "settings": changed,
        "text": md.prose(first["corpus"]),
        "seeds": md.show_seeds(row["seed"] for row in group),
        "figures [protocol]": "; ".join(measured),
        "parameters": md.show_count([first["parameters"]]),
        "tokens": md.show_count(row["tokens_seen"] for row in group),
        "seconds": md.show_count(seconds),
        "commit": ", ".join(sorted({row["commit"] or md.MISSING for row in group})),
    }


# -- benchmarks -------------------------------------------------------------------------------------------------------


def describe_benchmarks(research: Path) -> Iterator[str]:
    """Yield tables of the JSON files in measured/, as benchmarks.yaml says."""
    yield "# Benchmarks"
    for name, entry in read_yaml(research / "benchmarks.yaml").items():
        content = read_json(research / "measured" / name)
        yield f"## {md.prose(entry['title'])}"
        yield f"{md.prose(entry['about'])} [JSON](../../research/measured/{name})"
        for path, columns in entry["tables"].items():
            rows = list(rows_at(path.split("/"), content, {}))
            if not rows:
                raise InputError(f"benchmarks.yaml: {name}: no row at {path}")
            shown = []
            for row in rows:
                shown.append({md.readable(column): md.prose(md.show(row.get(column))) for column in columns})
            yield md.make_table(shown)
        machine = {**(content.get("environment") or {}), "protocol": content.get("protocol")}
        keys = [key for key in ("cpu", "threads", "torch", "commit", "protocol") if machine.get(key)]
        yield md.prose("; ".join(f"{key} {machine[key]}" for key in keys))


def rows_at(path: Sequence[str], value: Any, around: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows at a path such as results/<setting>/candidates/*.

    A star is every item of a list, <setting> every key, which the rows then have as `setting`.

    Args:
        path: steps of the path.
        value: content of a JSON file.
        around: keys of the mappings around it.

    Yields:
        A row with its own keys and those around it.
    """
    around = {**around, **(flatten(value) if isinstance(value, Mapping) else {"value": value})}
    if not path:
        yield around
        return
    step = path[0]
    rest = path[1:]
    if step == "*" and isinstance(value, list):
        for item in value:
            yield from rows_at(rest, item, around)
    elif step.startswith("<") and isinstance(value, Mapping):
        for name, item in value.items():
            yield from rows_at(rest, item, {**around, step.strip("<>"): name})
    elif isinstance(value, Mapping) and step in value:
        yield from rows_at(rest, value[step], around)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--add", nargs="+", type=Path, default=[], metavar="RUNS", help="run folders, or folders of them"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page would change")
    options = parser.parse_args()
    try:
        if options.add:
            runs = []
            for folder in options.add:
                runs += [run for run in find_runs(folder) if (run / "result.json").exists()]
            print(f"{book.add_runs(LEDGER, runs)} of {len(runs)} runs are new or changed in {LEDGER}")
        changed = write_pages(check=options.check)
    except FullRankError as error:
        sys.exit(f"research.pages: {error}")
    print(f"written: {', '.join(changed)}" if changed else "every page is what the ledger says")


if __name__ == "__main__":
    main()
