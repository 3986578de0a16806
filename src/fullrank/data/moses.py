"""The tokenizer of Moses, by `sacremoses`: what translation corpora of the papers were tokenized with.

The package is an extra: it is imported when a corpus or a translation asks for it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from fullrank.core.errors import InputError

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@lru_cache(maxsize=8)
def _tools(language: str) -> tuple[Any, Any]:
    """Tokenizer and detokenizer of a language."""
    try:
        from sacremoses import MosesDetokenizer, MosesTokenizer
    except ImportError as error:
        raise InputError(
            "Moses tokenization needs the package sacremoses: pip install 'fullrank[translate]', or set data.moses=false"
        ) from error
    return MosesTokenizer(lang=language), MosesDetokenizer(lang=language)


def tokenized(line: str, language: str) -> str:
    """Tokens of a line with single spaces between; `&`, quotes, brackets and bars are escaped as Moses does (`&quot;`)."""
    found = _tools(language)[0].tokenize(_CONTROL.sub(" ", line), return_str=True, escape=True)
    return " ".join(str(found).split())


def detokenized(text: str, language: str) -> str:
    """Ordinary text of a tokenized line; escapes are undone."""
    return " ".join(str(_tools(language)[1].detokenize(text.split(), return_str=True, unescape=True)).split())
