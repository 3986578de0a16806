"""`fullrank translate` as users call it: pipes, files, mistakes."""

import io
import json
import os
import random
import subprocess
import time

import pytest

import fullrank as fr
from cli_runs import command, environment
from fullrank.cli import main
from fullrank.cli.use import read_lines
from fullrank.experiments.translation import LineTranslator, Search
from translation_runs import LINES, write_run


@pytest.fixture
def translate(capfdbinary):
    """The verb in this process, with a pipe as its standard input."""

    def call(*words, stdin=b""):
        reading, writing = os.pipe()
        os.write(writing, stdin)
        os.close(writing)
        before = os.dup(0)
        os.dup2(reading, 0)
        os.close(reading)
        try:
            with pytest.raises(SystemExit) as stopped:
                main(["translate", *map(str, words)])
        finally:
            os.dup2(before, 0)
            os.close(before)
        out, err = capfdbinary.readouterr()
        return subprocess.CompletedProcess(words, int(stopped.value.code or 0), out, err)

    return call


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mine"
    write_run(folder, attention=fr.AttentionConfig(mix="position_wise"))
    return folder


def text(lines):
    return "".join(f"{line}\n" for line in lines).encode()


def test_lines_in_lines_out_in_order(run, translate):
    lines = LINES * 3
    expected = [best[0].text for best in LineTranslator(run, Search(beams=3)).translate(lines)]
    assert len(set(expected)) > 3
    process = translate(run, "--beam", 3, "--batch-size", 4, stdin=text(lines))
    assert process.returncode == 0, process.stderr
    assert process.stdout == text(expected)
    last = process.stderr.decode().splitlines()[-1]
    assert last.startswith("18 lines, ")
    assert last.endswith(" sentences/s")
    # Windows line ends, a mark at the beginning, no line end at the end; from a file, quietly
    odd = run.parent / "odd.txt"
    odd.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    process = translate(run, "--beam", 3, "--input", odd, "--quiet")
    assert (process.returncode, process.stdout, process.stderr) == (0, text(expected), b"")
    assert translate(run, "--quiet").stdout == b""


def test_lists_of_the_best_as_text_and_as_json_lines(run, translate):
    expected = LineTranslator(run, Search(beams=4, n_best=3, length_penalty=0.5)).translate(LINES)
    options = [run, "--beam", 4, "--n-best", 3, "--length-penalty", 0.5, "--quiet"]
    listed = translate(*options, stdin=text(LINES)).stdout.decode().splitlines()
    assert listed == [f"{i} ||| {t.text} ||| {t.score:.6f}" for i, best in enumerate(expected) for t in best]
    documents = [json.loads(line) for line in translate(*options, "--json", stdin=text(LINES)).stdout.splitlines()]
    assert [document["line"] for document in documents] == [1, 2, 3, 4, 5, 6]
    assert [document["source"] for document in documents] == LINES
    for document, best in zip(documents, expected, strict=True):
        assert document["translations"] == [
            {"text": t.text, "tokens": t.tokens, "score": t.score, "log_prob": t.log_prob} for t in best
        ]


@pytest.mark.full
def test_a_line_is_answered_before_the_next_one_comes_and_a_reader_may_leave_early(run):
    """A program that waits for the translation of each line gets it, though the buffer is not full; leaving is no error."""
    expected = [best[0].text for best in LineTranslator(run).translate(["rot", "ein hund schläft"])]
    with subprocess.Popen(
        command("translate", run),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        for line, answer in zip(["rot", "ein hund schläft"], expected, strict=True):
            process.stdin.write(text([line]))
            process.stdin.flush()
            assert process.stdout.readline() == text([answer])
        process.stdout.close()
        time.sleep(0.1)
        process.stdin.write(text(["rot"] * 50))
        process.stdin.close()
        assert b"Error" not in process.stderr.read()
        assert process.wait(60) == 0


TEXT = ["erste Zeile", "", "äöü €  \U0001f600", "a\x0bb\x85c\u2028d", "\x00", "x" * 200_000, " ", "letzte"]


class Pieces(io.RawIOBase):
    """A stream that gives these pieces, one a call."""

    def __init__(self, *pieces):
        self.pieces = [*pieces]

    def read(self, size=-1):
        return self.pieces.pop(0) if self.pieces else b""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_lines_are_whole_however_they_come(end, last):
    content = (end.join(TEXT) + end * last).encode()
    draw = random.Random(1)
    cuts = sorted(draw.sample(range(len(content)), 60))
    pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    for stream in (io.BytesIO(content), Pieces(*pieces)):
        assert [line for lines in read_lines(stream) for line in lines] == TEXT
