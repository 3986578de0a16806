"""Corpora with a name: found in local folders, counted against what was published; downloads from a local server."""

import dataclasses
import hashlib
import io
import tarfile
import threading
import zipfile
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError, RunError
from fullrank.data import prepare, unigram_perplexity
from fullrank.data.corpora import CorpusInfo, download, list_corpora
from fullrank.files import silent

SPLITS = ("train", "valid", "test")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


def counts(corpus) -> list[int]:
    return [corpus.splits[split]["tokens"] for split in SPLITS]


@pytest.mark.parametrize("inner", ["", "ptb"])
def test_penn_treebank_is_the_published_one(corpora, cache, inner):
    told: list[str] = []
    corpus = prepare(
        DataConfig(name="ptb", dir=str(corpora / inner), cache=cache), report=told.append, allow_slice=False
    )
    assert counts(corpus) == [929_589, 73_760, 82_430]
    assert len(corpus.tokenizer) == 10_000  # 9,998 words, <unk>, <eos>
    assert (corpus.label, corpus.is_slice, corpus.details["differs_from_published"]) == ("ptb", False, {})
    assert not any("slice" in line for line in told)


def test_penn_treebank_against_independent_counting(corpora, cache):
    corpus = prepare(DataConfig(name="ptb", dir=str(corpora), cache=cache))
    raw = {split: (corpora / "ptb" / f"ptb.{split}.txt").read_text(encoding="utf-8") for split in SPLITS}
    seen = Counter(raw["train"].replace("\n", " <eos> ").split())
    vocabulary = corpus.tokenizer
    assert vocabulary.entries == sorted(seen, key=lambda word: (-seen[word], word))
    assert vocabulary.entries[:3] == ["the", "<unk>", "<eos>"]
    for split in SPLITS:
        expected = raw[split].replace("\n", " <eos> ").split()
        assert [vocabulary.entries[i] for i in corpus.ids(split).tolist()] == expected
    ids = corpus.ids("test")
    assert (ids == vocabulary.unk_id).sum() == raw["test"].split().count("<unk>")
    assert 500 < unigram_perplexity(corpus, "test") < 900


def test_wikitext_103_slice(corpora, cache):
    told: list[str] = []
    given = DataConfig(name="wikitext-103", dir=str(corpora), cache=cache)
    corpus = prepare(given, report=told.append)
    assert counts(corpus) == [548_410, 217_646, 245_569]
    assert len(corpus.tokenizer) == 34_065
    assert corpus.is_slice
    assert corpus.label == "wikitext-103 (slice)"
    assert corpus.details["differs_from_published"] == {"train": {"published": 103_227_021, "here": 548_410}}
    assert any("train has 548,410 words, published are 103,227,021" in line for line in told)
    told.clear()
    prepare(given, report=told.append)
    assert any("(slice)" in line for line in told), "told again when it comes from the cache"
    with pytest.raises(
        InputError, match=r"wikitext-103 \(slice\) is not the published corpus .*paper scale .*data.dir"
    ):
        prepare(given, allow_slice=False)


@pytest.mark.parametrize("tokens", ["byte", "character"])
def test_enwik8_slice_cut_90_5_5(corpora, cache, tokens):
    corpus = prepare(DataConfig(name="enwik8", dir=str(corpora / "enwik8"), tokens=tokens, cache=cache))
    assert [corpus.splits[split]["bytes"] for split in SPLITS] == [3_738_658, 207_703, 207_703]
    assert corpus.label == "enwik8 (slice)"
    if tokens == "byte":
        raw = (corpora / "enwik8" / "enwik8.slice").read_bytes()
        assert b"".join(corpus.ids(split).astype("u1").tobytes() for split in SPLITS) == raw


def test_lm1b_slice(corpora, cache):
    corpus = prepare(DataConfig(name="lm1b", dir=str(corpora), min_count=3, cache=cache))
    train, valid, test = counts(corpus)
    assert train == 322_706
    assert valid + test == 318_286
    eos = corpus.tokenizer.eos_id
    lines = [int((corpus.ids(split) == eos).sum()) for split in SPLITS]
    assert lines == [12_216, 6_053, 6_052]
    assert corpus.is_slice
    assert "held-out shards only" in corpus.details["notes"][0]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_full_lm1b_layout(tmp_path):
    """99 shards in the archive's folders: here three, with the right held-out ones taken and the others left."""
    top = tmp_path / "lm1b" / "1-billion-word-language-modeling-benchmark-r13output"
    for i in (3, 1, 2):
        write(top / "training-monolingual.tokenized.shuffled" / f"news.en-{i:05d}-of-00100", f"shard {i}\n")
    for i in range(4):
        write(top / "heldout-monolingual.tokenized.shuffled" / f"news.en.heldout-{i:05d}-of-00050", f"shard {i} {i}\n")
    corpus = prepare(DataConfig(name="lm1b", dir=str(tmp_path), cache=str(tmp_path / "cache")))
    decoded = {split: corpus.tokenizer.decode(corpus.ids(split).tolist()) for split in SPLITS}
    assert decoded == {"train": "shard 1\nshard 2\nshard 3\n", "valid": "shard 1 1\n", "test": "shard <unk> <unk>\n"}


ERRORS = {
    "a file": ("ptb", "file", r"data.dir: .*file is a file; give the folder that holds ptb.train.txt, ptb.valid.txt"),
    "one empty": ("ptb", "hollow", r"ptb.valid.txt is empty"),
    "tiny enwik8": ("enwik8", "hollow", r"enwik8 has 3 bytes, too few to cut 90, 5 and 5 %"),
    "no shards": ("lm1b", "empty", r"holds 0 training shards and 0 held-out shards"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_of_folders(tmp_path, case):
    name, inner, message = ERRORS[case]
    write(tmp_path / "file", "x")
    (tmp_path / "empty").mkdir()
    for split in SPLITS:
        write(tmp_path / "hollow" / f"ptb.{split}.txt", "" if split == "valid" else "word\n")
    write(tmp_path / "hollow" / "enwik8", "abc")
    with pytest.raises(InputError, match=message):
        prepare(DataConfig(name=name, dir=str(tmp_path / inner), cache=str(tmp_path / "cache")))
    assert not (tmp_path / "cache" / "corpora").exists() or not list((tmp_path / "cache" / "corpora").iterdir())


# downloads


TEXTS = {split: f"the {split} text\n".encode() * 9 for split in SPLITS}


class Server:
    """Serves `files` of this machine; `asked`: the path of every request."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        body = self.files.get(request.path.lstrip("/"))
        if body is None:
            request.send_error(404)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def running():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def server(running, monkeypatch):
    """The server of this module, with nothing to serve and nothing asked."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running.files, running.asked = {}, []
    return running


def three_files(server: Server) -> CorpusInfo:
    server.files = {f"ptb.{split}.txt": text for split, text in TEXTS.items()}
    return dataclasses.replace(
        list_corpora()["ptb"],
        urls=tuple((f"{server.url}/ptb.{split}.txt",) for split in SPLITS),
        sha256={split: hashlib.sha256(text).hexdigest() for split, text in TEXTS.items()},
    )


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_come_verified_and_only_once(server, tmp_path):
    info = three_files(server)
    told: list[str] = []
    folder = download(info, tmp_path, told.append)
    assert folder == tmp_path / "sources" / "ptb"
    assert read(folder) == {f"ptb.{split}.txt": text for split, text in TEXTS.items()}
    assert any("Linguistic Data Consortium" in line for line in told)
    assert download(info, tmp_path, silent) == folder
    assert len(server.asked) == 3


@pytest.mark.parametrize("fault", ["another file", "no file"])
def test_a_download_that_fails_leaves_nothing(server, tmp_path, fault):
    info = three_files(server)
    named = "ptb.valid.txt"
    if fault == "another file":
        server.files[named] = b"something else\n"
    else:
        del server.files[named]
    with pytest.raises(RunError, match=named):
        download(info, tmp_path, silent)
    assert list((tmp_path / "sources").iterdir()) == []


def zipped(texts: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    return packed.getvalue()


def tarred(texts: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in texts.items():
            member = tarfile.TarInfo(f"top/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return packed.getvalue()


def test_the_second_mirror_and_an_archive(server, tmp_path):
    archive = zipped({f"wikitext-103/wiki.{split}.tokens": text for split, text in TEXTS.items()} | {"README": b"no"})
    server.files = {"good/w.zip": archive, "bad/w.zip": b"<html>moved</html>"}
    urls = (tuple(f"{server.url}/{mirror}/w.zip" for mirror in ("gone", "bad", "good")),)
    info = dataclasses.replace(list_corpora()["wikitext-103"], urls=urls, sha256={})
    assert read(download(info, tmp_path, silent)) == {f"wiki.{split}.tokens": text for split, text in TEXTS.items()}


def test_the_archive_of_lm1b(server, tmp_path):
    wanted = {
        "news.en-00001-of-00100": b"a\n",
        "news.en.heldout-00000-of-00050": b"b\n",
        "news.en.heldout-00001-of-00050": b"c\n",
    }
    server.files = {"lm1b.tar.gz": tarred(wanted | {"news.en.heldout-00002-of-00050": b"d\n", "README": b"e\n"})}
    info = dataclasses.replace(list_corpora()["lm1b"], urls=((f"{server.url}/lm1b.tar.gz",),))
    assert read(download(info, tmp_path, silent)) == wanted
