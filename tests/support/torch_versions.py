"""What some of the claimed torch versions lack, and the marks that skip tests of it."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_common

#: The version: (2, 13).
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

#: What a ``shard_placement_fn`` returns to choose a mesh; None where it cannot.
ShardPlacementResult = getattr(_fsdp_common, "ShardPlacementResult", None)

#: The names of mesh axes that ``dp_mesh_dims`` takes; None where there is no such option.
DataParallelMeshDims = getattr(fsdp, "DataParallelMeshDims", None)

#: Sets the partitioner's memory budget of a region; None where there is none.
region_activation_memory_budget = getattr(torch.autograd.graph, "region_activation_memory_budget", None)

#: Up to torch 2.12 a reduction over the fake group leaves its result as it was allocated.
REDUCES = TORCH >= (2, 13)

NEEDS_REDUCTION = pytest.mark.skipif(
    not REDUCES, reason="torch 2.11 and 2.12: the fake group leaves results unwritten"
)
NEEDS_KEPT_DTENSORS = pytest.mark.skipif(
    TORCH < (2, 13), reason="torch 2.11: AOTAutograd keeps no graph that makes DTensors"
)
NEEDS_MESH_PER_PARAMETER = pytest.mark.skipif(
    ShardPlacementResult is None, reason="torch 2.11: a shard_placement_fn cannot choose a mesh"
)
NEEDS_MESH_DIMS = pytest.mark.skipif(DataParallelMeshDims is None, reason="torch 2.11: no dp_mesh_dims")
NEEDS_REGION_BUDGET = pytest.mark.skipif(
    region_activation_memory_budget is None, reason="torch 2.11 and 2.12: no memory budget of a region"
)
NEEDS_MESSAGES = pytest.mark.skipif(
    not hasattr(torch.ops._c10d_functional, "isend"), reason="torch 2.11: no op sends a message to one rank"
)
NEEDS_SPLIT_BACKWARDS = pytest.mark.skipif(
    TORCH < (2, 13), reason="torch 2.11 and 2.12: schedules that split a backward count gradients of units twice"
)
NEEDS_STAGES_ON_ONE_RANK = pytest.mark.skipif(
    TORCH < (2, 12), reason="torch 2.11: neighbouring stages of one rank first send to each other, which gloo cannot"
)
NEEDS_REGIONS = pytest.mark.skipif(
    importlib.util.find_spec("torch._higher_order_ops.passes") is None,
    reason="torch 2.11: regions are not inlined",
)
NEEDS_SHARDED_REGIONS = pytest.mark.skipif(
    TORCH < (2, 13), reason="torch 2.12: Dynamo takes no DTensor as input of a region"
)
