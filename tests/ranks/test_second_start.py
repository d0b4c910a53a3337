"""The code of an earlier process: each rank uses what it has, and none waits for a rank that compiles nothing."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.implementations import compile_if_asked
from support.new_process import as_new_process
from support.parity import backward_on_all_batches, start_lockstep
from support.toy_models import WORKLOADS

from graphshard.coordination.transcript import Decided

CARD = "cpu-ethernet-1g"


def train(folder: str, cache: str, *, accumulates: bool = False, **options: Any) -> tuple[int, int]:
    """Two steps of a new model, like those of the unsharded one.

    Returns:
        How many graphs AOTAutograd has found in its cache, and how many variants of halves were compiled.
    """
    with as_new_process(f"{folder}/{cache}") as start:
        workload = WORKLOADS["mlp_7_15_3"]
        pair = start_lockstep(workload, "sharded")
        pair = replace(pair, forward=compile_if_asked("compiled", pair.model, **options))
        pair.train(1)
        if accumulates:
            pair.model.set_requires_gradient_sync(False)
            backward_on_all_batches(workload, pair.reference, 7)
            workload.loss(pair.forward, workload.batch_of(dist.get_rank(), 7)).backward()
            pair.model.set_requires_gradient_sync(True)
        pair.backward(3)
        pair.update(3)
    return start.counts


def start_again(folder: str, hardware: str | None) -> list[tuple[int, int]]:
    """Trainings one after the other, as in processes that start again; each rank has a cache of its own."""
    rank = dist.get_rank()
    own, other = f"rank{rank}", f"rank{1 - rank}"
    return [
        train(folder, own, hardware=hardware),
        train(folder, own, hardware=hardware),
        train(folder, own if rank == 0 else "empty", hardware=hardware),
        train(folder, own if rank == 1 else "empty too", hardware=hardware),
        train(folder, other, hardware=hardware),  # the code of a rank is that of all
        train(folder, own, hardware=hardware, overlap="always" if hardware is None else True, verify="full"),
        train(folder, own, hardware=hardware, accumulates=True),
        train(folder, own, hardware=hardware, accumulates=True),
    ]


@pytest.mark.inductor
@pytest.mark.parametrize("hardware", [None, CARD], ids=["by rules", "planned"])
def test_each_rank_uses_what_it_has(
    run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path, hardware: str | None
) -> None:
    first, second = run_on_gloo_ranks(2, start_again, str(tmp_path), hardware)
    anew, kept = (0, 2), (1, 0)
    assert first[:6] == [anew, kept, kept, anew, kept, anew]
    assert second[:6] == [anew, kept, anew, kept, kept, anew]
    for results in (first, second):
        (found, compiled), again = results[6:]
        assert found == 1 and compiled > 0, "for states that no process has met"
        assert again == kept, "variants of later states are kept, too"


def start_twice(folder: str, options: dict[str, Any]) -> list[tuple[int, int]]:
    """The second time with states that the first did not meet."""
    first = train(folder, "all", **options)
    dist.barrier()
    return [first, train(folder, "all", **options), train(folder, "all", accumulates=True, **options)]


@pytest.mark.inductor
@pytest.mark.parametrize(
    "options",
    [{"hardware": CARD, "memory_budget": "1GiB"}, {"hardware": None, "share_code": "always"}],
    ids=["budget", "pieces"],
)
def test_other_kinds_of_code_train_alike(
    run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path, options: dict[str, Any]
) -> None:
    for first, again, (found, compiled) in run_on_gloo_ranks(2, start_twice, str(tmp_path), options):
        assert (first, again) == ((0, 2), (1, 0))
        assert found == 1 and compiled > 0


def follow_another_plan(folder: str) -> list[tuple[int, int]]:
    """Rank 1 has kept code of other plans than rank 0: of a half, then of both halves."""
    rank = dist.get_rank()
    results = [train(folder, f"rank{rank}", hardware=CARD)]
    for is_joint in (False, True):
        if rank == 1:
            for file in Path(folder, "rank1", "steps").glob("*.step"):
                file.write_bytes(pickle.dumps(_with_other_plans(pickle.loads(file.read_bytes()), is_joint)))
        results.append(train(folder, f"rank{rank}", hardware=CARD))
        results.append(train(folder, f"rank{rank}", hardware=CARD))
    return results


def _with_other_plans(step: Any, is_joint: bool) -> Any:
    if is_joint:
        assert any(isinstance(line, Decided) for line in step.said)
        return replace(step, said=_other(step.said))
    backward = step.halves["backward"]
    variants = {state: replace(each, said=_other(each.said)) for state, each in backward.variants.items()}
    return replace(step, halves={**step.halves, "backward": replace(backward, variants=variants)})


def _other(said: Any) -> Any:
    return tuple(replace(line, plan="{}") if isinstance(line, Decided) else line for line in said)


@pytest.mark.inductor
def test_code_of_another_plan_is_compiled_again(
    run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    first, second = run_on_gloo_ranks(2, follow_another_plan, str(tmp_path))
    assert first == [(0, 2), (1, 0), (1, 0), (1, 0), (1, 0)]
    assert second == [(0, 2), (1, 1), (1, 0), (1, 2), (1, 0)]
