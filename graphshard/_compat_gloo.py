"""All-gathers of one tensor on gloo, by another way than torch's own. See ``_compat``.

Torch's kernel of ``_c10d_functional.all_gather_into_tensor`` asks the process group for a coalesced gather. With
several of them in flight, gloo's coalesced gather now and then destroys the heap (docs/reference/versions.md; checked:
2.13). The kernel here asks gloo for a plain gather. It is the op's kernel for CPU tensors in the whole process; a group
of another backend gets what torch does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # checked: 2.13
    AllgatherOptions,
    _register_work,
    _resolve_process_group,
)

_torch_gathers = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default


def _all_gather_on_cpu(
    shard: torch.Tensor, group_size: int, group_or_name: str | dist.ProcessGroup
) -> torch.Tensor:
    """``shard``, of shape ``(n, ...)``, of all ranks: shape ``(n * group_size, ...)``, complete after a wait."""
    is_name = isinstance(group_or_name, str)
    group = _resolve_process_group(group_or_name) if is_name else group_or_name
    backend = _gloo_backend(group, shard.device)
    if backend is None or not shard.dim():
        return _torch_gathers([shard], group_size, group_or_name)[0]
    shard = shard.contiguous()
    full = shard.new_empty((shard.shape[0] * group_size, *shard.shape[1:]))
    pieces = (full, shard)
    if shard.is_complex():  # travels as pairs of reals
        pieces = (torch.view_as_real(full), torch.view_as_real(shard))
    _register_work(full, backend._allgather_base(*pieces, AllgatherOptions()))
    return full


def _gloo_backend(group: dist.ProcessGroup, device: torch.device) -> dist.distributed_c10d.Backend | None:
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # a group with no backend of torch's
        return None
    return backend if backend.name() == "gloo" else None


#: Holds the kernel for as long as the process runs.
gather_library = torch.library.Library("_c10d_functional", "IMPL")
gather_library.impl("all_gather_into_tensor", _all_gather_on_cpu, "CPU")
