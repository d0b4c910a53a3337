"""Plans of torch and of Hugging Face, read as placements."""

import pytest
import torch
from support.parallel_models import ALONG_SEQUENCE_BY_HAND, PARALLEL_MODELS, Llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import graphshard
from graphshard.backend import JOINT_PIPELINE
from graphshard.errors import ShardingError
from graphshard.ir import RESHARD, ReshardCall
from graphshard.parallel.styles import read_styles
from graphshard.passes import PropagateSharding
from graphshard.pipeline import Pipeline
from graphshard.testing import capture_graphs


@pytest.fixture
def mesh(fake_group):
    fake_group(4)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _placements(model):
    return {name: param.placements for name, param in model.named_parameters()}


def test_a_plan_of_torch_places_parameters_as_it_says(mesh):
    by_style, by_name = Llama(), Llama()
    graphshard.parallelize(by_style, mesh["tp"], ALONG_SEQUENCE_BY_HAND, src_data_rank=None)
    graphshard.parallelize(by_name, mesh["tp"], PARALLEL_MODELS["llama"].placements, src_data_rank=None)
    assert _placements(by_style) == _placements(by_name)


def test_a_plan_of_torch_gathers_and_scatters_along_the_sequence(mesh):
    """One gather in front of attention and feed-forward, one reduce-scatter behind each, and for the embedding."""
    model = Llama(num_layers=1)
    graphshard.parallelize(model, mesh["tp"], ALONG_SEQUENCE_BY_HAND, src_data_rank=None)
    graphshard.fully_shard(model, mesh=mesh["dp"])
    batch = PARALLEL_MODELS["llama"].draw(torch.Generator())
    with torch.no_grad():
        graphs = capture_graphs(model, *batch, pipeline=Pipeline(PropagateSharding(), *JOINT_PIPELINE.passes))
    calls = [ReshardCall(*node.args) for node in graphs.joint.graph.find_nodes(op="call_function", target=RESHARD)]
    wide = [(call.src, call.dst) for call in calls if list(call.shape) == [2, 8, 16]]
    assert wide.count(("Partial(sum)", "Shard(1)")) == 3
    assert wide.count(("Shard(1)", "Replicate")) == 3  # attention, feed-forward, output
    assert not [pair for pair in wide if pair == ("Partial(sum)", "Replicate")]


def test_words_of_hugging_face(mesh):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=12
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    graphshard.parallelize(model, mesh["tp"], model.tp_plan, src_data_rank=None)
    layer = model.model.layers[1]
    assert layer.self_attn.o_proj.weight.placements == layer.mlp.down_proj.weight.placements == (Shard(1),)
    assert layer.self_attn.q_proj.weight.placements == model.lm_head.weight.placements == (Shard(0),)
    assert model.model.embed_tokens.weight.placements == (Shard(0),)


class Pair(nn.Module):
    def forward(self, x, y, *, z):
        return x, y


def test_styles_of_inputs_and_outputs():
    problems: list[str] = []
    styles = {
        "a": PrepareModuleInputOutput(
            input_layouts=(Shard(1), None),
            desired_input_layouts=(Replicate(), None),
            input_kwarg_layouts={"z": Replicate()},
            desired_input_kwarg_layouts={"z": Shard(0)},
            output_layouts=Shard(0),
            desired_output_layouts=Shard(1),
        ),
        "b": PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
        "c": RowwiseParallel(),
        "d": ColwiseParallel(output_layouts=Replicate()),
    }
    modules = {"a": Pair(), "b": Pair(), "c": nn.Linear(2, 2), "d": nn.Embedding(2, 2)}
    stated = read_styles(styles, modules, problems)
    assert not problems
    assert stated.inputs == {"a": {"x": Replicate(), "z": Shard(0)}}
    assert stated.outputs == {"a": Shard(1), "b": Replicate(), "d": Replicate()}
    assert stated.parameters == {"c.weight": Shard(1), "c.bias": Replicate(), "d.weight": Shard(1)}


class Takes(nn.Module):
    def forward(self):
        return torch.ones(2)


def test_refuses_layouts_of_arguments_that_do_not_exist(mesh):
    """All in one error; nothing is placed."""
    model = nn.ModuleDict({"linear": nn.Linear(2, 2), "source": Takes(), "pair": Pair()})
    layouts = (Replicate(), Replicate())
    plan = {
        "linear": PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts),
        "source": SequenceParallel(),
        "pair": PrepareModuleInput(
            input_kwarg_layouts={"mask": Replicate()}, desired_input_kwarg_layouts={"mask": Shard(0)}
        ),
    }
    with pytest.raises(ShardingError) as error:
        graphshard.parallelize(model, mesh["tp"], plan, inputs={"source": Shard(0)})
    text = str(error.value)
    for part in (
        "module 'linear' (Linear): PrepareModuleInput has layouts for 2 arguments, but its forward takes input",
        "module 'source' (Takes): SequenceParallel has layouts for 1 arguments, but its forward takes nothing",
        "inputs: module 'pair' has no argument 'mask'; it takes x, y, z",
        "inputs: module 'source' has no argument at all; it takes nothing",
    ):
        assert part in text, part
    assert type(model["linear"].weight) is nn.Parameter


def test_refuses_styles_that_do_not_fit(mesh):
    model = Llama()
    with pytest.raises(ShardingError) as error:
        graphshard.parallelize(model, mesh["tp"], {"norm": ColwiseParallel(), "layers.*.attention": "local_colwise"})
    text = str(error.value)
    assert "module 'norm' (RMSNorm): " in text and "'local_colwise' is no style for it; give ColwiseParallel" in text
