"""``graphshard.formulas``: what a training step costs as expressions in its dynamic dims and the mesh.

The step is captured at a few sizes of its dynamic dims. Every number of bytes is then a polynomial in
these, found exactly and checked at further, random sizes by further captures: one byte off is an error.
Bytes in the mesh axes follow from the shapes of parameters, and are checked the same way.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch import fx, nn

from .capture import CapturedStep, capture_step
from .collectives import is_collective
from .cost import HardwareCard
from .cost.compute import kernel_seconds, memory_seconds
from .cost.flops import executed_flops, kernel_class
from .cost.kernels import Kernel, kernels_of
from .cost.links import collective_bytes, collective_kind
from .errors import FormulaError, OptionError
from .inspection import Inspection
from .inspection_settings import Settings, plain_inputs, read_settings, refuse_sharded
from .ops import REDUCE_GRAD, UNSHARD
from .params import ReduceGradCall, UnshardCall
from .persistent_bytes import always_bytes, persistent_bytes
from .report.data import CATEGORIES
from .report.formulas import Formulas
from .report.link_formulas import Traffic, halves_seconds, stops_hiding
from .report.polynomials import Basis, expression, fit, undominated, value_at
from .resharding import reshard_step
from .rewrite import no_garbage_collection, remembered_results
from .stages import Stages

#: Degrees in each dim that are tried, in this order: bytes are rarely more than quadratic in a dim.
_DEGREES = (1, 2)

#: So many random points check the expressions.
_NUM_CHECKS = 2

#: The largest size of a dim that a search looks at.
_LARGEST = 1 << 40

#: So many meshes are tried one by one before memory is taken to fall with the ranks.
_NUM_TRIED = 12

#: The widest mesh axis that a search looks at.
_MOST_RANKS = 1 << 16

_NOTES = (
    "Bytes are exact while the graph stays as at the reference; the points checked say that it does there. Dims "
    "of size 1 are special to torch: expressions start at 2. The peak is that of the reference's order of "
    "collectives; at other sizes the schedule may choose another, so sizes that are solved were captured, too.",
    "Seconds keep each kernel in its regime and at its efficiency at the reference, and copies into and out of "
    "buckets as they are there; collectives of a kind have their average size and no low-latency protocol. A half "
    "takes the longer of its compute and its communication: what cannot overlap (the first gather, the last "
    "reduction) is in the simulation only.",
)


def formulas(
    model: nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Mapping[str, int],
    mesh: Mapping[str, int] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    progress: Callable[[str], None] | None = None,
    seed: int = 0,
    **options: Any,
) -> Formulas:
    """Expressions of memory, communication and time, and what solving them says.

    Args:
        model, args, kwargs, loss: as in :func:`graphshard.inspect`; the sizes of the inputs are the reference.
        dynamic: names of dims of the inputs: {"batch": 0, "sequence": 1}. Every input tensor whose size
            there is that of the first one is resized.
        mesh: the reference mesh; default 64 shards.
        progress: is told the name of each stage as it begins.
        seed: of the random points.
        options: others of :func:`graphshard.inspect`: hardware, tables, units, mp_policy,
            reshard_after_forward, optimizer, micro_batches, checkpoint. ``memory_budget`` is the limit
            in what is solved; ``plan`` is "unit".

    Raises:
        OptionError: ``dynamic`` names no dims of the inputs, or names that the mesh uses; unknown options.
        FormulaError: the graph changes with the sizes, or a capture disagrees with the expressions.
        GraphShardError: as :func:`graphshard.inspect`.
    """
    known: dict[str, Any] = dict.fromkeys(("tables", "mp_policy", "reshard_after_forward", "memory_budget"))
    known |= {"hardware": "h100-sxm", "units": (), "optimizer": "adamw", "micro_batches": 1, "checkpoint": ()}
    if unknown := sorted(set(options) - set(known)):
        raise OptionError(f"formulas has no option {', '.join(unknown)}; known: {', '.join(known)}")
    settings = read_settings(rules=None, mesh=mesh or {"shard": 64}, plan="unit", **{**known, **options})
    _, module, args, kwargs, sharded = plain_inputs(model, args, kwargs)
    refuse_sharded(sharded)
    sizes = _reference_sizes((*args, *kwargs.values()), dynamic)
    sampler = _Sampler(
        module=module, args=args, kwargs=kwargs, dynamic=dynamic, sizes=sizes, loss=loss,
        settings=settings, progress=progress or (lambda stage: None), known={},
    )  # fmt: skip
    return _Fitted.through(sampler, random.Random(seed)).formulas()


def _reference_sizes(inputs: Sequence[Any], dynamic: Mapping[str, int]) -> dict[str, int]:
    if not dynamic or {"shard", "replicate"} & set(dynamic):
        raise OptionError(
            'dynamic: name dims of the inputs, {"batch": 0}, and not "shard" or "replicate", which are mesh axes'
        )
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    found = {}
    for name, dim in dynamic.items():
        sizes = [value.shape[dim] for value in tensors if type(dim) is int and 0 <= dim < value.dim()]
        if not sizes:
            shapes = ", ".join(str(list(value.shape)) for value in tensors) or "no tensors"
            raise OptionError(f"dynamic: {name}={dim!r} is no dim of the inputs ({shapes})")
        found[name] = sizes[0]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """One capture, scheduled on one mesh.

    Attributes:
        structure: names of the nodes, in order, of both halves before any pass.
        orders: names of the nodes of each half as its collectives were placed.
        persistent: see :func:`graphshard.persistent_bytes.persistent_bytes`.
        activations, gathered: bytes at the end of the forward.
        live: bytes at each node of the forward, then of the backward, then in the optimizer's step.
        kernels: of each half, those around its collectives apart.
        copy_seconds: of each half, of the kernels around its collectives.
        traffic: bytes, and number, of the collectives of one micro-batch, by half and kind.
    """

    structure: tuple[str, ...]
    persistent: Mapping[str, int]
    activations: int
    gathered: int
    live: tuple[int, ...]
    kernels: tuple[tuple[Kernel, ...], ...]
    copy_seconds: tuple[float, ...]
    orders: Mapping[str, tuple[str, ...]]
    traffic: Mapping[tuple[str, str], tuple[int, int]]

    def whole_numbers(self, groups: Sequence[Sequence[_Group]]) -> list[int]:
        """Everything that is fitted, in one order."""
        works = [_works(kernels, of_half) for kernels, of_half in zip(self.kernels, groups, strict=True)]
        values = [self.activations, self.persistent["inputs"], self.gathered]
        return [*values, *(work for half in works for work in half.values()), *self.live]


#: What bounds a kernel: "memory", or its class and dtype.
_Group = str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampler:
    """Captures of one model at any sizes of its dynamic dims."""

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    dynamic: Mapping[str, int]
    sizes: Mapping[str, int]
    loss: Callable[[Any], torch.Tensor] | None
    settings: Settings
    progress: Callable[[str], None]
    known: dict[tuple[int, ...], CapturedStep]

    def captured(self, point: tuple[int, ...]) -> CapturedStep:
        if point not in self.known:
            sizes = dict(zip(self.dynamic, point, strict=True))
            self.progress("capture " + ", ".join(f"{name}={size}" for name, size in sizes.items()))
            args, kwargs = self._resized(sizes)
            self.known[point] = capture_step(
                self.module, args, kwargs, rules=self.settings.rules, loss=self.loss,
                checkpoint=self.settings.checkpoint, needs_loss=True,
                device_type=self.settings.card.device_type,
            )  # fmt: skip
        return self.known[point]

    def sample(
        self,
        point: tuple[int, ...],
        mesh: Mapping[str, int] | None = None,
        orders: Mapping[str, Sequence[str]] | None = None,
    ) -> _Sample:
        """The step at a point on a mesh, default the reference's; in given orders, or as it is scheduled."""
        mesh = mesh or self.settings.rules.mesh
        rules = replace(self.settings.rules, mesh=mesh)
        settings = replace(self.settings, rules=rules, budget_bytes=None)
        step = reshard_step(self.captured(point), mesh)
        inspection = Inspection(
            settings=settings, captured=step, stages=Stages(None), is_brief=True, orders=orders or {}
        )
        captured = (self.captured(point).forward, self.captured(point).backward)
        kernels = tuple(tuple(kernels_of(list(gm.graph.nodes))) for gm in captured)
        with no_garbage_collection(), remembered_results():
            persistent = persistent_bytes(self.module, step, settings.optimizer)
            halves = inspection.scheduled_halves(always_bytes(persistent, settings.micro_batches))
        live = [sum(row) + sum(outside) for _, memory, outside in halves for row in memory.live]
        in_optimizer = sum(persistent[name] for name in ("parameters", "optimizer", "gradients", "inputs"))
        at_end = dict(zip(CATEGORIES, halves[0][1].live[-1], strict=True))
        return _Sample(
            structure=tuple(node.name for gm in captured for node in gm.graph.nodes),
            orders={half.name: tuple(node.name for node in half.gm.graph.nodes) for half, _, _ in halves},
            persistent=persistent,
            activations=at_end["activations"],
            gathered=at_end["gathered"],
            live=(*live, in_optimizer),
            kernels=kernels,
            copy_seconds=tuple(
                _seconds(kernels_of(list(half.gm.graph.nodes)), settings.card) - _seconds(own, settings.card)
                for (half, _, _), own in zip(halves, kernels, strict=True)
            ),
            traffic={(half.name, kind): found for half, _, _ in halves for kind, found in _traffic(half.gm)},
        )

    def _resized(self, sizes: Mapping[str, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def fitted(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            shape = list(value.shape)
            for name, dim in self.dynamic.items():
                if dim < len(shape) and shape[dim] == self.sizes[name]:
                    shape[dim] = sizes[name]
            return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)

        return tuple(map(fitted, self.args)), {name: fitted(value) for name, value in self.kwargs.items()}


def _seconds(kernels: Sequence[Kernel], card: HardwareCard) -> float:
    return sum(kernel_seconds(kernel, card) for kernel in kernels)


def _traffic(gm: fx.GraphModule) -> Iterator[tuple[str, tuple[int, int]]]:
    found: dict[str, tuple[int, int]] = {}
    for node in filter(is_collective, gm.graph.nodes):
        num_bytes, count = found.get(collective_kind(node), (0, 0))
        found[collective_kind(node)] = (num_bytes + collective_bytes(node), count + 1)
    yield from found.items()


def _groups(kernels: Sequence[Kernel], card: HardwareCard) -> list[_Group]:
    """What bounds each kernel."""
    found = []
    for kernel in kernels:
        seconds = kernel_seconds(kernel, card) - card.kernel_overhead_seconds
        in_memory = memory_seconds(kernel.moved_bytes, card, scattered=kernel.is_scattered)
        kind = None if kernel.is_fused else kernel_class(kernel.nodes[0])
        is_arithmetic = seconds > in_memory * (1 + 1e-9)
        found.append((kind or "vector") if is_arithmetic else "memory")
    return found


def _works(kernels: Sequence[Kernel], groups: Sequence[_Group]) -> dict[_Group, int]:
    """Bytes or operations of each group."""
    found = dict.fromkeys(sorted(set(groups)), 0)
    for kernel, group in zip(kernels, groups, strict=True):
        if group == "memory":
            found[group] += kernel.moved_bytes
        elif group == "vector":
            found[group] += int(kernel.vector_flops)
        else:
            found[group] += int(executed_flops(kernel.nodes[0]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitted:
    """Polynomials through samples, and the points that confirmed them."""

    sampler: _Sampler
    reference: tuple[int, ...]
    sample: _Sample
    groups: tuple[tuple[_Group, ...], ...]
    basis: Basis
    coefficients: list[tuple[Fraction, ...]]
    checked: tuple[dict[str, int], ...]

    @staticmethod
    def through(sampler: _Sampler, chance: random.Random) -> _Fitted:
        """Raises the degrees until random points agree."""
        names = list(sampler.dynamic)
        reference = tuple(sampler.sizes.values())
        first = sampler.sample(reference)
        groups = tuple(tuple(_groups(kernels, sampler.settings.card)) for kernels in first.kernels)
        grids = [_grid(size) for size in reference]
        choices = [[size * factor for factor in range(4, 9)] for size in reference]
        checks = [tuple(map(chance.choice, choices)) for _ in range(_NUM_CHECKS)]

        def numbers(point: tuple[int, ...]) -> list[int]:
            structure = tuple(
                node.name
                for gm in (sampler.captured(point).forward, sampler.captured(point).backward)
                for node in gm.graph.nodes
            )
            if structure != first.structure:
                raise FormulaError(
                    f"the graph at {_text(names, point)} is not the one at {_text(names, reference)}: there are no "
                    "expressions for both; start from sizes of at least 2, or inspect each of them"
                )
            return sampler.sample(point, orders=first.orders).whole_numbers(groups)

        wrong = ""
        for degrees in sorted(itertools.product(_DEGREES, repeat=len(names)), key=sum):
            basis = Basis.of_degrees(degrees, grids)
            coefficients = fit(basis, {point: numbers(point) for point in basis.points})
            wrong = ""
            for point in checks:
                expected = [value_at(basis, one, point) for one in coefficients]
                bad = [index for index, (want, have) in enumerate(zip(expected, numbers(point), strict=True))
                       if want != have]  # fmt: skip
                if bad:
                    wrong = f"{len(bad)} of {len(expected)} numbers at {_text(names, point)}"
                    break
            if not wrong:
                return _Fitted(
                    sampler=sampler, reference=reference, sample=first, groups=groups, basis=basis,
                    coefficients=coefficients, checked=tuple(dict(zip(names, point, strict=True)) for point in checks),
                )  # fmt: skip
        raise FormulaError(
            f"no polynomial of degree {_DEGREES[-1]} in {', '.join(names)} gives what captures need: {wrong} differ; "
            "inspect the sizes you need instead"
        )

    def formulas(self) -> Formulas:
        settings, sampler = self.sampler.settings, self.sampler
        card, mesh = settings.card, settings.rules.mesh
        names = list(sampler.dynamic)
        symbols = {name: sympy.Symbol(name, integer=True, positive=True)
                   for name in (*names, *mesh)}  # fmt: skip
        dims = [symbols[name] for name in names]
        num_shards, num_replicas = symbols["shard"], symbols.get("replicate")
        found = iter(self.coefficients)
        fitted = {
            name: expression(self.basis, next(found), dims) for name in ("activations", "inputs", "gathered")
        }
        compute = [
            self._compute(kernels, groups, found, dims, card) + sympy.Float(copies)
            for kernels, groups, copies in zip(
                self.sample.kernels, self.groups, self.sample.copy_seconds, strict=True
            )
        ]
        moments = undominated(list(found))
        peak = sympy.Max(*(expression(self.basis, one, dims) for one in moments), evaluate=False)
        captured = sampler.captured(self.reference)
        shards = _shard_bytes(sampler.module, captured, num_shards)
        memory = {
            "parameters": shards["parameters"],
            "gradients": shards["gradients"],
            "optimizer": settings.optimizer.num_states * shards["trained"],
            **fitted,
            "largest unit": sympy.Integer(_largest_unit(captured)),
        }
        traffic = _traffic_expressions(captured, self.sample, num_shards, num_replicas)
        optimizer = settings.optimizer
        rate = card.memory_bandwidth * card.efficiency["memory"].at(
            (optimizer.num_reads + optimizer.num_writes) * self.sample.persistent["trained"]
        )
        moved = (optimizer.num_reads + optimizer.num_writes) * shards["trained"] / rate
        seconds = halves_seconds(
            dict(zip(("forward", "backward"), compute, strict=True)), traffic, symbols, card,
            optimizer=card.kernel_overhead_seconds + moved if optimizer.num_reads else sympy.Integer(0),
            micro_batches=settings.micro_batches,
        )  # fmt: skip
        limit = int(card.memory_bytes) if settings.budget_bytes is None else settings.budget_bytes
        sizes = dict(zip(names, self.reference, strict=True))
        reference = {**sizes, **mesh}
        result = Formulas(
            symbols=symbols,
            reference=reference,
            memory=memory,
            peak=peak,
            traffic={kind: settings.micro_batches * one for kind, one in _by_kind(traffic).items()},
            seconds=seconds,
            checked=self.checked,
            solutions={},
            notes=_NOTES,
        )
        self._check_meshes(result)
        solutions: dict[str, int | None] = {}
        for index, name in enumerate(names):
            solutions[f"largest {name} that fits"] = self._largest(index, moments, limit)
        solutions["smallest shard that fits"] = self._smallest_mesh(
            memory["parameters"] + memory["gradients"] + memory["optimizer"], limit
        )
        solutions["shard at which communication stops hiding"] = stops_hiding(result, card, _MOST_RANKS)
        return replace(result, solutions=solutions)

    def _compute(
        self,
        kernels: Sequence[Kernel],
        groups: Sequence[_Group],
        found: Iterator[tuple[Fraction, ...]],
        dims: Sequence[sympy.Symbol],
        card: HardwareCard,
    ) -> sympy.Expr:
        """Seconds of a half's kernels: work over the rate that each group has at the reference."""
        works = _works(kernels, groups)
        spent = dict.fromkeys(works, 0.0)
        for kernel, group in zip(kernels, groups, strict=True):
            spent[group] += kernel_seconds(kernel, card) - card.kernel_overhead_seconds
        total = sympy.Float(len(kernels) * card.kernel_overhead_seconds)
        for group, work in works.items():
            polynomial = expression(self.basis, next(found), dims)
            total += polynomial * sympy.Float(spent[group] / work) if work else 0
        return sympy.expand(total)

    def _check_meshes(self, result: Formulas) -> None:
        """Bytes in the mesh axes against the passes on another mesh, whose sizes divide little."""
        copies = {"replicate": 3} if "replicate" in result.symbols else {}
        for num_shards in (7, 24):
            mesh = copies | {"shard": num_shards}
            sample = self.sampler.sample(self.reference, mesh)
            expected = {name: sample.persistent[name] for name in ("parameters", "gradients", "optimizer")}
            repeats = self.sampler.settings.micro_batches
            for (_, kind), (num_bytes, _) in sample.traffic.items():
                expected[kind] = expected.get(kind, 0) + repeats * num_bytes
            for name, num_bytes in expected.items():
                one = result.memory.get(name, result.traffic.get(name))
                have = result.value(one, **mesh)
                if have != num_bytes:
                    raise FormulaError(
                        f"{name} on {mesh}: the expression gives {have} bytes, the passes {num_bytes}"
                    )

    def _largest(self, index: int, moments: Sequence[tuple[Fraction, ...]], limit: int) -> int | None:
        """The largest size of a dim, the others at the reference, that fits: the expression's, confirmed.

        The schedule may choose another order at another size, so captures at the size and the next one
        have the last word, and move the answer until they agree.
        """

        def at(size: int) -> tuple[int, ...]:
            return tuple(size if dim == index else same for dim, same in enumerate(self.reference))

        def is_predicted(size: int) -> bool:
            return all(value_at(self.basis, one, at(size)) <= limit for one in moments)

        def fits(size: int) -> bool:
            return max(self.sampler.sample(at(size)).live) <= limit

        predicted = _last_true(is_predicted, 1, _LARGEST)
        if predicted == _LARGEST:
            return None
        size = predicted or 1
        if fits(size):
            return _last_true(fits, size, _LARGEST)
        too_large = _last_true(lambda less: size - less > 0 and not fits(size - less), 0, size)
        assert too_large is not None
        return size - too_large - 1 or None

    def _smallest_mesh(self, persistent: sympy.Expr, limit: int) -> int | None:
        """The smallest shard axis on which the reference fits, by the passes on that very mesh.

        Meshes on which not even ``persistent`` fits are skipped. Padding can make a wider mesh need more,
        so the first ones are tried one by one; beyond them, memory is taken to fall with the ranks.
        """
        settings = self.sampler.settings
        copies = {name: size for name, size in settings.rules.mesh.items() if name == "replicate"}
        (shard,) = persistent.free_symbols
        at_least = sympy.lambdify(shard, persistent, "math")
        valid = [size for size in _valid_sizes(int(settings.card.ranks_per_node), _MOST_RANKS)
                 if at_least(size) <= limit]  # fmt: skip

        def is_too_small(index: int) -> bool:
            sample = self.sampler.sample(self.reference, copies | {"shard": valid[index]})
            return max(sample.live) > limit

        for index in range(min(_NUM_TRIED, len(valid))):
            if not is_too_small(index):
                return valid[index]
        if len(valid) <= _NUM_TRIED or is_too_small(len(valid) - 1):
            return None
        last = _last_true(is_too_small, _NUM_TRIED - 1, len(valid) - 2)
        assert last is not None
        return valid[last + 1]


def _valid_sizes(per_node: int, most: int) -> list[int]:
    """Axis sizes from 2: within a node any, beyond it whole nodes."""
    return [*range(2, per_node + 1), *range(2 * per_node, most + 1, per_node)]


def _last_true(holds: Callable[[int], bool], first: int, most: int) -> int | None:
    """The last number for which something holds that holds up to some number; None if not for the first."""
    if not holds(first):
        return None
    step, low = 1, first
    while low + step <= most and holds(low + step):
        low += step
        step *= 2
    high = min(low + step, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _grid(size: int) -> list[int]:
    """Sizes to measure a dim at; 1 is special to torch, so it is none of them."""
    start = size if size > 1 else 2
    return [start, 2 * start, 3 * start]


def _text(names: Sequence[str], point: Sequence[int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in zip(names, point, strict=True))


def _pieces(rows: Mapping[int, int], num_shards: sympy.Symbol) -> sympy.Expr:
    """Bytes of padded shards: for each number of rows, bytes of all that share it."""
    return sympy.Add(*(row_bytes * sympy.ceiling(sympy.Integer(num_rows) / num_shards)
                       for num_rows, row_bytes in sorted(rows.items())))  # fmt: skip


def _shard_bytes(
    module: nn.Module, captured: CapturedStep, num_shards: sympy.Symbol
) -> dict[str, sympy.Expr]:
    """Shards of all parameters, of those that are trained, and of their gradients."""
    calls = [ReduceGradCall(*node.args)
             for node in captured.backward.graph.find_nodes(op="call_function", target=REDUCE_GRAD)]  # fmt: skip
    trained = {call.name: call.dtype.itemsize for call in calls}
    rows: dict[str, dict[int, int]] = {"parameters": {}, "trained": {}, "gradients": {}}
    for name, param in module.named_parameters():
        num_rows = param.shape[0] if param.dim() else 1
        row_elements = param.numel() // max(num_rows, 1)
        itemsizes = {"parameters": param.element_size()}
        if name in trained:
            itemsizes |= {"trained": param.element_size(), "gradients": trained[name]}
        for what, itemsize in itemsizes.items():
            rows[what][num_rows] = rows[what].get(num_rows, 0) + row_elements * itemsize
    return {what: _pieces(of_rows, num_shards) for what, of_rows in rows.items()}


def _largest_unit(captured: CapturedStep) -> int:
    """Bytes of the largest unit, gathered."""
    full: dict[str, dict[str, int]] = {}
    for node in captured.forward.graph.find_nodes(op="call_function", target=UNSHARD):
        call, value = UnshardCall(*node.args), node.meta["val"]
        full.setdefault(call.unit, {})[call.name] = value.numel() * value.element_size()
    return max((sum(of_unit.values()) for of_unit in full.values()), default=0)


def _traffic_expressions(
    captured: CapturedStep, sample: _Sample, num_shards: sympy.Symbol, num_replicas: sympy.Symbol | None
) -> dict[tuple[str, str], Traffic]:
    """Bytes of each half's collectives by kind, of one micro-batch, and how many they are."""
    gathered: dict[str, dict[int, int]] = {"forward": {}, "backward": {}}
    reduced: dict[int, int] = {}
    for half, gm in (("forward", captured.forward), ("backward", captured.backward)):
        for node in gm.graph.find_nodes(op="call_function", target=UNSHARD):
            _add_rows(gathered[half], node.meta["val"])
    for node in captured.backward.graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        reduction = ReduceGradCall(*node.args)
        gradient = reduction.grad.meta["val"]
        _add_rows(reduced, gradient, reduction.reduce_dtype)
    found = {}
    for half, kind, num_bytes in (
        ("forward", "all_gather", num_shards * _pieces(gathered["forward"], num_shards)),
        ("backward", "all_gather", num_shards * _pieces(gathered["backward"], num_shards)),
        ("backward", "reduce_scatter", num_shards * _pieces(reduced, num_shards)),
    ):
        _, count = sample.traffic.get((half, kind), (0, 0))
        if num_bytes:
            found[half, kind] = Traffic(kind=kind, num_bytes=num_bytes, count=count, ranks=num_shards)
    if reduced and num_replicas is not None:
        _, count = sample.traffic["backward", "reduce_scatter"]
        pieces = sympy.Piecewise(
            (sympy.Integer(0), sympy.Eq(num_replicas, 1)), (_pieces(reduced, num_shards), True)
        )
        found["backward", "all_reduce"] = Traffic(
            kind="all_reduce", num_bytes=pieces, count=count, ranks=num_replicas
        )
    return found


def _add_rows(rows: dict[int, int], full: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    num_rows = full.shape[0]
    row_bytes = full.numel() // max(num_rows, 1) * (dtype or full.dtype).itemsize
    rows[num_rows] = rows.get(num_rows, 0) + row_bytes


def _by_kind(traffic: Mapping[tuple[str, str], Traffic]) -> dict[str, sympy.Expr]:
    found: dict[str, sympy.Expr] = {}
    for (_, kind), one in traffic.items():
        found[kind] = found.get(kind, sympy.Integer(0)) + one.num_bytes
    return found
