"""What shards take over from the parameters that they replace."""

import pytest
import torch
from support.toy_models import Transformer

import graphshard


@pytest.mark.filterwarnings("error")
def test_shard_of_a_tied_parameter_is_not_watched_as_a_replaced_one(fake_group):
    """It has two names; the watch over the old parameter was handed over to the shard with the second."""
    mesh = fake_group(1)
    model = Transformer(num_layers=1)
    old = model.tokens.weight
    graphshard.fully_shard(model, mesh=mesh)
    assert model.tokens.weight is model.output.weight
    assert not model.tokens.weight._post_accumulate_grad_hooks and len(old._post_accumulate_grad_hooks) == 1
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
