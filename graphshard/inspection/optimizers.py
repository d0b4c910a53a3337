"""The cost of an optimizer: the bytes that its step reads and writes, and its state.

A state has the shape and dtype of the parameter's shard, as in torch.optim. A step reads and writes each state once, as
a fused kernel does (``fused=True``): it is bound by memory bandwidth and has no temporaries. The scalar ``step`` of
each parameter is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cost import HardwareCard, memory_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """The number of tensors of a shard's size that an optimizer keeps, reads and writes in a step."""

    name: str
    num_states: int
    num_reads: int
    num_writes: int
    flops_per_element: int


#: Reads are parameter, gradient and states; writes are parameter and states. "none" has no step.
OPTIMIZERS = {
    kind.name: kind
    for kind in (
        OptimizerKind(name="adamw", num_states=2, num_reads=4, num_writes=3, flops_per_element=14),
        OptimizerKind(name="adam", num_states=2, num_reads=4, num_writes=3, flops_per_element=13),
        OptimizerKind(name="sgd", num_states=0, num_reads=2, num_writes=1, flops_per_element=2),
        OptimizerKind(name="sgd-momentum", num_states=1, num_reads=3, num_writes=2, flops_per_element=4),
        OptimizerKind(name="adagrad", num_states=1, num_reads=3, num_writes=2, flops_per_element=6),
        OptimizerKind(name="rmsprop", num_states=1, num_reads=3, num_writes=2, flops_per_element=7),
        OptimizerKind(name="none", num_states=0, num_reads=0, num_writes=0, flops_per_element=0),
    )
}


def step_seconds(kind: OptimizerKind, shard_bytes: int, num_elements: int, card: HardwareCard) -> float:
    """Seconds of one step over the shards of a rank: the roofline of one fused kernel.

    Args:
        kind: the optimizer.
        shard_bytes: bytes of the shards of trained parameters.
        num_elements: elements of these shards.
        card: the hardware.
    """
    moved = (kind.num_reads + kind.num_writes) * shard_bytes
    if not moved:
        return 0.0
    flops = kind.flops_per_element * num_elements
    arithmetic = flops / (card.vector_flops * card.efficiency["vector"].at(flops))
    return card.kernel_overhead_seconds + max(arithmetic, memory_seconds(moved, card))


def accumulation_seconds(gradient_bytes: int, card: HardwareCard) -> float:
    """Seconds to add the reduced gradients of one more micro-batch: two reads and a write."""
    if not gradient_bytes:
        return 0.0
    return card.kernel_overhead_seconds + memory_seconds(3 * gradient_bytes, card)
