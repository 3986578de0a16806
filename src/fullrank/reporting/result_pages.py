"""Result pages, made from a ledger, the claims of papers and the figures of benchmarks; nothing in them is typed by hand.

ledger.jsonl, claims/<paper>.yaml, benchmarks.yaml, *.json  ->  README.md, <paper>.md, other_runs.md, benchmarks.md
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullrank.config.claims import BenchmarkFile, BenchmarkTable, ClaimsFile, read_claims
from fullrank.config.load import read_yaml
from fullrank.core.errors import InputError
from fullrank.files import read_json, write_text
from fullrank.reporting.figures import (
    MISSING,
    count,
    decimals_of,
    duration,
    interval,
    over_runs,
    points,
    readable,
    spread,
)
from fullrank.reporting.ledger import Row, read_ledger
from fullrank.reporting.runs import mapping, number
from fullrank.reporting.verdicts import VERDICTS, Arm, Verdict, protocol_of, verdicts

_HEAD = "<!-- Made by `fullrank ledger pages`; change the ledger or the claims, not this page. -->"
_HOW = """The [ledger](ledger.jsonl) has a row for every finished run, written from its folder by `fullrank queue` or
`fullrank ledger add`; `fullrank ledger pages` makes these pages from it. A verdict compares two rows seed by seed. With three
seeds or more in common, a 95 % interval of the paired differences that lies wholly on the claimed side says *confirmed*,
wholly on the other side *not confirmed*, else *not decided*. Each interval stands for itself: of twenty verdicts one may be
chance. Figures compare in size with a paper's at scale `paper` only."""


def make_pages(folder: Path) -> dict[str, str]:
    """Every page by its file name."""
    rows, bodies, index = read_ledger(folder / "ledger.jsonl"), dict[str, list[str]](), list[list[str]]()
    papers = {path.stem: read_claims(path) for path in sorted((folder / "claims").glob("*.yaml"))}
    for stem, paper in papers.items():
        own = [row for row in rows if row["recipe"].startswith(f"{stem}/")]
        judged = verdicts(paper.claims, rows)
        counts = Counter(verdict.word for verdict in judged)
        bodies[f"{stem}.md"] = [f"# {paper.paper}", *_paper(paper, judged), "## Runs", *_runs(own)]
        index.append([f"[{paper.paper}]({stem}.md)", *(str(counts[word]) for word in VERDICTS), str(len(own))])
    others = [row for row in rows if row["recipe"].partition("/")[0] not in papers]
    bodies["other_runs.md"] = ["# Other runs", "Runs of recipes that belong to no paper's claims.", *_runs(others)]
    links = [f"[Other runs](other_runs.md): {len(others)}"]
    if (folder / "benchmarks.yaml").exists():
        bodies["benchmarks.md"] = ["# Benchmarks", *_benchmarks(folder)]
        links.append("[Benchmarks](benchmarks.md): speed and memory against peers")
    table = _table(["paper", *VERDICTS, "runs"], index)
    bodies["README.md"] = ["# Results", _HOW, "## Claims", table, "## Others", "\n".join(f"- {link}" for link in links)]
    return {name: "\n\n".join([_HEAD, *body]) + "\n" for name, body in bodies.items()}


def write_pages(folder: Path) -> list[str]:
    """Write the pages whose content changed, and return their names."""
    changed = _stale(folder, made := make_pages(folder))
    for name in changed:
        if name in made:
            write_text(folder / name, made[name])
        else:
            (folder / name).unlink()
    return changed


def check_pages(folder: Path) -> None:
    """InputError if a page is not what the ledger says."""
    if changed := _stale(folder, make_pages(folder)):
        raise InputError(
            f"{folder}: {', '.join(changed)}: not what the ledger, the claims and the benchmarks say; pages are not edited by "
            f"hand; run `fullrank ledger pages {folder}`"
        )


def _stale(folder: Path, made: Mapping[str, str]) -> list[str]:
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return sorted(name for name in {**made, **there} if made.get(name) != there.get(name))


# -- a paper ----------------------------------------------------------------------------------------------------------


def _paper(paper: ClaimsFile, judged: Sequence[Verdict]) -> Iterator[str]:
    if paper.about:
        yield paper.about.strip()
    names = [f"{place}. {verdict.claim.table}" for place, verdict in enumerate(judged, start=1)]
    lines = [
        [name, one.claim.claim, f"`{one.recipe}`" if one.recipe else "", f"**{one.word}**", _difference(one)]
        for name, one in zip(names, judged, strict=True)
    ]
    yield "## Claims"
    yield _table(["claim", "the paper says", "recipe", "verdict", "difference [95 %]"], lines)
    for name, verdict in zip(names, judged, strict=True):
        yield f"### {name}: {verdict.claim.claim}"
        yield "\n".join(f"- {line}" for line in _details(verdict))


def _difference(verdict: Verdict) -> str:
    if verdict.difference is None:
        return MISSING
    low, high = verdict.interval or (None, None)
    decimals = decimals_of(verdict.difference, low, high)
    unit = " %" if verdict.claim.statistic == "deviation" else ""
    return f"{points(verdict.difference, decimals)}{unit} [{interval(low, high, decimals)}]"


def _details(verdict: Verdict) -> Iterator[str]:
    claim = verdict.claim
    yield f"**{verdict.word}**" + (f": {claim.why}" if claim.why else "")
    if claim.released:
        yield f"the released code: {claim.released}"
    if claim.remark:
        yield claim.remark
    if verdict.than is None or verdict.better is None:
        return
    what = f"{claim.split} {readable(claim.measure)}, {claim.direction} is better"
    if claim.statistic == "deviation":
        what = f"deviation over seeds of {what}, difference in %"
    if verdict.difference is not None:
        yield f"{what}: {_difference(verdict)}"
    for arm, figures in zip((verdict.than, verdict.better), verdict.figures, strict=True):
        measured = (
            f"{spread(over_runs(figures), _figure)} ({', '.join(map(_figure, figures))})" if figures else "no pair"
        )
        runs = [arm.runs[seed] for seed in verdict.seeds] or list(arm.runs.values())
        tokens = sorted({row["tokens"] or 0 for row in runs})
        read = f", {' or '.join(map(count, tokens))} tokens" if tokens else ""
        yield f"`{arm.row}`: {measured}{read}; seeds {_seeds(verdict.seeds)} of {_seeds(sorted(arm.runs))}"
    runs = [run for arm in (verdict.than, verdict.better) for run in arm.runs.values()]
    yield from sorted({f"{run['data']['label']}; {protocol_of(run, claim.split).get('words')}" for run in runs})
    for arm in (verdict.than, verdict.better):
        yield f"`{_command(arm, claim.scale, verdict.seeds or (1, 2, 3))}`"


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) > 5 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds)) or "none"


def _command(arm: Arm, scale: str, seeds: Sequence[int]) -> str:
    settings = "".join(f" {setting}" if " " not in setting else f" '{setting}'" for setting in arm.overrides)
    return f"fullrank reproduce {arm.recipe} --rows {arm.row} --scale {scale} --seeds {','.join(map(str, seeds))}{settings}"


# -- runs -------------------------------------------------------------------------------------------------------------


def _runs(rows: Sequence[Row]) -> Iterator[str]:
    """A table of runs that differ only in their seed, then the protocols of their figures."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        same = (row[key] for key in ("recipe", "row", "scale", "set"))
        groups.setdefault(json.dumps([*same, row["data"]["label"], row["protocol"]], sort_keys=True), []).append(row)
    if not rows:
        yield "None yet."
        return
    protocols = list(dict.fromkeys(_protocol(row) for row in rows))
    yield _table(
        ["recipe", "row", "settings", "text", "seeds", "figures", "protocol", "parameters", "tokens", "time", "commit"],
        [_group(group, protocols.index(_protocol(group[0])) + 1) for group in groups.values()],
    )
    yield "\n".join(f"{place}. {words}" for place, words in enumerate(protocols, start=1))


def _protocol(row: Row) -> str:
    """The protocol of all splits, or that of each by its name where they differ."""
    words = {split: str(protocol_of(row, split).get("words")) for split in row["final"]}
    distinct = set(words.values())
    return distinct.pop() if len(distinct) == 1 else "; ".join(f"{split}: {one}" for split, one in words.items())


def _group(group: Sequence[Row], protocol: int) -> list[str]:
    first = group[0]
    settings = "not recorded" if first["set"] is None else ", ".join(f"{k}={v}" for k, v in first["set"].items())
    if training := first.get("training"):
        settings += f" (trained as `{training['recipe']}` {training['row']})"
    figures = []
    for split, values in mapping(first["final"]).items():
        known = [name for name in values if number(values[name]) is not None]
        name = next((name for name in ("bleu", "perplexity") if name in known), next(iter(known), None))
        if name is not None:
            stat = over_runs(number(mapping(row["final"][split]).get(name)) for row in group)
            remark = (
                ""
                if mapping(protocol_of(first, split).get("settings")).get("next_token", True)
                else ", not of next tokens"
            )
            figures.append(f"{split} {readable(name)} {spread(stat, _figure)}{remark}")
    seconds, tokens = (
        over_runs(number(row["seconds"]) for row in group),
        over_runs(number(row["tokens"]) for row in group),
    )
    return [
        f"`{first['recipe']}` {first['scale'] or ''}", str(first["row"] or ""), settings, first["data"]["label"],
        _seeds(sorted(row["seed"] for row in group)), "; ".join(figures), str(protocol),
        count(number(mapping(first["parameters"]).get("total"))), count(tokens.mean if tokens else None),
        duration(seconds.mean if seconds else None), ", ".join(sorted({row["commit"] or MISSING for row in group})),
    ]  # fmt: skip


# -- benchmarks -------------------------------------------------------------------------------------------------------


def _benchmarks(folder: Path) -> Iterator[str]:
    """Tables from JSON files, as benchmarks.yaml says (`config.claims.BenchmarkFile`)."""
    for name, raw in read_yaml(folder / "benchmarks.yaml").items():
        section, content = BenchmarkFile.from_dict(raw, name), read_json(folder / name)
        yield f"## {section.title}"
        yield f"{section.about.strip()} [JSON]({name})"
        for table in section.tables:
            if table.title:
                yield f"**{table.title}**"
            rows = list(_found(table.rows.split("/"), (), (content,)))
            if not rows:
                raise InputError(f"{folder / 'benchmarks.yaml'}: {name}: no row at {table.rows}")
            yield _benchmark(table, rows)
        environment = mapping(content.get("environment"))
        known = [
            f"{readable(key)} {environment[key]}" for key in ("cpu", "threads", "torch", "commit") if key in environment
        ]
        yield "; ".join([*known, str(content["protocol"])] if "protocol" in content else known)


def _benchmark(table: BenchmarkTable, rows: Sequence[tuple[tuple[str, ...], tuple[Any, ...]]]) -> str:
    columns = table.columns or {}
    if table.across is None or table.cell is None:
        return _table(list(columns), [[_cell(path, *row) for path in columns.values()] for row in rows])
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault(tuple(_cell(path, *row) for path in columns.values()), {})
        line[_cell(table.across, *row)] = _cell(table.cell, *row)
    names = list(dict.fromkeys(name for line in lines.values() for name in line))
    return _table(
        [*columns, *names], [[*left, *(line.get(name, "") for name in names)] for left, line in lines.items()]
    )


def _found(
    path: Sequence[str], stars: tuple[str, ...], chain: tuple[Any, ...]
) -> Iterator[tuple[tuple[str, ...], tuple[Any, ...]]]:
    """Values at a path with stars below the last one of `chain`: what stood at each star, and the values on the way."""
    here = chain[-1]
    if not path:
        yield stars, chain
    elif path[0] == "*":
        for name, inner in here.items() if isinstance(here, Mapping) else enumerate(here):
            yield from _found(path[1:], (*stars, str(name)), (*chain, inner))
    elif isinstance(here, Mapping) and path[0] in here:
        yield from _found(path[1:], stars, (*chain, here[path[0]]))


def _cell(path: str, stars: Sequence[str], chain: tuple[Any, ...]) -> str:
    if path.startswith("$"):
        return stars[int(path[1:]) - 1]
    if path.startswith("../"):
        around = (value[path[3:]] for value in reversed(chain[:-1]) if isinstance(value, Mapping) and path[3:] in value)
        return _figure(next(around, ""))
    keys = [] if path == "." else path.split("/")
    return next((_figure(found[-1]) for _, found in _found(keys, (), chain)), "")


def _figure(value: Any) -> str:
    """A number with four significant digits; any other value as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

    return "\n".join([line(headings), line(["---"] * len(headings)), *map(line, rows)])
