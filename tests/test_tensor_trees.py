"""Tensors inside whatever a forward takes or returns are cast and moved; the rest stays what it is."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphshard.tensor_trees import cast_tensors, move_tensors

Point = namedtuple("Point", ["x", "label"])


@dataclass
class Output:
    logits: torch.Tensor
    hidden: Any = None


CONTAINERS = {
    "tensor": lambda tensor: tensor,
    "tuple": lambda tensor: (tensor, 1),
    "list": lambda tensor: [tensor, "a"],
    "named tuple": lambda tensor: Point(tensor, "a"),
    "dict": lambda tensor: {"a": tensor, 2: None},
    "ordered dict": lambda tensor: OrderedDict(a=tensor),
    "mapping": lambda tensor: UserDict(a=tensor),
    "dataclass": lambda tensor: Output(tensor, hidden=(tensor,)),
    "nested": lambda tensor: [{"a": (tensor, Output(tensor))}],
}


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Output):
        return _tensors([value.logits, value.hidden])
    items = value.values() if hasattr(value, "values") else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_tensors_in_containers_are_cast(make):
    value = make(torch.ones(2))
    cast = cast_tensors(value, torch.bfloat16)
    assert type(cast) is type(value)
    found = _tensors(cast)
    assert len(found) == len(_tensors(value)) > 0
    assert all(tensor.dtype is torch.bfloat16 for tensor in found)
    assert all(tensor.dtype is torch.float32 for tensor in _tensors(value))


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_tensors_in_containers_are_moved(make):
    moved = move_tensors(make(torch.ones(2)), torch.device("meta"))
    assert _tensors(moved) and all(tensor.is_meta for tensor in _tensors(moved))


def test_what_is_not_a_tensor_stays():
    value = {"a": (1, "b", None), "c": [torch.arange(2)]}
    assert str(cast_tensors(value, torch.bfloat16)) == str(value)
    marker = object()
    assert cast_tensors(marker, torch.bfloat16) is marker
    assert cast_tensors(Output, torch.bfloat16) is Output  # the class itself


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_not_cast_but_moved(dtype):
    tensor = torch.ones(2, dtype=dtype)
    assert cast_tensors(tensor, torch.bfloat16) is tensor
    assert move_tensors(tensor, torch.device("meta")).is_meta


def test_a_tensor_that_fits_is_the_same_object():
    tensor = torch.ones(2)
    output = Output(tensor)
    assert cast_tensors(tensor, torch.float32) is tensor
    assert cast_tensors(output, torch.float32) is output
    assert move_tensors(tensor, torch.device("cpu")) is tensor


def test_gradients_flow_through_a_cast():
    x = torch.ones(2, requires_grad=True)
    (cast,) = cast_tensors((x,), torch.bfloat16)
    cast.sum().backward()
    assert x.grad.dtype is torch.float32 and x.grad.tolist() == [1.0, 1.0]
