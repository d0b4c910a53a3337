"""Compiles a model for a later run, on one machine and without the other ranks: plans and kernels go to one folder.

Each rank of the later run finds in the folder what it would plan and generate. The backend works as in that run: Dynamo
captures the model, the passes and the planner run, and Inductor generates code. Three things differ. The process group
is a fake one, so no rank waits for another. What is compiled does not compute: its results are empty memory. And plans
and kernels lie under keys of the whole graph, the options, the card, the processor, torch and the source of graphshard,
so that a later run with anything else finds nothing and compiles as ever.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ._compat import TorchDynamoException, tree_leaves, tree_map
from ._compat_groups import fake_world
from .backend import BackendOptions, compile_graph, count_compiled
from .cost import HardwareCard
from .errors import GraphShardError, OptionError
from .fsdp import FSDPModule, fully_shard
from .user_cache import CACHE_VARIABLE, cache_folder

#: Environment that names the folder of Inductor's caches, and where precompiled kernels lie in the folder of plans.
INDUCTOR_CACHE_VARIABLE, INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR", "inductor"

#: Returns a model, its positional and its keyword inputs.
Factory = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedAs:
    """How a later run shards the model.

    Attributes:
        mesh: sizes of the axes by name, outermost first: the axis of the shards, or that of the replicas and that.
        is_unit: says of the path of a module whether it is a unit of its own.
        mp_policy: dtypes of compute and reductions.
        reshard_after_forward: as for ``fully_shard``.
        device_type: where the model computes: "cpu" or "cuda".
    """

    mesh: Mapping[str, int]
    is_unit: Callable[[str], bool] = lambda path: False
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshard_after_forward: bool | None = None
    device_type: str = "cpu"

    def shard(self, model: nn.Module) -> None:
        """Shards the units and the rest of a model over a new mesh; one that is sharded already stays as it is.

        No mesh is made for the latter, since its groups would shift the names of those that the model makes.
        """
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            return
        sizes, names = tuple(self.mesh.values()), tuple(self.mesh)
        mesh = init_device_mesh(self.device_type, sizes, mesh_dim_names=names)
        for path, module in model.named_modules():
            if path and self.is_unit(path):
                self._shard(module, mesh)
        self._shard(model, mesh)

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=self.mp_policy,
            reshard_after_forward=self.reshard_after_forward,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Precompiled:
    """What one rank has added to a folder.

    Attributes:
        rank: the rank.
        found: graphs whose code was in the folder.
        compiled: graphs whose code is new in it.
        not_kept: graphs that Inductor does not cache.
        planned: plans that are new in it.
    """

    rank: int
    found: int
    compiled: int
    not_kept: int
    planned: int


def precompile(
    make: Factory,
    folder: Path,
    sharded: ShardedAs,
    *,
    options: Mapping[str, Any],
    micro_batches: int = 1,
    ranks: Sequence[int] = (),
    tell: Callable[[Precompiled], None] = lambda done: None,
) -> list[Precompiled]:
    """Compiles the training step of a model for each rank of a later run that needs code of its own.

    Ranks have equal graphs unless parameters that no gather reads are cut unevenly, or the model asks for its rank. So
    without ``ranks``, rank 0 and the last one are compiled, and if the last one needs plans or kernels of its own, the
    others.

    Args:
        make: makes model and inputs, once a rank; on the meta device too.
        folder: where plans and kernels go.
        sharded: how the later run shards the model.
        options: those of the backend in the later run; ``hardware`` must be a card or None.
        micro_batches: forwards and backwards of a step, of which the last one reduces gradients.
        ranks: the ranks to compile for; empty for those that need it.
        tell: is called when a rank is done.

    Raises:
        OptionError: this process has a process group, or ``options`` leave the card to the machine.
        GraphShardError: the model cannot be compiled with these options.
    """
    if dist.is_initialized():
        raise OptionError(
            "precompile makes process groups of its own, and this process has one; call it in another process"
        )
    parsed = BackendOptions.parse({"progress": False, **options})
    if parsed.hardware is not None and not isinstance(parsed.hardware, HardwareCard):
        raise OptionError(
            "precompile cannot measure the machine of a later run: give option hardware, a card or None"
        )
    size = math.prod(sharded.mesh.values())
    done: list[Precompiled] = []

    def compile_rank(rank: int) -> Precompiled:
        with fake_world(rank, size), _own_errors():
            found = _compile_step(make, sharded, parsed, micro_batches)
        done.append(replace(found, rank=rank))
        tell(done[-1])
        return done[-1]

    with _caches_in(folder):
        if ranks:
            for rank in ranks:
                compile_rank(rank)
        else:
            compile_rank(0)
            last = compile_rank(size - 1) if size > 1 else done[0]
            is_needed = last.rank > 0 and (last.compiled or last.planned)
            for rank in range(1, size - 1) if is_needed else ():
                compile_rank(rank)
    return done


def _compile_step(
    make: Factory,
    sharded: ShardedAs,
    options: BackendOptions,
    micro_batches: int,
) -> Precompiled:
    """Forward and backward of a rank whose process group is there, as a training runs them."""
    before, plans_before = count_compiled(), _num_plans()
    torch.compiler.reset()  # as in a new process, nothing is compiled
    model, args, kwargs = make()
    device = torch.device(sharded.device_type)
    _materialise(model, device)
    sharded.shard(model)
    args, kwargs = tree_map(lambda value: _on_device(value, device), (args, kwargs))

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(gm, example_inputs, options, is_ahead=True)

    step = torch.compile(model, backend=backend)
    for index in range(micro_batches):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(index == micro_batches - 1)
        scalar = _sum_of_results(step(*args, **kwargs))
        if scalar.requires_grad:
            scalar.backward()
    found, compiled, not_kept = (now - then for now, then in zip(count_compiled(), before, strict=True))
    return Precompiled(
        rank=dist.get_rank(),
        found=found,
        compiled=compiled,
        not_kept=not_kept,
        planned=_num_plans() - plans_before,
    )


def _sum_of_results(output: Any) -> Tensor:
    """A scalar that depends on all results of a model that have a gradient."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return (
        torch.stack([leaf.real.sum().to(torch.float32) for leaf in leaves]).sum()
        if leaves
        else torch.zeros(())
    )


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Moves a model to a device; what is on meta becomes memory that nobody has written. Ties stay ties."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if (
                    value is None
                    or isinstance(value, dist.tensor.DTensor)
                    or value.device.type == device.type
                ):
                    continue
                if id(value) not in moved:
                    data = _on_device(value.detach(), device)
                    is_parameter = isinstance(value, nn.Parameter)
                    moved[id(value)] = nn.Parameter(data, value.requires_grad) if is_parameter else data
                values[name] = moved[id(value)]


def _on_device(value: Any, device: torch.device) -> Any:
    """A tensor on a device; from meta, zeros that may be an index, or memory that nobody has written."""
    if not isinstance(value, Tensor) or value.device.type == device.type:
        return value
    is_differentiable = value.is_floating_point() or value.is_complex()
    if not value.is_meta:
        moved = value.to(device)
    else:
        make = torch.empty_like if is_differentiable else torch.zeros_like
        moved = make(value, device=device)
    return moved.requires_grad_(value.requires_grad) if value.is_leaf and is_differentiable else moved


def _num_plans() -> int:
    folder = cache_folder("plans")
    return 0 if folder is None or not folder.is_dir() else sum(1 for _ in folder.glob("*.json"))


@contextmanager
def _own_errors() -> Iterator[None]:
    """A context that takes an error of graphshard out of torch.compile's."""
    try:
        yield
    except TorchDynamoException as error:
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, GraphShardError):
            raise inner from error
        raise


@contextmanager
def _caches_in(folder: Path) -> Iterator[None]:
    """A context in which graphshard and Inductor keep what they make in one folder."""
    wanted = {CACHE_VARIABLE: str(folder), INDUCTOR_CACHE_VARIABLE: str(folder / INDUCTOR_FOLDER)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
