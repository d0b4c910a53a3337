"""Passes of the user in inspections: they run behind the passes that they name, and are in the report."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from support.inspected import inspect_linears

import graphshard
from graphshard.errors import OptionError
from graphshard.ir import is_collective
from graphshard.pipeline import Fact, PassReport
from graphshard.report import report_text

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from write_a_pass import FlattenGathers


@dataclass(frozen=True, kw_only=True)
class Watch:
    """watch: counts collectives, and changes nothing."""

    name: ClassVar[str] = "watch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm, ctx):
        return PassReport(changed=False, counts={"collectives seen": sum(map(is_collective, gm.graph.nodes))})


@pytest.mark.parametrize("plan", ["unit", "auto"])
def test_passes_of_the_user_run_and_are_in_the_report(plan):
    """Behind the pass that they name: at the level of shard ops, lowered, and placed. Nothing else changes."""
    place = "schedule_collectives" if plan == "unit" else "plan_collectives"
    report = inspect_linears(plan=plan, passes={name: [Watch()] for name in ("merge_waits", "", place)})
    names = [(step.graph, step.name) for step in report.passes]
    watched = [index for index, (_, name) in enumerate(names) if name == "watch"]
    seen = {names[index - 1]: report.passes[index].counts["collectives seen"] for index in watched}
    assert seen[("joint", "merge_waits")] == 0
    assert seen[("forward", "join_pointwise")] == 4
    assert seen[("forward", place)] == len(report.half("forward").collectives)
    assert [names[index][0] for index in watched] == ["joint", *["forward"] * 2, *["backward"] * 2]
    without = inspect_linears(plan=plan)
    assert report.step_seconds == without.step_seconds and report.memory == without.memory
    assert report.halves == without.halves


def test_a_pass_of_the_user_changes_what_a_step_costs():
    """The flat views of `write_a_pass` are nodes of the graph; in a report they are in the text behind the pass."""
    report = inspect_linears(passes=[FlattenGathers()])
    (step,) = [step for step in report.passes if (step.graph, step.name) == ("forward", "flatten_gathers")]
    assert step.counts == {"gathers flattened": 2} and "= view(" in step.text
    assert "# forward: flatten_gathers (" in report_text(report)
    with pytest.raises(OptionError, match="no pass 'lower' to follow"):
        inspect_linears(passes={"lower": [Watch()]})
    with pytest.raises(OptionError, match="sweep has no option passes"):
        graphshard.sweep(lambda batch: None, meshes=[{"shard": 2}], batches=[1], passes=[Watch()])
