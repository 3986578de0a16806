"""The words of Transformer-XL, split and joined as its old tokenizer did."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

from fullrank.core.errors import InputError, pip_install
from fullrank.files import text_of


def read_vocabulary(path: str | Path) -> list[str]:
    """Words by id, of a text file with one on a line, before the first space. InputError for the pickles of old releases."""
    data = Path(path).read_bytes()
    if data.startswith((b"\x80", b"PK")):  # a pickle, or torch's archive of one
        raise InputError(
            f"{path} is a pickle, which may run any code when it is read; convert it to text, one word a line: two lines "
            "that run no code are in docs/transformer_xl.md"
        )
    lines = text_of(data, str(path)).strip("\n").split("\n")
    if empty := [i + 1 for i, line in enumerate(lines) if not line.strip()]:
        raise InputError(f"{path}: line {empty[0]} holds no word; a vocabulary has one word on each line")
    return list(dict.fromkeys(line.split()[0] for line in lines))


class TransfoXLTokenizer(PreTrainedTokenizer):
    """Words of a text <-> ids; a word that the vocabulary lacks is `unk_token`.

    moses: normalize and split raw text as the old tokenizer did (needs sacremoses; "5,000" becomes 5 @,@ 000); without it
    text is split at white space, which is right for the files of WikiText-103. A text gets no special tokens.
    """

    vocab_files_names = {"vocab_file": "vocab.txt"}  # noqa: RUF012  Hugging Face reads plain collections
    model_input_names = ["input_ids"]  # noqa: RUF012  the model knows no padding

    def __init__(self, vocab_file: str | None = None, moses: bool = True, lower_case: bool = False, language: str = "en",
                 unk_token: str = "<unk>", eos_token: str = "<eos>", **kwargs: Any) -> None:  # fmt: skip
        if vocab_file is None:
            raise InputError(
                "vocab_file: there is no vocab.txt; an old vocab.bin is converted as docs/transformer_xl.md shows"
            )
        self.words = read_vocabulary(vocab_file)
        self.ids = {word: i for i, word in enumerate(self.words)}
        if missing := [str(token) for token in (unk_token, eos_token) if str(token) not in self.ids]:
            raise InputError(
                f"{vocab_file}: {', '.join(missing)} is no word of it; name others: unk_token=..., eos_token=..."
            )
        self.moses, self.lower_case, self.language = moses, lower_case, language
        if moses:
            try:
                import sacremoses
            except ImportError as error:
                raise InputError(
                    f"moses: needs the package sacremoses: {pip_install('translate')}; or moses=False for text in words"
                ) from error
            self._normalizer, self._splitter = (
                sacremoses.MosesPunctNormalizer(language),
                sacremoses.MosesTokenizer(language),
            )
            self._joiner = sacremoses.MosesDetokenizer(language)
        if "<formula>" in self.ids:
            kwargs.setdefault("extra_special_tokens", ["<formula>"])
        super().__init__(
            unk_token=unk_token, eos_token=eos_token, moses=moses, lower_case=lower_case, language=language, **kwargs
        )

    @property
    def vocab_size(self) -> int:
        """Number of words."""
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        """Ids of words, and of tokens that were added."""
        return self.ids | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        text = text.lower() if self.lower_case else text
        if not self.moses:
            return text.split()
        kept = {"protected_patterns": self.all_special_tokens, "escape": False}
        words = self._splitter.tokenize(self._normalizer.normalize(text.strip()), aggressive_dash_splits=True, **kept)
        return re.sub(r"(?<=\d)[,.](?=\d)", r" @\g<0>@ ", " ".join(words)).split()

    def _convert_token_to_id(self, token: str) -> int:
        return self.ids.get(token, self.ids[str(self.unk_token)])

    def _convert_id_to_token(self, index: int) -> str:
        return self.words[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of words; with `moses` marks and parts of numbers are joined again."""
        if not self.moses:
            return " ".join(tokens)
        return re.sub(r" @([,.])@ ", r"\1", self._joiner.detokenize(tokens)).strip()

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write `vocab.txt`, one word a line."""
        path = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}vocab.txt"
        path.write_text("".join(f"{word}\n" for word in self.words), encoding="utf-8", newline="\n")
        return (str(path),)
