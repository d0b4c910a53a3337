"""In which order two workers run the tests: see docs/extend/testing.md."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

#: Seconds of the files that take longest, in `make test`. Only their order counts; others follow as they are named.
SECONDS: dict[str, int] = {
    "inspection/test_sweep.py": 60,
    "inspection/test_inspect.py": 42,
    "backend/test_step_trials.py": 40,
    "backend/test_accumulation_choice.py": 38,
    "capture/test_find_blocks.py": 32,
    "inspection/test_formulas.py": 30,
    "passes/test_plan_collectives.py": 28,
    "inspection/test_other_meshes.py": 25,
    "backend/test_inductor_order.py": 18,
    "capture/test_capture_step.py": 18,
    "planner/search/test_exact.py": 14,
    "backend/test_checkpoint_counts.py": 13,
    "cli/test_cli.py": 12,
    "inspection/test_written_inputs.py": 8,
    "planner/search/test_choose_splits.py": 8,
    "planner/search/test_solve.py": 8,
    "planner/test_schedule.py": 8,
}


def file_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).as_posix()


def order_items(items: list[pytest.Item]) -> None:
    """The tests with ranks first; then files from the longest, so that none runs alone at the end."""

    def place(item: pytest.Item) -> tuple[bool, int]:
        file = file_of(item)
        return not file.startswith("ranks/"), -SECONDS.get(file, 0)

    items.sort(key=place)


def scope_of(nodeid: str) -> str:
    """What goes to one worker as a whole."""
    file = nodeid.partition("::")[0]
    return "ranks" if "ranks" in Path(file).parts else file
