"""Ready plans: the layers that they find in models of known code, and what they refuse."""

import pytest
import torch
from support.llama_example import llama_model
from support.parallel_models import LLAMA, PARALLEL_MODELS, Vit
from support.ready_plan_models import NanoGpt, TimmVit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import graphshard
from graphshard.errors import ShardingError
from graphshard.parallel import READY_PLANS, state_placements

WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


def stated(model: nn.Module, plan: str):
    return state_placements(model, plan).parameters


def test_llama_of_meta_is_the_plan_by_hand():
    model = PARALLEL_MODELS["llama"].build()
    assert stated(model, "llama") == state_placements(model, LLAMA).parameters


def test_llama_along_the_sequence_is_the_plan_by_hand():
    given = PARALLEL_MODELS["llama along the sequence"]
    model = given.build()
    by_hand = state_placements(model, given.placements, **given.held)
    ready = state_placements(model, "llama-sequence")
    assert ready.parameters == by_hand.parameters
    norms = {"layers.0.attention_norm": Shard(1), "layers.0.ffn_norm": Shard(1)}  # their gradients are cut at once
    assert ready.inputs == by_hand.inputs and ready.outputs == by_hand.outputs | norms


def test_llama_of_the_example_is_the_plan_of_its_script():
    (model, _, _) = llama_model.on_meta(
        llama_model.LlamaConfig(num_layers=2, width=64, hidden=128, num_heads=4, vocabulary=80), 1, 8
    )
    found = stated(model, "llama")
    cut_along = {name.split(".", 2)[-1]: placement.dim for name, placement in found.items()}
    assert cut_along == {
        "weight": 0,  # of the embedding and of the output layer
        "attention.query.weight": 0, "attention.key.weight": 0, "attention.value.weight": 0,
        "attention.output.weight": 1, "feed_forward.gate.weight": 0, "feed_forward.up.weight": 0,
        "feed_forward.down.weight": 1,
    }  # fmt: skip
    assert {"tokens.weight", "output.weight", "layers.1.attention.output.weight"} <= set(found)


def test_llama_of_hugging_face_is_its_own_plan():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=12,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    found = stated(model, "llama")
    own = {name: each for name, each in model.tp_plan.items() if "layers" in name}
    in_layers = {name: each for name, each in found.items() if "layers" in name}
    assert in_layers == state_placements(model, own).parameters
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == ROWS
    along = state_placements(model, "llama-sequence")
    assert along.outputs["model.layers.1.self_attn"] == along.outputs["model.norm"] == Shard(1)
    assert along.inputs["model.layers.1.mlp"] == along.inputs["lm_head"] == WHOLE


def test_gpt_of_nanogpt_and_of_hugging_face():
    """The layers of transformers' GPT-2 hold transposed weights."""
    transformers = pytest.importorskip("transformers")
    assert stated(NanoGpt(), "gpt") == {
        "transformer.wte.weight": ROWS,
        "lm_head.weight": ROWS,  # tied
        "transformer.h.0.attn.c_attn.weight": ROWS,
        "transformer.h.0.attn.c_proj.weight": COLUMNS,
        "transformer.h.0.attn.c_proj.bias": WHOLE,
        "transformer.h.0.mlp.c_fc.weight": ROWS,
        "transformer.h.0.mlp.c_fc.bias": ROWS,
        "transformer.h.0.mlp.c_proj.weight": COLUMNS,
        "transformer.h.0.mlp.c_proj.bias": WHOLE,
    }
    with torch.device("meta"):
        turned = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=12, n_head=2, vocab_size=9))
    found = stated(turned, "gpt")
    assert found["transformer.h.0.attn.c_attn.weight"] == COLUMNS
    assert found["transformer.h.0.attn.c_attn.bias"] == ROWS
    assert found["transformer.h.0.mlp.c_proj.weight"] == ROWS
    assert found["transformer.wte.weight"] == ROWS


def test_vit_of_timm_of_torch_and_of_the_tests():
    assert {name: each for name, each in stated(TimmVit(), "vit").items() if "attn" in name} == {
        "blocks.0.attn.qkv.weight": ROWS,
        "blocks.0.attn.proj.weight": COLUMNS,
        "blocks.0.attn.proj.bias": WHOLE,
    }
    by_hand = state_placements(Vit(), PARALLEL_MODELS["vit"].placements).parameters
    found = {name: each for name, each in stated(Vit(), "vit").items() if each != WHOLE}
    assert found == by_hand
    layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])
    assert stated(layers, "vit") == {
        "0.self_attn.in_proj_weight": ROWS,
        "0.self_attn.in_proj_bias": ROWS,
        "0.self_attn.out_proj.weight": COLUMNS,
        "0.self_attn.out_proj.bias": WHOLE,
        "0.linear1.weight": ROWS,
        "0.linear1.bias": ROWS,
        "0.linear2.weight": COLUMNS,
        "0.linear2.bias": WHOLE,
    }


def test_a_model_that_a_plan_does_not_fit_is_refused(fake_group):
    fake_group(2)
    tp = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(ShardingError) as error:
        graphshard.parallelize(NanoGpt(), tp, "llama")
    text = str(error.value)
    assert "'llama' does not fit NanoGpt" in text and "projections of attention to heads (attention.w[qkv], " in text
    assert "contracting layers of the MLP (feed_forward.w2, " in text and "transformer.h.0.attn.c_attn" in text
    with pytest.raises(ShardingError, match="no expanding layers of the MLP"):  # attention alone is not the plan
        model = PARALLEL_MODELS["llama"].build()
        for layer in model.layers:
            layer.feed_forward = nn.Identity()
        graphshard.parallelize(model, tp, "llama")
    with pytest.raises(ShardingError, match=r"no attention and MLP \(attention, attn"):
        graphshard.parallelize(PARALLEL_MODELS["gpt"].build(), tp, "gpt-sequence")
    with pytest.raises(ShardingError, match=f"no ready plan 'bert'; there are {', '.join(READY_PLANS)}"):
        graphshard.parallelize(NanoGpt(), tp, "bert")
    assert not hasattr(NanoGpt().lm_head.weight, "placements")
