"""The layout a gathered parameter has on the mesh of another parallelism (tensor, expert).

Such a parameter is a DTensor before it is sharded. Its shards are cut from this rank's piece of it,
so gathering them gives that piece back, and the forward must see the DTensor again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from .._compat import from_local_takes_grad_placements


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterLayout:
    """A DTensor without its values.

    Attributes:
        mesh, placements: where the pieces of the parameter are.
        grad_placements: where the pieces of its gradient must be before data parallelism reduces them.
        shape, stride: of the whole parameter, over all ranks.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    grad_placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(param: DTensor, partial_dims: tuple[int, ...] = ()) -> OuterLayout:
        """The layout of ``param``; over the mesh dims ``partial_dims`` its gradients stay unsummed."""
        placements = tuple(param.placements)
        return OuterLayout(
            mesh=param.device_mesh,
            placements=placements,
            grad_placements=tuple(
                Partial() if dim in partial_dims else placement for dim, placement in enumerate(placements)
            ),
            shape=param.shape,
            stride=tuple(param.stride()),
        )

    def wrap(self, piece: Tensor) -> Tensor:
        """The DTensor whose piece on this rank is ``piece``; gradients flow back to the piece."""
        of_gradient = {"grad_placements": self.grad_placements} if from_local_takes_grad_placements else {}
        return DTensor.from_local(
            piece,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
            **of_gradient,
        )
