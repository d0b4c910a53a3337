"""A half picks the variant for its units' state: right inputs, right outputs, one compile per state.

No ranks: shards are whole, and sums over the copies run on a fake group, which answers with its input.
"""

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.small_graphs import LOWERING, GraphBuilder, ParameterSpec, aten, num_targets
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from graphshard.backend.halves.half import Half, HalfFacts
from graphshard.backend.halves.half_variants import PLAIN, CompiledVariant, Selection, specialise
from graphshard.errors import UnsupportedShardingError
from graphshard.fsdp.state import ParameterSlot, Tree, Unit, UnitSettings, store_parameters
from graphshard.ir.mesh import NO_AXIS
from graphshard.ir.params import ReduceGradCall, gradient_call
from graphshard.ir.rewrite import copy_graph, output_values
from graphshard.ir.shard_ops import REDUCE_GRAD, UNSHARD
from graphshard.pipeline.context import PassContext

NAMES = ("a", "b")


def _call(build, shard, name, **changes):
    """A gather of a 2x2 parameter that is the only parameter of a unit."""
    spec = ParameterSpec((2, 2), unit=name, force_sum=True, **changes)
    call = spec.call(shard, build.handle(name), name, 1)
    return call._replace(replicate_group=dist.group.WORLD.group_name)


def _forward():
    """`a b x`, of the parameters a and b and an input x."""
    build = GraphBuilder()
    a, b, x = (build.input(f"primals_{i}", 2, 2) for i in (1, 2, 3))
    full = [build(UNSHARD, *_call(build, shard, name)) for shard, name in zip((a, b), NAMES, strict=True)]
    return build.finish(build(aten.mm.default, build(aten.mm.default, *full), x))


def _backward(**changes):
    """Gradients `t a` of a and `t + t` of b."""
    build = GraphBuilder()
    a, b = (build.input(f"primals_{i}", 2, 2) for i in (1, 2))
    tangent = build.input("tangents_1", 2, 2)
    calls = [_call(build, shard, name, **changes) for shard, name in zip((a, b), NAMES, strict=True)]
    grads = [
        build(aten.mul.Tensor, tangent, build(UNSHARD, *calls[0])),
        build(aten.add.Tensor, tangent, tangent),
    ]
    reduced = [
        build(REDUCE_GRAD, *gradient_call(call, grad, [2, 2], torch.float64))
        for call, grad in zip(calls, grads, strict=True)
    ]
    return build.finish(*reduced)


@dataclass
class Compiler:
    """Specialises a half, lowers the variant and runs it; keeps the variants."""

    gm: fx.GraphModule
    variants: list[Any] = field(default_factory=list)

    def __call__(self, state):
        examples = [node.meta["val"] for node in self.gm.graph.find_nodes(op="placeholder")]
        self.variants.append(specialise(self.gm, examples, state))
        lowered = copy_graph(self.last.gm)
        LOWERING.run(lowered, PassContext(full_checks=True))
        return CompiledVariant(run=lambda args: lowered(*args))

    @property
    def last(self):
        return self.variants[-1]


def _slot(unit, name, shard):
    """The slot of a parameter that is whole on every rank."""
    mesh = init_device_mesh("cpu", (2,))
    owner = nn.Module()
    owner._parameters[name] = nn.Parameter(DTensor.from_local(shard, mesh, [Replicate()], run_check=False))
    store_parameters(owner)
    return ParameterSlot(unit=unit, name=name, shape=shard.shape, dim=0, axis=NO_AXIS, owners=[(owner, name)])


class Setup:
    """A half with two units, and what a call of it takes."""

    def __init__(self, gm, *, is_backward, reshard_after_forward=None, **unit_options):
        self.tree = Tree(_end_is_queued=is_backward)  # as if inside a backward of autograd
        self.units = [
            Unit(
                tree=self.tree,
                modules=[],
                label=name,
                settings=UnitSettings(reshard_after_forward=reshard_after_forward),
                **unit_options,
            )
            for name in NAMES
        ]
        self.shards = [torch.randn(2, 2, dtype=torch.float64) for _ in NAMES]
        for unit, name, shard in zip(self.units, NAMES, self.shards, strict=True):
            unit.slots.append(_slot(unit, name, shard))
        self.compiler = Compiler(gm)
        self.half = Half(facts=HalfFacts.of(gm, is_backward=is_backward), compile_state=self.compiler)

    def run(self, last, handles=None):
        handles = [unit.handle for unit in self.units] if handles is None else handles
        args = [*self.shards, last, *handles]
        return list(self.half(args))


@pytest.fixture(autouse=True)
def _two_copies(fake_group):
    fake_group(2)


@pytest.fixture
def x():
    return torch.randn(2, 2, dtype=torch.float64)


def _selections(half):
    return [selection for selection, _ in half._variants]


def _inputs(variant):
    return [node.name for node in variant.gm.graph.find_nodes(op="placeholder")]


FORWARD_INPUTS = ["primals_1", "primals_2", "primals_3", "handle_a", "handle_b"]
BACKWARD_INPUTS = ["primals_1", "primals_2", "tangents_1", "handle_a", "handle_b"]


@pytest.mark.parametrize("is_backward", [False, True])
def test_a_state_that_never_changes_is_compiled_once(is_backward, x):
    setup = Setup(_backward() if is_backward else _forward(), is_backward=is_backward)
    a, b = setup.shards
    expected = [x * a, x + x, None, None] if is_backward else [a @ b @ x]
    for _ in range(3):
        torch.testing.assert_close(setup.run(x), expected)
    (variant,) = setup.compiler.variants
    assert _inputs(variant) == (BACKWARD_INPUTS if is_backward else FORWARD_INPUTS)


def test_a_handle_that_leads_nowhere_means_the_plain_state(x):
    setup = Setup(_backward(), is_backward=True)
    setup.units[0].reduce_grads = False
    setup.run(x, handles=[torch.empty(0, dtype=torch.int8)] * 2)
    assert _selections(setup.half) == [PLAIN]


def test_a_gathered_parameter_is_supplied(x):
    setup = Setup(_forward(), is_backward=False, reshard_after_forward=True)
    unit, (a, b) = setup.units[1], setup.shards
    unit.keep("b", torch.ones(2, 2, dtype=torch.float64))
    (result,) = setup.run(x)
    torch.testing.assert_close(result, a @ torch.ones_like(b) @ x)
    assert _inputs(setup.compiler.last) == [*FORWARD_INPUTS, "gathered_1"]
    assert num_targets(setup.compiler.last.gm, UNSHARD) == 1
    assert not unit.is_gathered  # its unit reshards after the forward
    torch.testing.assert_close(setup.run(x), [a @ b @ x])
    assert _selections(setup.half) == [Selection(supplied=(1,)), PLAIN]


def test_a_parameter_whose_shard_changed_is_gathered_again(x):
    setup = Setup(_forward(), is_backward=False)
    a, b = setup.shards
    setup.units[0].keep("a", torch.ones(2, 2, dtype=torch.float64))
    with torch.no_grad():
        setup.units[0].slot_of("a").param.add_(1.0)
    torch.testing.assert_close(setup.run(x), [a @ b @ x])
    assert _selections(setup.half) == [PLAIN]


def test_a_forward_keeps_what_is_not_freed_by_the_backward(x):
    setup = Setup(_forward(), is_backward=False, reshard_after_forward=False)
    setup.units[0].reshard_after_backward = False
    a, b = setup.shards
    for _ in range(3):
        torch.testing.assert_close(setup.run(x), [a @ b @ x])
    assert torch.equal(setup.units[0].gathered_value("a"), a)
    assert not setup.units[1].is_gathered
    assert _selections(setup.half) == [Selection(kept=(0,)), Selection(supplied=(0,))]
    assert len(output_values(setup.compiler.variants[0].gm.graph)) == 2


def test_a_backward_frees_what_the_forward_kept_in_the_first_place(x):
    setup = Setup(_backward(), is_backward=True, reshard_after_forward=False)
    for unit, name, shard in zip(setup.units, NAMES, setup.shards, strict=True):
        unit.keep(name, shard.clone())
    setup.units[1].reshard_after_backward = False
    setup.run(x)
    assert _selections(setup.half) == [Selection(supplied=(0,))]
    assert [unit.is_gathered for unit in setup.units] == [False, True]


def test_a_unit_stays_gathered_until_its_gradients_are_reduced(x):
    forward, backward = Setup(_forward(), is_backward=False), Setup(_backward(), is_backward=True)
    unit, a = backward.units[0], backward.shards[0]
    forward.units[0], forward.shards = unit, backward.shards
    forward.half.facts = dataclasses.replace(forward.half.facts, kept_between=frozenset({"a"}))
    forward.units[1].settings.reshard_after_forward = True
    unit.reduce_grads, unit.settings.reshard_after_forward = False, True
    for _ in range(2):
        forward.run(x)
        assert torch.equal(unit.gathered_value("a"), a), "for the backward, and for the next forward"
        backward.run(x)
        assert torch.equal(unit.gathered_value("a"), a)
    unit.reduce_grads = True
    forward.run(x)
    assert unit.is_gathered, "the last backward needs it, too"
    backward.run(x)
    assert not unit.is_gathered
    assert _selections(forward.half) == [Selection(kept=(0,)), Selection(supplied=(0,))]
    assert _selections(backward.half) == [
        Selection(supplied=(0,), unreduced=(0,)),
        Selection(supplied=(0,), with_unreduced=(0,)),
    ]


@pytest.mark.parametrize("reduce_grads", [False, True])
def test_an_evaluation_leaves_gathered_what_stays_so_and_frees_the_rest(x, reduce_grads):
    setup = Setup(_forward(), is_backward=False, reshard_after_forward=True)
    unit = setup.units[0]
    unit.keeps_between, unit.reduce_grads = True, reduce_grads
    unit.keep("a", setup.shards[0].clone())
    setup.run(x)
    assert unit.is_gathered == (not reduce_grads)


def test_an_evaluation_keeps_nothing_of_its_own(x):
    """What it gathers in inference mode no backward could save."""
    setup = Setup(_forward(), is_backward=False)
    unit = setup.units[0]
    unit.keeps_between, unit.reduce_grads = True, False
    setup.run(x)
    assert _selections(setup.half) == [PLAIN] and not unit.is_gathered
    with torch.inference_mode():
        unit.keep("a", torch.ones(2, 2, dtype=torch.float64))
    assert not unit.is_gathered


@pytest.mark.parametrize("reshards", [True, False])
def test_a_planners_choice_ends_with_the_last_backward(x, reshards):
    """Whatever ``set_reshard_after_backward`` says of units that free their parameters after the forward."""
    setup = Setup(_backward(), is_backward=True, reshard_after_forward=reshards, reshard_after_backward=False)
    unit = setup.units[0]
    unit.keeps_between = True
    unit.keep("a", setup.shards[0].clone())
    setup.run(x)
    assert unit.is_gathered == (not reshards)


def test_a_copied_unit_is_no_longer_part_of_a_plan():
    assert not copy.deepcopy(Unit(tree=Tree(), modules=[], keeps_between=True)).keeps_between


def test_gradients_wait_unreduced_and_join_the_next_reduction(x):
    setup = Setup(_backward(num_replicas=2), is_backward=True)
    a, _ = setup.shards
    setup.units[0].reduce_grads = False
    for count in (1, 2):
        torch.testing.assert_close(setup.run(x), [None, x, None, None])  # (x + x) / 2 copies
        torch.testing.assert_close(setup.units[0].unreduced, {"a": count * x * a})
    assert setup.compiler.last.unreduced_outputs == {0}
    assert num_targets(setup.compiler.last.gm, REDUCE_GRAD) == 1
    setup.units[0].reduce_grads = True
    torch.testing.assert_close(setup.run(x), [3 * x * a / 2, x, None, None])
    assert _inputs(setup.compiler.last) == [*BACKWARD_INPUTS, "unreduced_0"]
    assert setup.units[0].unreduced == {}
    assert setup.compiler.last.unreduced_outputs == frozenset()
    torch.testing.assert_close(setup.run(x), [x * a / 2, x, None, None])
    expected = [Selection(unreduced=(0,)), Selection(with_unreduced=(0,)), PLAIN]
    assert _selections(setup.half) == expected


def test_a_flag_set_between_forward_and_backward_counts(x):
    """Both halves were compiled and run; the graph of the backward did not change."""
    setup = Setup(_backward(), is_backward=True)
    assert setup.run(x)[0] is not None
    setup.units[0].reduce_grads = setup.units[1].reduce_grads = False
    assert setup.run(x) == [None] * 4
    assert setup.tree.waiting


def test_partial_sums_wait_and_join_the_next_all_reduce(x):
    setup = Setup(_backward(num_replicas=2), is_backward=True)
    a, _ = setup.shards
    unit = setup.units[0]
    unit.all_reduce_grads = False
    torch.testing.assert_close(setup.run(x), [None, x, None, None])
    torch.testing.assert_close(unit.partial, {"a": x * a})  # not divided yet
    assert [
        ReduceGradCall(*node.args).all_reduce
        for node in setup.compiler.last.gm.graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    ] == [False, True]
    assert setup.compiler.last.unreduced_outputs == frozenset()
    setup.run(x)
    unit.all_reduce_grads = True
    torch.testing.assert_close(setup.run(x), [3 * x * a / 2, x, None, None])
    assert _inputs(setup.compiler.last) == [*BACKWARD_INPUTS, "partial_0"]
    assert unit.partial == {}
    assert _selections(setup.half) == [Selection(scattered=(0,)), Selection(with_partial=(0,))]


def test_unreduced_gradients_join_a_partial_sum(x):
    setup = Setup(_backward(num_replicas=2), is_backward=True)
    a, _ = setup.shards
    unit = setup.units[0]
    unit.reduce_grads = False
    setup.run(x)
    unit.reduce_grads, unit.all_reduce_grads = True, False
    setup.run(x)
    torch.testing.assert_close((unit.unreduced, unit.partial), ({}, {"a": 2 * x * a}))
    both = Selection(scattered=(0,), with_unreduced=(0,))
    assert _selections(setup.half) == [Selection(unreduced=(0,)), both]


def test_without_copies_there_is_no_all_reduce_to_leave_out(x):
    setup = Setup(_backward(), is_backward=True)
    setup.units[0].all_reduce_grads = False
    assert setup.run(x)[0] is not None
    assert _selections(setup.half) == [PLAIN]


@pytest.mark.parametrize("counts", [True, False])
def test_a_variant_for_each_amount_that_is_held(counts, x):
    """Gradients of micro-batches before: nothing, one, and as an input."""
    setup = Setup(_backward(num_replicas=2), is_backward=True)
    setup.half.facts = dataclasses.replace(setup.half.facts, counts_held=counts)
    setup.units[0].reduce_grads = False
    for _ in range(3):
        setup.run(x)
    setup.units[0].reduce_grads = True
    setup.run(x)
    held = [variant.held_bytes for variant in setup.compiler.variants]
    assert held == ([0, x.nbytes, 0] if counts else [0, 0])


def test_what_is_held_counts_in_a_forward(x):
    setup = Setup(_forward(), is_backward=False)
    setup.half.facts = dataclasses.replace(setup.half.facts, counts_held=True)
    a, b = setup.units
    a.add_unreduced("a", torch.zeros(3))
    b.add_partial("b", torch.zeros(5))
    setup.run(x)
    a.keep("a", torch.zeros(2, 2, dtype=torch.float64))  # an input now
    setup.run(x)
    assert [variant.held_bytes for variant in setup.compiler.variants] == [32, 32]
    setup.units[1].partial.clear()
    setup.run(x)
    assert setup.compiler.last.held_bytes == 12
    assert _inputs(setup.compiler.last) == [*FORWARD_INPUTS, "gathered_0"]
    a.slots.append(_slot(a, "another", torch.zeros(2)))
    a.keep("another", torch.zeros(7))  # which this half does not read
    setup.run(x)
    assert setup.compiler.last.held_bytes == 12 + 28


def test_a_half_that_cannot_be_compiled_loses_no_gradient(x):
    setup = Setup(_backward(num_replicas=2), is_backward=True)
    a, b = setup.units
    full, partial = torch.ones(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    a.add_unreduced("a", full)
    a.add_partial("a", partial)
    compiler, setup.half.compile_state = setup.compiler, lambda state: 1 / 0
    with pytest.raises(ZeroDivisionError):
        setup.run(x)
    assert a.unreduced["a"] is full and a.partial["a"] is partial and not b.unreduced
    setup.half.compile_state = compiler
    setup.run(x)
    assert not a.unreduced and not a.partial


def test_gradients_wait_in_the_dtype_of_the_reduction(x):
    setup = Setup(_backward(reduce_dtype=torch.float32), is_backward=True)
    setup.units[0].reduce_grads = False
    setup.run(x)
    assert setup.units[0].unreduced["a"].dtype is torch.float32
    setup.units[0].reduce_grads = True
    assert setup.run(x)[0].dtype is torch.float64
    (added,) = (node for node in setup.compiler.last.gm.graph.nodes if node.name == "unreduced_0")
    assert added.meta["val"].dtype is torch.float32


def test_the_half_itself_is_not_edited(x):
    setup = Setup(_backward(), is_backward=True)
    before = str(setup.compiler.gm.graph)
    setup.units[0].reduce_grads = False
    setup.run(x)
    assert str(setup.compiler.gm.graph) == before
    assert _inputs(setup.compiler) == BACKWARD_INPUTS


def _summed_reductions():
    build = GraphBuilder()
    a, tangent = build.input("primals_1", 2, 2), build.input("tangents_1", 2, 2)
    call = gradient_call(_call(build, None, "a"), tangent, [2, 2], torch.float64)
    one, two = (build(REDUCE_GRAD, *call._replace(name=name)) for name in ("a", "a again"))
    return build.finish(build(aten.add.Tensor, one, two), a)


def test_a_sum_of_reductions_cannot_wait(x):
    gm = _summed_reductions()
    unit = Unit(tree=Tree(_end_is_queued=True), modules=[], label="a")
    half = Half(facts=HalfFacts.of(gm, is_backward=True), compile_state=Compiler(gm))
    assert half([x, x, unit.handle])[0] is not None
    unit.reduce_grads = False
    with pytest.raises(UnsupportedShardingError, match="parameter a is read in several ways"):
        half([x, x, unit.handle])


def test_a_variant_runs_below_autograd_and_is_compiled_with_it():
    def is_recorded():
        return (torch.ones(2, requires_grad=True) * 2).requires_grad

    seen = {}

    def compile_state(state):
        seen["compiling"] = is_recorded()

        def run(args):
            seen["running"] = is_recorded()
            return args[:1]

        return CompiledVariant(run=run)

    setup = Setup(_forward(), is_backward=False)
    setup.half.compile_state = compile_state
    setup.run(torch.eye(2, dtype=torch.float64))
    assert seen == {"compiling": True, "running": False}
    seen.clear()
    setup.units[0].keep("a", setup.shards[0])  # another state, another path
    setup.run(torch.eye(2, dtype=torch.float64))
    assert seen == {"compiling": True, "running": False}
    assert is_recorded()
