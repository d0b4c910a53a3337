"""``graphshard precompile``: what it prints and writes, and one line with exit status 2 for every mistake."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from support.factories import MODULE

from graphshard import precompile as precompile_module
from graphshard.cli.main import main
from graphshard.cost import load_card
from graphshard.errors import OptionError
from graphshard.hardware import MachineNeed
from graphshard.hardware.kept_cards import keep_card
from graphshard.precompile import Precompiled, ShardedAs, precompile


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a module of factories."""
    (tmp_path / "factories.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("factories", None)


GOOD = ["precompile", "factories:short", "--mesh", "shard=4", "--out", "made", "--unit", "first"]


def test_ranks_that_differ_by_nothing_share_one_compilation(here, capsys, interpreted):
    assert main([*GOOD, "--hardware", "cpu-ethernet-1g", "--micro-batches", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 0: ") and lines[1].startswith("rank 3: ") and len(lines) == 3
    assert ", 0 plans made" not in lines[0] and lines[1].endswith(", 0 plans made")
    made = here / "made"
    assert lines[2] == f"a run finds this with GRAPHSHARD_CACHE={made} TORCHINDUCTOR_CACHE_DIR={made / 'inductor'}"
    assert not dist.is_initialized() and os.environ["GRAPHSHARD_CACHE"] != str(made)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "a=2,b=2"], "--mesh shard=4,a=2,b=2: one axis of shards, or replicas and then shards"),
        (["--mesh", "tp=2"], "--mesh shard=4,tp=2: one axis of shards, or replicas and then shards; a model"),
        (["--rank", "4"], "--rank 4: the mesh has ranks 0 to 3"),
        (["--threads", "0"], "give whole numbers, at least 1"),
        (["--option", "bucket"], "write NAME=VALUE"),
        (["--option", "hardware=none"], "--hardware names a card"),
        (["--option", "buckets=unit"], "unknown option(s) 'buckets'"),
        (["--unit", "third"], "--unit: no module matches 'third'"),
        (["--option", "memory_budget=100"], "needs a cost model"),
        (["--param-dtype", "float7"], "--param-dtype float7: no floating-point dtype"),
    ],
)
def test_mistakes(here, capsys, arguments, message):
    assert main([*GOOD, "--hardware", "none", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_axis_without_ranks(here, capsys):
    words = ["precompile", "factories:short", "--mesh", "shard=0", "--out", "made", "--hardware", "none"]
    assert main(words) == 2
    assert "--mesh shard=0: an axis has one rank at least" in capsys.readouterr().err


def test_a_budget_that_no_plan_keeps(here, capsys, interpreted):
    assert main([*GOOD, "--hardware", "cpu-ethernet-1g", "--option", "memory_budget=100"]) == 2
    assert "no schedule keeps a memory budget of 100 bytes" in capsys.readouterr().err


def test_an_exported_program_is_refused(here, capsys):
    assert main([*GOOD[:1], "factories:exported", *GOOD[2:], "--hardware", "none"]) == 2
    assert "precompile needs the model itself" in capsys.readouterr().err


def test_a_kept_card_of_this_machine_is_used_and_handed_on(here, capsys, interpreted, monkeypatch):
    assert main(GOOD) == 2
    assert "no run of 4 ranks on cpu has measured this machine" in capsys.readouterr().err
    key = {"host": os.uname().nodename, "torch": torch.__version__, "ranks": "4 in all, nodes: [[0, 0, 0, 0]]"}
    file = keep_card(key, MachineNeed(device_type="cpu"), load_card("cpu-ethernet-1g"))
    assert main([*GOOD, "--rank", "1"]) == 0
    assert (here / "made" / "cards" / file.name).read_text() == file.read_text()
    assert ", 0 plans made" not in capsys.readouterr().out


def test_a_process_with_a_group_is_refused(fake_group, tmp_path):
    fake_group(2)
    with pytest.raises(OptionError, match="this process has one"):
        precompile(lambda: None, tmp_path, ShardedAs(mesh={"shard": 2}), options={"hardware": None})


def test_a_card_that_is_not_known_yet_is_refused(tmp_path):
    with pytest.raises(OptionError, match="cannot measure the machine of a later run"):
        precompile(lambda: None, tmp_path, ShardedAs(mesh={"shard": 2}), options={"hardware": "auto"})


@pytest.mark.parametrize(
    ("differs", "asked", "expected"),
    [
        ({}, (), [0, 3]),
        ({3: {"compiled": 1}}, (), [0, 3, 1, 2]),
        ({3: {"planned": 1}}, (), [0, 3, 1, 2]),
        ({3: {"not_kept": 1}}, (), [0, 3]),
        ({}, (2, 1), [2, 1]),
    ],
    ids=["all_alike", "other_code", "other_plans", "not_cached", "asked_for"],
)
def test_other_ranks_are_compiled_if_the_last_one_needs_what_rank_0_does_not(
    tmp_path, monkeypatch, differs, asked, expected
):
    def compile_step(*_):
        rank, nothing = dist.get_rank(), {"found": 0, "compiled": 0, "not_kept": 0, "planned": 0}
        return Precompiled(rank=rank, **{**nothing, **differs.get(rank, {})})

    monkeypatch.setattr(precompile_module, "_compile_step", compile_step)
    told = []
    done = precompile(
        lambda: None, tmp_path, ShardedAs(mesh={"shard": 4}), options={"hardware": None}, ranks=asked, tell=told.append
    )
    assert [each.rank for each in done] == expected and told == done
