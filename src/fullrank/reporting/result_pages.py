"""Result pages, made from a ledger, the claims of papers and the figures of benchmarks; nothing in them is typed by hand.

ledger.jsonl, claims/<paper>.yaml, benchmarks.yaml, census_notes.yaml, *.json
->  README.md, leaderboard.md, curves/*.svg, <paper>.md, other_runs.md, benchmarks.md, census.md
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullrank.config.claims import BenchmarkFile, ClaimsFile
from fullrank.config.load import flatten, read_yaml
from fullrank.core.errors import InputError
from fullrank.files import check_own, is_own, read_json, write_text
from fullrank.reporting import census, figures, leaderboard
from fullrank.reporting.figures import MISSING, code, literal, prose, ranges, readable, spread
from fullrank.reporting.ledger import Row, protocol_of, read_ledger, settings, text_of
from fullrank.reporting.runs import mapping, number
from fullrank.reporting.verdicts import VERDICTS, Verdict, judge

MARK = "<!-- Made by `fullrank ledger pages`"  # of every page; what does not begin so is not ours
_HEAD = f"{MARK}; change the ledger or the claims, not this page. -->"
_HOW = """The [ledger](ledger.jsonl) has a row for every finished run, written from its folder by `fullrank queue` or
`fullrank ledger add`; `fullrank ledger pages` makes these pages from it. A verdict compares two rows seed by seed. With three
seeds or more in common, a 95 % interval of the paired differences that lies wholly on the claimed side says *confirmed*,
wholly on the other side *not confirmed*, else *not decided*. Each interval stands for itself: of twenty verdicts one may be
chance. Figures compare in size with a paper's at scale `paper` only."""


def make_pages(folder: Path) -> dict[str, str]:
    """Every page by its file name."""
    rows, bodies, index = read_ledger(folder / "ledger.jsonl"), dict[str, list[str]](), list[dict[str, str]]()
    papers = {
        path.stem: ClaimsFile.of_file(read_yaml(path), path) for path in sorted((folder / "claims").glob("*.yaml"))
    }
    for stem, paper in papers.items():
        own = [row for row in rows if row["recipe"].startswith(f"{stem}/")]
        judged = [judge(claim, rows) for claim in paper.claims]
        counts = Counter(verdict.word for verdict in judged)
        bodies[f"{stem}.md"] = [f"# {prose(paper.paper)}", "## Claims", *_claims(judged), "## Runs", *_runs(own)]
        verdicts = {word: str(counts[word]) for word in VERDICTS}
        index.append({"paper": f"[{prose(paper.paper)}]({stem}.md)", **verdicts, "runs": str(len(own))})
    others = [row for row in rows if row["recipe"].partition("/")[0] not in papers]
    bodies["other_runs.md"] = ["# Other runs", "Runs of recipes that belong to no paper's claims.", *_runs(others)]
    board = [piece if isinstance(piece, str) else _table(piece) for piece in leaderboard.page(rows)]
    bodies["leaderboard.md"] = ["# Leaderboard", *board]
    links = "- [Leaderboard](leaderboard.md): the best rows on each text, with their curves and commands\n"
    links += f"- [Other runs](other_runs.md): {len(others)}"
    if (folder / "benchmarks.yaml").exists():
        bodies["benchmarks.md"] = ["# Benchmarks", *_benchmarks(folder)]
        links += "\n- [Benchmarks](benchmarks.md): speed and memory against peers"
    if (folder / "census.json").exists():
        checked = read_json(folder / "census.json", census.Census)["classes"]
        notes = read_yaml(folder / "census_notes.yaml") if (folder / "census_notes.yaml").exists() else {}
        pieces = [piece if isinstance(piece, str) else _table(piece) for piece in census.page(checked, notes)]
        bodies["census.md"] = ["# Census of transformers", *pieces]
        links += f"\n- [Census](census.md): the check of {len(checked)} classes of transformers"
    bodies["README.md"] = ["# Results", _HOW, "## Claims", _table(index), "## Others", links]
    pages = {name: "\n\n".join(filter(None, [_HEAD, *body])) + "\n" for name, body in bodies.items()}
    pages = {name: re.sub("&lt;(eos|sos|unk)(&gt;|>)", r"`<\1>`", page) for name, page in pages.items()}
    return pages | leaderboard.curves(rows)


def write_pages(folder: Path, *, check: bool = False) -> list[str]:
    """Write pages that are not what the ledger says, and delete those of ours that it no longer makes; returns their names.

    Files that do not begin with our mark stay. InputError, before anything is written, where one has the name of a page.
    check: InputError names the pages that would be written or deleted instead.
    """
    made, files = make_pages(folder), [*folder.glob("*.md"), *folder.glob("curves/*.svg")]
    marks = {".md": MARK, ".svg": leaderboard.BEGINNING}
    for name in made:
        check_own(folder / name, marks[Path(name).suffix], "a page")
    ours = {path.relative_to(folder).as_posix(): path for path in files if is_own(path, marks[path.suffix])}
    there = {name: path.read_text(encoding="utf-8", errors="replace") for name, path in ours.items()}
    changed = sorted(name for name in {**made, **there} if made.get(name) != there.get(name))
    if check and changed:
        raise InputError(
            f"{folder}: {', '.join(changed)}: not what the ledger, the claims and the benchmarks say; pages are not edited by "
            f"hand; run `fullrank ledger pages {folder}`"
        )
    for name in changed:
        if name in made:
            write_text(folder / name, made[name])
        else:
            (folder / name).unlink()
    return changed


# -- claims -----------------------------------------------------------------------------------------------------------


def _claims(judged: Sequence[Verdict]) -> Iterator[str]:
    """A table of all verdicts, then what each rests on."""
    names = [f"{place}. {prose(verdict.claim.table)}" for place, verdict in enumerate(judged, start=1)]
    yield _table([
        {"claim": name, "the paper says": prose(one.claim.claim), "recipe": code(one.claim.recipe) if one.sides else "",
         "verdict": f"**{one.word}**", "difference [95 %]": _difference(one)}
        for name, one in zip(names, judged, strict=True)
    ])  # fmt: skip
    for name, verdict in zip(names, judged, strict=True):
        yield f"### {name}: {prose(verdict.claim.claim)}"
        yield "\n".join(f"- {line}" for line in _details(verdict))


def _difference(verdict: Verdict) -> str:
    if verdict.difference is None:
        return MISSING
    low, high = verdict.interval or (None, None)
    decimals = figures.decimals_of(verdict.difference, low, high)
    unit = " %" if verdict.claim.statistic == "deviation" else ""
    return f"{figures.points(verdict.difference, decimals)}{unit} [{figures.interval(low, high, decimals)}]"


def _details(verdict: Verdict) -> Iterator[str]:
    claim, split = verdict.claim, verdict.claim.figure.split(".")[1]
    yield f"**{verdict.word}**" + (f": {prose(claim.why)}" if claim.why else "")
    if claim.remark:
        yield prose(claim.remark)
    if verdict.difference is not None:
        what = f"{readable(claim.figure.removeprefix('final.').replace('.', ' '))}, {claim.direction} is better"
        what = f"deviation over seeds of {what}, difference in %" if claim.statistic == "deviation" else what
        yield f"{what}: {_difference(verdict)}; seeds {ranges(verdict.seeds)}"
    texts = set[str]()
    for side in verdict.sides:
        if side.runs:
            own, tokens = side.figures.values(), {row.get("tokens_seen") or 0 for row in side.runs.values()}
            each = f"{spread(figures.over_runs(own), _figure)} ({', '.join(map(_figure, own))})"
            counts = " or ".join(map(figures.count, sorted(tokens)))
            yield f"{code(side.row)}: {each}, {counts} tokens; seeds {ranges(side.runs)}"
        else:
            yield f"{code(side.row)}: no run"
        texts |= {literal(f"{text_of(run)}; {protocol_of(run, split).get('words')}") for run in side.runs.values()}
    yield from sorted(texts)
    yield from (code(side.command) for side in verdict.sides)


# -- runs -------------------------------------------------------------------------------------------------------------


def _runs(rows: Sequence[Row]) -> Iterator[str]:
    """A table of runs that differ only in their seed, then the protocols of their figures."""
    words = [str(protocol_of(row, split).get("words")) for row in rows for split in row["final"]]
    protocols = list(dict.fromkeys(words))
    yield _table([_group(group, protocols) for group in settings(rows)])
    yield "\n".join(f"{place}. {literal(words)}" for place, words in enumerate(protocols, start=1))


def _group(group: Sequence[Row], protocols: Sequence[str]) -> dict[str, str]:
    """Runs that differ only in their seed as a line of the table. A figure has the number of its protocol."""
    first, measured = group[0], list[str]()
    changed = (
        "not recorded" if first["set"] is None else literal(", ".join(f"{k}={v}" for k, v in first["set"].items()))
    )
    if training := first.get("training"):
        changed += f" (trained as {code(training['recipe'])} {literal(training['row'])})"
    for split, values in first["final"].items():
        protocol = protocol_of(first, split)
        name = next((name for name in ("bleu", "perplexity") if name in values), next(iter(values), ""))
        stat = figures.over_runs(number(row["final"][split].get(name)) for row in group)
        next_token = mapping(protocol.get("settings")).get("next_token", True)
        place = protocols.index(str(protocol.get("words"))) + 1
        measured.append(
            f"{literal(split)} {literal(readable(name))} {spread(stat, _figure)} [{place}]"
            + ("" if next_token else ", not of next tokens")
        )
    seconds, tokens = (figures.over_runs(row.get(key) for row in group) for key in ("wall_seconds", "tokens_seen"))
    return {
        "recipe": f"{code(first['recipe'])} {literal(first['scale'] or '')}",
        "row": literal(first["row"] or ""),
        "settings": changed,
        "text": literal(text_of(first)),
        "seeds": ranges(row["seed"] for row in group),
        "figures [protocol]": "; ".join(measured),
        "parameters": figures.count(mapping(first.get("parameters")).get("total")),
        "tokens": figures.count(tokens.mean if tokens else None),
        "time": figures.duration(seconds.mean if seconds else None),
        "commit": literal(", ".join(sorted({row["environment"].get("commit") or MISSING for row in group}))),
    }


# -- benchmarks -------------------------------------------------------------------------------------------------------


def _benchmarks(folder: Path) -> Iterator[str]:
    """Tables from JSON files, as benchmarks.yaml says (`config.claims.BenchmarkFile`)."""
    for name, raw in read_yaml(folder / "benchmarks.yaml").items():
        file = BenchmarkFile.of_file(raw, name)
        content = read_json(folder / str(name))
        yield f"## {prose(file.title)}"
        yield f"{prose(file.about.strip())} [JSON]({name})"
        for path, columns in file.tables.items():
            rows = list(_rows_at(path.split("/"), content, {}))
            if not rows:
                raise InputError(f"{folder / 'benchmarks.yaml'}: {name}: no row at {path}")
            yield _table([{readable(column): literal(_figure(row.get(column))) for column in columns} for row in rows])
        machine = {**mapping(content.get("environment")), "protocol": content.get("protocol")}
        known = [key for key in ("cpu", "threads", "torch", "commit", "protocol") if machine.get(key)]
        yield literal("; ".join(f"{key} {machine[key]}" for key in known))


def _rows_at(path: Sequence[str], value: Any, around: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rows at a path, each with its own keys and those around it."""
    around = {**around, **(flatten(value) if isinstance(value, Mapping) else {"value": value})}
    if not path:
        yield around
    elif isinstance(value, list):
        for inner in value if path[0] == "*" else ():
            yield from _rows_at(path[1:], inner, around)
    elif not isinstance(value, Mapping):
        return
    elif path[0].startswith("<"):
        for name, inner in value.items():
            yield from _rows_at(path[1:], inner, {**around, path[0].strip("<>"): name})
    elif path[0] in value:
        yield from _rows_at(path[1:], value[path[0]], around)


def _figure(value: Any) -> str:
    """A number with four significant digits; any other value as it is, none as an empty text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """A table in Markdown; all rows have the same keys, which are its headings."""
    if not rows:
        return "None yet."
    lines = [rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in lines)
