"""Capture of a plain model: the graph text of training, numbers of the unsharded model, clear errors."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from support.all_ranks import assert_all_gradients, assert_same, run_joint, step_inputs
from support.interpreted_halves import interpreted_halves
from support.llama_example import llama_model
from support.small_models import MODELS, example_batch, shard_units
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.capture.capture_step import CapturedStep, capture_step
from graphshard.capture.fake_step import loss_in
from graphshard.capture.rules import ShardingRules
from graphshard.errors import CaptureError, OptionTypeError, ShardingError
from graphshard.ir.collectives import ALL_GATHER, ALL_REDUCE
from graphshard.ir.graph_text import graph_text
from graphshard.ir.params import ReduceGradCall, UnshardCall
from graphshard.ir.rewrite import output_values
from graphshard.ir.shard_ops import REDUCE_GRAD, UNSHARD
from graphshard.passes import LowerShards

from support.small_graphs import num_targets, run_pass  # isort: skip

UNITS = {
    "two_linears": ["first", "second"],
    "tied_embedding": [],
    "called_thrice": ["layer"],
    "frozen_first": ["first", "second"],
    "blocks_2": ["blocks.*"],
    "blocks_3": ["blocks.*"],  # enough of them to be exported once
}


def _rules(name: str, **options) -> ShardingRules:
    return ShardingRules(**({"mesh": {"shard": 2}, "units": UNITS[name]} | options))


def _mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def _computation(text: str) -> list[str]:
    """Each node written out down to the inputs, sorted: inputs are called by what they are.

    The two ways differ in the order of inputs, and of gradients that become ready together.
    """
    written: dict[str, str] = {}
    digests = []
    num_others = 0
    for line in text.splitlines():
        name, _, rest = line.partition(": ")
        if rest.startswith("i8[0] = input"):
            written[name] = "<handle>"
        elif " = shard " in rest:
            written[name] = rest
        elif rest.endswith(" = input"):
            written[name] = f"<{rest} {num_others}>"
            num_others += 1
        elif not line.startswith("return"):
            rest = re.sub(r"%[\w.]+", lambda match: written[match.group()], rest)
            written[name] = f"<{rest[:60]} {hash(rest)}>"
            digests.append(written[name])
    return sorted(digests)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ["two_linears", "tied_embedding", "blocks_2", "blocks_3"])
def test_graphs_are_those_of_training(name, fake_group, tmp_path):
    captured = capture_step(MODELS[name](), [example_batch(name)], rules=_rules(name), loss=_mean_square)
    model = shard_units(MODELS[name](), fake_group(2))

    class Step(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _mean_square(model(x))

    torch._dynamo.reset()
    torch.compile(Step(), backend="graphshard", options={"dump": tmp_path})(example_batch(name)).backward()
    for half in ("forward", "backward"):
        context = captured.context.for_backward() if half == "backward" else captured.context
        gm = captured.backward if half == "backward" else captured.forward
        found = _computation(graph_text(gm, mesh=context.mesh, parameters=context.parameters))
        trained = _computation((tmp_path / f"graph0.{half}.0-partitioned.txt").read_text())
        assert found == trained
        assert num_targets(gm, UNSHARD if half == "forward" else REDUCE_GRAD) > 0


class _OneInput(llama_model.Llama):
    def forward(self, tokens):
        return super().forward(tokens, tokens)


def test_placed_graphs_are_those_of_training(fake_group, tmp_path):
    """`parallelize` and `fully_shard` on ranks; the ready plan that cuts values along the sequence too."""
    config = llama_model.LlamaConfig(num_layers=1, width=16, hidden=24, num_heads=4, num_kv_heads=2, vocabulary=12)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    rules = ShardingRules(mesh={"shard": 2, "tp": 2}, units=["layers.*"], placements="llama-sequence")
    captured = capture_step(_OneInput(config), [tokens], rules=rules, needs_loss=True)
    fake_group(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = graphshard.parallelize(_OneInput(config), mesh["tp"], "llama-sequence", src_data_rank=None)
    for unit in (*model.layers, model):
        graphshard.fully_shard(unit, mesh=mesh["shard"])
    torch._dynamo.reset()
    with interpreted_halves():
        torch.compile(model, backend="graphshard", options={"dump": tmp_path})(tokens).backward()
    for half in ("forward", "backward"):
        context = captured.context.for_backward() if half == "backward" else captured.context
        text = graph_text(getattr(captured, half), mesh=context.mesh, parameters=context.parameters)
        trained = _computation((tmp_path / f"graph0.{half}.0-partitioned.txt").read_text())
        assert _computation(text) == trained, half
        assert "axis=tp" in text
    assert {each for each in captured.reshards.values()} == {
        "Partial(sum) -> Shard(1)", "Shard(1) -> Replicate", "Partial(sum) -> Replicate", "Partial(max) -> Replicate"
    }  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", list(UNITS))
def test_numbers_are_those_of_the_unsharded_model(name, num_ranks):
    model = MODELS[name]().double()
    batch = example_batch(name, dtype=torch.float64)
    captured = capture_step(model, [batch], rules=_rules(name, mesh={"shard": num_ranks}))
    inputs, expected = step_inputs(name, num_ranks)
    found = run_joint(captured.joint, captured.context, inputs)
    assert_same(found, expected)
    num_trained = sum(param.requires_grad for param in model.parameters())
    assert_all_gradients(found, captured.context, num_trained)


def test_a_brief_capture_has_the_same_graphs_and_no_texts():
    whole, brief = (
        capture_step(
            MODELS["blocks_2"](),
            [example_batch("blocks_2")],
            rules=_rules("blocks_2"),
            loss=_mean_square,
            is_brief=is_brief,
        )
        for is_brief in (False, True)
    )
    assert whole.text and whole.records and not brief.text and not brief.records
    for half in ("joint", "forward", "backward"):
        texts = [
            graph_text(getattr(one, half), mesh=one.context.mesh, parameters=one.context.parameters)
            for one in (whole, brief)
        ]
        assert texts[0] == texts[1]


class _WithIdleParts(nn.Module):
    """A parameter and a buffer that nothing reads, one buffer under two names, dropout, a number."""

    def __init__(self):
        super().__init__()
        self.linear, self.idle = nn.Linear(4, 4), nn.Linear(1000, 1000)
        self.register_buffer("unread", torch.ones(7000))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("again", self.scale)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, factor):
        return (self.dropout(self.linear(x)) * self.scale * self.again * factor).square().mean()


def test_what_nothing_reads_is_no_input_and_numbers_are_constants():
    for factor in (0.5, 0.25):
        captured = capture_step(
            _WithIdleParts(), [torch.ones(8, 4), factor], rules=ShardingRules(mesh={"shard": 4})
        )
        shapes = [
            tuple(node.meta["val"].shape)
            for node in captured.forward.graph.find_nodes(op="placeholder")
            if isinstance(node.meta.get("val"), Tensor) and captured.context.binding(node.name) is None
        ]
        assert shapes.count((4,)) <= 1 and (7000,) not in shapes and (1000, 1000) not in shapes
        assert f", {factor})" in graph_text(captured.joint)


def test_model_and_inputs_are_left_alone():
    model = MODELS["two_linears"]()
    before = copy.deepcopy(model.state_dict())
    capture_step(model, [example_batch("two_linears")], rules=_rules("two_linears"), loss=_mean_square)
    assert type(model) is MODELS["two_linears"] and all(
        type(param) is nn.Parameter for param in model.parameters()
    )
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def _bindings(captured: CapturedStep) -> dict[str, str]:
    return {binding.name: binding.unit for binding in captured.context.parameters}


def test_units_are_the_innermost_modules_that_match():
    rules = ShardingRules(mesh={"shard": 4}, units=["blocks.*", "blocks.*.up"])
    with torch.device("meta"):
        captured = capture_step(MODELS["blocks_2"](), [torch.empty(2, 6)], rules=rules, loss=_mean_square)
    assert _bindings(captured) == {
        "enter.weight": "root", "enter.bias": "root",
        **{
            f"blocks.{index}.{name}": f"blocks.{index}.up" if name.startswith("up") else f"blocks.{index}"
            for index in range(2)
            for name in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
        },
        "leave.weight": "root", "leave.bias": "root",
    }  # fmt: skip


def test_world_size_does_not_change_the_graph():
    """4,096 ranks: the same nodes as 8, with smaller shards."""
    small, large = (
        capture_step(
            MODELS["two_linears"](), [example_batch("two_linears")], rules=_rules("two_linears", mesh=mesh)
        )
        for mesh in ({"shard": 8}, {"shard": 4096})
    )
    targets = [
        [node.target for node in each.joint.graph.nodes if node.op == "call_function"]
        for each in (small, large)
    ]
    assert targets[0] == targets[1]
    assert {binding.group_size for binding in large.context.parameters} == {4096}


def test_dtypes_of_a_policy():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rules = _rules("two_linears", mp_policy=policy)
    captured = capture_step(
        MODELS["two_linears"](), [example_batch("two_linears")], rules=rules, loss=_mean_square
    )
    for node in captured.joint.graph.find_nodes(op="call_function", target=UNSHARD):
        assert UnshardCall(*node.args).shard.meta["val"].dtype == torch.float32
        assert node.meta["val"].dtype == torch.bfloat16
    for node in captured.joint.graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        call = ReduceGradCall(*node.args)
        assert call.grad.meta["val"].dtype == torch.bfloat16 and call.reduce_dtype == torch.float32
        assert node.meta["val"].dtype == torch.float32
    products = captured.joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert {node.meta["val"].dtype for node in products} == {torch.bfloat16}


def test_hybrid_mesh():
    rules = _rules("two_linears", mesh={"replicate": 2, "shard": 4})
    captured = capture_step(MODELS["two_linears"](), [example_batch("two_linears")], rules=rules)
    assert [(axis.label, axis.size) for axis in captured.context.mesh.axes] == [
        ("replicate", 2),
        ("shard", 4),
    ]
    run_pass(LowerShards(), captured.backward, captured.context.for_backward())
    assert num_targets(captured.backward, ALL_REDUCE) == 4


class _WithLogits(nn.Module):
    """Returns its loss among others, one of which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.linear(x)
        return {"loss": logits.square().mean(), "logits": logits, "best": logits.argmax(-1), "again": logits}


@pytest.mark.parametrize(
    ("loss", "results"),
    [
        (lambda output: output["loss"], [(), (8, 3)]),
        (None, [(), (8, 3)]),
        (lambda output: output["loss"] * 2, [()]),
        (lambda output: output["logits"].square().mean(), [()]),
    ],
    ids=["returned", "found", "scaled", "computed"],
)
def test_results_beside_a_loss_that_the_model_returns_have_gradients(loss, results):
    captured = capture_step(
        _WithLogits(), [torch.ones(8, 4)], rules=ShardingRules(mesh={"shard": 2}), loss=loss, needs_loss=True
    )
    found = output_values(captured.forward.graph)[: captured.num_results]
    assert [tuple(node.meta["val"].shape) for node in found] == results
    inputs = captured.backward.graph.find_nodes(op="placeholder")
    tangents = [node.meta["val"] for node in inputs if node.name.startswith("tangents_")]
    assert [tuple(tangent.shape) for tangent in tangents] == results


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (torch.tensor(1.0), 1.0),
        ({"loss": torch.tensor(2.0), "aux": torch.tensor(3.0)}, 2.0),
        (SimpleNamespace(loss=torch.tensor(4.0)), 4.0),
        ((torch.ones(3), torch.tensor(5.0), torch.tensor(6)), 5.0),
        ((torch.tensor(5.0), torch.tensor(6.0)), None),
        ({"logits": torch.ones(3)}, None),
    ],
    ids=["itself", "entry", "attribute", "only scalar", "two scalars", "none"],
)
def test_the_loss_in_an_output(output, found):
    loss = loss_in(output)
    assert (None if loss is None else loss.item()) == found


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda output: output["logits"], r"what loss=<function.*> returns is no loss: f32\[8, 3\];"),
        (lambda output: (output["loss"], output["logits"]), r"returns is no loss: f32\[\], f32\[8, 3\]; it must"),
    ],
)
def test_what_is_picked_of_several_results_must_be_a_loss(loss, said):
    with pytest.raises(CaptureError, match=said):
        capture_step(
            _WithLogits(), [torch.ones(8, 4)], rules=ShardingRules(mesh={"shard": 2}), loss=loss, needs_loss=True
        )


@pytest.mark.parametrize(("reshard", "num_gathers"), [(None, 0), (True, 1), (False, 0)])
def test_reshard_after_forward(reshard, num_gathers):
    """Only the second layer's weight is read by the backward."""
    rules = ShardingRules(mesh={"shard": 2}, reshard_after_forward=reshard)
    captured = capture_step(MODELS["two_linears"](), [example_batch("two_linears")], rules=rules)
    run_pass(LowerShards(), captured.backward, captured.context.for_backward())
    assert num_targets(captured.backward, ALL_GATHER) == num_gathers


def _saved_bytes(captured: CapturedStep) -> int:
    """Of the values that are handed to the backward: neither inputs nor the loss."""
    _, *saved = output_values(captured.forward.graph)
    values = [node.meta["val"] for node in saved if isinstance(node, fx.Node) and node.op != "placeholder"]
    return sum(value.numel() * value.element_size() for value in values)


def test_checkpointed_layers_save_less_and_gather_as_often():
    found = {}
    for is_checkpointed in (False, True):
        config = llama_model.LlamaConfig(
            num_layers=2,
            width=16,
            hidden=32,
            num_heads=4,
            num_kv_heads=2,
            vocabulary=11,
            checkpointed=is_checkpointed,
        )
        model, args, kwargs = llama_model.on_meta(config, 2, 8)
        found[is_checkpointed] = capture_step(
            model, args, kwargs, rules=ShardingRules(mesh={"shard": 4}, units=["layers.*"])
        )
    plain, checkpointed = found[False], found[True]
    assert 0 < _saved_bytes(checkpointed) < 0.5 * _saved_bytes(plain)
    weights = {
        UnshardCall(*node.args).name
        for node in checkpointed.backward.graph.find_nodes(op="call_function", target=UNSHARD)
    }
    assert len(weights) == num_targets(checkpointed.backward, UNSHARD) == 2 * 9


def test_patterns_that_match_nothing_are_listed():
    rules = ShardingRules(mesh={"shard": 2}, units=["first", "layers.*", "blocks"])
    with pytest.raises(
        ShardingError, match=r"no module matches 'layers\.\*', 'blocks'; modules are first, second"
    ):
        capture_step(MODELS["two_linears"](), [example_batch("two_linears")], rules=rules)


@pytest.mark.parametrize("mesh", [{}, {"data": 2}, {"shard": 2, "replicate": 2}, {"replicate": 2}])
def test_mesh_of_other_axes_is_refused(mesh):
    with pytest.raises(ShardingError, match="write shard=N, or replicate=M and then shard=N"):
        ShardingRules(mesh=mesh)


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_mesh_of_no_ranks_is_refused(size):
    with pytest.raises(ShardingError, match=f"shard={size!r} must be a whole number"):
        ShardingRules(mesh={"shard": size})


class _Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        return self.layer(x).sum()


class _Branches(_Breaks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x.sum() if x.max() > 0 else x.mean()


@pytest.mark.parametrize("model", [_Breaks, _Branches])
def test_graph_break_shows_the_line(model):
    with pytest.raises(CaptureError, match=r"cannot be captured as one graph") as caught:
        capture_step(model(), [torch.ones(2, 3)], rules=ShardingRules(mesh={"shard": 2}))
    assert "test_capture_step.py" in str(caught.value) and "in forward" in str(caught.value)


class _HoldsATensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = torch.ones(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


_TARGET = torch.ones(2, 3)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # on Dynamo's way to its error
@pytest.mark.parametrize(
    ("model", "loss"),
    [(_HoldsATensor(), torch.sum), (nn.Linear(3, 3), lambda output: (output - _TARGET).sum())],
    ids=["model", "loss"],
)
def test_a_tensor_from_elsewhere_is_refused(model, loss):
    with pytest.raises(CaptureError, match=r"no parameter, no buffer and no input: size=\(2, 3\); register it"):
        capture_step(model, [torch.ones(2, 3)], rules=ShardingRules(mesh={"shard": 2}), loss=loss)


def test_a_loss_with_parameters_is_refused():
    loss = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    with pytest.raises(CaptureError, match=r"parameters of its own \(0\.weight, 0\.bias\), which .* part of the model"):
        capture_step(nn.Linear(3, 3), [torch.ones(2, 3)], rules=ShardingRules(mesh={"shard": 2}), loss=loss)


def test_a_loss_that_cannot_be_called_is_refused():
    with pytest.raises(OptionTypeError, match="loss=3 must be a function that turns the model's output into a scalar"):
        capture_step(nn.Linear(3, 3), [torch.ones(2, 3)], rules=ShardingRules(mesh={"shard": 2}), loss=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": 8}, "mesh=8 must be sizes of axes by name"),
        ({"units": [3]}, r"units=\[3\] must be a list of patterns of module paths"),
        ({"units": "layers"}, "units='layers' must be a list"),
        ({"mp_policy": "bf16"}, "mp_policy='bf16' must be a MixedPrecisionPolicy"),
    ],
)
def test_rules_of_other_types_are_refused(changes, message):
    with pytest.raises(OptionTypeError, match=message):
        ShardingRules(**{"mesh": {"shard": 2}, **changes})


def test_a_number_of_ranks_for_reshard_after_forward_is_refused():
    with pytest.raises(ShardingError, match="reshard_after_forward=4 must be True, False or None"):
        ShardingRules(mesh={"shard": 8}, reshard_after_forward=4)


def test_capturing_without_gradients_is_capturing_all_the_same():
    rules = ShardingRules(mesh={"shard": 2})
    model, batch = torch.nn.Linear(4, 4), torch.ones(2, 4)
    texts = []
    for has_grad in (True, False):
        with torch.set_grad_enabled(has_grad):
            step = capture_step(model, (batch,), rules=rules, loss=torch.sum)
        texts.append(graph_text(step.joint, mesh=step.context.mesh, parameters=step.context.parameters))
    assert texts[0] == texts[1]
