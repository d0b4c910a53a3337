"""The placements that one op wants and gives: DTensor's rule, and when pending sums are carried on.

The rule of DTensor is asked for the placements of the inputs at hand. It names those with the least communication.

Pending terms (``Partial``) stay pending only through ops that change no number and through sums of terms. In front of
any other op they are reduced. So the gradients of several products are added before one reduction, and nothing is
reduced twice because two values depend on it. The gradient of a parameter is cast to a smaller dtype before the terms
are reduced, as DTensor does it: the ranks send that dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from .._compat import tree_leaves, tree_map
from .._compat_dtensor import (
    KNOWS_INDEX_PUT,
    OpPlacements,
    is_plain_partial,
    masked_dim,
    mesh_without_groups,
    placements_of_op,
)
from ..ir import REDUCE_GRAD, aten, is_view, shard_shape, size_hint, tensors_of
from .sent_bytes import Progress, exchanges_cuts, sent_bytes
from .values import PlacedValue

REPLICATED = Replicate()

#: Ops through which pending terms stay pending, if all their tensors are terms of one reduction.
_CARRY_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_SUMS = (Partial("sum"), Partial("avg"))
_CARRY_ANY = (aten.clone.default, aten.alias.default)

#: Casts to another dtype.
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)

#: Attention on a CPU. DTensor has rules for the kernels of GPUs alone: a batch or some heads are computed alone.
_ATTENTION_ON_CPU = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)

#: What DTensor says of terms that are bools, and the reduction that gives 0 or 1 on every backend.
_OF_BOOLS: dict[Any, Placement] = {Partial("sum"): Partial("max"), Partial("product"): Partial("min")}

#: What old rules of DTensor leave to code that it runs beside the op (checked: 2.13 has whole rules): a convolution of
#: pieces of pixels needs those of its neighbours, and an index into a piece is none into the whole.
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_FIND_INDICES = (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)

#: Ops that read of their input only its type.
_READ_TYPE_ALONE = (aten.rand_like.default, aten.randn_like.default, aten.empty_like.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """Indices into a cut dim: a rank keeps those of its own rows, and what it selects for the others is zero.

    Attributes:
        position: of the indices among the arguments.
        start, size: the rows of this rank.
    """

    position: int
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one call runs on local tensors.

    Attributes:
        target: the op to call.
        args: its arguments; a tensor is replaced by the placement that the call wants it in, a size may be local.
        outputs: the placement of the result, or a tuple of them.
        masked: the call selects rows from a cut dim.
        reason: why the inputs are replicated; "" if a rule says how the call runs.
    """

    target: Any
    args: tuple[Any, ...]
    outputs: Any
    masked: Masked | None = None
    reason: str = ""


#: Answers of DTensor's rules by number of ranks, rank, op and arguments, inside :func:`remembered_rules`; else None.
_REMEMBERED: ContextVar[dict[Any, OpPlacements] | None] = ContextVar("remembered rules", default=None)


@contextlib.contextmanager
def remembered_rules() -> Iterator[None]:
    """Inside, a rule is asked once for equal arguments, whichever graph they are in. Rules take milliseconds."""
    token = _REMEMBERED.set({})
    try:
        yield
    finally:
        _REMEMBERED.reset(token)


class OpRules:
    """Answers for the ops of one graph; ``rank`` is this rank's place among the ``num_ranks`` of the axis."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        self.num_ranks, self.rank = num_ranks, rank
        self._mesh = mesh_without_groups(num_ranks, rank)
        remembered = _REMEMBERED.get()
        self._known = {} if remembered is None else remembered

    def verdict(
        self, node: fx.Node, values: Mapping[fx.Node, PlacedValue], progress: Progress | None = None
    ) -> Verdict:
        """How ``node`` runs, for the placements that its inputs have.

        Args:
            node: a call of an op; at least one input is not replicated.
            values: of the inputs that are tensors.
            progress: of the graph, for what further calls may share.
        """
        if not isinstance(node.target, torch._ops.OpOverload):
            return self.gathered(node, values, "is no op of one kernel")
        if draws_numbers(node):
            return self.gathered(node, values, "draws random numbers")
        if node.target._schema.is_mutable:
            return self.gathered(node, values, "writes to its input")
        if node.target is aten.index_put.default and not KNOWS_INDEX_PUT:
            return self.gathered(node, values, "has no right rule on this torch")
        if any(isinstance(value.placement, (tuple, list)) for value in values.values()):
            return self.gathered(node, values, "takes the results of another op as one value")
        if any(isinstance(each, fx.Node) and each in values for each in node.kwargs.values()):
            return self.gathered(node, values, "has tensors among its keyword arguments")
        placements = {source: value.placement for source, value in values.items()}
        if (carried := self._carried(node, placements)) is not None:
            return carried
        if (attention := _attention_on_cpu(node, placements)) is not None:
            reason = self._leaves_none(node, attention, values) or self._parts_groups(node, attention, values)
            return self.gathered(node, values, reason) if reason else self._answer(node, attention)
        while not all(isinstance(each, Replicate) for each in placements.values()):
            try:
                found = self._ask(node, values, placements)
            except Exception as error:
                return self.gathered(node, values, _reason(error))
            if reason := self._fault(node, found, values):
                return self.gathered(node, values, reason)
            pending = _kept_pending(node, found, placements)
            if not pending:
                cheapest = self._cheapest(node, values, placements, found, progress or Progress())
                return self._answer(node, cheapest)
            placements.update(dict.fromkeys(pending, REPLICATED))
        return self.gathered(node, values, "")

    def _carried(self, node: fx.Node, placements: Mapping[fx.Node, Placement]) -> Verdict | None:
        """The verdict where all inputs are terms of one reduction, and the result is too."""
        kinds = set(placements.values())
        (kind, *others) = kinds
        if others or not is_plain_partial(kind):
            return None
        is_sum = node.target in _CARRY_SUMS and kind in _SUMS
        num_tensors = sum(isinstance(each, fx.Node) and each in placements for each in node.args)
        is_same = node.target in _CARRY_ANY or (is_view(node) and node.target is not aten.view.dtype)
        if (is_sum and num_tensors == 2) or is_same or (kind in _SUMS and _shrinks_gradient(node)):
            return Verdict(target=node.target, args=_with(node.args, placements), outputs=kind)
        return None

    def _cheapest(
        self,
        node: fx.Node,
        values: Mapping[fx.Node, PlacedValue],
        placements: Mapping[fx.Node, Placement],
        found: OpPlacements,
        progress: Progress,
    ) -> OpPlacements:
        """An answer with an input gathered, where the one at hand exchanges cuts and sends more in the end."""
        if not exchanges_cuts(node, values, found):
            return found
        answers = [found]
        for source, placement in placements.items():
            if isinstance(placement, Shard):
                gathered = {**placements, source: REPLICATED}
                with contextlib.suppress(Exception):  # a rule that fails gives no answer
                    other = self._ask(node, values, gathered)
                    if not (self._fault(node, other, values) or _kept_pending(node, other, gathered)):
                        answers.append(other)
        return min(answers, key=lambda each: sent_bytes(node, values, each, self.num_ranks, progress))

    def _ask(
        self, node: fx.Node, values: Mapping[fx.Node, PlacedValue], placements: Mapping[fx.Node, Placement]
    ) -> OpPlacements:
        def known(value: Any) -> Any:
            if isinstance(value, fx.Node):
                if value in values:
                    return values[value].as_placed(placements[value])
                return _hint(value.meta["val"])
            return value

        args = tree_map(known, tuple(_plain(node.args)))
        key = (
            self.num_ranks,
            self.rank,
            node.target,
            repr((args, node.kwargs)),
        )  # the blocks of a model are alike
        if key not in self._known:
            self._known[key] = placements_of_op(node.target, args, dict(node.kwargs), self._mesh)
        found = self._known[key]
        if found.op is not node.target:
            return found
        return replace(found, args=_restored(found.args, args, tuple(_plain(node.args))))

    def _fault(self, node: fx.Node, found: OpPlacements, values: Mapping[fx.Node, PlacedValue]) -> str:
        """Why an answer cannot be used; "" if it can."""
        return (
            _unknown_placement(found)
            or _is_half_a_rule(node, found)
            or self._lacks_rows(found)
            or self._leaves_none(node, found, values)
            or self._parts_groups(node, found, values)
        )

    def _lacks_rows(self, found: OpPlacements) -> str:
        """Why indices cannot select from the rows of each rank."""
        if (mask := _mask_of(found)) is not None:
            shape, dim = mask[1]
            if shard_shape(shape, dim, self.num_ranks, self.num_ranks - 1)[dim] == 0:
                return f"selects from {shape[dim]} rows, fewer than the last rank needs one of"
        return ""

    def _leaves_none(self, node: fx.Node, found: OpPlacements, values: Mapping[fx.Node, PlacedValue]) -> str:
        """Why ranks without rows cannot run the call as the others do; all ranks decide alike."""
        given = [values[each].whole for each in tree_leaves(_plain(node.args)) if each in values]
        wanted = [each for each in tree_leaves(found.args) if isinstance(each, Placement)]
        results, outputs = tensors_of(node.meta["val"]), tree_leaves(found.outputs)
        placed = [*zip(given, wanted, strict=False), *zip(results, outputs, strict=False)]
        last = self.num_ranks - 1
        for whole, placement in placed:
            size = whole.shape[placement.dim] if isinstance(placement, Shard) else 0
            if isinstance(size, int) and size and shard_shape([size], 0, self.num_ranks, last)[0] == 0:
                return f"would leave the last of {self.num_ranks} ranks none of {size} rows"
        return ""

    def _parts_groups(self, node: fx.Node, found: OpPlacements, values: Mapping[fx.Node, PlacedValue]) -> str:
        """Why heads cannot be cut: several queries share a key and value, and would not lie on one rank with it.

        The kernels take the head of the keys from the place of the query among those of the rank.
        """
        if not str(node.target).startswith("aten._scaled_dot_product"):
            return ""
        places = [each.name for each in node.target._schema.arguments]
        places = [places.index(name) for name in ("query", "key")]
        queries, keys = (size_hint(values[node.args[place]].whole.shape[1]) for place in places)
        is_cut = any(found.args[place] == Shard(1) for place in places)
        if not is_cut or queries == keys or queries % self.num_ranks == keys % self.num_ranks == 0:
            return ""
        return (
            f"has {keys} heads of keys for {queries} of queries, which {self.num_ranks} ranks do not divide"
        )

    def _answer(self, node: fx.Node, found: OpPlacements) -> Verdict:
        mask = _mask_of(found)
        if mask is None:
            value, outputs = node.meta["val"], found.outputs
            if isinstance(value, torch.Tensor) and value.dtype is torch.bool:
                outputs = _OF_BOOLS.get(outputs, outputs)  # a sum of bytes is no bool
            return Verdict(target=found.op, args=found.args, outputs=outputs)
        position, (shape, dim) = mask
        rows = -(-shape[dim] // self.num_ranks)
        size = shard_shape(shape, dim, self.num_ranks, self.rank)[dim]
        args = list(found.args)
        args[position] = REPLICATED
        masked = Masked(position=position, start=self.rank * rows, size=size)
        return Verdict(target=found.op, args=tuple(args), outputs=Partial(), masked=masked)

    def gathered(self, node: fx.Node, values: Mapping[fx.Node, PlacedValue], reason: str) -> Verdict:
        """The verdict that gathers all inputs.

        Args:
            node, values: as in :meth:`verdict`.
            reason: why, for the report; "" if the rule wants it.
        """
        placements = dict.fromkeys(values, REPLICATED)
        return Verdict(
            target=node.target, args=_with(node.args, placements), outputs=REPLICATED, reason=reason
        )


def _unknown_placement(found: OpPlacements) -> str:
    """Why no reshard can make what an answer wants, or read what it gives."""
    for each in (*tree_leaves(found.args), *tree_leaves(found.outputs)):
        if not isinstance(each, Placement) or isinstance(each, Replicate) or type(each) is Shard:
            continue
        if not isinstance(each, Partial):
            return f"would give {each!r}, a cut in several places"
        if not is_plain_partial(each) and masked_dim(each) is None:
            return f"would give {each!r}, terms that are not summed as they are"
    return ""


def _is_half_a_rule(node: fx.Node, found: OpPlacements) -> str:
    """Why the op alone does not compute what an answer says."""
    if node.target in _FIND_INDICES and any(isinstance(each, Partial) for each in tree_leaves(found.outputs)):
        return "finds indices into a piece"
    if node.target in _CONVOLUTIONS:
        given = 1 if node.target is aten.convolution.default else 2  # tensors that have the batch
        placements = [each for each in found.args if isinstance(each, Placement)]
        batch, others = placements[:given], placements[given:]
        if set(batch) not in ({REPLICATED}, {Shard(0)}) or set(others) != {REPLICATED}:
            return "has no sharding rule but for a batch"
    return ""


def _attention_on_cpu(node: fx.Node, placements: Mapping[fx.Node, Placement]) -> OpPlacements | None:
    """The answer of DTensor's rule for attention on GPUs, where batch or heads are cut."""
    cut = next((each for each in placements.values() if each in (Shard(0), Shard(1))), None)
    if node.target not in _ATTENTION_ON_CPU or cut is None:
        return None
    return OpPlacements(op=node.target, args=_with(node.args, dict.fromkeys(placements, cut)), outputs=cut)


def _shrinks_gradient(node: fx.Node) -> bool:
    """Whether a call casts what nothing else reads to a smaller dtype, for a reduction or a result alone."""
    if node.target not in CASTS or len(node.args[0].users) > 1:
        return False
    before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype
    if not (before.is_floating_point and after.is_floating_point and after.itemsize < before.itemsize):
        return False
    readers = list(node.users)
    for reader in readers:  # grows on the way
        if is_view(reader) and reader.target is not aten.view.dtype:
            readers += reader.users
        elif reader.op != "output" and reader.target is not REDUCE_GRAD:
            return False
    return True


def reads_type_alone(node: fx.Node) -> bool:
    """Whether an op reads of its tensor only shape, dtype and device."""
    return node.target in _READ_TYPE_ALONE


def _with(args: Any, placements: Mapping[fx.Node, Placement]) -> tuple[Any, ...]:
    """The arguments with placements in place of tensors."""
    return tuple(
        fx.node.map_aggregate(
            args, lambda each: placements.get(each, each) if isinstance(each, fx.Node) else each
        )
    )


def draws_numbers(node: fx.Node) -> bool:
    """Whether the result depends on the generator: attention without dropout does not, its backward may."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    names = [each.name for each in node.target._schema.arguments]
    if "dropout_p" not in names:
        return torch.Tag.nondeterministic_seeded in node.target.tags
    position = names.index("dropout_p")
    given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given)


def _kept_pending(
    node: fx.Node, found: OpPlacements, placements: Mapping[fx.Node, Placement]
) -> list[fx.Node]:
    """The inputs whose terms the rule would carry through the op."""
    if found.op is not node.target:
        return []
    pairs = zip(tree_leaves(tuple(_plain(node.args))), tree_leaves(found.args), strict=True)
    return [
        source
        for source, wanted in pairs
        if isinstance(source, fx.Node)
        and is_plain_partial(placements.get(source, REPLICATED))
        and isinstance(wanted, Partial)
    ]


def _mask_of(found: OpPlacements) -> tuple[int, tuple[Sequence[int], int]] | None:
    for position, each in enumerate(found.args):
        mask = masked_dim(each) if isinstance(each, Placement) else None
        if mask is not None:
            return position, mask
    return None


def _plain(value: Any) -> Any:
    """Immutable lists and dicts of FX as plain ones, which pytree knows."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else [*map(_plain, value)]
    return value


def _hint(value: Any) -> Any:
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def _restored(found: Any, asked: Any, given: Any) -> Any:
    """The arguments that DTensor gave back, with the graph's own where nothing has changed (symbolic sizes)."""
    if isinstance(found, (list, tuple)) and isinstance(given, (list, tuple)):
        return type(given)(_restored(*each) for each in zip(found, asked, given, strict=True))
    if isinstance(found, Placement):
        return found
    return given if found == asked else found


def _reason(error: Exception) -> str:
    if isinstance(error, NotImplementedError):
        return "has no sharding rule"
    first = str(error).strip().splitlines() or [type(error).__name__]
    return f"its sharding rule fails: {first[0][:120]}"
