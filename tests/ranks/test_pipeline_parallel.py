"""Stages of torch's pipelining on axis "pp", each sharded on axis "dp", against the model in one piece."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.comm_counts import count_collectives
from support.implementations import EVERY, pick_fully_shard
from support.thorough import is_thorough
from support.torch_versions import NEEDS_SPLIT_BACKWARDS, NEEDS_STAGES_ON_ONE_RANK
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

Run = Callable[..., list[Any]]

WIDTH, MICRO_BATCHES, ROWS, LEARNING_RATE = 6, 4, 2, 0.1

#: These ask autograd for the gradients of inputs first, and later for those of parameters.
SPLITTING = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")

#: By schedule, the stages of a rank of two, of how many there are.
STAGES = {
    "ScheduleGPipe": lambda rank: ([rank], 2),
    "Schedule1F1B": lambda rank: ([rank], 2),
    "ScheduleInterleaved1F1B": lambda rank: ([rank, rank + 2], 4),
    "ScheduleLoopedBFS": lambda rank: ([rank, rank + 2], 4),
    "ScheduleInterleavedZeroBubble": lambda rank: ([rank, rank + 2], 4),
    "ScheduleZBVZeroBubble": lambda rank: ([rank, 3 - rank], 4),
    "ScheduleDualPipeV": lambda rank: ([rank, 3 - rank], 4),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def _batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x = torch.randn(MICRO_BATCHES * ROWS, WIDTH, generator=generator)
    return x, torch.randn(MICRO_BATCHES * ROWS, WIDTH, generator=generator)


def train_stages(implementation: str, schedule_name: str, reshards: bool, **options: Any) -> None:
    """Two steps: losses, gradients and parameters of each stage are those of the whole model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp_rank, dp_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    own, num_stages = STAGES[schedule_name](pp_rank)
    torch.manual_seed(0)
    # What is compiled for several stages takes long; there a stage of one block shows as much.
    num_blocks = 1 if implementation == "compiled" and reshards and not is_thorough() else 2
    reference = nn.ModuleList(nn.Sequential(*(Block() for _ in range(num_blocks))) for _ in range(num_stages))
    fully_shard = pick_fully_shard("fsdp2" if implementation == "fsdp2" else "sharded")
    modules, stages = [], []
    for index in own:
        module = copy.deepcopy(reference[index])
        for block in module:
            if implementation == "blocks":
                block.compile(backend="aot_eager")
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshards)
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshards)
        if implementation == "compiled":
            module.compile(backend="graphshard", options=options)
        modules.append(module)
        stages.append(
            pipelining.PipelineStage(
                module, index, num_stages, torch.device("cpu"), group=mesh.get_group("pp")
            )
        )
    schedule_class = getattr(pipelining.schedules, schedule_name)
    takes_one = issubclass(schedule_class, pipelining.schedules.PipelineScheduleSingle)
    schedule = schedule_class(stages[0] if takes_one else stages, n_microbatches=MICRO_BATCHES, loss_fn=_loss)
    optimizers = [torch.optim.SGD(module.parameters(), lr=LEARNING_RATE) for module in modules]
    plain = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE)
    for step in range(2):
        expected = []
        for replica in range(2):
            for x, target in zip(
                *(value.chunk(MICRO_BATCHES) for value in _batch(step, replica)), strict=True
            ):
                for stage in reference:
                    x = stage(x)
                loss = _loss(x, target)
                (loss / MICRO_BATCHES / 2).backward()
                if replica == dp_rank:
                    expected.append(loss.detach())
        x, target = _batch(step, dp_rank)
        losses: list[Tensor] = []
        inputs = [x] if 0 in own else []
        ends = {"target": target, "losses": losses} if num_stages - 1 in own else {}
        schedule.step(*inputs, **ends)
        if ends:
            assert_close(torch.stack(losses).detach(), torch.stack(expected))
        for index, module in zip(own, modules, strict=True):
            for (name, full), found in zip(
                reference[index].named_parameters(), module.parameters(), strict=True
            ):
                label = f"gradient of {name} in stage {index}"
                assert found.grad is not None, f"no {label}"
                assert_close(
                    found.grad.full_tensor(), full.grad, msg=lambda text, label=label: f"{label}: {text}"
                )
        for optimizer in (*optimizers, plain):
            optimizer.step()
            optimizer.zero_grad()
    for index, module in zip(own, modules, strict=True):
        for full, found in zip(reference[index].parameters(), module.parameters(), strict=True):
            assert_close(found.full_tensor(), full)


def _cases() -> Iterator[Any]:
    """Of schedules that split the backward, those that work.

    Compiled code cannot be run twice backward (torch's error), and FSDP2 loses gradients of units that reshard.
    """
    quick = {
        ("sharded", "ScheduleInterleaved1F1B", False),
        ("sharded", "ScheduleZBVZeroBubble", True),
        ("sharded", "ScheduleDualPipeV", False),
        ("blocks", "ScheduleInterleaved1F1B", True),
        ("compiled", "Schedule1F1B", False),
        ("compiled", "ScheduleInterleaved1F1B", True),
    }
    for case in itertools.product(("fsdp2", "sharded", "blocks", "compiled"), STAGES, (False, True)):
        implementation, schedule_name, reshards = case
        runs = implementation == "sharded" or (implementation == "fsdp2" and not reshards)
        if runs or schedule_name not in SPLITTING:
            marks = [] if case in quick else [pytest.mark.slow]
            if schedule_name in SPLITTING and implementation == "sharded":
                marks.append(NEEDS_SPLIT_BACKWARDS)
            if schedule_name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
                marks.append(NEEDS_STAGES_ON_ONE_RANK)
            yield pytest.param(*case, marks=marks)


@pytest.mark.parametrize(("implementation", "schedule_name", "reshards"), list(_cases()))
def test_stages_train_like_the_whole_model(
    run_on_gloo_ranks: Run, implementation: str, schedule_name: str, reshards: bool
) -> None:
    run_on_gloo_ranks(4, train_stages, implementation, schedule_name, reshards)


def train_on_measured_ranks(schedule_name: str) -> None:
    train_stages("compiled", schedule_name, True, hardware="auto")


@pytest.mark.parametrize(
    "schedule_name", ["Schedule1F1B", pytest.param("ScheduleInterleaved1F1B", marks=pytest.mark.slow)]
)
def test_each_stage_measures_and_plans_on_its_own(run_on_gloo_ranks: Run, schedule_name: str) -> None:
    """The ranks of the other stages wait for activations meanwhile: nothing may wait for them."""
    run_on_gloo_ranks(4, train_on_measured_ranks, schedule_name)


def count_gathers(implementation: str, unshards: bool) -> None:
    """A stage that does not reshard is gathered once for all micro-batches, and is freed at the end."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    index, fully_shard = mesh.get_local_rank("pp"), pick_fully_shard(implementation)
    stage = nn.Sequential(Block(), Block())
    for module in (*stage, stage):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    if implementation == "compiled":
        stage.compile(backend="graphshard")
    schedule = pipelining.Schedule1F1B(
        pipelining.PipelineStage(stage, index, 2, torch.device("cpu"), group=mesh.get_group("pp")),
        n_microbatches=MICRO_BATCHES,
        loss_fn=_loss,
    )
    x, target = _batch(0, 0)
    for _ in range(3):  # the first step compiles, and shows that there are micro-batches
        with count_collectives() as counts:
            for module in stage.modules():
                if unshards and isinstance(module, FSDPModule):
                    module.unshard()
            schedule.step(*([x] if index == 0 else []), **({"target": target} if index == 1 else {}))
        assert all(isinstance(parameter, DTensor) for parameter in stage.parameters())
    assert counts == {"gathers": 2, "reductions": 2}


@pytest.mark.parametrize("unshards", [True, False], ids=["begins with unshard", "as the user of FSDP2 has it"])
@pytest.mark.parametrize("implementation", EVERY)
def test_a_stage_is_gathered_once_a_step(run_on_gloo_ranks: Run, implementation: str, unshards: bool) -> None:
    run_on_gloo_ranks(4, count_gathers, implementation, unshards)
