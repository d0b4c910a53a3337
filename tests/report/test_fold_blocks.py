"""Repeated blocks of a graph's text are written once, and nothing else is left out."""

import pytest

from graphshard.report.fold_blocks import folded_lines


def _layer(index):
    return [
        f"%mm_{index}: f32[2, 8] = aten.mm(%x_{index}, %w_{index})  # layers.{index}.up",
        f"%relu_{index}: f32[2, 8] = aten.relu(%mm_{index})",
        f"%mm_{index + 100}: f32[2, 4] = aten.mm(%relu_{index}, %v_{index})",
        f"%x_{index + 1}: f32[2, 4] = aten.add(%x_{index}, %mm_{index + 100})",
    ]


def test_equal_blocks_are_written_once():
    first, last = ["%tokens: i64[2] = input"], ["return (%x_5,)"]
    lines = [*first, *(line for index in range(5) for line in _layer(index)), *last]
    more = "# 4 more blocks of 4 lines like the 4 above, but for numbers in names"
    assert list(folded_lines(lines)) == [*first, *_layer(0), more, *last]


def test_two_runs_of_blocks():
    other = [line.replace("relu", "gelu") for index in range(3) for line in _layer(index)]
    lines = [*(line for index in range(4) for line in _layer(index)), "between", *other]
    found = list(folded_lines(lines))
    assert [line for line in found if line.startswith("#")] == [
        "# 3 more blocks of 4 lines like the 4 above, but for numbers in names",
        "# 2 more blocks of 4 lines like the 4 above, but for numbers in names",
    ]
    assert len(found) == 4 + 1 + 1 + 4 + 1


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["%a: f32[2] = input"],
        [line for index in range(2) for line in _layer(index)],  # two are no run
        [line.replace("f32[2, 8]", f"f32[2, {8 + index}]") for index in range(5) for line in _layer(index)],
        [f"%p_{index}: f32[{index}] = input" for index in range(20)],
    ],
    ids=["nothing", "one", "two", "sizes", "inputs"],
)
def test_other_sizes_are_no_equal_blocks(lines):
    assert list(folded_lines(lines)) == lines
