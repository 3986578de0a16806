"""Reports in words: the headline, what the figures say and no more, and what forbids or weakens a comparison."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.evaluation import statistics
from fullrank.reporting import figures, runs, tables
from fullrank.reporting.compare import Comparison, best_row, compared_split, signatures
from fullrank.reporting.figures import BLEU, LAST_POSITION, SCORES, TOKENISED_BLEU, Measure, interval, listed, points
from fullrank.reporting.finetuning import SERVER, UNKNOWN, Arm, Task, Tuning, metric_words
from fullrank.reporting.rows import MARK, Row
from fullrank.reporting.runs import MASKED_MODELING, TRANSLATION, RunGroup, integer, mapping
from fullrank.reporting.tables import LAST_POSITION_TITLE, SPLIT_WORDS, Table, change_words, interval_words, print_table

_KINDS = {
    TRANSLATION: "translation models", runs.LANGUAGE_MODELING: "language models", MASKED_MODELING: "masked language models",
}  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """`headline` is one line, `paragraphs` are a few sentences. `warnings` forbid a comparison, `cautions` weaken one."""

    headline: str
    paragraphs: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


def summarize(content: Comparison | Tuning) -> Summary:
    """Summary of a report; every claim is one that its figures support."""
    return _of_tuning(content) if isinstance(content, Tuning) else _of_comparison(content)


def _of_comparison(compared: Comparison) -> Summary:
    warnings, cautions = tuple(_warnings(compared)), tuple(dict.fromkeys(_cautions(compared)))
    groups = [_Words(rows, compared.measure) for rows in compared.groups]
    if not groups:
        nothing = "There is nothing to compare until a run has written its result."
        return Summary("No run has finished yet", (nothing,), warnings, cautions)
    if len(groups) > 1 and compared.comparable:
        paragraphs = tuple(f"{one.first.part}: {one.claim()[0]}. {one.claim()[1]}" for one in groups)
        headline = f"{len(groups)} models in one table: rows of each are compared with its first"
        return Summary(headline, paragraphs, warnings, cautions)
    if len(groups) > 1:
        paragraphs = tuple(f"On {one.first.label or 'a text that is not recorded'}: {one.claim()[1]}" for one in groups)
        what = "text or signature" if compared.task == TRANSLATION else "text or vocabulary"
        return Summary(f"Not one comparison: the runs differ in {what}", paragraphs, warnings, cautions)
    resampled, undecided = groups[0].resampled(compared)
    headline, paragraph = groups[0].claim(undecided)
    return Summary(headline, (f"{paragraph} {resampled}".strip(),), warnings, cautions)


class _Words:
    """Sentences about rows that were measured on one text, judged by one figure on one split."""

    def __init__(self, rows: Sequence[Row], measure: Measure) -> None:
        self.rows, self.measure, self.first = rows, measure, rows[0]
        self.split = compared_split([row for row in rows if row.comparable_figures])
        self.measured = [row for row in rows if self.split in row.comparable_figures]
        self.best = best_row(rows, measure, self.split)
        self.name = f"{SPLIT_WORDS[self.split]} {measure.words}"

    def short(self, row: Row, split: str = "") -> str:
        return self.measure.spread(row.figures[split or self.split])

    def long(self, row: Row) -> str:
        stat = row.figures[self.split]
        seeds = "" if stat.deviation is None else f" (mean ± standard deviation of {stat.count} seeds)"
        return self.short(row) + seeds

    def equal(self, one: Row, other: Row, split: str = "") -> bool:
        """Equal to the digits shown."""
        split = split or self.split
        return self.measure.show(one.figures[split].mean) == self.measure.show(other.figures[split].mean)

    def apart(self, one: Row, other: Row) -> bool | None:
        """True if the interval over seeds of the difference leaves out 0; None where one seed leaves it unknown."""
        ends = one.against(other, self.split)
        return None if ends is None else ends.low > 0 or ends.high < 0

    def claim(self, undecided: bool = False) -> tuple[str, str]:
        """Headline and paragraph. `undecided`: on resampled test sets the best row and the first cannot be told apart."""
        best, measure = self.best, self.measure
        if undertrained := listed(row.name for row in self.rows if row.undertrained):
            headline = f"{undertrained}: undertrained, {measure.words} above that of a unigram model"
            sentences = [
                self._unigram(),
                "Rows above it have learned less than word frequencies: train longer to compare.",
            ]
        elif best is None:
            headline = f"{listed(row.name for row in self.rows)}: {measure.words} is {NOT_NEXT_TOKEN}"
            sentences = [self._last_positions()]
        elif len(self.measured) == 1:
            headline = f"{best.name}: {self.name} {self.short(best)}"
            lone = "One seed says nothing about the spread." if len(best.runs) == 1 else ""
            reached = f"{best.name} reaches {measure.article}{self.name} of {self.long(best)}."
            sentences = [reached, self._unigram(), lone]
        else:
            headline, against_first = self._against_first(best, undecided)
            sentences = [against_first, self._neighbours(best), self._unigram(), self._other_split(best), self._seeds()]
        return headline, " ".join(filter(None, sentences))

    def _last_positions(self) -> str:
        """The only figures where no row has a next-token perplexity."""
        stats = [(row, row.by_checkpoint(LAST_POSITION).get("final", {})) for row in self.rows]
        split = "test" if any("test" in by_split for _, by_split in stats) else "valid"
        values = [f"{row.name} {LAST_POSITION.spread(by_split[split])}" for row, by_split in stats if split in by_split]
        return f"{LAST_POSITION_TITLE}, on the {SPLIT_WORDS[split]} split: {listed(values)}." if values else ""

    def _against_first(self, best: Row, undecided: bool) -> tuple[str, str]:
        """Headline and sentence about the best of several rows beside the first."""
        first, measure, split = self.first, self.measure, self.split
        value, is_best = f"{self.name} {self.short(best)}", f"{best.name} is {measure.extreme}"
        if best is first:
            other = best_row([row for row in self.measured if row is not best], measure, split)
            if other is not None and split in other.difference:
                ends = other.intervals.get(split)
                sure = f" (95 % interval {measure.show_interval(*ends)})" if ends else ""
                value += f"; next is {other.name} at {measure.show_difference(other.difference[split])}{sure}"
            return f"{best.name}, the first row, stays {measure.extreme}: {value}", ""
        if first not in self.measured:
            kind = " of next tokens" if first.marked else ""
            return f"{is_best}: {value}", f"The first row, {first.name}, has no {self.name}{kind} to compare with."
        base = f"The first row, {first.name}, has {self.long(first)}."
        if self.equal(best, first):
            return f"{best.name} and {first.name} are equal to the digits shown: {value}", base
        difference = measure.difference(best.figures[split].mean, first.figures[split].mean) or 0.0
        value = f"{value}, {measure.size(difference)} {measure.beyond} {first.name}"
        ends = best.against(first, split)
        if ends is None:
            lone = [row.name for row in (best, first) if len(row.runs) == 1]
            seeds = ("no scatter over the seeds", f"one seed of {listed(lone)}", "one seed")[len(lone)]
            return f"{is_best}: {value} ({seeds}, no interval)", base
        value = f"{value} (95 % interval {measure.show_interval(*ends)})"
        if ends.low <= 0 <= ends.high:
            return f"{is_best}, but other seeds might turn it round: {value}", base
        if undecided:
            return f"{is_best}, but other sentences might turn it round: {value}", base
        return f"{best.name} is best: {value}", base

    def _unigram(self) -> str:
        values = {self.measure.show(row.unigram[self.split]) for row in self.rows if self.split in row.unigram}
        return f"A unigram model with the same vocabulary has {values.pop()}." if len(values) == 1 else ""

    def _neighbours(self, best: Row) -> str:
        """Rows from which the best cannot be told apart, besides the first, of which the headline speaks."""
        others = [row for row in self.measured if row is not best and (row is not self.first or best is self.first)]
        near = [row.name for row in others if self.apart(best, row) is False]
        return f"These seeds do not tell {best.name} from {listed(near)}." if near else ""

    def _other_split(self, best: Row) -> str:
        if self.split != "test":
            return f"No row has {self.measure.article}test {self.measure.words}."
        measured = [row for row in self.rows if "valid" in row.comparable_figures]
        lead = best_row(measured, self.measure, "valid") if len(measured) > 1 else None
        if lead is None or lead is best or ("valid" in best.figures and self.equal(lead, best, "valid")):
            return ""
        value = self.short(lead, "valid")
        return f"On the validation split another row is {self.measure.extreme}: {lead.name} with {value}."

    def _seeds(self) -> str:
        rows = [row for row in self.rows if not row.marked]
        lone = [row.name for row in rows if len(row.runs) == 1]
        if len(lone) == len(rows):
            return "Every row is one seed, and one seed cannot decide between rows: how far seeds scatter is not known here."
        return f"One seed only, so nothing is decided: {listed(lone)}." if lone else ""

    def resampled(self, compared: Comparison) -> tuple[str, bool]:
        """Result of resampled test sets for the best row against the first (or the best of the others if it is the first).

        True if the best row and the first cannot be told apart.
        """
        tested = compared.differences[0] if compared.differences else None
        if tested is None or tested.split != self.split or len(self.measured) < 2:
            return "", False
        other = best_row(self.rows[1:], self.measure, self.split) if self.best is self.first else self.best
        pair = next((row for row in tested.rows if other is not None and row.row == other.name), None)
        if pair is None:
            return "", False
        means = "" if pair.runs == pair.baseline_runs == 1 else ", means over their runs"
        verdict = "leaves out 0" if pair.decided else "holds 0: other sentences might turn it round"
        decimals = figures.decimals_of(pair.difference, pair.low, pair.high)
        sentence = (
            f"Paired bootstrap over {tested.split} sentences, {pair.row} − {pair.baseline}{means}: "
            f"{points(pair.difference, decimals)} ({interval(pair.low, pair.high, decimals)}); the 95 % interval {verdict} "
            f"(p = {pair.p_value:.3f})."
        )
        return sentence, pair.baseline == self.first.name and not pair.decided


def _warnings(compared: Comparison) -> Iterator[str]:
    """Reasons why figures must not be compared."""
    if not compared.comparable:
        in_bits = compared.measure.in_bits
        first, *other_texts = (runs.measured_on(rows[0].runs[0], in_bits=in_bits) for rows in compared.groups)
        fields = dict.fromkeys(word for other in other_texts for word in runs.differences_of_text(first, other))
        groups = "; ".join(
            f"{listed(row.name for row in rows)} on {rows[0].label or 'a text not recorded'}"
            for rows in compared.groups
        )
        yield (
            f"{_capital(compared.measure.plural)} of these runs cannot be compared. They differ in: {', '.join(fields)}. "
            f"Compare only within a group: {groups}."
        )
    if compared.left_out:
        own, *others = (_KINDS.get(task, task) for task in (compared.task, *(run.task for run in compared.left_out)))
        names = listed(f"{run.name} ({run.folder})" for run in compared.left_out)
        yield (
            f"These are {own}, as the first run is; {listed(dict.fromkeys(others))} are left out: {names}. "
            "Report them on their own."
        )
    if marked := [row.name for row in compared.rows if row.marked]:
        yield (
            f"{MARK} {listed(marked)}: {NOT_NEXT_TOKEN}. Such a figure compares with no other; that of the last "
            "position of every segment is an ordinary perplexity, for its target is not read."
        )


def _cautions(compared: Comparison) -> Iterator[str]:
    """Reasons why a difference may not be due to the rows."""
    rows, measure = compared.rows, compared.measure
    for group in compared.groups:
        yield from _cautions_of_group(group)
    if len(compared.protocols) > 1:
        ways = "; ".join(f"[{index}] {protocol}" for index, protocol in enumerate(compared.protocols, start=1))
        by_part = {row.part: {other.shown_protocol for other in rows if other.part == row.part} for row in rows}
        mixed = any(len(protocols) > 1 for protocols in by_part.values())
        reason = "The runs were not all evaluated by the same protocol; part of a difference may come from that."
        own = "Each model was evaluated by a protocol of its own."
        yield f"{reason if mixed else own} Rows are marked with theirs: {ways}."
    if any(run.protocols_differ for run in compared.runs):
        yield "Validation and test figures are measured by different protocols: the two columns do not compare."
    others = [other.plural for other in figures.MEASURES if compared.states(other)]
    if others and compared.paper_measure is None:
        yield (
            f"The paper's figures are {others[-1]}, and these runs are compared by {measure.words}: they are left out."
        )
    if compared.task == MASKED_MODELING:
        yield f"What is compared is {MASKED_TOKEN}: the model reads the rest of the text, on both sides."
    if compared.paper_is_last:
        last_is_best = all(row.last and row.last == row.figures for row in rows)
        yield (
            "The paper's figures are of the weights of the last epoch: compare them with ours of the last checkpoint"
            + (", which in these runs is the best." if last_is_best else ".")
        )
    if any(row.by_checkpoint(figures.WITHOUT_SOS) for row in rows):
        yield (
            "Every line begins with a token <sos>, which counts in the perplexities and costs almost nothing; without it, as "
            "tokens are usually counted, they are higher."
        )
    versions = signatures(compared.runs).get(BLEU.key, ())
    if len(versions) > len({runs.without_version(signature) for signature in versions}):
        yield "BLEU was computed by different versions of sacreBLEU, which may move it a little."
    if compared.task == TRANSLATION and len({str(row.runs[0].corpus.get("vocabulary")) for row in rows}) > 1:
        yield (
            "The rows have different vocabularies: their perplexities, which are per token, do not compare; BLEU does."
        )
    if measure is BLEU and (names := [row.name for row in rows if any(not run.next_token for run in row.runs)]):
        yield f"Perplexity of {listed(names)} is left out: {NOT_NEXT_TOKEN}."
    if measure is BLEU and compared.paper_measure is BLEU and compared.states(TOKENISED_BLEU):
        yield "The paper's figures of some rows are tokenised BLEU and are left out: ours beside them are sacreBLEU's."


def row_notes(group: RunGroup) -> Iterator[str]:
    """Runs of a row whose training is that of a row of another table, or of this one."""
    for run in group.runs:
        if origin := mapping(run.get("training")):
            whose = " ".join(str(origin[key]) for key in ("recipe", "row") if origin.get(key))
            yield f"{group.name}, seed {run.seed}: one training with {whose} ({origin.get('folder')}), measured anew."


def _cautions_of_group(rows: Sequence[Row]) -> Iterator[str]:
    """Cautions about rows that were measured on one text."""
    first, runs = rows[0], [run for row in rows for run in row.runs]
    if first.is_slice:
        yield f"The text is a slice ({first.label}): its figures are not those of the published corpus."
    reduced = first.is_slice or any(run.get("scale") not in (None, "paper") for run in runs)
    if reduced and any(row.paper for row in rows):
        yield (
            f"These runs are on {first.label}. The paper's figures belong to its own setting (scale paper, full corpus), "
            "which these runs do not repeat: the levels do not compare."
        )
    budgets = sorted(tokens for run in runs if (tokens := integer(run.get("tokens_seen"))) is not None)
    # batches of whole sentences do not end at the same token with every seed
    slack = 1.01 if runs[0].task == TRANSLATION else 1.0
    if budgets and budgets[-1] > slack * budgets[0]:
        yield f"The runs did not train on equally many tokens: {budgets[0]:,} to {budgets[-1]:,}."
    keys = ("platform", "cpu", "threads", "device", "precision")
    if len({tuple(str(run.get("environment", key)) for key in keys) for run in runs}) > 1:
        yield "The runs were not all made on the same kind of machine; tokens/s, ms and wall time do not compare."


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


# -- notes beneath tables ---------------------------------------------------------------------------------------------


def comparison_notes(compared: Comparison) -> Iterator[str]:
    """Legend of the table of rows."""
    measure, better = compared.measure, compared.measure.comparative
    yield f"{_capital(measure.words)}: {better} is better; the {measure.extreme} of comparable rows is set bold."
    if any(row.difference for row in compared.rows):
        whose, unit = "their" if measure.in_bits else "its", ", in points" if measure.higher else ""
        of_part = " of its model" if any(row.part for row in compared.rows) else ""
        interval = ", and its 95 % interval over seeds (paired if the seeds are the same, else Welch's)"
        yield (
            f"Beneath {measure.article or 'the '}{measure.words}: {whose} difference to the first row{of_part}{unit}"
            f"{interval if any(row.intervals for row in compared.rows) else ''}."
        )
    if measure is BLEU:
        yield "Perplexity is per target token."
    if compared.several_seeds:
        yield (
            "Rows with several seeds (n) show mean ± sample standard deviation; the mean is that of the runs' "
            f"{measure.plural}. Speeds and times are means."
        )
    if compared.paper_measure is not None:
        yield "“Paper” is the published figure, as the recipe states it."
    if any(row.marked for row in compared.rows):
        yield f"{MARK} {NOT_NEXT_TOKEN}; such a figure compares with no other, and is never set bold."
    if measure is figures.BITS_PER_BYTE and compared.states(figures.BITS_PER_CHARACTER):
        yield (
            "The paper calls its figure bits per character; where the corpus is bytes (enwik8), a character is a byte."
        )


def signature_notes(compared: Comparison) -> Iterator[str]:
    """Method of the scores of translations."""
    signed = signatures(compared.runs)
    yield from (f"{one.words}: sacreBLEU, {' and '.join(signed[one.key])}." for one in SCORES if one.key in signed)
    if compared.paper_measure is TOKENISED_BLEU:
        measured = any(row.stats(TOKENISED_BLEU) for row in compared.rows)
        yield (
            f"{TOKENISED_BLEU.short}: tokenised, lower-cased BLEU4, as fairseq-generate printed it, which is what the paper "
            "states; it does not compare with sacreBLEU's."
            + ("" if measured else " These runs have none: their corpus is not tokenised.")
        )


def difference_notes(compared: Comparison) -> list[str]:
    """Method and limits of the tables of differences."""
    if not (tests := compared.differences):
        return []
    sizes = listed(f"{tested.sentences:,} {tested.split} sentences" for tested in tests)
    left_out = dict.fromkeys(sentence for tested in tests for sentence in tested.left_out)
    return [
        "A difference is set bold where its interval over sentences leaves out 0. "
        f"Paired bootstrap (Koehn 2004): {tests[0].samples:,} samples of the {sizes}, the same for all rows, seed "
        f"{tests[0].seed}; of a row with several runs (n) the mean of their BLEU.",
        "The interval over sentences and p are about these very models on other sentences like these. The interval over seeds "
        "(paired if the seeds are the same, else Welch's) is about training again; two runs a row leave it wide.",
        *(f"Left out: {sentence}." for sentence in left_out),
    ]


# -- fine-tuning ------------------------------------------------------------------------------------------------------


def _of_tuning(tuning: Tuning) -> Summary:
    """Every arm against its baseline; unequal terms are warnings, other remarks and how figures were made are cautions."""
    sentences = [
        sentence for task in tuning.tasks for arm in task.arms for sentence in _against_sentences(task, arm)
    ] or [
        f"{task.name}: {metric_words(key[1])} x 100 of {arm.name}, {key[0]}: {arm.figures[key].words}."
        for task in tuning.tasks
        for key in task.keys[:1]
        for arm in task.arms
        if key in arm.figures
    ]
    remarks = [f"{task.name}: {remark}" for task in tuning.tasks for remark in task.remarks]
    warnings = [remark for remark in remarks if "Not equal terms" in remark]
    cautions = [remark for remark in remarks if remark not in warnings] + _tuning_notes(tuning)
    cautions += [note for arm in tuning.arms for note in row_notes(arm)]
    headline, *others = sentences or ["No run has finished."]
    return Summary(headline, tuple(others), tuple(warnings), tuple(cautions))


def _against_sentences(task: Task, arm: Arm) -> Iterator[str]:
    """The headline figures.score of an arm against its baseline, and its deviation where anything can be said of it."""
    key = next((key for key in task.keys if key in arm.figures), None)
    if key is None or (against := arm.figures[key].against) is None:
        return
    beginning = (
        f"{task.name}: {metric_words(key[1])} of {arm.name} is {figures.score(arm.figures[key].stat.mean)}, "
        f"{points(against.difference, against.decimals)} to {against.baseline}"
    )
    if against.interval is None:
        yield f"{beginning}; whether that is more than chance cannot be told from so few seeds."
    else:
        kind = "paired over seeds" if against.paired else "Welch"
        verdict = "more than the choice of seeds" if against.decided else "not decided by these seeds"
        yield f"{beginning} (95 % {interval_words(against.interval, against.decimals)}, {kind}): {verdict}."
    change, ends = against.deviation_change_percent, against.deviation_f_interval
    if change is not None and ends is not None:
        decided = ends.low > 0 or ends.high < 0
        verdict = "" if decided else ", so these seeds do not decide whether it rises or falls"
        yield (
            f"{task.name}: its deviation over seeds changed by {change_words(change)} against {against.baseline} "
            f"(95 % {change_words(ends)}){verdict}."
        )


def _tuning_notes(tuning: Tuning) -> list[str]:
    """Method and limits of the figures."""
    if not any(task.compares for task in tuning.tasks):
        return []
    papers = [figure.paper for arm in tuning.arms for figure in arm.figures.values()]
    server = "“Server” are scores of the GLUE test server: of other examples than ours, not to be set beside them."
    return [
        "Mean ± sample standard deviation (n − 1) over n seeds. Differences are of means, with 95 % intervals over seeds: "
        "Welch's for independent seeds; paired (Student) where both arms have the same seeds.",
        "Deviation: 100 (s / s of the baseline − 1) as in Skip Cross-head, Table 4. Its first interval is from the F "
        f"distribution, exact for normal scores; the second from {statistics.SAMPLES:,} samples of the seeds (percentiles, "
        f"seed {statistics.SEED}), too narrow for few seeds.",
        *([server] if any(paper is not None and paper.of == SERVER for paper in papers) else []),
    ]


def protocol_notes(task: Task) -> list[str]:
    """Methods of the figures of a task, each once."""
    return list(dict.fromkeys(
        f"{task.name}: {arm.get('protocol') or UNKNOWN}; the {arm.get('checkpoint') or UNKNOWN} checkpoint; "
        f"trained on {task.examples('train', arm)}"
        for arm in task.arms
    ))  # fmt: skip


# -- a whole report on the terminal -----------------------------------------------------------------------------------


def print_report(content: Comparison | Tuning, console: Console | None = None) -> None:
    """Print the headline, then the tables, each with what has to be said about it."""
    console, summary, tuned = console or Console(), summarize(content), isinstance(content, Tuning)
    unfinished = [f"Not finished: {run.folder} ({'; '.join(run.problems)})" for run in content.unfinished]
    notes = _notes_in_lines(content.notes, console.width)
    styled: list[tuple[str, Iterable[Table | str]]] = [
        ("bold", (summary.headline, *(summary.paragraphs if tuned else ()))),
        ("yellow", summary.warnings),
        ("dim", _tuning_parts(content) if isinstance(content, Tuning) else _comparison_parts(content)),
        ("dim" if tuned else "", summary.cautions),
        ("yellow", unfinished),
        ("dim", notes),
    ]
    for style, parts in styled:
        for part in parts:
            if isinstance(part, Table):
                print_table(part, console)
            else:
                console.print(Text(part, style))


_NOTE_LINES = 3


def _notes_in_lines(notes: Mapping[str, str], width: int) -> list[str]:
    """The notes of recipes in at most three lines; of several recipes, their names."""
    if not notes:
        return []
    several, names = len(notes) > 1, ", ".join(notes)
    words = f"Notes of {names}: " + ("`fullrank recipes show NAME`" if several else notes[names])
    lines = textwrap.wrap(words, width)
    if len(lines) <= _NOTE_LINES:
        return lines
    rest = "NAME" if several else names
    shortened = textwrap.wrap(words, width, max_lines=_NOTE_LINES - 1, placeholder=" ...")
    return [*shortened, f"`fullrank recipes show {rest}` has the rest"]


def _comparison_parts(compared: Comparison) -> Iterator[Table | str]:
    if compared.rows:
        yield tables.comparison_table(compared)
    for row in compared.rows:
        yield from row_notes(row)
    yield from tables.other_figures(compared)
    yield from signature_notes(compared)
    yield from (tables.difference_table(compared, tested) for tested in compared.differences)
    yield from difference_notes(compared)


def _tuning_parts(tuning: Tuning) -> Iterator[Table | str]:
    for task in tuning.tasks:
        yield from (tables.scores_table(task, key) for key in task.keys)
        yield tables.arms_table(task)
        yield from protocol_notes(task)
