"""IWSLT 2014 as it was published: TED talks with tags, and how they become lines, as everybody prepares them since
Ranzato et al. (2016).

The training file without its address, keyword and id lines and without the tags of title and description; the test set is
dev2010, dev2012, tst2010, tst2011 and tst2012, from XML. Every 23rd of the cleaned training pairs is the validation set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fullrank.data.files import lines
from fullrank.data.pair_lines import SplitFiles

VALID_EVERY = 23
_DROPPED = re.compile("<url>|<talkid>|<keywords>")
_TAGS = re.compile("</?title>|</?description>")
_SEGMENT = re.compile(r'<seg id="[0-9]*">\s*|\s*</seg>\s*')
_TEST = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")


def tagged(path: Path, key: str) -> Iterator[str]:
    """Sentences of a training file."""
    return (_TAGS.sub("", line) for line in lines(path, key) if not _DROPPED.search(line))


def segments(path: Path, key: str) -> Iterator[str]:
    """Sentences of a test file."""
    return (_SEGMENT.sub("", line).replace("\u2019", "'") for line in lines(path, key) if "<seg id" in line)


def raw_names(side: str) -> list[str]:
    """Files of a language, `de` or `en`: the training file, then those of the test set."""
    return [f"train.tags.de-en.{side}", *(f"IWSLT14.{name}.de-en.{side}.xml" for name in _TEST)]


def raw_files(places: Sequence[Path], languages: tuple[str, str]) -> dict[str, SplitFiles] | None:
    """The published files, if one of the folders holds them all."""
    for place in places:
        source, target = ([place / name for name in raw_names(side)] for side in languages)
        if all(path.is_file() for path in (*source, *target)):
            return {
                "train": SplitFiles(source[:1], target[:1], tagged),
                "test": SplitFiles(source[1:], target[1:], segments),
            }
    return None
