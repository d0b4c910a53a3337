"""parallelize: what it states, and one error for all that is wrong. Training is tested on real ranks."""

import copy
import re
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from support.parallel_models import PARALLEL_MODELS, TiedGpt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import graphshard
from graphshard.auto_placements import _sizes
from graphshard.backend import JOINT_PIPELINE
from graphshard.errors import OptionError, ShardingError, StaleOptimizerError
from graphshard.passes import PropagateSharding
from graphshard.pipeline import Pipeline
from graphshard.testing import capture_graphs


@pytest.fixture
def tp(fake_group):
    fake_group(4)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]


def test_every_parameter_is_on_the_axis(tp):
    given = PARALLEL_MODELS["llama"]
    model = given.build()
    assert graphshard.parallelize(model, tp, given.placements, src_data_rank=None) is model
    layer = model.layers[1]
    assert layer.attention.wo.weight.placements == (Shard(1),)
    assert layer.attention_norm.weight.placements == (Replicate(),)
    assert layer.attention.wq.weight.to_local().shape == (8, 16)
    assert all(isinstance(param, DTensor) and param.device_mesh == tp for param in model.parameters())


def test_negative_dims_frozen_and_tied_parameters(tp):
    model = TiedGpt()
    model.body.norm.weight.requires_grad_(False)
    graphshard.parallelize(model, tp, {"body.output.weight": Shard(-2)}, src_data_rank=None)
    assert model.body.output.weight is model.body.tokens.weight
    assert model.body.tokens.weight.placements == (Shard(0),)
    assert not model.body.norm.weight.requires_grad


def test_on_the_meta_device(tp):
    with torch.device("meta"):
        model = nn.Linear(4, 6)
    graphshard.parallelize(model, tp, {"weight": Shard(0)}, src_data_rank=None)
    assert model.weight.is_meta and model.weight.to_local().shape == (3, 4)


def test_one_error_lists_all_that_is_wrong(tp):
    given = PARALLEL_MODELS["llama"]
    model = given.build()
    with pytest.raises(ShardingError) as error:
        graphshard.parallelize(
            model,
            tp,
            {
                "layers.*.attention.wx.weight": Shard(0),
                "layers.*.attention.wq.weight": Shard(0),
                "layers.0.*.wq.weight": Shard(1),
                "norm.weight": Shard(1),
                "output.weight": Partial(),
                "tok_embeddings.weight": [Shard(0), Shard(1)],
                "layers.*.attention.wo.weight": {"tp": Shard(1), "ep": Shard(0)},
            },
            inputs={"layers.*.attention": {"mask": Replicate()}, "blocks.*": Shard(1)},
            outputs={"norm": Partial()},
        )
    text = str(error.value).replace("Partial(reduce_op='sum')", "Partial(sum)").replace("P(sum)", "Partial(sum)")
    problems = text.removeprefix("parallelize: ").split("; ")
    allowed = "must be Shard(dim) or Replicate(), on the one axis of the mesh"
    for start, remedy in (
        ("'layers.*.attention.wx.weight' matches no parameter", ""),
        ("there are tok_embeddings.weight, ", ", ...: correct it or leave it out"),
        (
            "'layers.*.attention.wq.weight' and 'layers.0.*.wq.weight' both match parameter "
            "'layers.0.attention.wq.weight'",
            ": leave one out",
        ),
        ("parameter 'norm.weight' of shape [16] has no dim 1", ": give Shard of a dim that it has, or Replicate()"),
        ("parameter 'output.weight': Partial(sum) ", allowed),
        ("parameter 'tok_embeddings.weight': [Shard(dim=0), Shard(dim=1)] ", allowed),
        ("parameter 'layers.1.attention.wo.weight': {'tp': Shard(dim=1), 'ep': Shard(dim=0)} ", allowed),
        ("inputs: module 'layers.1.attention' has no argument 'mask'", ""),
        ("it takes x, angles", ": name one of these"),
        ("'blocks.*' matches no module", ""),
        ("there are tok_embeddings, layers, ", ", ...: correct it or leave it out"),
        ("outputs: module 'norm': Partial(sum) ", allowed),
    ):
        assert [each for each in problems if each.startswith(start) and each.endswith(remedy)], (start, problems)
    assert not any(isinstance(param, DTensor) for param in model.parameters())


def test_heads_and_widths_that_the_ranks_do_not_divide_are_no_mistakes(fake_group):
    """Three heads and one key head on four ranks: gathered in front of the attention, which each rank computes."""
    fake_group(4)
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    given = PARALLEL_MODELS["llama with three heads"]
    model = graphshard.parallelize(given.build(), mesh["tp"], given.placements, src_data_rank=None)
    graphshard.fully_shard(model, mesh=mesh["dp"])
    with torch.no_grad():
        batch = given.draw(torch.Generator())
        graphs = capture_graphs(model, *batch, pipeline=Pipeline(PropagateSharding(), *JOINT_PIPELINE.passes))
    (attention,) = [node for node in graphs.joint.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert {node.meta["val"].shape[1] for node in attention.all_input_nodes} == {3}
    assert model.layers[0].attention.wq.weight.to_local().shape == (3, 12)


@pytest.mark.parametrize("compiled", [False, True])
def test_values_that_lack_the_dim_are_named(tp, compiled):
    """A dim beyond the last one is none of the first dims."""
    for held, message in (
        ({"inputs": {"0": Shard(2)}}, "inputs: argument 'input' of module '0' of shape [3, 4] has no dim 2: give "),
        ({"outputs": {"": Shard(-3)}}, "outputs: the result of module '' of shape [3, 4] has no dim -3: give "),
    ):
        model = graphshard.parallelize(nn.Sequential(nn.ReLU()), tp, {}, **held)
        step = torch.compile(model, backend="eager") if compiled else model
        with pytest.raises(ShardingError, match=re.escape(message)):
            step(torch.ones(3, 4))


def test_marks_hold_in_models_that_are_compiled_after_an_error(tp):
    """Dynamo leaves out the code that calls hooks for the rest of the process, once a hook has raised."""
    for dim in (5, 0):
        model = graphshard.parallelize(nn.Sequential(nn.ReLU()), tp, {}, outputs={"0": Shard(dim)})
        graphs = []

        def keep(gm, _, graphs=graphs):
            graphs.append(gm)
            return gm.forward

        with pytest.raises(ShardingError) if dim == 5 else nullcontext():
            torch.compile(model, backend=keep)(torch.ones(4, 4))
    assert [gm.code.count("'Shard(0)'") for gm in graphs] == [2]


class Pair(NamedTuple):
    """What a module may return."""

    first: torch.Tensor
    second: torch.Tensor | None


class Packed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return {"first": x.sin(), "second": None} if self.kind is dict else self.kind(x.sin(), None)


@pytest.mark.parametrize("kind", [dict, Pair])
def test_values_in_dicts_and_named_tuples_are_held(tp, kind):
    model = nn.Sequential(Packed(kind))
    graphshard.parallelize(model, tp, {}, outputs={"0": Shard(1)})
    graphs = []

    def keep(gm, _):
        graphs.append(gm)
        return gm

    x = torch.ones(2, 4)
    assert type(model(x)) is kind
    found = torch.compile(model, backend=keep, fullgraph=True)(x)
    assert type(found) is kind
    text = graphs[0].code
    assert text.count("'Replicate', 'Shard(1)'") == text.count("'Shard(1)', 'Replicate'") == 1


def test_refuses_two_placements_of_a_tied_parameter(tp):
    with pytest.raises(ShardingError, match="are one tied parameter"):
        graphshard.parallelize(
            TiedGpt(), tp, {"body.output.weight": Shard(0), "body.tokens.weight": Shard(1)}
        )


def test_refuses_a_model_that_is_placed(tp):
    model = graphshard.parallelize(nn.Linear(4, 4), tp, {"weight": Shard(0)}, src_data_rank=None)
    with pytest.raises(ShardingError, match="call parallelize once on a plain model, before fully_shard"):
        graphshard.parallelize(model, tp, {"weight": Shard(0)})


def test_refuses_a_mesh_that_is_no_named_axis(fake_group):
    fake_group(4)
    for mesh in (init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), init_device_mesh("cpu", (4,))):
        with pytest.raises(ShardingError, match=r"one named axis, such as mesh\['tp'\], .*; 'wight' matches no param"):
            graphshard.parallelize(nn.Linear(4, 4), mesh, {"wight": Shard(0)})


def test_auto_says_what_it_needs(tp, fake_group):
    model = TiedGpt()
    with pytest.raises(OptionError, match=r"chosen by prediction and needs args, hardware: inspect=\{"):
        graphshard.parallelize(model, tp, "auto")
    with pytest.raises(OptionError, match="needs hardware"):
        graphshard.parallelize(model, tp, "auto", inspect={"args": ()})
    with pytest.raises(OptionError, match='"auto" chooses inputs and outputs too'):
        graphshard.parallelize(model, tp, "auto", inputs={"body": Shard(1)})
    with pytest.raises(OptionError, match=r"inspect=... is for placements=\"auto\", not for 'gpt'"):
        graphshard.parallelize(model, tp, "gpt", inspect={})
    with pytest.raises(OptionError, match="choose_placements has no option unit; known: hardware"):
        graphshard.parallelize(model, tp, "auto", inspect={"args": (), "hardware": "h100-sxm", "unit": []})
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    fake_group(8)
    axes = ("pod", "dp", "tp")
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=axes)
    assert list(_sizes(whole, whole["tp"]).items()) == [("replicate", 2), ("shard", 2), ("tp", 2)]
    alone = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    assert _sizes(alone, alone) == {"shard": 1, "tp": 8}
    with pytest.raises(ShardingError, match="with axes pod, dp, tp, ep cannot be read as replicate, shard and tp"):
        many = init_device_mesh("cpu", (2, 2, 2, 1), mesh_dim_names=(*axes, "ep"))
        graphshard.parallelize(model, many["tp"], "auto", inspect={"args": (), "hardware": "h100-sxm"})


def test_placements_on_a_second_axis_are_refused(fake_group):
    fake_group(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "tp2"))
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4, bias=False)})
    graphshard.parallelize(model, mesh["tp"], {"first.*": Shard(0)}, src_data_rank=None)
    with pytest.raises(ShardingError) as error:
        graphshard.parallelize(model, mesh["tp2"], {"second.weight": Shard(1)}, src_data_rank=None)
    assert "parameter(s) 'first.weight', 'first.bias', 'second.weight' have placements on an axis" in str(error.value)
    assert "on one axis of all the ranks that share a batch" in str(error.value)
    assert model["second"].weight.device_mesh == mesh["tp"]
    sharded = graphshard.fully_shard(nn.Linear(4, 4), mesh=mesh["tp"])
    with pytest.raises(ShardingError, match=r"is a DTensor on .* already: call parallelize on a plain model, before"):
        graphshard.parallelize(sharded, mesh["tp2"], {"weight": Shard(0)}, src_data_rank=None)


def test_conversions_before_fully_shard(tp):
    """What is read whole is so after conversions, which torch makes new parameters of, and after a copy."""

    def assign(model: nn.Module) -> None:
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    for change in (nn.Module.double, lambda model: model.to_empty(device="cpu"), copy.deepcopy, assign):
        model = nn.Sequential(nn.Linear(4, 4))
        graphshard.parallelize(model, tp, {"0.weight": Shard(0)}, src_data_rank=None)
        model = change(model) or model
        graphshard.fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"])
        assert tuple(model(torch.ones(2, 4, dtype=model[0].weight.dtype)).shape) == (2, 4)


def test_what_was_set_on_parameters_before(tp):
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.no_weight_decay = True
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda param: None)
    graphshard.parallelize(model, tp, {"0.weight": Shard(0)}, src_data_rank=None)
    assert model[0].weight.no_weight_decay and len(model[0].weight._post_accumulate_grad_hooks) == 1
    handle.remove()
    assert not model[0].weight._post_accumulate_grad_hooks
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StaleOptimizerError, match=r"parallelize: this SGD .* holds 0\.weight, 0\.bias"):
        graphshard.parallelize(model, tp, {"0.weight": Shard(0)}, src_data_rank=None)
    del optimizer
    graphshard.parallelize(model, tp, {"0.weight": Shard(0)}, src_data_rank=None)
