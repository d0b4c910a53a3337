"""Long work: the time of each stage, told to a callback or to the logger "graphshard", and time limits."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

LOGGER = logging.getLogger("graphshard")


def say_nothing(line: str) -> None:
    """Reports no progress."""


@dataclass(slots=True)
class Stages:
    """Stages that follow each other. The name of each is told when it begins; its seconds are kept when it ends.

    Attributes:
        progress: is called with the name of each stage.
        seconds: by name, of the stages that have ended.
    """

    progress: Callable[[str], None] | None
    seconds: dict[str, float] = field(default_factory=dict)
    _name: str = ""
    _began: float = 0.0

    def begin(self, name: str) -> None:
        """Ends the current stage and begins another."""
        self.end()
        self._name, self._began = name, time.perf_counter()
        if self.progress is not None:
            self.progress(name)

    def end(self) -> None:
        """Ends the current stage, if there is one."""
        if self._name:
            self.seconds[self._name] = time.perf_counter() - self._began
        self._name = ""


@dataclass(slots=True, eq=False)
class TimeLimit:
    """How long a search may take, in seconds of its thread: other work on the machine does not count.

    Attributes:
        seconds: the most, from when the limit was made; infinite for no limit.
        was_reached: a search has stopped because of it.
    """

    seconds: float = math.inf
    was_reached: bool = False
    _began: float = field(default_factory=time.thread_time)

    def left(self) -> float:
        """Seconds that are left; 0 or less if it is over."""
        return self.seconds - self.spent()

    def spent(self) -> float:
        """Seconds since the limit was made."""
        return time.thread_time() - self._began

    def part(self, share: float) -> TimeLimit:
        """A limit that began with this one and is over after a share of its time."""
        return replace(self, seconds=share * self.seconds)

    def is_over(self, ahead: float = 0.0) -> bool:
        """Whether it is over, or will be after work of ``ahead`` seconds, which is then not to be started."""
        is_over = self.left() <= ahead
        self.was_reached = self.was_reached or is_over
        return is_over


#: Without a number from the user, planning may take so many seconds, and so many times what tracing took. That is about
#: a fifth of the compilation, compilers included and planning not: GPT of 4, 8 and 32 layers is traced in 1.2, 2.3 and
#: 7.1 s and compiled in 31, 30 and 46 s of processors, with a cold cache.
_SECONDS, _TIMES_TRACING = 3.0, 0.9


@dataclass(slots=True, eq=False)
class PlanningTime:
    """The time that the searches for one step share.

    Attributes:
        seconds: what is left; None for the default, which is known once tracing is over.
    """

    seconds: float | None = None
    _began: float = field(default_factory=time.thread_time)

    @contextlib.contextmanager
    def part(self, share: float) -> Iterator[TimeLimit]:
        """The limit of one search: a share of what is left. What the search takes is then gone."""
        if self.seconds is None:
            self.seconds = _SECONDS + _TIMES_TRACING * (time.thread_time() - self._began)
        limit = TimeLimit(seconds=share * self.seconds)
        try:
            yield limit
        finally:
            self.seconds -= limit.spent()


@contextlib.contextmanager
def logged(name: str) -> Iterator[None]:
    """Logs the start of a stage, and its duration if it succeeds."""
    stages = Stages(lambda name: LOGGER.info("%s ...", name))
    stages.begin(name)
    yield
    stages.end()
    LOGGER.info("%s took %.1f s", name, stages.seconds[name])


@dataclass(slots=True)
class StageLines:
    """Prints a line on stderr for each stage: the seconds so far, its name, and what comes. Quiet without a terminal.

    Attributes:
        following: stages in the order in which they come; a stage that is not among them is printed alone.
    """

    following: Sequence[str] = ()
    _began: float = field(default_factory=time.perf_counter)

    def __call__(self, stage: str) -> None:
        """Prints the line of a stage that begins."""
        if not sys.stderr.isatty():
            return
        after = ""
        if stage in self.following[:-1]:
            after = f", then {self.following[self.following.index(stage) + 1]}"
        seconds = time.perf_counter() - self._began
        print(f"  {seconds:6.1f} s  {stage}{after}", file=sys.stderr, flush=True)
