"""All-gather extensions: tensor subclasses that define what is gathered and what the full parameter is.

A parameter may hold a tensor subclass, a quantised weight for instance, with the methods ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather``, as in FSDP2. Its shards are of that subclass. The first method turns the shard into plain
tensors to gather. The second turns the gathered tensors into the full parameter. Gradients go to the shard as if the
full parameter itself had been gathered.

Code that is compiled traces both methods: each tensor that the first one returns becomes an ``unshard`` of its own
(docs/decisions/0010).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ..._compat_dtensor import is_traceable_wrapper_subclass
from ...errors import ExtensionError, UnsupportedShardingError
from ...ir import UnshardCall, padded_shape, shard_shape
from .parameter_slot import ParameterSlot

_PRE = "fsdp_pre_all_gather"
_POST = "fsdp_post_all_gather"


def has_extension(tensor: Tensor, name: str) -> bool:
    """Whether a parameter's data has a gather extension.

    Raises:
        ExtensionError: (an AssertionError) it has only one of the two methods.
    """
    found = [method for method in (_PRE, _POST) if hasattr(tensor, method)]
    if len(found) == 1:
        raise ExtensionError(
            f"parameter {name}: {type(tensor).__name__} has {found[0]} only; define {_PRE} and {_POST}"
        )
    return bool(found)


def calls_before(
    call: UnshardCall,
    mesh: DeviceMesh,
    stride: Sequence[int],
    module: nn.Module,
    policy: MixedPrecisionPolicy,
) -> tuple[list[UnshardCall], Any]:
    """The gathers that ``call.shard`` asks for, along dim 0 and in their own dtypes, and its metadata.

    Raises:
        ExtensionError: (an AssertionError) ``fsdp_pre_all_gather`` takes neither 1 nor 5 arguments, or its inputs for a
            shard that lacks rows do not have the padded shape, as those of other ranks do.
    """
    method = getattr(call.shard, _PRE)
    signature = inspect.signature(method)
    size = torch.Size(call.shape)
    arguments = (mesh, size, tuple(stride), module, policy)
    if len(signature.parameters) not in (1, 5):
        raise ExtensionError(
            f"parameter {call.name}: {_PRE}{signature} must take (mesh) or "
            "(mesh, outer_size, outer_stride, module, mp_policy)"
        )
    inputs, metadata = method(*arguments[: len(signature.parameters)])
    padded = padded_shape(call.shape, call.dim, call.group_size)
    if list(call.shard.shape) != padded and any(list(value.shape) != padded for value in inputs):
        raise ExtensionError(
            f"parameter {call.name} of shape {tuple(call.shape)} is cut unevenly over {call.group_size} ranks: "
            f"{_PRE} must return inputs of the padded shape {tuple(padded)}, not "
            f"{[tuple(value.shape) for value in inputs]}"
        )
    calls = []
    for value in inputs:
        plain = value.view(-1) if value.ndim == 0 else value
        shape = [plain.shape[0] * call.group_size, *plain.shape[1:]]
        calls.append(call._replace(shard=plain, shape=shape, dim=0, dtype=None))
    return calls, metadata


def full_after(shard: Tensor, gathered: Sequence[Tensor], metadata: Any, call: UnshardCall) -> Tensor:
    """The full parameter that the shard makes of the gathered tensors, without padding."""
    full, _ = getattr(shard, _POST)(tuple(gathered), metadata, call.dtype or shard.dtype)
    return full if full.shape == torch.Size(call.shape) else full.narrow(0, 0, call.shape[0])


def extended_calls(slot: ParameterSlot, call: UnshardCall) -> tuple[list[UnshardCall], Any]:
    """:func:`calls_before` with the arguments of a sharded parameter; ``call.shard`` is its shard."""
    with torch.no_grad():  # and not detach(), in which the float8 weight of torchao loses its scale
        shard = call.shard if call.device is None else call.shard.to(call.device)
        if not slot.untraceable and list(shard.shape) != padded_shape(slot.shape, slot.dim, slot.axis.size):
            extension = TracedExtension.of(slot, shard)
            shard = extension.rebuilt(extension.inner(shard))
        return calls_before(call._replace(shard=shard), *_pre_arguments(slot))


class PreArguments(NamedTuple):
    """What ``fsdp_pre_all_gather`` is called with, besides the shape of the whole parameter."""

    mesh: DeviceMesh
    stride: tuple[int, ...]
    module: nn.Module
    policy: MixedPrecisionPolicy


def _pre_arguments(slot: ParameterSlot) -> PreArguments:
    param = slot.param
    assert isinstance(param, DTensor)
    mesh = param.device_mesh
    shard_mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]
    owner, _ = slot.owners[0]
    return PreArguments(shard_mesh, param.stride(), owner, slot.unit.settings.mp_policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedExtension:
    """How compiled code makes a full parameter of the tensors that its shard holds.

    Attributes:
        slot: the parameter; held weakly, since a graph must not keep a model. None in a capture of a plain model.
        kind: class of the shard.
        names: attributes by which the shard holds its tensors.
        context: of ``__tensor_unflatten__``.
        shape, stride: of the padded shard.
        padded: the attributes of tensors that get rows of padding.
        given: without a slot, what the extension is called with.
    """

    slot: ref[ParameterSlot] | None
    kind: type
    names: tuple[str, ...]
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padded: frozenset[str] = frozenset()
    given: PreArguments | None = None

    @staticmethod
    def of(slot: ParameterSlot, local: Tensor) -> TracedExtension:
        """Reads it off this rank's shard, of a parameter that can be traced."""
        return replace(TracedExtension.of_shard(local, slot.shape, slot.axis.size), slot=ref(slot))

    @staticmethod
    def of_shard(
        local: Tensor, shape: Sequence[int], num_ranks: int, given: PreArguments | None = None
    ) -> TracedExtension:
        """Reads it off a shard along dim 0 of a parameter of this shape, without a slot."""
        names, context = local.__tensor_flatten__()
        # Decided by what is equal on every rank, so that all of them trace the same graph.
        padded = frozenset(names if shape[0] % num_ranks else ())
        return TracedExtension(
            slot=None,
            kind=type(local),
            names=tuple(names),
            context=context,
            shape=tuple(padded_shape(shape, 0, num_ranks)),
            stride=tuple(local.stride()),
            padded=padded,
            given=given,
        )

    def calls(self, call: UnshardCall) -> tuple[list[UnshardCall], Any]:
        """:func:`calls_before`; ``call.shard`` has all rows."""
        given = self.given
        if given is None:
            slot = self.slot() if self.slot is not None else None
            assert slot is not None, "a graph is traced while its model is alive"
            given = _pre_arguments(slot)
        with torch.no_grad():
            shard = call.shard if call.device is None else call.shard.to(call.device)
            return calls_before(call._replace(shard=shard), *given)

    def like_inner(self, local: Tensor, device: torch.device | str | None = None) -> list[Tensor]:
        """Empty tensors like :meth:`inner`, on this device or that of ``local``, made in the fake mode that is on."""
        found = []
        for name in self.names:
            value = getattr(local, name)
            shape = [self.shape[0], *value.shape[1:]] if name in self.padded else list(value.shape)
            is_like = shape == list(value.shape)
            size = (shape, value.stride()) if is_like else (shape, torch.empty(shape, device="meta").stride())
            found.append(torch.empty_strided(*size, dtype=value.dtype, device=device or value.device))
        return found

    def inner(self, local: Tensor) -> list[Tensor]:
        """The tensors that a shard holds, with rows of zeros where it lacks some."""
        found = []
        for name in self.names:
            value = getattr(local, name).detach()
            missing = self.shape[0] - value.shape[0] if name in self.padded else 0
            found.append(torch.cat([value, value.new_zeros(missing, *value.shape[1:])]) if missing else value)
        return found

    def rebuilt(self, inner: Sequence[Tensor]) -> Tensor:
        """The shard that holds these tensors."""
        unflatten: Any = self.kind.__tensor_unflatten__  # type: ignore[attr-defined]
        named = dict(zip(self.names, inner, strict=True))
        shard: Tensor = unflatten(named, self.context, torch.Size(self.shape), self.stride)
        for name, value in named.items():
            if getattr(shard, name, None) is None:  # torchao 0.18 loses the scale of a float8 weight here
                setattr(shard, name, value)
        return shard


def refuse_wrapper(full: Tensor, name: str) -> None:
    """Refuses a tensor subclass that holds its data in inner tensors and does not say how to gather them.

    A copy into a plain tensor would give up its class, and may change its values.
    """
    if hasattr(full, "__tensor_flatten__"):
        raise UnsupportedShardingError(
            f"parameter {name} is a {type(full).__name__}, which holds its data in other tensors: define {_PRE} and "
            f"{_POST} in its class, which say how shards are gathered, or list the parameter in ignored_params"
        )


def without_data(full: Tensor) -> Tensor:
    """A parameter with an extension on the meta device, if :func:`why_untraceable` says nothing."""
    names, context = full.__tensor_flatten__()
    inner = {}
    for name in names:
        value = getattr(full, name)
        inner[name] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    unflatten: Any = type(full).__tensor_unflatten__
    found: Tensor = unflatten(inner, context, full.shape, full.stride())
    return found


def why_untraceable(full: Tensor, num_ranks: int) -> str:
    """Why compiled code cannot take shards of a parameter apart into plain tensors, equal in shape on every rank.

    Args:
        full: the parameter before it is cut, so that all ranks give the same answer.
        num_ranks: ranks over which dim 0 is cut.

    Returns:
        A clause; "" if it can.
    """
    kind = type(full).__name__
    if not is_traceable_wrapper_subclass(full):
        return f"{kind} does not define __tensor_flatten__ and __tensor_unflatten__, which say what tensors it holds"
    if not _can_be_rebuilt(full):
        return f"{kind}.__tensor_unflatten__ does not make a {kind} of (inner tensors, context, size, stride)"
    held = {name: getattr(full, name) for name in full.__tensor_flatten__()[0]}
    nested = [name for name, value in held.items() if type(value) not in (Tensor, nn.Parameter)]
    if nested:
        return f"{kind} holds tensor subclasses ({', '.join(nested)}) and not plain tensors"
    others = [name for name, value in held.items() if value.shape[:1] != full.shape[:1]]
    if full.shape[0] % num_ranks and others:
        return (
            f"shape {tuple(full.shape)} is cut unevenly over {num_ranks} ranks, and {', '.join(others)} of {kind} "
            "cannot be padded as they do not have its rows"
        )
    return ""


def cut_extended(full: Tensor, name: str, num_ranks: int) -> list[Tensor]:
    """The pieces of all ranks, cut along dim 0 by the ops of the tensor's own class; those without rows are empty.

    Raises:
        UnsupportedShardingError: the class has no op that cuts it so.
        ExtensionError: (an AssertionError) the pieces are not what was cut, bit by bit.
    """
    what = f"parameter {name}, a {type(full).__name__} of shape {tuple(full.shape)}, over {num_ranks} ranks"
    try:
        pieces = list(torch.chunk(full, num_ranks))
        pieces += [full.narrow(0, 0, 0) for _ in range(num_ranks - len(pieces))]
    except Exception as error:
        raise UnsupportedShardingError(
            f"fully_shard: cannot cut {what}: {error}. Its class must implement aten.split along dim 0 for this size; "
            "else choose a number of ranks that divides it, or list the parameter in ignored_params"
        ) from error
    for rank, piece in enumerate(pieces):
        expected = shard_shape(full.shape, 0, num_ranks, rank)
        if list(piece.shape) != expected:
            raise UnsupportedShardingError(
                f"fully_shard: cannot cut {what}: aten.split of its class gives rank {rank} a piece of shape "
                f"{tuple(piece.shape)}, not {tuple(expected)}. Choose a number of ranks that divides the parameter, or "
                "list it in ignored_params"
            )
    whole, parts = inner_tensors(full), [inner_tensors(piece) for piece in pieces]
    changed = [each for each in whole if not _is_cut(whole[each], [part.get(each) for part in parts])]
    if changed:
        raise ExtensionError(
            f"fully_shard: cutting {what} changes its values: {', '.join(changed)} of the pieces are neither copies "
            "nor pieces of the whole one; aten.split of its class must not quantise again. List the parameter in "
            "ignored_params otherwise"
        )
    return pieces


def copy_extended(piece: Tensor, name: str, device: torch.device) -> Tensor:
    """A copy of a piece with its own memory: of its inner tensors where possible, since ``clone`` may quantise again.

    Raises:
        ExtensionError: (an AssertionError) the copy differs from the piece.
    """
    given = inner_tensors(piece)
    if hasattr(piece, "__tensor_flatten__") and piece.device == device and _can_be_rebuilt(piece):
        names, context = piece.__tensor_flatten__()
        inner = {each: copy_extended(getattr(piece, each).detach(), name, device) for each in names}
        unflatten: Any = type(piece).__tensor_unflatten__
        copied: Tensor = unflatten(inner, context, piece.shape, piece.stride())
    else:
        copied = piece.clone() if piece.device == device else piece.to(device)
    found = inner_tensors(copied)
    changed = [
        each for each, value in given.items() if each not in found or not _same_bits(value, found[each])
    ]
    if changed or type(copied) is not type(piece):
        raise ExtensionError(
            f"fully_shard: a copy of parameter {name} on {device} is a {type(copied).__name__} with other values than "
            f"the {type(piece).__name__} ({', '.join(changed) or 'its class'}); give the class __tensor_flatten__ and "
            "__tensor_unflatten__, and move the model to the device before it is sharded"
        )
    return copied


def _can_be_rebuilt(tensor: Tensor) -> bool:
    """Whether its class makes an equal tensor of what it says that the tensor holds."""
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name).detach() for name in names}
    unflatten: Any = type(tensor).__tensor_unflatten__
    try:
        return type(unflatten(inner, context, tensor.shape, tensor.stride())) is type(tensor)
    except TypeError:  # another signature
        return False


def is_quantised(full: Tensor) -> bool:
    """Whether a tensor subclass holds codes: inner tensors that are no floating point, or floats of 8 bits."""
    return any(
        not value.is_floating_point() or value.element_size() == 1 for value in inner_tensors(full).values()
    )


def check_gather(
    full: Tensor, pieces: Sequence[Tensor], name: str, rank: int, pre_arguments: tuple[Any, ...]
) -> None:
    """Refuses an extension that gathers another quantised tensor than was cut. It gathers nothing: all pieces are here.

    Args:
        full: the quantised tensor.
        pieces: those of all ranks.
        name: of the parameter.
        rank: of this rank on the shard axis.
        pre_arguments: what ``fsdp_pre_all_gather`` is called with; it takes the first one, or all.

    Raises:
        ExtensionError: (an AssertionError) the result has the class of ``full`` and other bits, or ranks would gather
            tensors of different shapes.
    """
    inputs, metadata = [], None
    for index, piece in enumerate(pieces):
        method = getattr(piece, _PRE)
        given, described = method(*pre_arguments[: len(inspect.signature(method).parameters)])
        inputs.append([value.view(-1) if value.ndim == 0 else value for value in given])
        metadata = described if index == rank else metadata
    shapes = [[tuple(value.shape) for value in values] for values in inputs]
    if any(each != shapes[0] for each in shapes):
        raise ExtensionError(
            f"fully_shard: parameter {name}, a {type(full).__name__} of shape {tuple(full.shape)}, is cut "
            f"unevenly over {len(pieces)} ranks, and {_PRE} returns tensors of other shapes on each: "
            f"{shapes[0]} and {shapes[-1]}. Choose a number of ranks that divides the parameter, "
            "or list it in ignored_params"
        )
    gathered = tuple(torch.cat(values) for values in zip(*inputs, strict=True))
    result, _ = getattr(pieces[rank], _POST)(gathered, metadata, full.dtype)
    if type(result) is not type(full):
        return  # another kind of tensor: nothing to compare
    whole, found = inner_tensors(full), inner_tensors(result)
    changed = [
        each for each, value in whole.items() if each not in found or not _same_bits(value, found[each])
    ]
    if changed or result.shape != full.shape:
        raise ExtensionError(
            f"fully_shard: gathering parameter {name}, a {type(full).__name__} of shape {tuple(full.shape)}, "
            f"over {len(pieces)} ranks gives other values than were cut ({', '.join(changed) or tuple(result.shape)}): "
            f"{_PRE} must return all tensors that differ between ranks. List the parameter in ignored_params otherwise"
        )


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors in which a tensor subclass holds its data, by their attributes; none for a plain tensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
    else:
        names = [name for name, value in vars(tensor).items() if isinstance(value, Tensor)]
    found: dict[str, Tensor] = {}
    for name in names:
        value = getattr(tensor, name)
        nested = inner_tensors(value) if type(value) is not Tensor else {}
        found.update({f"{name}.{each}": inner for each, inner in nested.items()} or {name: value.detach()})
    return found


def _is_cut(whole: Tensor, parts: Sequence[Tensor | None]) -> bool:
    """Whether an inner tensor is the same in all pieces, or the pieces' are cut out of it along a dim."""
    given = [part for part in parts if part is not None]
    if len(given) < len(parts):
        return False
    if all(_same_bits(whole, part) for part in given):
        return True
    for dim in range(whole.ndim):
        others = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in given if part.ndim == whole.ndim]
        if len(others) == len(given) and set(others) == {(*whole.shape[:dim], *whole.shape[dim + 1 :])}:
            joined = torch.cat(given, dim)
            if _same_bits(whole, joined):
                return True
    return False


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_meta or other.is_meta:
        return True
    one, other = (value.detach().cpu().contiguous().view(-1) for value in (one, other))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
