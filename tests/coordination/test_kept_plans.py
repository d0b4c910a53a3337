"""Plans of earlier processes in the cache folder."""

import os

import pytest

from graphshard.coordination import keep_plan, kept_plans, read_plan

KEY, OTHER = "a" * 64, "a" * 32 + "b" * 32


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHSHARD_CACHE", str(tmp_path))
    return tmp_path / "plans"


def test_a_plan_reads_back_under_its_whole_key(cache):
    assert read_plan(KEY) is None
    keep_plan(KEY, {"decided": [1, 2]})
    assert read_plan(KEY) == {"decided": [1, 2]}
    assert read_plan(OTHER) is None  # the name of its file is the same


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": "other"}', '{"plan": {}}', f'{{"key": "{KEY}", "plan": 1}}'])
def test_a_file_that_is_no_plan_is_none(cache, text):
    keep_plan(KEY, {})
    (file,) = cache.glob("*.json")
    file.write_text(text)
    assert read_plan(KEY) is None


def test_the_oldest_plans_are_deleted(cache, monkeypatch):
    monkeypatch.setattr(kept_plans, "_MOST_PLANS", 2)
    for number in range(4):
        keep_plan(str(number) * 64, {"number": number})
        os.utime(cache / f"{str(number) * 32}.json", (number, number))
    keep_plan("9" * 64, {})
    assert [read_plan(str(number) * 64) is None for number in (0, 1, 2, 3, 9)] == [True, True, True, False, False]


def test_without_a_cache_nothing_is_kept(monkeypatch):
    monkeypatch.setenv("GRAPHSHARD_CACHE", "")
    keep_plan(KEY, {})
    assert read_plan(KEY) is None
