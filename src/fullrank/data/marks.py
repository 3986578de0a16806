"""Marks in texts and vocabularies, and the names that stand for them where a text may hold the same characters."""

EOS, SOS, UNK = "<eos>", "<sos>", "<unk>"
MASK = "<mask>"  # no entry of the text: a masked language model has one entry more than its vocabulary, the last
EOS_OF_TEXT = f"{EOS}\ufdd0"  # the entry of a word <eos> in a text: Unicode keeps U+FDD0 for such uses, no text has it
LINE_START = "\ufdd2"
BLOCK = "\u2581"  # what begins a word of a unigram model
BLOCK_OF_TEXT = "\x1f"  # a block in a text; white space, so that no word holds it
NEVER = -1e9  # log probability of a piece that no text has


def name_line_end(line_end: bool, line_start: bool) -> str:
    """The name of `<eos>` in a `tokenizer.json`: newline where it ends a line, a sign where `<sos>` has to follow it."""
    return EOS if not line_end else "\u2028\ufdd1" if line_start else "\n"  # white space, so no word has that name
