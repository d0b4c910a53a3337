"""``graphshard.formulas``: the cost of a training step as expressions in its dynamic dims and the mesh axes.

The step is captured at a few sizes of its dynamic dims. Bytes are then polynomials in these dims, found exactly, and
checked by captures at random sizes: one byte off is an error. Bytes in the mesh axes follow from the shapes of
parameters, and are checked the same way.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch import nn

from ..._compat import tree_leaves
from ...capture import has_extended_parameters, no_garbage_collection
from ...cost import HardwareCard, Kernel, kernel_seconds, warn_of
from ...errors import FormulaError, OptionError
from ...report import Formulas
from ...setting_checks import AUTO_PLACEMENTS
from .. import PlacementChooser, plain_inputs, read_settings, refuse_sharded
from .links import (
    communication_lines,
    halves_seconds,
    ranks_in_node,
    seconds_over_shards,
    sizes_that_fill_nodes,
    stops_hiding,
)
from .mesh import by_kind, largest_unit, moves_expressions, shard_bytes, traffic_expressions
from .polynomials import Basis, expression, fit, undominated, value_at
from .sampling import Group, Sample, Sampler, groups_of, works_of

#: Degrees in each dim, in the order in which they are tried. Bytes are rarely more than quadratic in a dim.
_DEGREES = (1, 2)

#: Factors of the reference sizes at which dims are measured, and those of which the checks take some. They are no
#: powers of two: where a number of tokens is a width of the model, kernels are merged that are not merged elsewhere.
_GRID = (1, 3, 5)
_CHECKS = (6, 9, 10, 11, 13)

#: Random points that check the expressions.
_NUM_CHECKS = 2

#: The largest size of a dim in a search.
_LARGEST = 1 << 40

#: Meshes that a search tries one by one. Beyond them it assumes that memory falls with the number of ranks.
_NUM_TRIED = 12

#: The widest mesh axis in a search.
_MOST_RANKS = 1 << 16

_NOTES = (
    "Bytes are exact while the graph stays as at the reference; the points checked say that it does there. Dims "
    "of size 1 are special to torch: expressions start at 2. The peak is that of the reference's order of "
    "collectives; at other sizes the schedule may choose another, so sizes that are solved were captured, too.",
    "Seconds merge kernels as at sizes that are no width of the model. They keep each kernel in its regime and at its "
    "efficiency at the reference, and copies into and out of buckets as they are there; collectives of a kind have "
    "their average size and no low-latency protocol. A half "
    "takes the longer of its compute and its communication: what cannot overlap (the first gather, the last "
    "reduction) is in the simulation only.",
)

_PLACED_NOTE = (
    "{axis}={size} stays as it is; expressions are those of one rank of it. A half waits for its reshards over {axis}. "
    "In the backward, some of them overlap products of weight gradients, in the simulation only."
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
    """Expressions of memory, communication and time, and their solutions.

    Args:
        model, args, kwargs, loss: as in :func:`graphshard.inspect`; the sizes of the inputs are the reference.
        dynamic: names for dims of the inputs: {"batch": 0, "sequence": 1}. Every input tensor that has the size of the
            first one in this dim is resized.
        mesh: the reference mesh; default 64 shards. With placements it has a further axis, whose size stays as it is.
        progress: takes the name of each stage as it begins.
        seed: seed of the random points.
        options: other options of :func:`graphshard.inspect`: hardware, tables, units, mp_policy, reshard_after_forward,
            optimizer, micro_batches, checkpoint, placements ("auto" chooses them at the reference), and
            ``memory_budget``, the limit in solutions. ``plan`` is "unit".

    Raises:
        OptionError: ``dynamic`` names no dims of the inputs, or has names of mesh axes; options are unknown.
        FormulaError: the graph changes with the sizes, or a capture differs from the expressions.
        GraphShardError: as :func:`graphshard.inspect`.
    """
    without = ("tables", "mp_policy", "reshard_after_forward", "memory_budget", "placements")
    known: dict[str, Any] = dict.fromkeys(without)
    known |= {"hardware": "h100-sxm", "units": (), "optimizer": "adamw", "micro_batches": 1, "checkpoint": ()}
    if unknown := sorted(set(options) - set(known)):
        raise OptionError(f"formulas has no option {', '.join(unknown)}; known: {', '.join(known)}")
    settings = read_settings(rules=None, mesh=mesh or {"shard": 64}, plan="unit", **{**known, **options})
    if settings.rules.mesh["shard"] == 1:
        raise OptionError(
            "formulas on mesh shard=1: its graphs gather nothing, and say nothing of other sizes; give a mesh with two "
            "shards at least"
        )
    _, module, args, kwargs, sharded = plain_inputs(model, args, kwargs)
    refuse_sharded(sharded)
    if has_extended_parameters(module):
        raise FormulaError(
            "parameters with gather extensions (fsdp_pre_all_gather) compute with shards, whose sizes are no "
            "polynomials: inspect or sweep the sizes you need instead"
        )
    sizes = _reference_sizes(tree_leaves((args, dict(kwargs))), dynamic, settings.rules.mesh)
    notes: tuple[str, ...] = ()
    if settings.rules.placements == AUTO_PLACEMENTS:
        if progress is not None:
            progress("choose placements")
        choice = PlacementChooser(module=module, args=args, kwargs=kwargs, loss=loss).choose(settings)
        settings = replace(settings, rules=replace(settings.rules, placements=choice.placements))
        notes = (f"Placements chosen at the reference: {choice.name}. {choice.note}",)
    sampler = Sampler(
        module=module, args=args, kwargs=kwargs, dynamic=dynamic, sizes=sizes, loss=loss,
        settings=settings, progress=progress or (lambda stage: None), known={},
    )  # fmt: skip
    with no_garbage_collection():
        found = _Fitted.through(sampler, random.Random(seed)).formulas()
    warn_of(settings.told, stacklevel=2)
    return replace(found, notes=(*found.notes, *notes))


def _reference_sizes(
    inputs: Sequence[Any], dynamic: Mapping[str, int], mesh: Mapping[str, int]
) -> dict[str, int]:
    axes = dict.fromkeys(("shard", "replicate", *mesh))
    if not dynamic or axes.keys() & set(dynamic):
        listed = " or ".join(map(json.dumps, axes))
        raise OptionError(
            f'dynamic: name dims of the inputs, {{"batch": 0}}, and not {listed}, which are mesh axes'
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
class _Fitted:
    """Polynomials through samples, and the points that confirmed them."""

    sampler: Sampler
    reference: tuple[int, ...]
    sample: Sample
    groups: tuple[tuple[Group, ...], ...]
    basis: Basis
    coefficients: list[tuple[Fraction, ...]]
    checked: tuple[dict[str, int], ...]

    @staticmethod
    def through(sampler: Sampler, chance: random.Random) -> _Fitted:
        """Raises the degrees until random points agree."""
        names = list(sampler.dynamic)
        reference = tuple(sampler.sizes.values())
        grids = [_grid(size) for size in reference]
        choices = [[size * factor for factor in _CHECKS] for size in reference]
        checks = chance.sample(list(itertools.product(*choices)), _NUM_CHECKS)

        def structure_at(point: tuple[int, ...]) -> tuple[str, ...]:
            step = sampler.step(point)
            return tuple(node.name for gm in (step.forward, step.backward) for node in gm.graph.nodes)

        def refuse(what: str, point: tuple[int, ...], other: tuple[int, ...], remedy: str) -> None:
            raise FormulaError(
                f"{what} at {_text(names, point)} is not the one at {_text(names, other)}: there are no "
                f"expressions for both; {remedy}, or inspect each of them"
            )

        start = tuple(grid[0] for grid in grids)  # the reference, but for sizes of 1
        sampler.expected = len({reference, start}) + len(names) + len(checks)
        structure = structure_at(reference)
        along = [(*start[:dim], grid[1], *start[dim + 1 :]) for dim, grid in enumerate(grids)]
        for point in (start, *along, *checks):
            if structure_at(point) != structure:
                refuse("the graph", point, reference, "start from larger sizes")
        sampler.interpolate([start, *along], checks)
        typical = tuple(grid[1] for grid in grids)
        # Where the size of an input is a width of the model, kernels are merged that are not merged elsewhere.
        sampler.merged = sampler.merging(typical)
        first = sampler.sample(reference)
        groups = tuple(tuple(groups_of(kernels, sampler.settings.card)) for kernels in first.kernels)

        @functools.cache
        def numbers(point: tuple[int, ...]) -> list[int]:
            if structure_at(point) != structure:
                refuse("the graph", point, reference, "start from larger sizes")
            sample = first if point == reference else sampler.sample(point, orders=first.orders)
            if point in checks and not sample.is_merged_so:
                remedy = "start from other sizes (a batch of 3 instead of 2, say)"
                refuse("the merging of kernels", point, typical, remedy)
            return sample.whole_numbers(groups)

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
        further = _further_ranks(mesh)
        symbols = {name: sympy.Symbol(name, integer=True, positive=True)
                   for name in (*names, *_axes_of_data(mesh))}  # fmt: skip
        dims = [symbols[name] for name in names]
        num_shards, num_replicas = symbols["shard"], symbols.get("replicate")
        found = iter(self.coefficients)
        fitted = {
            name: expression(self.basis, next(found), dims) for name in ("activations", "inputs", "gathered")
        }
        moved = {key: expression(self.basis, next(found), dims) for key in self.sample.moved}
        compute = [
            self._compute(kernels, groups, found, dims, card) + sympy.Float(copies)
            for kernels, groups, copies in zip(
                self.sample.kernels, self.groups, self.sample.copy_seconds, strict=True
            )
        ]
        moments = undominated(list(found))
        peak = sympy.Max(*(expression(self.basis, one, dims) for one in moments), evaluate=False)
        captured = sampler.captured(self.reference)
        shards = shard_bytes(sampler.module, captured, num_shards)
        memory = {
            "parameters": shards["parameters"],
            "gradients": shards["gradients"],
            "optimizer": settings.optimizer.num_states * shards["trained"],
            **fitted,
            "largest unit": sympy.Integer(largest_unit(captured)),
        }
        traffic = traffic_expressions(captured, self.sample, num_shards, num_replicas)
        moves = moves_expressions(moved, self.sample, further)
        stepping, adding = seconds_over_shards(settings, shards, self.sample.persistent)
        seconds = halves_seconds(
            dict(zip(("forward", "backward"), compute, strict=True)), traffic, symbols, card,
            optimizer=stepping, accumulation=adding, micro_batches=settings.micro_batches, moves=moves,
            further=further,
        )  # fmt: skip
        limit = settings.limit_bytes
        sizes = dict(zip(names, self.reference, strict=True))
        reference = {**sizes, **mesh}
        result = Formulas(
            symbols=symbols,
            reference=reference,
            memory=memory,
            peak=peak,
            traffic={
                **{kind: settings.micro_batches * one for kind, one in by_kind(traffic).items()},
                **{
                    f"{kind} of reshards": settings.micro_batches * one
                    for kind, one in by_kind(moves).items()
                },
            },
            seconds=seconds,
            communication=communication_lines(traffic, ranks_in_node(symbols, card, further), card, moves),
            checked=self.checked,
            solutions={},
            notes=(*_NOTES, _PLACED_NOTE.format(axis=list(mesh)[-1], size=further))
            if further > 1
            else _NOTES,
        )
        sampler.progress("check other meshes, then the largest sizes and the smallest mesh")
        self._check_meshes(result)
        solutions: dict[str, int | None] = {}
        for index, name in enumerate(names):
            sampler.progress(f"find the largest {name} that fits")
            solutions[f"largest {name} that fits"] = self._largest(index, moments, limit)
        sampler.progress("find the smallest mesh")
        solutions["smallest shard that fits"] = self._smallest_mesh(
            memory["parameters"] + memory["gradients"] + memory["optimizer"], limit
        )
        solutions["shard at which communication stops hiding"] = stops_hiding(
            result, card, _MOST_RANKS, further
        )
        return replace(result, solutions=solutions)

    def _compute(
        self,
        kernels: Sequence[Kernel],
        groups: Sequence[Group],
        found: Iterator[tuple[Fraction, ...]],
        dims: Sequence[sympy.Symbol],
        card: HardwareCard,
    ) -> sympy.Expr:
        """Seconds of the kernels of a half: the work of each group over its rate at the reference."""
        works = works_of(kernels, groups)
        spent = dict.fromkeys(works, 0.0)
        for kernel, group in zip(kernels, groups, strict=True):
            spent[group] += kernel_seconds(kernel, card) - card.kernel_overhead_seconds
        total = sympy.Float(len(kernels) * card.kernel_overhead_seconds)
        for group, work in works.items():
            polynomial = expression(self.basis, next(found), dims)
            total += polynomial * sympy.Float(spent[group] / work) if work else 0
        return sympy.expand(total)

    def _check_meshes(self, result: Formulas) -> None:
        """Checks bytes in the mesh axes against the passes, on a mesh whose sizes divide few dims."""
        copies = {"replicate": 3} if "replicate" in result.symbols else {}
        for num_shards in (7, 24):
            sizes = copies | {"shard": num_shards}
            mesh = {**self.sampler.settings.rules.mesh, **sizes}
            sample = self.sampler.sample(self.reference, mesh)
            expected = {name: sample.persistent[name] for name in ("parameters", "gradients", "optimizer")}
            repeats = self.sampler.settings.micro_batches
            for (_, kind), (num_bytes, _) in sample.traffic.items():
                expected[kind] = expected.get(kind, 0) + repeats * num_bytes
            for name, num_bytes in expected.items():
                one = result.memory.get(name, result.traffic.get(name))
                have = result.value(one, **sizes)
                if have != num_bytes:
                    raise FormulaError(
                        f"{name} on {mesh}: the expression gives {have} bytes, the passes {num_bytes}; inspect the "
                        "meshes you need instead"
                    )

    def _largest(self, index: int, moments: Sequence[tuple[Fraction, ...]], limit: int) -> int | None:
        """The largest size of a dim that fits, with the other dims at the reference.

        The schedule may choose another order at another size. So the step at the expression's answer and at the next
        size decides, and moves the answer until they agree. The answer itself is captured.
        """

        def at(size: int) -> tuple[int, ...]:
            return tuple(size if dim == index else same for dim, same in enumerate(self.reference))

        def is_predicted(size: int) -> bool:
            return all(value_at(self.basis, one, at(size)) <= limit for one in moments)

        predicted = _last_true(is_predicted, 1, _LARGEST)
        if predicted == _LARGEST:
            return None

        def search() -> int | None:
            @functools.cache
            def fits(size: int) -> bool:
                return self.sampler.most_bytes(at(size)) <= limit

            size = predicted or 1
            if fits(size):
                return _last_true(fits, size, _LARGEST)
            too_large = _last_true(lambda less: size - less > 0 and not fits(size - less), 0, size)
            assert too_large is not None
            return size - too_large - 1 or None

        found = search()
        return found if found is None or self.sampler.confirms(at(found)) else search()

    def _smallest_mesh(self, persistent: sympy.Expr, limit: int) -> int | None:
        """The smallest shard axis on which the reference fits, by the passes on that mesh.

        Meshes on which ``persistent`` alone does not fit are skipped. Padding can make a wider mesh need more, so the
        first meshes are tried one by one. Beyond them memory is assumed to fall with the number of ranks.
        """
        settings = self.sampler.settings
        mesh, per_node = settings.rules.mesh, int(settings.card.ranks_per_node)
        (shard,) = persistent.free_symbols
        at_least = sympy.lambdify(shard, persistent, "math")
        valid = [size for size in sizes_that_fill_nodes(per_node, _MOST_RANKS, _further_ranks(mesh))
                 if at_least(size) <= limit]  # fmt: skip

        def is_too_small(index: int) -> bool:
            return self.sampler.most_bytes(self.reference, {**mesh, "shard": valid[index]}) > limit

        for index in range(min(_NUM_TRIED, len(valid))):
            if not is_too_small(index):
                return valid[index]
        if len(valid) <= _NUM_TRIED or is_too_small(len(valid) - 1):
            return None
        last = _last_true(is_too_small, _NUM_TRIED - 1, len(valid) - 2)
        assert last is not None
        return valid[last + 1]


def _axes_of_data(mesh: Mapping[str, int]) -> list[str]:
    return [name for name in mesh if name in ("replicate", "shard")]


def _further_ranks(mesh: Mapping[str, int]) -> int:
    """The size of the axis of placements; 1 without."""
    return math.prod(size for name, size in mesh.items() if name not in ("replicate", "shard"))


def _last_true(holds: Callable[[int], bool], first: int, most: int) -> int | None:
    """The last number for which ``holds`` is true, if it is true up to some number; None if not for the first."""
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
    """Sizes at which a dim is measured, without 1, which torch treats specially."""
    start = size if size > 1 else 2
    return [start * factor for factor in _GRID]


def _text(names: Sequence[str], point: Sequence[int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in zip(names, point, strict=True))
