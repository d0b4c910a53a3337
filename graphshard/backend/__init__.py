"""The ``torch.compile`` backend: from Dynamo's graph to Inductor's code.

Imports: all rooms below, ``fsdp`` included.

Read first: ``entry``, then in the order of a compile: ``dtensor_boundary``, ``half``, ``step_planner``,
``step_trials``, ``accumulation``, ``dynamic_sizes``, ``inductor_config``, ``emitted_order``, ``gloo_release``;
``options`` are what a user may set.
"""

from .dtensor_boundary import cross_boundary
from .entry import JOINT_PIPELINE, LOWERING, graphshard, half_pipeline
from .inductor_config import drop_rng_states, functorch_patch, inductor_decompositions, partition_as_inductor
from .options import BackendOptions
from .step_trials import JointTrials, StepChoice

__all__ = [
    "JOINT_PIPELINE",
    "LOWERING",
    "BackendOptions",
    "JointTrials",
    "StepChoice",
    "cross_boundary",
    "drop_rng_states",
    "functorch_patch",
    "graphshard",
    "half_pipeline",
    "inductor_decompositions",
    "partition_as_inductor",
]
