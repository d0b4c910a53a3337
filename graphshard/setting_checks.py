"""Checks settings that need no torch: of a step (mesh, optimizer, plan, placements) and of a calibration.

Inspections and calibrations check their settings here. The command does so before it imports torch, to answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .errors import CalibrationError, OptionError, ShardingError

#: Values of ``inspect(plan=...)``.
PLANS = ("unit", "auto")

#: Names of :data:`graphshard.inspection.optimizers.OPTIMIZERS`.
OPTIMIZER_NAMES = ("adamw", "adam", "sgd", "sgd-momentum", "adagrad", "rmsprop", "none")

#: Names of :data:`graphshard.parallel.READY_PLANS`.
READY_PLAN_NAMES = ("llama", "gpt", "vit", "llama-sequence", "gpt-sequence")

#: Placements that are chosen by cost.
AUTO_PLACEMENTS = "auto"

#: Names of torch's floating-point dtypes.
FLOAT_DTYPES = frozenset({
    "bfloat16", "half", "float16", "float", "float32", "double", "float64", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
})  # fmt: skip

#: Environment that torchrun gives its ranks.
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_axes(mesh: Mapping[str, int], *, is_placed: bool) -> None:
    """Checks names and sizes of the axes of a mesh.

    Args:
        mesh: sizes of the axes, outermost first.
        is_placed: there are placements for an axis behind the shards.

    Raises:
        ShardingError: an axis is unknown or missing, or its size is no whole number of ranks.
    """
    names = tuple(mesh)
    end = names.index("shard") + 1 if "shard" in names else 0
    further = names[end:]
    if names[:end] not in (("shard",), ("replicate", "shard")) or len(further) > 1 or "replicate" in further:
        raise ShardingError(
            f"mesh axes {', '.join(map(str, names)) or '(none)'}: write shard=N, or replicate=M and then shard=N; "
            "with placements, one further axis behind them: tp=K (one axis of all ranks that share a batch)"
        )
    if further and not is_placed:
        raise ShardingError(
            f"mesh axis {further[0]} has no placements: say how the model lies on it (placements=..., or "
            f"--placements), such as the ready plan 'llama'; ready plans are {', '.join(READY_PLAN_NAMES)}"
        )
    if is_placed and not further:
        sizes = _text_of(mesh)
        raise ShardingError(
            f"placements: the mesh {sizes} has no axis for them; add one behind shard, such as {sizes}, tp=8"
        )
    if wrong := [f"{name}={size!r}" for name, size in mesh.items() if type(size) is not int or size < 1]:
        raise ShardingError(f"mesh: {', '.join(wrong)} must be a whole number of ranks, at least 1")


def check_nodes(mesh: Mapping[str, int], ranks_per_node: int, card: str) -> None:
    """Checks that the ranks of a mesh fill the nodes of a card.

    Raises:
        ShardingError: some node is filled in part.
    """
    num_ranks = 1
    for size in mesh.values():
        num_ranks *= size
    if num_ranks > ranks_per_node and num_ranks % ranks_per_node:
        below = num_ranks // ranks_per_node * ranks_per_node
        raise ShardingError(
            f"mesh {_text_of(mesh)}: {num_ranks} ranks do not divide into nodes of {ranks_per_node} (card {card!r}); "
            f"use {below} or {below + ranks_per_node} ranks, or a card with another ranks_per_node"
        )


def check_step(*, micro_batches: int, plan: str, optimizer: str) -> None:
    """Checks the number of micro-batches, and the names of plan and optimizer.

    Raises:
        OptionError: one of them is none.
    """
    if type(micro_batches) is not int or micro_batches < 1:
        raise OptionError(f"micro_batches={micro_batches!r} must be a whole number, at least 1")
    if plan not in PLANS:
        raise OptionError(f"plan={plan!r} is unknown; known: {', '.join(map(repr, PLANS))}")
    if optimizer not in OPTIMIZER_NAMES:
        raise OptionError(f"optimizer={optimizer!r} is unknown; known: {', '.join(OPTIMIZER_NAMES)}")


def check_ready_plan(name: str) -> None:
    """Checks the name of a ready plan.

    Raises:
        ShardingError: there is no such plan.
    """
    if name not in READY_PLAN_NAMES:
        raise ShardingError(
            f"there is no ready plan {name!r}; there are {', '.join(READY_PLAN_NAMES)}; or give placements by name"
        )


def check_card_file(out: Path) -> None:
    """Checks that a card can be written to a file.

    Raises:
        CalibrationError: its folder does not exist, or it is a folder itself.
    """
    if not out.parent.is_dir():
        raise CalibrationError(f"no folder {out.parent} to write {out.name} to; make it first")
    if out.is_dir():
        raise CalibrationError(f"{out} is a folder: name the file of the card, {out / 'here.json'}")


def check_spawned_ranks(num_ranks: int, like: str, device_type: str | None) -> None:
    """Checks what a calibration without torchrun is to measure.

    Raises:
        CalibrationError: there are too few ranks for collectives, or several ranks would share GPUs.
    """
    if num_ranks == 1 and like:
        return
    if num_ranks < 2:
        raise CalibrationError(
            f"collectives need at least 2 ranks, not {num_ranks}; give more (--nproc), or name the card whose links "
            "one rank takes (--like)"
        )
    if device_type not in (None, "cpu"):
        raise CalibrationError(
            "without torchrun only the CPU can be measured; start one rank per device, or measure one device "
            "(--nproc 1) with the links of another card (--like)"
        )


def _text_of(mesh: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.items())
