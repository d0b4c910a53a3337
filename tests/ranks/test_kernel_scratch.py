"""All ranks plan from what one of them measured of its kernels; no rank waits for another's measurements."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.implementations import compile_if_asked, shard_units
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.errors import GraphShardError
from graphshard.memory import scratch_measured

#: What a kernel of rank 0 takes here, and one of rank 1.
OF_RANK = (1 << 20, 1 << 24)


def _train(folder: str, budget: str | None, limits: tuple[str, str] = ("", "")) -> tuple[int, list[str]]:
    """Two steps in bfloat16; how many kernels this rank ran to measure them, and what it dumped of the memory.

    Args:
        folder: for dumps.
        budget: of memory, for a plan; None for the schedule without a hardware card.
        limits: of the instructions of each rank's processor; "" for none.
    """
    rank, runs = dist.get_rank(), []

    def peak_of(call: object) -> int:
        runs.append(call)
        return OF_RANK[rank]

    limit = {"ONEDNN_MAX_CPU_ISA": limits[rank]} if limits[rank] else {}
    scratch_measured._measured.cache_clear()
    with patch.object(scratch_measured, "_peak_of", peak_of), patch.dict(os.environ, limit):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        model = shard_units("compiled", model, [], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        plan = {"hardware": "cpu-loopback", "bucket": "auto", "memory_budget": budget} if budget else {}
        options = {**plan, "dump": f"{folder}/{rank}"}
        forward = compile_if_asked("compiled", model, **options)
        for _ in range(2):
            forward(torch.randn(32, 64)).sum().backward()
    scratch_measured._measured.cache_clear()
    files = sorted(Path(folder, str(rank)).glob("graph*.memory.txt"))
    return len(runs), [file.read_text() for file in files]


def test_one_rank_measures_and_all_plan_from_its_numbers(run_on_gloo_ranks, tmp_path: Path):
    (runs, texts), (other_runs, other_texts) = run_on_gloo_ranks(2, _train, str(tmp_path), "1GiB")
    assert runs > 0 and other_runs == 0
    assert texts == other_texts and len(texts) == 2
    assert all(f"{OF_RANK[0]:>14}  " in text and " (scratch)" in text for text in texts)


def test_a_rank_with_another_processor_measures_its_own(run_on_gloo_ranks, tmp_path: Path):
    ranks = run_on_gloo_ranks(2, _train, str(tmp_path), "1GiB", ("", "AVX2"))
    for (runs, texts), own in zip(ranks, OF_RANK, strict=True):
        assert runs > 0
        assert all(f"{own:>14}  " in text for text in texts)


def test_without_a_card_each_rank_places_by_its_own_numbers(run_on_gloo_ranks, tmp_path: Path):
    """The sequence of collectives does not depend on them."""
    for (runs, texts), own in zip(run_on_gloo_ranks(2, _train, str(tmp_path), None), OF_RANK, strict=True):
        assert runs > 0 and len(texts) == 2
        assert all(f"{own:>14}  " in text for text in texts)


def _refused(folder: str, budget: str) -> str:
    with pytest.raises((GraphShardError, torch._dynamo.exc.BackendCompilerFailed)) as refused:
        _train(folder, budget, ("", "AVX2"))
    torch.compiler.reset()
    return str(refused.value)


def test_a_budget_that_one_rank_cannot_keep_is_refused_on_all(run_on_gloo_ranks, tmp_path: Path):
    """Rank 0 plans within it; the kernels of rank 1 take more."""
    first, second = run_on_gloo_ranks(2, _refused, str(tmp_path), "8MiB")
    assert "rank 1" in first
    assert "memory_budget" in second or "bytes" in second
