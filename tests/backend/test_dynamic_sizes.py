"""A half with symbolic sizes is refused where it does not keep the budget, before it runs."""

import pytest
import torch
from torch import nn

import graphshard
from graphshard.backend import dynamic_sizes
from graphshard.errors import InfeasibleBudgetError
from graphshard.units import exact_size

pytestmark = pytest.mark.usefixtures("brief_plans", "interpreted")

BUDGET = 200_000


def _model(mesh):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)))
    for block in model:
        graphshard.fully_shard(block, mesh=mesh)
    return graphshard.fully_shard(model, mesh=mesh)


def _compiled(mesh, budget=BUDGET, **how):
    torch.compiler.reset()
    options = {"hardware": "cpu-ethernet-1g", "bucket": "auto", "memory_budget": budget}
    return torch.compile(_model(mesh), backend="graphshard", options=options, **how)


def _step(compiled, size):
    compiled(torch.zeros(size, 32)).square().mean().backward()


def test_a_size_that_does_not_fit_is_refused_before_it_runs_and_others_are_not(fake_group, monkeypatch):
    measured, measure = [], dynamic_sizes.measured_peak
    monkeypatch.setattr(dynamic_sizes, "measured_peak", lambda *args: measured.append(args) or measure(*args))
    compiled = _compiled(fake_group(2), dynamic=True)
    for size in (8, 4, 16):
        _step(compiled, size)
    assert len(measured) == 2  # both halves, at 16
    for _ in range(2):
        with pytest.raises(InfeasibleBudgetError) as caught:
            _step(compiled, 2000)
    _step(compiled, 16)
    assert len(measured) == 3
    needed = caught.value.smallest_bytes
    assert needed > 2000 * 4 * (32 + 64)
    message = str(caught.value)
    assert message.startswith("graph 0 (forward) is compiled for any size and was planned for one; ")
    assert "at size 2000 where 8 was planned for, its plan needs" in message
    assert f"needs {exact_size(needed)} of a memory budget of {exact_size(BUDGET)}. " in message
    assert "torch.compile(dynamic=False)" in message and f"allow {exact_size(needed)}" in message


def test_what_a_size_needs_is_what_a_plan_for_it_takes(fake_group):
    """A plan for that size alone, within what the forward is said to need, is found, and none within 2 % less."""
    mesh = fake_group(2)
    compiled = _compiled(mesh, dynamic=True)
    with torch.no_grad():
        compiled(torch.zeros(8, 32))
        with pytest.raises(InfeasibleBudgetError) as caught:
            compiled(torch.zeros(2000, 32))
        needed = caught.value.smallest_bytes
        _compiled(mesh, needed, dynamic=False)(torch.zeros(2000, 32))
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no schedule keeps a memory budget"):
            _compiled(mesh, int(0.9 * needed), dynamic=False)(torch.zeros(2000, 32))


def test_what_lives_through_the_step_grows_too(fake_group, monkeypatch):
    """A backward does not read the model's other input, which is held beside it all the same."""

    class TwoInputs(nn.Linear):
        def forward(self, x, other):
            return super().forward(x), 2 * other

    needed, compute = [], dynamic_sizes.RunningSizes.needed_bytes

    def remember(self, sizes):
        needed.append(compute(self, sizes))
        return needed[-1]

    monkeypatch.setattr(dynamic_sizes.RunningSizes, "needed_bytes", remember)
    torch.compiler.reset()
    model = graphshard.fully_shard(TwoInputs(32, 32), mesh=fake_group(2))
    options = {"hardware": "cpu-ethernet-1g", "memory_budget": "10MB"}
    compiled = torch.compile(model, backend="graphshard", options=options, dynamic=True)
    for size in (8, 2000):
        result, _ = compiled(torch.zeros(size, 32), torch.zeros(size, 320))
        result.square().mean().backward()
    forward, backward = needed
    assert forward > 2 * 2000 * 320 * 4
    assert 2000 * 320 * 4 < backward < 2 * 2000 * 320 * 4


def test_without_a_budget_nothing_is_looked_at(fake_group, monkeypatch):
    monkeypatch.setattr(dynamic_sizes.RunningSizes, "check", lambda *_: pytest.fail("looked"))
    compiled = _compiled(fake_group(2), None, dynamic=True)
    for size in (8, 2000):
        _step(compiled, size)


def test_an_expanded_input_counts_as_it_lies_in_memory():
    """The gradient of a mean is one number, seen at every place of the result."""
    value = torch.empty(1, device="meta").expand(2000, 32)
    assert dynamic_sizes._sized(value, {}).stride() == (0, 0)
