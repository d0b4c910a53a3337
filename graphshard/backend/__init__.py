"""The ``torch.compile`` backend: from a graph of Dynamo to Inductor's code.

Imports: all rooms below, ``fsdp`` included.

Read first: ``entry``, then in the order of a compile:

- ``options`` (what a user may set), ``dynamo_graph`` (what the graph says), ``dtensor_boundary`` (parameters
  enter), ``padded_shards`` (as what), ``extended_gathers`` (those with gather extensions), ``parameter_writes`` (those
  that the model changes leave);
- ``joint`` (passes on the joint graph), ``step_planner``, ``step_choice``, ``step_trials`` and ``accumulation``
  (choices by cost for both halves);
- ``compilation`` (the steps that compile a half), ``pipelines``, ``halves`` (a room of its own: a half in the states of
  its units), ``dynamic_sizes``, ``observer`` (log lines and dumps);
- ``inductor`` (a room of its own: the hand-over);
- ``second_start`` (a room of its own: what a later process finds), ``step_key`` (what that depends on),
  ``loaded_step`` (it at work).
"""

from .dtensor_boundary import Boundary, enter_boundary
from .entry import compile_graph, graphshard
from .inductor import (
    count_compiled,
    drop_rng_states,
    functorch_patch,
    inductor_decompositions,
    partition_as_inductor,
)
from .options import BackendOptions, default_hardware
from .pipelines import JOINT_PIPELINE, LOWERING, RESHARDING, half_pipelines, joint_pipeline
from .step_choice import StepChoice
from .step_trials import JointTrials

__all__ = [
    "JOINT_PIPELINE",
    "LOWERING",
    "RESHARDING",
    "BackendOptions",
    "Boundary",
    "JointTrials",
    "StepChoice",
    "compile_graph",
    "count_compiled",
    "default_hardware",
    "drop_rng_states",
    "enter_boundary",
    "functorch_patch",
    "graphshard",
    "half_pipelines",
    "inductor_decompositions",
    "joint_pipeline",
    "partition_as_inductor",
]
