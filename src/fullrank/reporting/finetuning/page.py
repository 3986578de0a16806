"""Fine-tuning over seeds as one HTML page that needs nothing but itself."""

from __future__ import annotations

import shlex
from pathlib import Path

from fullrank.reporting import details as more
from fullrank.reporting import format
from fullrank.reporting.finetuning import words
from fullrank.reporting.finetuning.arms import metric_words, points_per_unit
from fullrank.reporting.finetuning.comparing import Against, Arm, Figure, Summary, TaskSummary, points_words
from fullrank.reporting.finetuning.figure import strip_figure
from fullrank.reporting.markup import Html, details, el, join, preformatted, section, swatch, table, td, th
from fullrank.reporting.results import RunRecord, integer, mapping, number
from fullrank.reporting.shell import document, write
from fullrank.reporting.table import ms_per_step
from fullrank.reporting.troubles import unfinished


def write_page(found: Summary, path: Path, title: str | None = None) -> Path:
    """Writes the page and returns its path: `path`, or `report.html` in a folder.

    Equal inputs give equal bytes. An older report is replaced, any other file of that name is an InputError; RunError if the
    page cannot be written.
    """
    return write(Path(path), render(found, title))


def render(found: Summary, title: str | None = None) -> str:
    """The page as text."""
    navigation = {"summary": "Summary"}
    navigation |= {_identity(task): task.task for task in found.tasks}
    navigation |= {"environment": "Environment", "reproduce": "Reproduce", "unfinished": "Unfinished"}
    body = [
        _summary(found),
        *(_task(task) for task in found.tasks),
        _environment(found),
        _reproduce(found),
        section(
            "unfinished", "Unfinished and damaged runs", *(unfinished(run, run.problems) for run in found.unfinished)
        ),
    ]
    return document(title or _title(found), _subtitle(found), navigation, body)


def _identity(task: TaskSummary) -> str:
    return f"task-{task.task.replace('/', '-')}"


def _title(found: Summary) -> str:
    runs = len(found.runs) + len(found.unfinished)
    tasks = [task.task for task in found.tasks]
    on = f" on {format.listed(tasks)}" if 0 < len(tasks) < 4 else f" on {len(tasks)} tasks" if tasks else ""
    return f"Fine-tuning: {runs} run{'' if runs == 1 else 's'}{on}"


def _subtitle(found: Summary) -> str:
    arms = sum(len(task.arms) for task in found.tasks)
    said = [f"{arms} arm{'' if arms == 1 else 's'}", f"{len(found.runs)} finished"]
    return "fullrank report · " + ", ".join(
        [*said, *([f"{len(found.unfinished)} not finished"] * bool(found.unfinished))]
    )


def _summary(found: Summary) -> Html:
    remarks = [f"{task.task}: {remark}" for task in found.tasks for remark in task.remarks]
    warnings = [remark for remark in remarks if "Not equal terms" in remark]
    said, cautions = (
        words.sentences(found),
        [*(remark for remark in remarks if remark not in warnings), *words.how(found)],
    )
    if not said:
        said = [
            f"{task.task}: {points_words(task.task, figure.metric)} of {arm.name}, {key[0]}: {words.ours(figure)}."
            for task in found.tasks
            for key in task.keys[:1]
            for arm, figure in task.figures(key)
        ] or ["No run has finished."]
    return el(
        "section",
        *(el("p", warning, cls="warning", attrs={"role": "note"}) for warning in warnings),
        el("h2", _unbroken(said[0]), attrs={"id": "summary-heading"}, cls="claim"),
        *(el("p", _unbroken(line), cls="lead") for line in said[1:]),
        el("ul", *(el("li", line) for line in cautions), cls="cautions") if cautions else Html(""),
        attrs={"id": "summary", "aria-labelledby": "summary-heading"},
    )


def _unbroken(text: str) -> str:
    """No line ends before a percent sign."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _task(task: TaskSummary) -> Html:
    named: list[more.Named] = [(arm.name, slot, arm.runs) for slot, arm in enumerate(task.arms)]
    heading = task.title if task.title == task.task else f"{task.task}: {task.title}"
    parts = [*(el("p", line, cls="note") for line in words.protocol(task))]
    for key in task.keys:
        parts += [el("h3", words.heading(task, key), cls="below"), _scores(task, key)]
    parts.append(
        el("div", *(_strip(task, key) for key in task.keys), cls="figures below" if len(task.keys) > 1 else "below")
    )
    parts += [_arms(task), details("Single runs", _runs(task), cls="printed"), *more.configurations(named)]
    return section(_identity(task), heading, *parts)


def _scores(task: TaskSummary, key: tuple[str, str]) -> Html:
    figures = task.figures(key)
    paper = any(figure.paper for _, figure in figures)
    several = any(figure.stat.count > 1 for _, figure in figures)
    head = [th("Arm"), th("n", cls="num"), th("ours", cls="num")] + ([th("paper", cls="num")] if paper else [])
    if task.compares:
        head += [
            th("difference", el("span", "95 % interval", cls="sub"), cls="num"),
            th("change of deviation", el("span", "95 % interval", cls="sub"), cls="num"),
            th("p of equal deviations", el("span", "Brown-Forsythe", cls="sub"), cls="num"),
        ]
    body = []
    for arm, figure in figures:
        cells = [_name(task, arm), td(str(figure.stat.count), cls="num"), td(words.ours(figure), cls="num")]
        if paper:
            cells.append(td(words.papers(figure.paper), cls="num quiet"))
        if task.compares:
            cells += _against(figure)
        body.append(cells)
    found = table([head], body, caption=words.heading(task, key), cls="comparison")
    unknown = task.compares and not several
    return join(
        [found, el("p", "Unknown: at least two seeds in both arms are needed.", cls="note") if unknown else Html("")]
    )


def _against(figure: Figure) -> list[Html]:
    against = figure.against
    if against is None:
        return [td("baseline", cls="num quiet"), td("", cls="num"), td("", cls="num")]
    stated = figure.papers_change
    paper = "" if stated is None else el("span", f"{words.change(stated)} in the paper", cls="sub")
    return [
        td(_strong(words.difference(against), against.decided), *_lines(_differences(against)), cls="num"),
        td(
            words.change(against.change),
            *_lines({
                "by F": words.change_interval(against.f_interval), "bootstrap": words.change_interval(against.bootstrap),
            } if against.change is not None else {}),
            paper,
            cls="num",
        ),
        td(words.p_value(against.p), cls="num"),
    ]  # fmt: skip


def _differences(against: Against) -> dict[str, str]:
    if against.interval is None:
        return {"interval": words.UNKNOWN}
    paired = {"paired": words.interval(against.paired)} if against.pairs else {}
    return {"Welch": words.interval(against.welch), **paired}


def _strong(text: str, decided: bool | None) -> Html:
    return el("strong" if decided else "span", text)


def _lines(found: dict[str, str]) -> list[Html]:
    return [
        el("span", f"{value} {name}" if value != words.UNKNOWN else f"{name} unknown", cls="sub")
        for name, value in found.items()
    ]


def _strip(task: TaskSummary, key: tuple[str, str]) -> Html:
    found = task.figures(key)
    label = f"{key[0]} {points_words(task.task, key[1])} (higher is better)"
    values = ", ".join(f"{arm.name} {words.ours(figure)}" for arm, figure in found)
    slots = [task.arms.index(arm) for arm, _ in found]
    drawn = Html(strip_figure(found, slots, label, f"{words.heading(task, key)}: {values}."))
    several = any(figure.stat.count > 1 for _, figure in found)
    said = (
        "A dot is one seed; beneath, the bar is the mean, the line mean ± deviation. "
        if several
        else "A dot is one seed. "
    )
    caption = el(
        "figcaption",
        el("b", f"{key[0]}: {metric_words(key[1])}"),
        el("span", said + "The axis does not start at zero."),
    )
    return el("figure", caption, drawn, cls="" if len(task.keys) > 1 else "wide")


def _arms(task: TaskSummary) -> Html:
    found = [words.details(arm) for arm in task.arms]
    head = [th("Arm"), *(th(name, cls="" if name in ("encoder", "attention") else "num") for name in found[0])]
    body = [
        [
            _name(task, arm),
            *(td(text, cls="" if name in ("encoder", "attention") else "num") for name, text in said.items()),
        ]
        for arm, said in zip(task.arms, found, strict=True)
    ]
    return el("div", el("h3", "The arms"), table([head], body, caption="The arms"), cls="below")


def _runs(task: TaskSummary) -> Html:
    heads = [
        *(f"{split} {metric_words(metric)}" for split, metric in task.keys),
        "loss",
        "steps",
        "ms/step",
        "wall time",
    ]
    head = [th("Arm"), th("seed", cls="num"), *(th(word, cls="num") for word in heads), th("folder")]
    body = [_run(task, arm, run) for arm in task.arms for run in arm.runs]
    return table([head], body, caption="Single runs")


def _run(task: TaskSummary, arm: Arm, run: RunRecord) -> list[Html]:
    result = mapping(run.result)
    final = mapping(result.get("final"))
    unit = points_per_unit(task.task)
    scores = [number(mapping(final.get(split)).get(metric)) for split, metric in task.keys]
    loss = number(mapping(final.get(task.keys[0][0])).get("loss"))
    cells = [
        *(format.score(None if score is None else unit * score) for score in scores),
        format.MISSING if loss is None else f"{loss:.4f}",
        format.count(integer(result.get("steps"))),
        format.milliseconds(next(iter(ms_per_step(run).values()), None)),
        format.duration(number(result.get("wall_seconds"))),
    ]
    seed = td(format.MISSING if run.seed is None else str(run.seed), cls="num")
    return [_name(task, arm), seed, *(td(text, cls="num") for text in cells), td(el("code", str(run.folder)))]


def _name(task: TaskSummary, arm: Arm) -> Html:
    return th(swatch(task.arms.index(arm)), el("span", arm.name, cls="name"), scope="row", cls="row-name")


def _environment(found: Summary) -> Html:
    results = [(arm.name, mapping(run.result)) for task in found.tasks for arm in task.arms for run in arm.runs]
    if not results:
        return Html("")

    def shared(key: str) -> Html:
        return more.shared([(name, {"value": result.get(key)}) for name, result in results], more.value_of)

    keys = ("recipe", "scale", "protocol", "checkpoint", "kernel")
    splits = dict.fromkeys(split for _, result in results for split in mapping(result.get("sha256")))
    cards = [
        more.card("Training and protocol", [(key, shared(key)) for key in keys]),
        more.card("Examples", [(f"{task.task}, {split}", join([task.examples(split)])) for task in found.tasks
                               for split in splits if task.examples(split) != "unknown examples"]),
        more.machine_card(results),
    ]  # fmt: skip
    return section("environment", "Environment", el("div", *cards, cls="cards"))


def _reproduce(found: Summary) -> Html:
    """A command for each arm, which trains its seeds again from the configuration that was saved with them."""
    items = [
        el(
            "li",
            swatch(slot),
            el("b", arm.name),
            f" seeds {words.seeds_words(arm.seeds)}",
            preformatted(_commands(arm)),
        )
        for task in found.tasks
        for slot, arm in enumerate(task.arms)
    ]
    note = (
        "Each command trains the resolved configuration saved with a run into new folders; the same figures need the same "
        "versions, device and number of threads. A run that was stopped goes on exactly where it was with "
    )
    said = el("p", note, el("code", "fullrank finetune FOLDER"), ".", cls="note")
    return section("reproduce", "How to reproduce", said, el("ul", *items, cls="commands")) if items else Html("")


def _commands(arm: Arm) -> str:
    runs = arm.runs
    if len(runs) > 1 and list(arm.seeds) == list(range(1, len(runs) + 1)):
        again = runs[0].folder.parent / f"{arm.name.replace(' ', '-')}-again"
        said = shlex.join([str(runs[0].folder / "config.yaml"), "--seeds", str(len(runs)), "--out", str(again)])
        return f"fullrank finetune {said}"
    return "\n".join(
        f"fullrank finetune {shlex.quote(str(run.folder / 'config.yaml'))} "
        f"--out {shlex.quote(str(run.folder.parent / f'{run.folder.name}-again'))}"
        for run in runs
    )
