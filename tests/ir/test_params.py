"""Shards are laid out as `torch.chunk` lays them out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshard.ir.params import (
    ParameterBinding,
    Scaling,
    gradient_scaling,
    padded_rows,
    padded_shape,
    shard_shape,
)

SHAPES = st.lists(st.integers(0, 20), min_size=1, max_size=3)


@given(shape=SHAPES, num_ranks=st.integers(1, 9), data=st.data())
def test_shards_are_torch_chunks(shape, num_ranks, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    chunks = list(torch.empty(shape).chunk(num_ranks, dim))
    empty = [size if index != dim else 0 for index, size in enumerate(shape)]
    expected = [list(chunk.shape) for chunk in chunks] + [empty] * (num_ranks - len(chunks))
    assert [shard_shape(shape, dim, num_ranks, rank) for rank in range(num_ranks)] == expected


@given(shape=SHAPES, num_ranks=st.integers(1, 9), data=st.data())
def test_padded_shape_is_the_largest_shard(shape, num_ranks, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    assert padded_shape(shape, dim, num_ranks) == shard_shape(shape, dim, num_ranks, 0)
    assert padded_shape(shape, dim, num_ranks)[dim] == padded_rows(shape[dim], num_ranks)


@given(num_rows=st.integers(0, 10_000), num_ranks=st.integers(1, 1_000))
def test_padded_rows_is_the_ceiling(num_rows, num_ranks):
    rows = padded_rows(num_rows, num_ranks)
    assert rows * num_ranks >= num_rows > (rows - 1) * num_ranks


def test_five_rows_over_four_ranks():
    assert [shard_shape([5, 3], 0, 4, rank)[0] for rank in range(4)] == [2, 2, 1, 0]


def test_arguments_are_not_changed():
    shape = [5, 3]
    padded_shape(shape, 0, 4)
    shard_shape(shape, 0, 4, 3)
    assert shape == [5, 3]


def test_numel_counts_the_full_parameter():
    binding = ParameterBinding(
        placeholder="primals_1", position=0, name="w", unit="root", shape=(5, 3, 2), dim=0, axis="shard",
        group_size=4, reshard=True,
    )  # fmt: skip
    assert binding.numel == math.prod(binding.shape) == 30


@pytest.mark.parametrize(
    ("num_ranks", "before", "after"),
    [(2, 2, 1), (3, 2, 1.5), (4, 2, 2), (5, 2, 2.5), (6, 4, 1.5), (8, 4, 2), (18, 4, 4.5), (128, 16, 8)],
)
def test_float16_is_divided_in_two_steps(num_ranks, before, after):
    """The divisors of FSDP2: a sum overflows early, a division up front underflows early."""
    scaling = gradient_scaling(torch.float16, num_ranks, None, False)
    assert scaling.op == "sum"
    assert (1 / scaling.before, 1 / scaling.after) == pytest.approx((before, after))


@given(num_ranks=st.integers(1, 4096))
def test_the_two_steps_divide_by_the_number_of_ranks(num_ranks):
    scaling = gradient_scaling(torch.float16, num_ranks, None, False)
    assert scaling.before * scaling.after == pytest.approx(1 / num_ranks)
    assert math.log2(scaling.before).is_integer()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("num_ranks", "divide_factor", "force_sum", "expected"),
    [
        (4, None, False, Scaling(1.0, "avg", 1.0)),
        (4, 4.0, False, Scaling(1.0, "avg", 1.0)),
        (4, None, True, Scaling(1.0, "sum", 0.25)),
        (4, 5.0, False, Scaling(1.0, "sum", 0.2)),
        (4, 1.0, True, Scaling(1.0, "sum", 1.0)),
        (1, None, False, Scaling(1.0, "sum", 1.0)),
        (1, 2.0, False, Scaling(1.0, "sum", 0.5)),
    ],
    ids=["mean", "same factor", "forced sum", "factor", "plain sum", "one rank", "one rank, factor"],
)
def test_other_dtypes_are_averaged_or_divided_once(dtype, num_ranks, divide_factor, force_sum, expected):
    assert gradient_scaling(dtype, num_ranks, divide_factor, force_sum) == expected


def test_a_factor_of_float16_is_split_too():
    scaling = gradient_scaling(torch.float16, 2, 8.0, True)
    assert scaling == Scaling(0.25, "sum", 0.5)
