"""Progress: one line that changes on a terminal, plain lines in a pipe."""

import io

from fullrank.cli.app import say, show_progress, tell


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(text):
    """The lines that a terminal shows in the end."""
    return [line.rpartition("\x1b[2K")[2].rpartition("\r")[2] for line in text.split("\n")]


def test_a_terminal_has_one_line_that_changes(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    for number in range(3):
        show_progress(f"{number} of 3: a training with\na name of two lines and of many letters")
        assert "\n" not in terminal.getvalue()
    assert shown(terminal.getvalue()) == ["2 of 3: a training with a name of two l"]
    say("failed: one")
    assert shown(terminal.getvalue()) == ["failed: one", ""]
    show_progress("4 of 4")
    tell(None, ["done"], json=False)
    assert shown(terminal.getvalue()) == ["failed: one", ""]
    assert capsys.readouterr().out == "done\n"
