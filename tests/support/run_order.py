"""In which order two workers run the tests: see docs/extend/testing.md."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

#: Seconds of the files that take longest, in `make test`. Only their order counts; others follow as they are named.
SECONDS: dict[str, int] = {
    "inspection/test_inspect.py": 44,
    "passes/test_plan_collectives.py": 44,
    "inspection/test_formulas.py": 42,
    "inspection/test_sweep.py": 40,
    "backend/test_step_trials.py": 34,
    "capture/test_find_blocks.py": 34,
    "backend/test_inductor_order.py": 30,
    "backend/test_accumulation_choice.py": 25,
    "inspection/test_placements.py": 20,
    "inspection/test_other_meshes.py": 19,
    "backend/test_threaded_ranks.py": 18,
    "capture/test_capture_step.py": 18,
    "passes/test_plan_prefetch.py": 18,
    "planner/search/test_solve.py": 18,
    "backend/test_order_on_cuda.py": 17,
    "backend/test_checkpoint_counts.py": 15,
    "inspection/test_placement_choice.py": 15,
    "passes/test_propagate_sharding.py": 15,
    "backend/test_unusable_plans.py": 14,
    "inspection/test_written_inputs.py": 13,
    "planner/test_schedule.py": 13,
    "planner/search/test_exact.py": 10,
    "cli/test_hf_model.py": 8,
    "planner/search/test_choose_splits.py": 7,
    "cli/test_cli.py": 6,
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
