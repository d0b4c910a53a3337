"""Public errors: all in one file, each says its remedy, and each survives the way between two processes."""

import ast
import copy
import inspect
import pickle
from pathlib import Path

import pytest

from graphshard import errors
from graphshard.errors import (
    BudgetError,
    GraphShardError,
    InfeasibleBudgetError,
    OutgrownBudgetError,
    RefusedError,
    UnknownGroupError,
)

ROOT = Path(__file__).parent.parent
PUBLIC = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, GraphShardError)
]

#: Arguments of those that make their message themselves.
ARGUMENTS = {
    BudgetError: ((100, 200, "the graph"), {}),
    InfeasibleBudgetError: ((100, 200), {"is_smallest": True, "held_bytes": 7}),
    OutgrownBudgetError: (("the forward", 100, 200, [8, 4], [4, 4]), {}),
}


def _example(kind):
    args, kwargs = ARGUMENTS.get(kind, (("the message",), {}))
    return kind(*args, **kwargs)


@pytest.mark.parametrize("kind", PUBLIC)
@pytest.mark.parametrize(
    "travel",
    [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_an_error_travels(kind, travel):
    error = _example(kind)
    error.add_note("on rank 3")
    found = travel(error)
    assert type(found) is kind and found is not error
    assert str(found) == str(error) and found.args == error.args
    assert vars(found) == vars(error) and found.__notes__ == ["on rank 3"]


@pytest.mark.parametrize("kind", PUBLIC)
def test_the_message_is_the_argument(kind):
    """Neither a repr of it, as a KeyError shows, nor one that replaces what the base class was given."""
    error = _example(kind)
    assert error.args == (str(error),)
    assert str(kind.__new__(kind)) == ""


@pytest.mark.parametrize("kind", [kind for kind in PUBLIC if kind is not GraphShardError])
def test_an_error_says_what_to_do(kind):
    assert "Remedy: " in kind.__doc__


def test_a_rank_that_rebuilds_a_refusal_keeps_its_kind():
    assert isinstance(pickle.loads(pickle.dumps(RefusedError("rank 0 stopped"))), errors.AgreementError)


def test_budget_errors_say_both_numbers_and_the_remedy():
    smallest = _example(InfeasibleBudgetError)
    assert (smallest.smallest_bytes, smallest.is_smallest) == (207, True)
    assert "budget of 100 bytes" in str(smallest)
    assert str(smallest).endswith(
        "the smallest feasible one is 207 bytes: allow that much, or use a smaller batch or more ranks"
    )
    found = InfeasibleBudgetError(100, 200, is_smallest=False)
    assert "budget of 100 bytes; the smallest found that is kept is 200 bytes: allow" in str(found)
    outgrown = _example(OutgrownBudgetError)
    assert (outgrown.smallest_bytes, outgrown.is_smallest) == (200, False)
    assert "at size 8 where 4 was planned for, its plan needs 200 bytes of a memory budget of 100" in str(outgrown)
    assert "torch.compile(dynamic=False)" in str(outgrown)
    inspected = _example(BudgetError)
    assert (inspected.budget_bytes, inspected.needed_bytes) == (100, 200)
    assert "memory_budget: 100 bytes a rank, but the graph needs 200 bytes; allow that much" in str(inspected)


def test_an_unknown_group_is_a_key_error_that_reads_well():
    assert str(UnknownGroupError("no group 'x'")) == "no group 'x'"
    assert issubclass(UnknownGroupError, KeyError)


def errors_defined(source: str) -> list[str]:
    """Public classes of ``source`` that are exceptions by their name, or by that of a base."""
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and any(name.endswith(("Error", "Exception")) for name in (node.name, *map(ast.unparse, node.bases)))
    ]


def test_no_public_error_is_elsewhere():
    files = [*(ROOT / "graphshard").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix(): errors_defined(path.read_text()) for path in files}
    assert found.pop("graphshard/errors.py") == [kind.__name__ for kind in PUBLIC]
    # An exact search that grows too large is control flow between two files of the search.
    assert found.pop("graphshard/planner/search/exact.py") == ["TooLargeError"]
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source", ["class PlanError(GraphShardError): ...", "class Stopped(Exception): ...", "class WrongError(X): ..."]
)
def test_a_public_error_is_found(source):
    assert errors_defined(source)


def assigned_args(source: str) -> list[int]:
    """Lines that overwrite ``self.args``."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node) == "self.args"
    ]


def test_no_error_overwrites_its_args():
    assert assigned_args("class E(Exception):\n    def __init__(self):\n        self.args = (1,)") == [3]
    assert assigned_args((ROOT / "graphshard" / "errors.py").read_text()) == []
