"""Plans of an earlier run that must not be used: damaged ones, of other sizes, of passes whose source is not known."""

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import pytest
import torch
from support.small_models import MODELS, example_batch, shard_units
from torch import nn
from torch._functorch import config as functorch_config

import graphshard
from graphshard.backend import BackendOptions, step_planner
from graphshard.backend.pipelines import joint_pipeline
from graphshard.passes import plan_collectives
from graphshard.pipeline import PassReport

pytestmark = pytest.mark.usefixtures("interpreted", "brief_plans")

CARD = "cpu-ethernet-1g"


@pytest.fixture
def plans(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHSHARD_CACHE", str(tmp_path))
    with functorch_config.patch(enable_autograd_cache=False):  # code is not kept
        yield tmp_path / "plans"


@contextmanager
def counted():
    """Inside, how often a plan is searched (True) or followed (False) is appended."""
    found, real = [], plan_collectives.plan_graph

    def plan_graph(*arguments, **named):
        found.append(named["known"] is None)
        return real(*arguments, **named)

    with mock.patch.object(plan_collectives, "plan_graph", plan_graph):
        yield found


def _step(mesh, **options):
    """A step in what is a new process to the backend; whether it has searched for a plan."""
    torch.compiler.reset()
    model = shard_units(MODELS["two_linears"](), mesh)
    compiled = torch.compile(model, backend="graphshard", options={"hardware": CARD, **options})
    with counted() as searched:
        compiled(example_batch("two_linears")).sum().backward()
    return any(searched)


def _damage(plans, change):
    for file in plans.glob("*.json"):
        data = json.loads(file.read_text())
        data["plan"] = change(data["plan"])
        file.write_text(json.dumps(data))


DAMAGE = {
    "nothing": lambda plan: {},
    "no table": lambda plan: {**plan, "scratch": 1},
    "no plan": lambda plan: {**plan, "decided": {}},
    "another plan": lambda plan: {**plan, "decided": {**plan["decided"], "steps": [[0, True, [7]]], "unknown": 1}},
}


def test_a_damaged_plan_is_made_anew_and_replaced(plans, fake_group):
    mesh = fake_group(2)
    assert _step(mesh) and not _step(mesh)
    for name, change in DAMAGE.items():
        _damage(plans, change)
        assert _step(mesh), name
        assert not _step(mesh), name


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """A pass that changes nothing."""

    name: ClassVar[str] = "nothing"
    requires: ClassVar[frozenset] = frozenset()
    provides: ClassVar[frozenset] = frozenset()
    breaks: ClassVar[frozenset] = frozenset()

    def run(self, gm, ctx):
        return PassReport(changed=False)


def test_with_a_pass_that_was_typed_in_nothing_is_kept(plans, fake_group):
    """In a notebook, for instance: whether it is the same pass in the next run is not known."""
    typed = {"__name__": "notebook", "Nothing": Nothing}
    exec("class Typed(Nothing):\n    pass", typed)
    mesh, own = fake_group(2), [typed["Typed"]()]
    assert _step(mesh, passes=own) and _step(mesh, passes=own)
    assert not list(plans.glob("*.json"))
    assert joint_pipeline(BackendOptions(passes={"merge_waits": tuple(own)})).uuid() == ""
    assert _step(mesh, passes=[Nothing()]) and not _step(mesh, passes=[Nothing()])


def _choices(mesh, size, budget):
    """How many choices for both halves a step of any size has asked for that were not kept."""
    torch.compiler.reset()
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
    model = nn.Sequential(*(graphshard.fully_shard(block, mesh=mesh) for block in blocks))
    graphshard.fully_shard(model, mesh=mesh)
    options = {"hardware": CARD, "memory_budget": budget}
    compiled = torch.compile(model, backend="graphshard", options=options, dynamic=True)
    with mock.patch.object(step_planner, "_choose", wraps=step_planner._choose) as choose:
        compiled(torch.zeros(size, 32)).square().mean().backward()
    return choose.call_count


def test_a_choice_for_a_size_is_none_for_another(plans, fake_group):
    """The graph is the same text for any size. What fits at one may not fit at the other."""
    mesh = fake_group(2)
    assert [_choices(mesh, size, "64MB") for size in (8, 8, 500)] == [1, 0, 1]
