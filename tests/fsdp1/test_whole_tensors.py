"""Full state dicts and ``summon_full_params`` gather at once what the ranks cut evenly."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn

import graphshard
from graphshard.fsdp1 import whole_tensors


@pytest.mark.parametrize(("rows", "num_gathers", "num_alone"), [(4, 1, 0), (3, 0, 4)])
@pytest.mark.parametrize("how", ["state_dict", "summon_full_params"])
def test_even_parameters_of_a_wrapper_travel_together(fake_group, how, rows, num_gathers, num_alone):
    """Four parameters; three rows are cut unevenly over two ranks, and each of these is gathered by itself."""
    fake_group(2)
    module = nn.Sequential(nn.Linear(3, rows), nn.Linear(rows, rows))
    model = graphshard.FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    together, alone = whole_tensors.gather_single, whole_tensors.whole_tensor
    with (
        patch.object(whole_tensors, "gather_single", side_effect=together) as gathers,
        patch.object(whole_tensors, "whole_tensor", side_effect=alone) as singles,
    ):
        if how == "state_dict":
            shown = model.state_dict()
        else:
            with graphshard.FullyShardedDataParallel.summon_full_params(model):
                shown = dict(module.named_parameters())
    assert [value.shape for value in shown.values()] == [(rows, 3), (rows,), (rows, rows), (rows,)]
    assert (gathers.call_count, singles.call_count) == (num_gathers, num_alone)
