"""Bytes and seconds for people: a unit of their size, and the exact number where a message asks for one."""

import pytest

from graphshard.units import count_text, exact_size, size_text, time_text


@pytest.mark.parametrize(
    ("num_bytes", "text", "exact"),
    [
        (0, "0 B", "0 bytes"),
        (1023, "1023 B", "1023 bytes"),
        (200_000, "195.3 KiB", "195.3 KiB (200000 bytes)"),
        (3 * 2**20, "3 MiB", "3 MiB (3145728 bytes)"),
        (60 * 2**30 + 1, "60 GiB", "60 GiB (64424509441 bytes)"),
        (20_000 * 2**30, "20000 GiB", "20000 GiB (21474836480000 bytes)"),
    ],
)
def test_bytes(num_bytes, text, exact):
    assert (size_text(num_bytes), exact_size(num_bytes)) == (text, exact)


def test_seconds():
    assert [time_text(seconds) for seconds in (0.0, 2.5e-6, 1.5e-3, 12.0)] == ["0 us", "2.5 us", "1.5 ms", "12 s"]
    assert [time_text(seconds) for seconds in (999.9e-6, 0.9999, 154e-9)] == ["1000 us", "999.9 ms", "0.154 us"]
    assert time_text(123_456.0) == "123500 s"


def test_counts():
    numbers = (76, 1234, 999_950, 12_604_416, 8_030_261_248, 1_026_408_232_448)
    assert [count_text(number) for number in numbers] == [
        "76", "1.23 thousand", "1000 thousand", "12.6 million", "8.03 billion", "1.03 trillion"
    ]  # fmt: skip
