"""Corpora with a name: found in local folders, counted against what was published; downloads from a local server."""

import dataclasses
import hashlib
import io
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from fullrank.config.run import DataConfig, list_corpora
from fullrank.core.errors import RunError
from fullrank.data import prepare
from fullrank.data.corpora import download

SPLITS = ("train", "valid", "test")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


def counts(corpus):
    return [corpus.splits[split]["tokens"] for split in SPLITS]


@pytest.mark.parametrize("inner", ["", "ptb"])
def test_penn_treebank_is_the_published_one(corpora, cache, inner, caplog):
    caplog.set_level("INFO")
    corpus = prepare(DataConfig(name="ptb", dir=str(corpora / inner), cache=cache), allow_slice=False)
    assert counts(corpus) == [929_589, 73_760, 82_430]
    assert len(corpus.tokenizer) == 10_000  # 9,998 words, <unk>, <eos>
    assert (corpus.label, corpus.is_slice, corpus.details["differs_from_published"]) == ("ptb", False, {})
    assert not any("slice" in line for line in caplog.messages)


@pytest.mark.parametrize("tokens", ["byte", "character"])
def test_enwik8_slice_cut_90_5_5(corpora, cache, tokens):
    corpus = prepare(DataConfig(name="enwik8", dir=str(corpora / "enwik8"), tokens=tokens, cache=cache))
    assert [corpus.splits[split]["bytes"] for split in SPLITS] == [3_738_658, 207_703, 207_703]
    assert corpus.label == "enwik8 (slice)"
    if tokens == "byte":
        raw = (corpora / "enwik8" / "enwik8.slice").read_bytes()
        assert b"".join(corpus.ids(split).astype("u1").tobytes() for split in SPLITS) == raw


def test_text8_has_27_characters_cut_90_5_5(tmp_path, cache, caplog):
    text = "the quick brown fox jumps over a lazy dog and " * 50
    write(tmp_path / "text8", text)
    caplog.set_level("INFO")
    corpus = prepare(DataConfig(name="text8", dir=str(tmp_path), cache=cache))
    assert counts(corpus) == [2070, 115, 115]
    assert set(corpus.tokenizer.entries) <= set("abcdefghijklmnopqrstuvwxyz ") | {"<unk>", "\n"}
    assert "".join(corpus.tokenizer.decode(corpus.ids(split).tolist()) for split in SPLITS) == text
    assert corpus.label == "text8 (slice)"
    published = list_corpora()["text8"].published
    assert (published, sum(published.values())) == ({"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}, 10**8)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# downloads


TEXTS = {split: f"the {split} text\n".encode() * 9 for split in SPLITS}


@pytest.fixture
def server(monkeypatch):
    """Serves `files` by their names; `requests`: the path of every request."""
    files = {}
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            body = files.get(self.path.lstrip("/"))
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield SimpleNamespace(files=files, requests=requests, url=f"http://127.0.0.1:{http.server_port}")
    http.shutdown()
    http.server_close()


def three_files(server):
    server.files.update({f"ptb.{split}.txt": text for split, text in TEXTS.items()})
    return dataclasses.replace(
        list_corpora()["ptb"],
        urls=tuple((f"{server.url}/ptb.{split}.txt",) for split in SPLITS),
        sha256={split: hashlib.sha256(text).hexdigest() for split, text in TEXTS.items()},
    )


def read(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_come_verified_and_only_once(server, tmp_path, caplog):
    info = three_files(server)
    caplog.set_level("INFO")
    folder = download(info, tmp_path)
    assert folder == tmp_path / "sources" / "ptb"
    assert read(folder) == {f"ptb.{split}.txt": text for split, text in TEXTS.items()}
    assert any("Linguistic Data Consortium" in line for line in caplog.messages)
    assert download(info, tmp_path) == folder
    assert len(server.requests) == 3


@pytest.mark.parametrize("fault", ["another file", "no file"])
def test_a_download_that_fails_leaves_nothing(server, tmp_path, fault):
    info = three_files(server)
    named = "ptb.valid.txt"
    if fault == "another file":
        server.files[named] = b"something else\n"
    else:
        del server.files[named]
    with pytest.raises(RunError, match=named):
        download(info, tmp_path)
    assert list((tmp_path / "sources").iterdir()) == []


def zipped(texts):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    return packed.getvalue()


def test_the_second_mirror_and_an_archive(server, tmp_path):
    archive = zipped({f"wikitext-103/wiki.{split}.tokens": text for split, text in TEXTS.items()} | {"README": b"no"})
    server.files.update({"good/w.zip": archive, "bad/w.zip": b"<html>moved</html>"})
    urls = (tuple(f"{server.url}/{mirror}/w.zip" for mirror in ("gone", "bad", "good")),)
    info = dataclasses.replace(list_corpora()["wikitext-103"], urls=urls, sha256={})
    assert read(download(info, tmp_path)) == {f"wiki.{split}.tokens": text for split, text in TEXTS.items()}
