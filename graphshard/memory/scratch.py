"""Memory that kernels of libraries allocate for themselves while they run, beside their operands and results.

Counted are the CPU's: its convolutions, its attention, and its products of bfloat16. What depends on the number of
threads is counted for those that this process has (:func:`torch.get_num_threads`).
"""

from __future__ import annotations

from torch import fx

from .scratch_attention import attention_scratch_bytes
from .scratch_convolutions import convolution_scratch_bytes
from .scratch_products import product_scratch_bytes


def scratch_bytes(node: fx.Node, device_type: str) -> int:
    """The most that a node's kernel allocates for itself while it runs.

    Args:
        node: any node; 0 for those of which nothing is known.
        device_type: where it will run; 0 for any but "cpu": workspaces of cuDNN and cuBLAS are not known.
    """
    if device_type != "cpu":
        return 0
    return convolution_scratch_bytes(node) + attention_scratch_bytes(node) + product_scratch_bytes(node)
