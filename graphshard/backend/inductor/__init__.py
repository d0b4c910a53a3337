"""The hand-over of a planned graph to Inductor: its settings, its partitioner, and the order it must keep.

Imports: ``errors``, ``ir``, ``memory``. Private names of Inductor are allowed here and nowhere else in the backend.

Read first: ``inductor_config`` (what is switched off), ``partition`` (the joint graph in two halves), ``order_pinning``
(kernels keep the planned order), ``emitted_order`` (the check of that), ``equal_pieces`` and ``compile_pieces``
(equal parts of a half are compiled once), ``group_aliases`` (names of process groups in
generated code), ``gloo_release`` (waits that free memory), ``host_copies`` (results copied to the CPU).
"""

from .compile_pieces import Code, compile_in_pieces, may_be_in_pieces
from .emitted_order import emitted_order, order_difference, planned_order
from .equal_pieces import Piece, cut_in_pieces, num_compiled_ops
from .group_aliases import name_groups_by_axis, named
from .host_copies import start_copies, waiting
from .inductor_config import (
    JOINT_PASS,
    compile_fx,
    compile_fx_inner,
    compile_later,
    config_patches,
    count_compiled,
    functorch_patch,
    memory_patch,
)
from .order_pinning import pinning_patch
from .partition import (
    JointPass,
    Partition,
    drop_rng_states,
    inductor_decompositions,
    partition_as_inductor,
    partitioner_settings,
    prepare_patterns,
    saved_share,
    type_rng_states,
    unwrap_undrawn,
)

__all__ = [
    "JOINT_PASS",
    "Code",
    "JointPass",
    "Partition",
    "Piece",
    "compile_fx",
    "compile_fx_inner",
    "compile_in_pieces",
    "compile_later",
    "config_patches",
    "count_compiled",
    "cut_in_pieces",
    "drop_rng_states",
    "emitted_order",
    "functorch_patch",
    "inductor_decompositions",
    "may_be_in_pieces",
    "memory_patch",
    "name_groups_by_axis",
    "named",
    "num_compiled_ops",
    "order_difference",
    "partition_as_inductor",
    "partitioner_settings",
    "pinning_patch",
    "planned_order",
    "prepare_patterns",
    "saved_share",
    "start_copies",
    "type_rng_states",
    "unwrap_undrawn",
    "waiting",
]
