"""Convert a run folder written before all tokenizers became those of Hugging Face: python scripts/convert_run.py OLD NEW.

NEW is a copy that today's `fullrank eval NEW` reads with the same figures: vocabulary files, configuration and records are
converted. The text is prepared anew where it is there, and its token ids have to be those that the run was trained on.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from fullrank.config.load import build, flatten, merge, read_yaml, to_yaml
from fullrank.core.errors import ConfigError, FullRankError, InputError
from fullrank.data import Tokenizer, build_bytes, build_characters, build_words, prepare
from fullrank.data.language import Pieces, build_language
from fullrank.data.tokenizers import LINE_END, read_merges, wrap_bpe
from fullrank.files import digest, parse_json, read_checked, read_json, write_json

# values of keys that are no more, by which they did nothing; keys of training are left out whatever they said
AT_REST = {"model.attention.value_residual": False, "model.output.latent_dropout_locked": False, "eval.dynamic": None}
FREE = ("train.", "model.output.epsilon", "data.eos", "data.concatenate_splits", "eval.sample", "eval.keep_log_")
WORD_EOS = "<eos>\ufdd0"  # the entry of a word <eos> of a text


def convert_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert old settings: leave out the keys that are no more.

    Raises InputError for a key that made the model another.
    """
    try:
        return build(raw).to_dict()
    except ConfigError as error:
        unknown = re.findall("unknown key '(.*?)'", str(error))
        values = flatten(raw)
        for key in unknown:
            if values.pop(key) != AT_REST.get(key, ...) and not key.startswith(FREE):
                raise InputError(f"{key}: this version has no such key, and the run was made with it") from error
        if not unknown:
            raise
        return convert_config(merge({}, values))


def convert_tokenizer(folder: Path) -> Tokenizer:
    """Make today's tokenizer of old files; raises InputError where none gives the same ids."""
    meta = read_checked(folder / "vocabulary.json")
    kind = meta["kind"]
    lowercase = meta["lowercase"]
    if kind in ("byte", "sentences"):
        return build_bytes(lowercase=lowercase) if kind == "byte" else convert_language(meta)
    sos = meta.get("line_start", False)
    if not meta.get("line_end", True) or (sos and kind == "bpe"):
        raise InputError(f"{folder}: lines without <eos>, or BPE with <sos>, have no tokenizer in this version")
    saved = Backend.from_file(str(folder / "tokenizer.json"))
    ids = saved.get_vocab(with_added_tokens=False)
    if kind == "bpe":
        backend = Backend(models.BPE(ids, read_merges(saved)))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return wrap_bpe(backend, lowercase=lowercase)
    entries = sorted(ids, key=ids.__getitem__)
    if kind == "character":
        return build_characters(entries, lowercase=lowercase)
    names = {"\u2028\ufdd1": LINE_END, WORD_EOS: "<eos>"}
    return build_words([names.get(name, name) for name in entries], lowercase=lowercase, split=meta["split"], sos=sos)


def convert_language(meta: Mapping[str, Any]) -> Tokenizer:
    """Make today's tokenizer of a language of a translation."""
    kind = meta["segmenter"]
    state = meta["state"]
    entries = meta["pieces"][2:]
    names = entries
    merges: list[tuple[str, str]] = []
    scores = {}
    if kind == "codes":
        entries = [piece[:-2] if piece.endswith("@@") else piece + "</w>" for piece in entries]
        names = list(entries)
        for line in state.splitlines()[1:]:
            left, right = line.split(" ")
            merges.append((left, right))
            names += [left, right, left + right]
    elif kind == "unigram":
        scores = dict(parse_json(state)["model"]["vocab"][1:])
        names = list(scores)
    elif kind == "byte_bpe":
        saved = Backend.from_str(state)
        ids = saved.get_vocab(with_added_tokens=False)
        merges = read_merges(saved)
        names = sorted(ids, key=ids.__getitem__)
    pieces = Pieces(kind, names, merges, scores)
    return build_language(meta["name"], pieces, entries, moses=meta["moses"], lowercase=meta["lowercase"])


def convert(old: Path, new: Path) -> None:
    """Convert the run folder `old` to the folder `new`; raises InputError where that is not possible exactly."""
    config = build(convert_config(read_yaml(old / "config.yaml")))
    identity = read_json(old / "run.json")
    folders = [path.parent.relative_to(old) for path in sorted(old.glob("**/vocabulary.json"))]
    tokenizers = {folder: convert_tokenizer(old / folder) for folder in folders}
    for tokenizer in (None, tokenizers.get(Path())):  # ids of words may differ in the order of equally frequent ones
        try:
            corpus = prepare(config.data, tokenizer=tokenizer)
        except FullRankError as error:
            print(f"{old}: {error}; the new folder reads files: fullrank eval NEW --text FILE", file=sys.stderr)
            break
        if corpus.text_checksums == identity["text"]:
            tokenizers = dict(zip(folders, corpus.tokenizers.values(), strict=True))
            identity["prepared"] = str(corpus.folder.resolve())
            break
    else:
        raise InputError(f"{old}: this version makes other token ids of the text than the run was trained on")
    identity["vocabulary"] = " ".join(tokenizer.fingerprint for tokenizer in tokenizers.values())
    shutil.copytree(old, new, symlinks=True)
    (new / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    write_json(new / "run.json", identity)
    for folder, tokenizer in tokenizers.items():
        tokenizer.save(new / folder)
    for path in new.glob("checkpoints/step-*/checkpoint.json"):
        content = read_json(path)["content"]
        content["run"]["config"] = convert_config(content["run"]["config"])
        content["run"]["identity"]["vocabulary"] = identity["vocabulary"]
        path.write_text(json.dumps({"sha256": digest(content), "content": content}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
