"""``--hf``: a configuration of Hugging Face transformers as the model, without a factory and without a network."""

import json
import sys

import pytest
import torch
from support.cost_cards import ROUND_CARD

from graphshard.cli.hf_model import HfFactory
from graphshard.cli.main import main
from graphshard.errors import UsageError

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "broken.json").write_text("{")
    ROUND_CARD.save(tmp_path / "round.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_inspect_and_sweep_take_a_configuration(here, capsys):
    rest = ["--hardware", "round.json", "--unit", "model.layers.*", "--sequence", "16"]
    arguments = ["--hf", "config.json", "--batch", "3", "--mesh", "shard=2", *rest, "--json", "out.json"]
    assert main(["inspect", *arguments]) == 0
    data = json.loads((here / "out.json").read_text())
    assert data["model"]["name"] == "LlamaForCausalLM" and data["throughput"]["tokens"] == 3 * 16
    assert {one["name"] for one in data["model"]["units"]} == {"root", "model.layers.0", "model.layers.1"}
    meshes = ["--meshes", "shard=4; replicate=2,shard=2", "--batch", "3", "--processes", "1"]
    assert main(["sweep", "--hf", ".", *meshes, *rest, "--json", "sweep.json"]) == 0
    points = json.loads((here / "sweep.json").read_text())["points"]
    assert [point["mesh"] for point in points] == [{"shard": 4}, {"replicate": 2, "shard": 2}]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("config", "name", "length"),
    [("gpt2", "GPT2LMHeadModel", 1024), ("bert", "BertForMaskedLM", 512), ("t5", "T5ForConditionalGeneration", 1024)],
)
def test_the_model_of_a_model_type_computes_a_loss(here, config, name, length):
    model, args, kwargs = HfFactory(config, None)(2)
    assert type(model).__name__ == name and args == ()
    assert {what: tuple(value.shape) for what, value in kwargs.items()} == dict.fromkeys(
        ("input_ids", "labels"), (2, length)
    )
    assert all(param.is_meta for param in model.parameters())


def test_architectures_of_the_file_come_first(here):
    named = TINY | {"architectures": ["LlamaModel", "LlamaForCausalLM"]}
    (here / "named.json").write_text(json.dumps(named))
    model, _, _ = HfFactory("named.json", 8)(1)
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.use_cache is False


@pytest.mark.parametrize("architectures", [[], ["LlamaForCausalLM"]])
def test_weights_are_float32_whatever_the_file_says(here, architectures):
    named = TINY | {"architectures": architectures, "dtype": "bfloat16"}
    (here / "half.json").write_text(json.dumps(named))
    model, _, _ = HfFactory("half.json", 8)(1)
    assert {param.dtype for param in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("config", "sequence", "complaint"),
    [
        ("broken.json", None, "--hf broken.json cannot be read: "),
        ("nobody/nothing", None, "no such file or folder, .* nothing is downloaded: give the path of a config.json"),
        ("vit", None, "no language model of transformers has a ViTConfig; write a factory"),
        ("config.json", 65, "--sequence 65: the model of --hf config.json takes 64 positions at most"),
    ],
)
def test_what_cannot_be_read_says_so(here, config, sequence, complaint):
    with pytest.raises(UsageError, match=complaint):
        HfFactory(config, sequence)(1)


def test_a_configuration_that_makes_no_model(here):
    (here / "odd.json").write_text(json.dumps(TINY | {"pad_token_id": 64}))
    with pytest.raises(UsageError, match=r"--hf odd\.json: transformers cannot make the model .* Padding_idx"):
        HfFactory("odd.json", 8)(1)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="--hf llama: transformers is not installed; pip install transformers"):
        HfFactory("llama", None)(1)
