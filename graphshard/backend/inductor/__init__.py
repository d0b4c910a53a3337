"""The hand-over of a planned graph to Inductor: its settings, its partitioner, and the order it must keep.

Imports: ``errors``, ``ir``, ``memory``. Private names of Inductor are allowed here and nowhere else in the backend.

Read first: ``inductor_config`` (what is switched off), ``partition`` (the joint graph in two halves), ``order_pinning``
(kernels keep the planned order), ``emitted_order`` (the check of that), ``equal_pieces`` and ``compile_pieces``
(equal parts of a half are compiled once), ``group_aliases`` (names of process groups in
generated code), ``gloo_release`` (waits that free memory), ``host_copies`` (results copied to the CPU).
"""

from .compile_pieces import PieceRow, compile_in_pieces, may_be_in_pieces
from .emitted_order import emitted_order, order_difference, planned_order
from .equal_pieces import Piece, cut_in_pieces, num_compiled_ops
from .group_aliases import name_groups_by_axis
from .host_copies import start_copies
from .inductor_config import (
    JOINT_PASS,
    compile_fx,
    compile_fx_inner,
    compile_later,
    config_patches,
    count_compiled,
    count_loaded,
    functorch_patch,
    keeps_code,
    memory_patch,
    records_cuda_graphs,
    settings_of_torch,
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
from .variant_code import EmptyResults, VariantCode

__all__ = [
    "JOINT_PASS",
    "EmptyResults",
    "JointPass",
    "Partition",
    "Piece",
    "PieceRow",
    "VariantCode",
    "compile_fx",
    "compile_fx_inner",
    "compile_in_pieces",
    "compile_later",
    "config_patches",
    "count_compiled",
    "count_loaded",
    "cut_in_pieces",
    "drop_rng_states",
    "emitted_order",
    "functorch_patch",
    "inductor_decompositions",
    "keeps_code",
    "may_be_in_pieces",
    "memory_patch",
    "name_groups_by_axis",
    "num_compiled_ops",
    "order_difference",
    "partition_as_inductor",
    "partitioner_settings",
    "pinning_patch",
    "planned_order",
    "prepare_patterns",
    "records_cuda_graphs",
    "saved_share",
    "settings_of_torch",
    "start_copies",
    "type_rng_states",
    "unwrap_undrawn",
]
