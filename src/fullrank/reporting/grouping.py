"""Which runs are seeds of one row, what a row is called, and which rows were measured on the same text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fullrank.config.load import flatten
from fullrank.reporting.results import SPLITS, TRANSLATION, RunRecord, mapping

# where a run was trained and how it was watched makes no other row of it
CIRCUMSTANCES = {
    "train.seed", "train.device", "train.threads", "train.track", "train.log_every_steps", "train.save_every_steps",
    "train.keep_checkpoints", "train.keep_model", "eval.test",
    "data.cache", "data.dir",
}  # fmt: skip

_SEED_SUFFIX = re.compile(r"[-_./ ]+(seed|s)[-_ ]?\d+$", re.IGNORECASE)

_REFERENCES = " references"
_VERSION = re.compile(r"\|version:[^|]*")

TEXT_FIELDS = {
    "name": "corpus",
    "label": "label",
    "vocabulary": "vocabulary",
    "valid": "validation tokens",
    "test": "test tokens",
    "fingerprint": "vocabulary fingerprint",
    "valid sha256": "validation text",
    "test sha256": "test text",
    "valid pairs": "validation pairs",
    "test pairs": "test pairs",
    "valid references": "validation references",
    "test references": "test references",
    "signature": "BLEU signature",
}


def row_key(record: RunRecord) -> str:
    """Equal for runs that differ only in their seed."""
    settings = {key: value for key, value in flatten(record.config).items() if key not in CIRCUMSTANCES}
    origin = [record.origin(key) for key in ("recipe", "row", "scale")]
    name = "" if settings else _stem(record.name)
    # a run that has not kept its references is a seed of the row all the same
    text = {key: value for key, value in measured_on(record).items() if not key.endswith(_REFERENCES)}
    return json.dumps([origin, name, settings, text], sort_keys=True, default=str)


def seeds_of_rows(records: Sequence[RunRecord]) -> list[tuple[RunRecord, ...]]:
    """Runs gathered into rows, in order of first appearance.

    Two runs of one row with the same seed (or with none recorded) are no independent samples: the second opens
    a row of its own, so that a spread is always one over different seeds. So does one with other reference translations.
    """

    def apart(other: RunRecord, record: RunRecord) -> bool:
        same_seed = other.seed == record.seed or record.seed is None
        return same_seed or bool(text_differences(measured_on(other), measured_on(record)))

    rows: dict[tuple[str, int], list[RunRecord]] = {}
    for record in records:
        key, copy = row_key(record), 0
        while any(apart(other, record) for other in rows.get((key, copy), [])):
            copy += 1
        rows.setdefault((key, copy), []).append(record)
    return [tuple(row) for row in rows.values()]


def row_names(rows: Sequence[Sequence[RunRecord]]) -> list[str]:
    """One distinct name for each row: its row in the recipe or its own name, and as much more as it takes."""
    names = [_base_name(row) for row in rows]
    for more in (_scale, _recipe, _folder):
        twice = {name for name, times in Counter(names).items() if times > 1}
        names = [_joined(name, more(row[0])) if name in twice else name for name, row in zip(names, rows, strict=True)]
    used: set[str] = set()
    for index, name in enumerate(names):
        distinct, number = name, 2
        while distinct in used:
            distinct, number = f"{name} ({number})", number + 1
        names[index] = distinct
        used.add(distinct)
    return names


def measured_on(record: RunRecord) -> dict[str, Any]:
    """What a figure depends on besides the model: text, splits and vocabulary, as far as recorded.

    BLEU is of text, whatever a vocabulary cuts it into: there, pairs, reference translations and signature decide.
    """
    result = mapping(record.result)
    if record.finetunes:
        return {f"{split} sha256": digest for split, digest in mapping(result.get("sha256")).items()}
    corpus, pairs = mapping(result.get("corpus")), record.task == TRANSLATION
    found = {key: corpus.get(key) for key in ("name", "label", *(() if pairs else ("vocabulary", "fingerprint")))}
    if pairs:
        final = mapping(result.get("final"))
        ways = [mapping(final.get(split)).get("bleu_signature") for split in SPLITS]
        found["signature"] = next((without_version(str(way)) for way in ways if way), None)
    for split in SPLITS:  # the training text makes another model, not another measurement
        if pairs:
            found[f"{split} pairs"] = mapping(corpus.get("pairs")).get(split)
            found[split + _REFERENCES] = record.references.get(split)
        else:
            found[split] = mapping(corpus.get("tokens")).get(split)
            found[f"{split} sha256"] = mapping(corpus.get("sha256")).get(split)
    return {key: value for key, value in found.items() if value is not None}


def without_version(signature: str) -> str:
    """A signature of sacreBLEU without its version, which alone makes no other measurement."""
    return _VERSION.sub("", signature)


def text_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The fields in which two texts differ, in words; what only one of them records decides nothing."""
    if bool(first) != bool(second):
        return ["corpus (not recorded in every run)"]
    return [word for key, word in TEXT_FIELDS.items() if key in first and key in second and first[key] != second[key]]


def texts_of_rows(rows: Sequence[Sequence[RunRecord]]) -> list[int]:
    """For each row the number of the text it was measured on; equal numbers may be compared."""
    known: list[dict[str, Any]] = []
    numbers: list[int] = []
    for row in rows:
        text = measured_on(row[0])
        same = (index for index, other in enumerate(known) if not text_differences(other, text))
        found = next(same, len(known))
        if found == len(known):
            known.append(text)
        numbers.append(found)
    return numbers


def _stem(name: str) -> str:
    return _SEED_SUFFIX.sub("", name) or name


def _base_name(row: Sequence[RunRecord]) -> str:
    if named := row[0].origin("row"):
        return named
    return _stem(row[0].name) if len(row) > 1 else row[0].name


def _scale(record: RunRecord) -> str:
    return record.origin("scale")


def _recipe(record: RunRecord) -> str:
    return record.origin("recipe")


def _folder(record: RunRecord) -> str:
    return "/".join(record.folder.parts[-2:])


def _joined(name: str, more: str) -> str:
    return f"{name} · {more}" if more and more not in name else name
