"""Progress of a command: a line for each stage on a terminal, nothing elsewhere."""

import pickle
import re

from graphshard.progress import StageLines


def test_a_terminal_shows_the_time_the_stage_and_what_comes(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    lines = StageLines(["capture", "plan", "done"])
    for stage in ("capture", "something else", "plan", "done"):
        lines(stage)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [re.sub(r"^ +[0-9]+\.[0-9] s  ", "", line) for line in printed.err.splitlines()] == [
        "capture, then plan", "something else", "plan, then done", "done",
    ]  # fmt: skip


def test_nothing_is_printed_without_a_terminal(capsys):
    StageLines(["capture"])("capture")
    assert capsys.readouterr() == ("", "")


def test_other_processes_go_on_with_it(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    pickle.loads(pickle.dumps(StageLines()))("measure")
    assert capsys.readouterr().err.endswith(" s  measure\n")
