"""In which order two workers run the tests: see docs/extend/testing.md."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

#: Seconds of the files that take longest, in `make test`. Only their order counts; others follow as they are named.
SECONDS: dict[str, int] = {
    "planner/search/test_solve.py": 60,
    "inspection/test_inspect.py": 60,
    "backend/test_inductor_order.py": 50,
    "inspection/test_sweep.py": 40,
    "planner/search/test_choose_splits.py": 40,
    "planner/search/test_exact.py": 30,
    "passes/test_plan_collectives.py": 25,
    "planner/test_schedule.py": 25,
    "capture/test_capture_step.py": 20,
    "inspection/test_formulas.py": 10,
}


def file_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).as_posix()


def group_of(item: pytest.Item) -> str:
    """All tests of real process groups, whose ranks take a core each; else each file."""
    file = file_of(item)
    return "ranks" if file.startswith("ranks/") else file


def order_items(items: list[pytest.Item]) -> None:
    """The tests with ranks first, one worker's; then files from the longest, so that none runs alone at the end."""

    def place(item: pytest.Item) -> tuple[bool, int]:
        return group_of(item) != "ranks", -SECONDS.get(file_of(item), 0)

    items.sort(key=place)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
