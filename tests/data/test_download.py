"""Downloads, from a server on this machine: verified, taken up after a break, whole or not at all."""

import dataclasses
import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fullrank.config.data import DataConfig
from fullrank.core.errors import RunError
from fullrank.data import corpora as corpora_module
from fullrank.data import prepare
from fullrank.data.corpora import CORPORA, CorpusInfo, download, fetch

SPLITS = ("train", "valid", "test")
TEXTS = {split: f"the {split} text\n".encode() * 9 for split in SPLITS}


class Server:
    """Serves `files`; `breaks`: so many times a connection closes half-way; `asked`: (path, Range) of every request."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.breaks = 0
        self.ranges = True
        self.asked: list[tuple[str, str | None]] = []
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
        asked = request.headers.get("Range")
        self.asked.append((request.path, asked))
        body = self.files.get(request.path.lstrip("/"))
        if body is None:
            request.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.ranges else 0
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(body) - start))
        request.end_headers()
        rest = body[start:]
        if self.breaks:
            self.breaks -= 1
            rest = rest[: len(rest) // 2]
        request.wfile.write(rest)

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
    running.files, running.breaks, running.ranges, running.asked = {}, 0, True, []
    return running


def silent(line: str) -> None:
    pass


def three_files(server: Server) -> CorpusInfo:
    server.files = {f"ptb.{split}.txt": text for split, text in TEXTS.items()}
    return dataclasses.replace(
        CORPORA["ptb"],
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
    asked = len(server.asked)
    assert download(info, tmp_path, silent) == folder
    assert len(server.asked) == asked == 3


def test_prepare_downloads_and_labels(server, tmp_path, monkeypatch):
    monkeypatch.setattr("fullrank.data.corpora.CORPORA", dict(CORPORA) | {"ptb": three_files(server)})
    corpus = prepare(DataConfig(name="ptb", cache=str(tmp_path)))
    assert corpus.is_slice, "the counts are not the published ones, wherever the files came from"
    assert corpus.splits["train"].words == 9 * 4


def test_another_file_than_published_is_refused(server, tmp_path):
    info = three_files(server)
    server.files["ptb.valid.txt"] = b"something else\n"
    with pytest.raises(
        RunError, match=r"the downloaded ptb.valid.txt is not the published file \(its sha256 differs\)"
    ):
        download(info, tmp_path, silent)
    assert list((tmp_path / "sources").iterdir()) == []


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_taken_up(server, tmp_path, ranges):
    body = bytes(range(256)) * 5000
    server.files, server.breaks, server.ranges = {"big": body}, 2, ranges
    fetch(f"{server.url}/big", tmp_path / "big", silent)
    assert (tmp_path / "big").read_bytes() == body
    first, second, third = (asked for _, asked in server.asked)
    half = len(body) // 2
    assert (first, second) == (None, f"bytes={half}-")
    assert third == (f"bytes={half + half // 2}-" if ranges else f"bytes={half}-")


def test_progress_is_told(server, tmp_path, monkeypatch):
    monkeypatch.setattr(corpora_module, "_BLOCK", 1000)
    server.files = {"big": bytes(100_000)}
    told: list[str] = []
    fetch(f"{server.url}/big", tmp_path / "big", told.append)
    assert told == [f"{server.url}/big: {percent} % of 0.1 MB" for percent in range(10, 101, 10)]


def test_the_second_mirror_and_an_archive(server, tmp_path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for split, text in TEXTS.items():
            archive.writestr(f"wikitext-103/wiki.{split}.tokens", text)
        archive.writestr("wikitext-103/README", "no")
    server.files = {"good/wikitext-103-v1.zip": packed.getvalue(), "bad/wikitext-103-v1.zip": b"<html>moved</html>"}
    urls = (
        (
            f"{server.url}/gone/wikitext-103-v1.zip",
            f"{server.url}/bad/wikitext-103-v1.zip",
            f"{server.url}/good/wikitext-103-v1.zip",
        ),
    )
    info = dataclasses.replace(CORPORA["wikitext-103"], urls=urls, sha256={})
    assert read(download(info, tmp_path, silent)) == {f"wiki.{split}.tokens": text for split, text in TEXTS.items()}


def test_the_archive_of_lm1b(server, tmp_path):
    packed = io.BytesIO()
    wanted = {
        "news.en-00001-of-00100": b"a\n",
        "news.en.heldout-00000-of-00050": b"b\n",
        "news.en.heldout-00001-of-00050": b"c\n",
    }
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in (wanted | {"news.en.heldout-00002-of-00050": b"d\n", "README": b"e\n"}).items():
            member = tarfile.TarInfo(f"top/../folder/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    server.files = {"lm1b.tar.gz": packed.getvalue()}
    info = dataclasses.replace(CORPORA["lm1b"], urls=((f"{server.url}/lm1b.tar.gz",),))
    assert read(download(info, tmp_path, silent)) == wanted


def test_no_network_names_both_ways(tmp_path, monkeypatch):
    unreachable = "http://nowhere.invalid/ptb.train.txt"
    info = dataclasses.replace(CORPORA["ptb"], urls=((unreachable,),))
    with pytest.raises(RunError) as error:
        download(info, tmp_path, silent)
    text = str(error.value)
    assert unreachable in text
    assert "--from DIR (data.dir=DIR) with ptb.train.txt, ptb.valid.txt, ptb.test.txt" in text
    assert list((tmp_path / "sources").iterdir()) == []


def test_a_missing_file_on_the_server(server, tmp_path):
    info = three_files(server)
    del server.files["ptb.test.txt"]
    with pytest.raises(RunError, match=r"ptb.test.txt: Not Found"):
        download(info, tmp_path, silent)
    assert list((tmp_path / "sources").iterdir()) == []
