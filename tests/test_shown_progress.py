"""Progress of long work, on a terminal and in a log."""

import io
import threading

import pytest

from graphshard import shown_progress
from graphshard.shown_progress import ShownProgress


class Stream(io.StringIO):
    """A stream that may be a terminal, and tells when something is written."""

    def __init__(self, is_terminal=False):
        super().__init__()
        self.is_terminal, self.written = is_terminal, threading.Event()

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        count = super().write(text)
        self.written.set()
        return count


@pytest.fixture
def patience(monkeypatch):
    def set_to(seconds):
        monkeypatch.setattr(shown_progress, "PATIENCE_SECONDS", seconds)

    return set_to


def test_a_log_gets_one_line_for_the_innermost_long_stage(patience):
    patience(0.01)
    stream = Stream()
    progress = ShownProgress(stream=stream)
    with progress.stage("compiling"), progress.stage("planning"):
        progress.tell("trial 2")
        assert stream.written.wait(10)
        progress.tell("trial 3")
    assert stream.getvalue().startswith("graphshard: planning") and stream.getvalue().count("\n") == 1


def test_short_stages_and_silent_ones_show_nothing(patience):
    patience(1000.0)
    stream = Stream()
    with ShownProgress(stream=stream).stage("compiling"):
        pass
    patience(0.0)
    with ShownProgress(is_on=False, stream=stream).stage("compiling"):
        assert not stream.written.wait(0.05)
    assert not stream.getvalue() and threading.active_count() < 50


def test_a_terminal_shows_the_stage_and_what_it_tells(patience, monkeypatch):
    patience(0.0)
    monkeypatch.setenv("TERM", "xterm")
    stream = Stream(is_terminal=True)
    progress = ShownProgress(stream=stream)
    with progress.stage("planning"):
        assert stream.written.wait(10)
        progress.tell("trial 2, best so far 20 ms")
        stream.written.clear()
        assert stream.written.wait(10)
    assert "graphshard: planning: trial 2, best so far 20 ms" in stream.getvalue()
    assert progress._status is None


def test_an_error_ends_the_stages(patience):
    patience(1000.0)
    progress = ShownProgress(stream=Stream())
    with pytest.raises(ValueError, match="no"), progress.stage("planning"):
        raise ValueError("no")
    assert progress._stages == []
