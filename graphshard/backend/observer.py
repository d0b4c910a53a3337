"""The observer of one compilation: log lines with times, and graph texts in the user's folder (option ``dump``)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from ..errors import OptionError
from ..ir import graph_text, group_labels, node_names
from ..memory import kept_inputs, memory_timeline
from ..pipeline import PassContext, PassRecord
from ..planner import PlannedGraph
from ..progress import logged
from ..shown_progress import ShownProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Sees what the steps of a compilation do; no step reads anything from it but the name of its stage.

    A stage is "joint", "forward", "backward" or "inference"; further variants of a half are "backward-2", ...

    Attributes:
        folder: where graph texts are written, one file a stage and step; None for nowhere.
        index: number of the graph, for file names and log lines.
        progress: shows what takes long.
    """

    folder: Path | None = None
    index: int = 0
    progress: ShownProgress = field(default_factory=lambda: ShownProgress(is_on=False))
    _num_variants: Counter[str] = field(default_factory=Counter)

    def stage_of(self, half: str) -> str:
        """The name of the next variant of a half: ``backward`` for its first state, then ``backward-2``, ..."""
        self._num_variants[half] += 1
        number = self._num_variants[half]
        return half if number == 1 else f"{half}-{number}"

    @contextmanager
    def passes(self, stage: str, gm: fx.GraphModule) -> Iterator[None]:
        """Logs and shows that the passes run on a graph, and how long they took."""
        name = f"graph {self.index} ({stage}): {len(gm.graph.nodes)} nodes, passes"
        with logged(name), self.progress.stage(f"planning graph {self.index} ({stage})"):
            yield

    @contextmanager
    def inductor(self, stage: str) -> Iterator[None]:
        """Logs and shows that Inductor compiles, and how long it took."""
        name = f"graph {self.index} ({stage}): Inductor"
        with logged(name), self.progress.stage(f"Inductor compiles graph {self.index} ({stage})"):
            yield

    def graph(self, stage: str, step: str, gm: fx.GraphModule, context: PassContext) -> None:
        """Dumps a graph before the first pass."""
        if self.folder is not None:
            self.text(stage, step, graph_text(gm, mesh=context.mesh, parameters=context.parameters))

    def records(self, stage: str, records: Sequence[PassRecord], first: int = 1) -> None:
        """Dumps the graph after each pass; ``first`` numbers the first of them."""
        for number, record in enumerate(records, start=first):
            self.text(stage, f"{number}-{record.name}", record.text)

    def placed(
        self, stage: str, gm: fx.GraphModule, context: PassContext, records: Sequence[PassRecord]
    ) -> None:
        """Dumps what the passes on a half did, the memory timeline of the result, and its plan."""
        self.records(stage, records)
        if self.folder is None:
            return
        timeline = memory_timeline(gm, kept=kept_inputs(gm), scratch=context.scratch)
        self.text(stage, "memory", timeline.text(node_names(gm)))
        for planned in (record.report.planned for record in records):  # the last ones may be a user's
            if isinstance(planned, PlannedGraph):
                plan = planned.plan.with_labels(group_labels(gm, context.mesh))
                self.text(stage, "plan", f"{plan}\n")

    def text(self, stage: str, step: str, text: str) -> None:
        """Dumps a text."""
        if self.folder is not None:
            (self.folder / f"graph{self.index}.{stage}.{step}.txt").write_text(text)


def next_index(folder: Path | None) -> int:
    """Number of the first graph not yet dumped into ``folder``, which is made; 0 without a folder.

    Raises:
        OptionError: the folder cannot be made.
    """
    if folder is None:
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"graphshard backend: option dump={str(folder)!r} cannot be made ({error.strerror}); "
            "give the path of a folder, or of one that may be made"
        ) from error
    return next(index for index in itertools.count() if not any(folder.glob(f"graph{index}.*")))
