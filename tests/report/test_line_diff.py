"""Unified diffs: applying them gives the second text; they are as short as difflib's where that matters."""

import difflib
import re
import time

from hypothesis import example, given
from hypothesis import strategies as st

from graphshard.report.line_diff import unified_lines


def _patched(before: list[str], diff: list[str]) -> list[str]:
    """What `patch` makes of it: every line of the first text that a hunk names must be there."""
    made, at = [], 0
    for line in diff:
        if line.startswith("@@"):
            start, count, new, _ = map(int, re.fullmatch(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@", line).groups())
            start -= count > 0
            made += before[at:start]
            at = start
            assert len(made) == new - (line.split("+")[1].split(",")[1] != "0 @@")
            continue
        if line[0] != "+":
            assert before[at] == line[1:]
            at += 1
        if line[0] != "-":
            made.append(line[1:])
    return made + before[at:]


lines = st.lists(st.sampled_from("abcdefgh"), max_size=30)


@given(before=lines, after=lines, context=st.integers(0, 3))
@example(before=[], after=["a"], context=2)
@example(before=["a"], after=[], context=0)
def test_a_diff_turns_one_text_into_the_other(before, after, context):
    diff = list(unified_lines(before, after, context=context))
    assert _patched(before, diff) == after
    assert (diff == []) == (before == after)


@given(data=st.data(), size=st.integers(0, 60))
def test_unique_lines_in_order_give_difflibs_diff(data, size):
    before = [f"line {number}" for number in range(size)]
    changed = data.draw(st.sets(st.integers(0, max(size - 1, 0))))
    after = [f"new {number}" if number in changed else line for number, line in enumerate(before)]
    expected = list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
    found = list(unified_lines(before, after))
    assert [line for line in found if line[0] != "@"] == [line for line in expected if line[0] != "@"]


def test_a_moved_line_is_two_lines():
    before = [f"line {number}" for number in range(50)]
    after = [*before[:10], *before[11:40], before[10], *before[40:]]
    assert [line for line in unified_lines(before, after) if line[0] in "+-"] == ["-line 10", "+line 10"]


def test_time_does_not_grow_with_the_square():
    before = [f"line {number} of many" for number in range(40_000)]
    after = [f"{line}, changed" if number % 3 else line for number, line in enumerate(before)]
    began = time.process_time()
    found = list(unified_lines(before, after, context=0))
    assert time.process_time() - began < 10
    assert sum(line[0] == "+" for line in found) == sum(number % 3 > 0 for number in range(40_000))
