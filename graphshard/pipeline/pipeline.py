"""Passes with contracts, and the pipeline that checks them.

A pass is a frozen, keyword-only dataclass whose fields are its options. A :class:`Pipeline` is a tuple of passes.
Building it folds what they require, provide and break, so a wrong order fails there. Running it checks after each pass
that the graph is well-formed, that every fact that should hold does, and that the pass reported a change exactly if the
graph text changed.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import fx

from ..errors import PassError, PipelineError
from ..ir import graph_text, is_collective, operands, output_values, text_fingerprint
from .context import PassContext
from .facts import CHECKERS, Fact

#: What the ``repr`` of a function, and of an object that has none of its own, says of this process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What a pass hands to its caller beside the graph; a pass with such a result extends this class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What a pass did.

    Attributes:
        changed: whether the graph text differs from before.
        counts: named numbers for a reader ("gathers merged": 12).
        skipped: one sentence, with the reason, for each thing that the pass did not do.
        new_signature: the pass changed the inputs or the types of the outputs on purpose.
        planned: the result of a planning pass (:class:`graphshard.planner.plan_graph.PlannedGraph`).
    """

    changed: bool
    counts: Mapping[str, int] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    new_signature: bool = False
    planned: PassResult | None = None


@runtime_checkable
class Pass(Protocol):
    """One graph transformation: it edits the graph in place and does nothing else."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[Fact]]
    provides: ClassVar[frozenset[Fact]]
    breaks: ClassVar[frozenset[Fact]]

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """One pass of one run: its report, its time, and the graph after it."""

    name: str
    report: PassReport
    seconds: float
    num_nodes: int
    num_collectives: int
    collective_bytes: int
    text: str


class Pipeline:
    """An ordered tuple of passes whose contracts fit together.

    Args:
        passes: the passes, first to last.
        given: facts that hold before the first pass.

    Raises:
        PipelineError: a pass requires a fact that no earlier pass provides, or that one breaks.
    """

    def __init__(self, *passes: Pass, given: frozenset[Fact] = frozenset({Fact.TYPED})) -> None:
        self.passes = passes
        self.given = given
        self._held_after = self._fold()

    def _fold(self) -> list[frozenset[Fact]]:
        held = self.given
        broken_by: dict[Fact, str] = {}
        result = []
        for step in self.passes:
            if missing := step.requires - held:
                names = ", ".join(sorted(fact.name for fact in missing))
                culprits = {broken_by[fact] for fact in missing if fact in broken_by}
                cause = (
                    f"broken by {', '.join(sorted(culprits))}" if culprits else "provided by no earlier pass"
                )
                raise PipelineError(f"{step.name} requires {names}, {cause}; in the order: {self}")
            broken_by.update(dict.fromkeys(step.breaks, step.name))
            held = (held - step.breaks) | step.provides
            result.append(held)
        return result

    @property
    def facts_at_end(self) -> frozenset[Fact]:
        """Facts that hold after the last pass."""
        return self._held_after[-1] if self._held_after else self.given

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __str__(self) -> str:
        return " > ".join(_pass_text(step) for step in self.passes)

    def __repr__(self) -> str:
        return f"Pipeline({str(self)!r})"

    @staticmethod
    def parse(
        text: str, known: Mapping[str, type[Any]], *, given: frozenset[Fact] = frozenset({Fact.TYPED})
    ) -> Pipeline:
        """Reads back ``str(pipeline)``; ``known`` maps pass names to classes (``graphshard.passes.KNOWN``).

        Raises:
            PipelineError: unknown pass or option, or a text that is not ``name(option=value) > name``.
        """
        parts = text.split(" > ") if text.strip() else []
        return Pipeline(*(_parse_pass(part.strip(), known) for part in parts), given=given)

    def split(self, index: int) -> tuple[Pipeline, Pipeline]:
        """The passes before ``index`` and the rest, as two pipelines that run one after the other."""
        first = Pipeline(*self.passes[:index], given=self.given)
        return first, Pipeline(*self.passes[index:], given=first.facts_at_end)

    def uuid(self) -> str:
        """A key for compile caches: a hash of the pipeline's text, of torch's version, and of source.

        Source is all files of graphshard, and for a pass from elsewhere its class and all files of the package it is
        in (its own file if it is in none). So the key covers what passes call there; it does not cover what they call
        in further packages.

        "" if there is no such key, so that nothing may be cached: Python finds no source of a pass (a class of a
        notebook, for instance), a file cannot be read, or an option is a function or an object that does not show
        what it holds.
        """
        classes = [type(step) for step in self.passes]
        if any(_ADDRESS.search(repr(value)) for step in self.passes for _, value in _options_of(step)):
            return ""
        try:
            sources = sorted({inspect.getsource(kind) for kind in classes if not _is_own(kind)})
            contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in source_files(classes)]
        except (OSError, TypeError):
            return ""
        return text_fingerprint("\n".join([str(self), torch.__version__, *sources, *contents]))

    def run(self, gm: fx.GraphModule, ctx: PassContext, *, before: str | None = None) -> list[PassRecord]:
        """Runs every pass on ``gm`` in place.

        Args:
            gm: the graph.
            ctx: what passes know.
            before: the graph's text, if the caller has it.

        Raises:
            PassError: a pass broke a fact, the graph's signature, or its own report.
        """
        records = []
        if before is None:
            before = graph_text(gm, mesh=ctx.mesh, parameters=ctx.parameters)
        signature = _signature(gm)
        for step, held in zip(self.passes, self._held_after, strict=True):
            started = time.perf_counter()
            report = step.run(gm, ctx)
            gm.graph.lint()
            after = graph_text(gm, mesh=ctx.mesh, parameters=ctx.parameters)
            _check_step(step, gm, ctx, held, report.changed, before != after)
            if report.new_signature:
                signature = _signature(gm)
            if _signature(gm) != signature:
                raise PassError(
                    f"{step.name} changed the inputs or the types of the outputs of the graph; a pass must keep both"
                )
            records.append(_record(step, report, time.perf_counter() - started, gm, after))
            before = after
        gm.recompile()
        return records

    def run_unchecked(self, gm: fx.GraphModule, ctx: PassContext) -> list[PassReport]:
        """Runs every pass on ``gm`` in place without checks, for a graph like one that was checked.

        The checks and texts of :meth:`run` take longer than the passes.
        """
        return [step.run(gm, ctx) for step in self.passes]


def source_files(kinds: Iterable[type[Pass]]) -> list[Path]:
    """The files of graphshard, and those of the packages that some passes are in."""
    places = {Path(__file__).parents[1], *map(_folder_of, kinds)}
    return sorted(
        {file for place in places for file in (place.rglob("*.py") if place.is_dir() else (place,))}
    )


def _is_own(kind: type[Pass]) -> bool:
    return kind.__module__.split(".")[0] == __name__.split(".")[0]


def _folder_of(kind: type[Pass]) -> Path:
    """The folder of the package that a class is in; its file if it is in none."""
    file = Path(inspect.getfile(kind))
    return file.parent if getattr(sys.modules.get(kind.__module__), "__package__", "") else file


def _pass_text(step: Pass) -> str:
    options = ", ".join(f"{name}={_value_text(value)}" for name, value in _options_of(step))
    return f"{step.name}({options})" if options else step.name


def _options_of(step: Pass) -> list[tuple[str, Any]]:
    """Names and values of the options that are not the default."""
    found = [
        (option.name, getattr(step, option.name), option.default)
        for option in dataclasses.fields(step)  # type: ignore[arg-type]
    ]
    return [(name, value) for name, value, default in found if value != default]


def _value_text(value: Any) -> str:
    """The ``repr`` of an option as it is in every process: without addresses, and with sets in order."""
    if isinstance(value, (set, frozenset)) and value:
        text = f"{{{', '.join(sorted(map(_value_text, value)))}}}"
        return text if isinstance(value, set) else f"frozenset({text})"
    if type(value) is tuple:
        return f"({', '.join(map(_value_text, value))}{',' * (len(value) == 1)})"
    if type(value) is list:
        return f"[{', '.join(map(_value_text, value))}]"
    if type(value) is dict:
        items = (f"{_value_text(key)}: {_value_text(each)}" for key, each in value.items())
        return f"{{{', '.join(items)}}}"
    return _ADDRESS.sub("", repr(value))


def _parse_pass(text: str, known: Mapping[str, type[Any]]) -> Pass:
    name, parenthesis, rest = text.partition("(")
    if name not in known:
        raise PipelineError(f"unknown pass {name!r}; known: {', '.join(sorted(known))}")
    try:
        call = ast.parse(f"options({rest}" if parenthesis else "options()", mode="eval").body
        assert isinstance(call, ast.Call), "not a list of options"
        assert not call.args, "options are given by name"
        options = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return known[name](**options)
    except (SyntaxError, ValueError, TypeError, AssertionError) as error:
        raise PipelineError(f"cannot read {text!r}: {error}; expected name(option=value, ...)") from error


def _signature(gm: fx.GraphModule) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Input names, and shape and dtype of the outputs (their strides may change)."""
    inputs = tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))
    outputs = []
    for value in output_values(gm.graph):
        fake = value.meta.get("val") if isinstance(value, fx.Node) else value
        is_tensor = isinstance(fake, torch.Tensor)
        outputs.append(
            f"{fake.dtype}{[str(size) for size in fake.shape]}" if is_tensor else type(fake).__name__
        )
    return inputs, tuple(outputs)


def _check_step(
    step: Pass, gm: fx.GraphModule, ctx: PassContext, held: frozenset[Fact], reported: bool, moved: bool
) -> None:
    if reported != moved:
        did = "changed" if moved else "did not change"
        raise PassError(
            f"{step.name} reported changed={reported}, but it {did} the graph text; correct its report"
        )
    for fact in sorted(held, key=lambda fact: fact.name):
        if problems := CHECKERS[fact](gm, ctx):
            shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            raise PassError(f"after {step.name} the graph is not {fact.name}: {shown}")


def _record(step: Pass, report: PassReport, seconds: float, gm: fx.GraphModule, text: str) -> PassRecord:
    collectives = [node for node in gm.graph.nodes if is_collective(node)]
    sizes = [
        value.numel() * value.element_size()
        for node in collectives
        for value in (arg.meta["val"] for arg in operands(node))
    ]
    static = [size for size in sizes if isinstance(size, int)]
    return PassRecord(
        name=step.name,
        report=report,
        seconds=seconds,
        num_nodes=len(gm.graph.nodes),
        num_collectives=len(collectives),
        collective_bytes=sum(static),
        text=text,
    )
