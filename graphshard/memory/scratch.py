"""Memory that kernels of libraries allocate for themselves while they run, beside their operands and results.

How much that is depends on the processor, the library and the number of threads. So it is measured where the kernels
will run (``scratch_measured``) and kept in a table (``scratch_table``). Where nothing was measured, an upper bound that
follows from sizes counts instead (``scratch_bound``). On a GPU only attention's backward is counted (``scratch_gpu``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from ..ir import tensors_of
from .scratch_bound import bound_bytes
from .scratch_calls import TensorSpec, kernel_call
from .scratch_gpu import gpu_scratch_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelScratch:
    """What kernels allocate on one machine.

    Attributes:
        known: measured bytes, by the text of the call.
        num_threads: of the process that the kernels run in, for the bound; 0 for those of this process.
    """

    known: Mapping[str, int] = field(default_factory=dict)
    num_threads: int = 0

    def bytes_of(self, node: fx.Node, device_type: str) -> int:
        """What a node's kernel allocates for itself while it runs: as measured, or the bound.

        Args:
            node: any node; 0 for those that run no kernel of a library.
            device_type: where it will run; 0 for any but "cpu" and "cuda".
        """
        if device_type == "cuda":
            return gpu_scratch_bytes(node)
        if device_type != "cpu" or (call := kernel_call(node)) is None:
            return 0
        if self.known and (measured := self.known.get(str(call))) is not None:
            return measured
        results = [TensorSpec.of(tensor) for tensor in tensors_of(node.meta.get("val"))]
        return bound_bytes(call, results, self.num_threads or torch.get_num_threads())


#: Where nothing was measured.
UNMEASURED = KernelScratch()
