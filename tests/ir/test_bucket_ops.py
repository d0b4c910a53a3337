"""Packing into a bucket and out of it again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.ir.bucket_ops import ADD_ROWS, JOIN_PARTS, PACK, UNPACK, dtypes_text

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(deadline=None)
@given(sizes=SIZES, num_rows=st.integers(1, 4))
def test_unpack_is_the_inverse_of_pack(sizes, num_rows):
    pieces = [torch.randn(num_rows, size) for size in sizes]
    unpacked = UNPACK(PACK(pieces, num_rows), num_rows, sizes)
    assert all(torch.equal(new, old.view(-1)) for new, old in zip(unpacked, pieces, strict=True))
    assert all(new.is_contiguous() for new in unpacked)


@settings(deadline=None)
@given(
    pieces=st.lists(
        st.tuples(
            st.integers(0, 5),
            st.sampled_from([torch.float64, torch.bfloat16, torch.uint8, torch.int8, torch.bool, torch.complex64]),
        ),
        min_size=1,
        max_size=5,
    ),
    num_rows=st.integers(1, 3),
)
def test_pieces_of_several_dtypes_are_sent_as_bytes(pieces, num_rows):
    """At any address: pieces of one byte stand in front of larger ones."""
    dtypes = [dtype for _, dtype in pieces]
    values = [torch.randn(num_rows, size).to(dtype) for size, dtype in pieces]
    bucket = PACK(values, num_rows)
    assert bucket.dtype == (torch.uint8 if len(set(dtypes)) > 1 else dtypes[0])
    sizes = [size * dtype.itemsize // bucket.dtype.itemsize for size, dtype in pieces]
    unpacked = UNPACK(bucket, num_rows, sizes, dtypes_text(dtypes))
    assert [value.dtype for value in unpacked] == dtypes
    assert all(torch.equal(new, old.view(-1)) for new, old in zip(unpacked, values, strict=True))


def test_opcheck_with_several_dtypes():
    pieces = [torch.randn(2, 3), torch.randn(2, 5).bfloat16(), torch.tensor([1, 2], dtype=torch.uint8)]
    torch.library.opcheck(PACK, (pieces, 2))
    torch.library.opcheck(UNPACK, (PACK(pieces, 2), 2, [12, 10, 1], "float32,bfloat16,uint8"))


def test_a_bucket_is_rank_major():
    """A row holds every member's piece for one rank: what a reduce-scatter hands out, a gather collects."""
    weight, bias = torch.arange(8.0).view(4, 2), torch.arange(10.0, 12.0)
    assert PACK([weight, bias], 2).tolist() == [0, 1, 2, 3, 10, 4, 5, 6, 7, 11]
    assert PACK([weight, bias], 1).tolist() == [*range(8), 10, 11]


def test_strided_pieces_are_read_in_row_order():
    piece = torch.arange(6.0).view(2, 3).t()
    assert PACK([piece], 1).tolist() == piece.reshape(-1).tolist()


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("sizes", [[3], [3, 2], [1, 1, 4]], ids=str)
def test_opcheck(sizes, num_rows):
    """Schema (results are no views of the inputs), fake tensors, AOT dispatch."""
    pieces = [torch.randn(num_rows, size) for size in sizes]
    torch.library.opcheck(PACK, (pieces, num_rows))
    torch.library.opcheck(JOIN_PARTS, (pieces, num_rows))
    torch.library.opcheck(UNPACK, (PACK(pieces, num_rows), num_rows, sizes))


def test_parts_of_a_gather_are_joined_rank_by_rank():
    """Each part has a row of every rank; the whole has all of one rank's rows, then the next one's."""
    first, second = torch.tensor([[0], [10]]), torch.tensor([[1, 2], [11, 12]])
    assert JOIN_PARTS([first, second], 2).tolist() == [0, 1, 2, 10, 11, 12]
    assert JOIN_PARTS([first, second], 1).tolist() == [0, 10, 1, 2, 11, 12]


@pytest.mark.parametrize("num_rows", [1, 2])
def test_an_empty_member(num_rows):
    """A parameter without elements has an empty shard on every rank."""
    pieces = [torch.randn(num_rows, 3), torch.empty(0, 4)]
    torch.library.opcheck(UNPACK, (PACK(pieces, num_rows), num_rows, [3, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("shape", [(6,), (6, 4)], ids=str)
def test_rows_are_added(shape, is_mean, dtype):
    bucket = torch.randn(shape).to(dtype)
    torch.library.opcheck(ADD_ROWS, (bucket, 3, is_mean))
    first, second, third = bucket.double().chunk(3)
    exact = (first + second + third) / (3 if is_mean else 1)
    torch.testing.assert_close(ADD_ROWS(bucket, 3, is_mean), exact.to(dtype))
    assert torch.equal(ADD_ROWS(bucket, 1, is_mean), bucket)


def test_rows_are_added_in_their_order():
    """Whatever the position in the bucket: a parameter's gradient does not depend on what it was merged with."""
    bucket = torch.randn(7, 1003)
    total = bucket[0].clone()
    for row in bucket[1:]:
        total += row
    assert torch.equal(ADD_ROWS(bucket.view(-1), 7, False), total)
    zeros = torch.full((4,), -0.0)
    assert torch.signbit(ADD_ROWS(zeros, 2, False)).all()
    assert ADD_ROWS(torch.empty(0, 4), 2, True).shape == (0, 4)
