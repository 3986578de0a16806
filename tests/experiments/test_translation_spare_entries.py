"""A model may have more entries than its vocabulary: it translates, and what has no name is an unknown word."""

from pathlib import Path

from fullrank.data.language import build_language, find_words
from fullrank.experiments.translation import LineTranslator, replace_unknown
from translation_runs import languages, write_run


def test_entries_that_only_the_model_has_are_unknown_words() -> None:
    target = languages()[1]
    assert replace_unknown((3, len(target), len(target) + 5, len(target) - 1), target) == (3, 1, 1, len(target) - 1)


def test_a_model_with_spare_entries_translates(tmp_path: Path) -> None:
    write_run(tmp_path)
    smaller = build_language("en", find_words(languages()[1].entries[2:4]))
    smaller.save(tmp_path / "tokenizer" / "target")
    lines = LineTranslator(tmp_path).translate(["ein hund schläft .", "rot"])
    assert all(set(best[0].text.split()) <= set(smaller.entries) for best in lines)
