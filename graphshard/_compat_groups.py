"""Private torch names of process groups: second names, and groups without other ranks. See ``_compat``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group  # checked: 2.13
from torch.distributed.device_mesh import DeviceMesh


def register_group_name(name: str, group: dist.ProcessGroup) -> bool:
    """Gives a process group a further name; False if the name is taken by another group (checked: 2.13).

    Torch holds the group weakly, and forgets all names with ``destroy_process_group()``.
    """
    try:
        return _resolve_process_group(name) is group
    except RuntimeError:  # nobody has the name, or its group is gone
        pass
    try:
        _register_process_group(name, group)
    except RuntimeError:
        return False
    return True


@contextmanager
def fake_world_named(name: str, num_ranks: int) -> Iterator[str]:
    """:func:`fake_world`, whose group has a further name; gives its own. Does nothing in a process that has groups."""
    if dist.is_initialized():
        yield name
        return
    with fake_world(0, num_ranks):
        register_group_name(name, dist.group.WORLD)
        yield dist.group.WORLD.group_name


@contextmanager
def fake_world(rank: int, num_ranks: int) -> Iterator[None]:
    """A context in which this process is one of ``num_ranks`` in a group that communicates nothing (checked: 2.13)."""
    from torch.testing._internal.distributed import fake_pg  # registers the kind of group "fake"

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh is cut out of; the mesh itself if it is whole (checked: 2.13)."""
    return mesh._get_root_mesh()
