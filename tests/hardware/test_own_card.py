"""The card of this machine without ranks: names of devices, needs, the cache folder, and where there is no card."""

import logging
import os
import sys
from dataclasses import replace

import pytest
import torch
from support.small_models import MODELS, example_batch, shard_units

from graphshard.backend import dynamo_graph
from graphshard.backend.options import BackendOptions
from graphshard.cli.main import main
from graphshard.cost import known_cards, load_card
from graphshard.errors import CardError, OptionError
from graphshard.hardware import GroupNeed, MachineNeed, OwnCard, kept_cards, named_devices, shipped_card_of
from graphshard.hardware.kept_cards import file_of, keep_card, read_kept
from graphshard.memory import table_beside

GIB = 2**30
KEY = {"host": "here", "ranks": "2 in all", "torch": "2.13"}
NEED = MachineNeed(
    device_type="cpu",
    groups=(GroupNeed.of_parameters(2, ("all_gather", "reduce_scatter"), 5_000_000),),
    dtypes=("float32",),
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHSHARD_CACHE", str(tmp_path / "graphshard"))
    return tmp_path / "graphshard" / "cards"


@pytest.mark.parametrize(
    ("name", "gib", "card"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", 39.3, None),  # a slice of one
        ("NVIDIA H100 PCIe", 79.6, None),
        ("NVIDIA H100 NVL", 93.1, None),
        ("NVIDIA H200", 139.8, "h200-sxm"),
        ("NVIDIA H200 NVL", 139.8, None),
        ("NVIDIA H20", 95.6, None),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-sxm"),
        ("NVIDIA A100-SXM4-40GB", 39.4, None),
        ("NVIDIA A100 80GB PCIe", 79.3, None),
        ("NVIDIA B200", 178.4, "b200"),
    ],
)
def test_a_gpu_takes_a_shipped_card_by_its_name_and_memory(name, gib, card):
    assert shipped_card_of(name, int(gib * GIB)) == card


def test_every_shipped_card_of_a_gpu_has_a_name():
    assert set(named_devices._NAMES.values()) == {
        name for name in known_cards() if load_card(name).device_type == "cuda"
    }


def test_a_card_serves_what_it_was_measured_for():
    (group,) = NEED.groups
    assert group.largest_bytes == 2**23
    more = replace(NEED, dtypes=("bfloat16", "float32"), classes=("attention",))
    larger = replace(NEED, groups=(replace(group, largest_bytes=2**24),))
    other = replace(NEED, groups=(replace(group, kinds=("all_reduce",)),))
    assert NEED.covers(NEED) and more.covers(NEED) and larger.covers(NEED)
    for need in (more, larger, other, replace(NEED, device_type="cuda")):
        assert not NEED.covers(need)
    both = more.joined(other)
    assert both.covers(more) and both.covers(other) and MachineNeed.from_data(both.as_data()) == both


def test_sizes_end_with_the_largest_and_are_those_of_the_kinds_asked_for():
    (group,) = NEED.groups
    sizes = NEED.sizes(group)
    assert sizes.collective_bytes[-1] == 2**23 and sizes.kinds == ("all_gather", "reduce_scatter")
    assert sizes.dtypes == (torch.float32,) and sizes.classes == ()


def test_a_kept_card_reads_back_and_a_broken_one_is_none(cache):
    card = load_card("cpu-loopback")
    file = keep_card(KEY, NEED, card)
    assert file == file_of(KEY) and file.parent == cache and file_of({**KEY, "torch": "2.14"}) != file
    kept = read_kept(file)
    assert (kept.card, kept.need, kept.key, kept.card.file) == (card, NEED, KEY, file)
    assert [each.file for each in kept_cards()] == [file]
    file.write_text(file.read_text()[:100])
    assert read_kept(file) is None and kept_cards() == []


def test_a_cache_that_cannot_be_written_is_no_error(cache, caplog):
    cache.parent.write_text("a file where the folder should be")
    with caplog.at_level(logging.INFO, "graphshard"):
        assert keep_card(KEY, NEED, load_card("cpu-loopback")) is None
    assert "cannot be written" in caplog.text


def test_the_oldest_cards_are_deleted_with_their_tables(cache, monkeypatch):
    monkeypatch.setattr(sys.modules["graphshard.hardware.kept_cards"], "_MOST_CARDS", 2)
    files = []
    for number in range(3):
        files.append(keep_card({"host": str(number)}, NEED, load_card("cpu-loopback")))
        table_beside(files[-1]).write_text("[]")
        os.utime(files[-1], (number, number))
    keep_card({"host": "last"}, NEED, load_card("cpu-loopback"))
    assert [file.exists() for file in files] == [False, False, True]
    assert [table_beside(file).exists() for file in files] == [False, False, True]


def test_a_broken_table_beside_a_kept_card_stops_no_run(narrow_card, cache, monkeypatch, fake_group, interpreted):
    file = keep_card(KEY, NEED, load_card("cpu-loopback"))
    table_beside(file).write_text("{")
    card = replace(load_card("cpu-loopback"), file=file)
    monkeypatch.setattr(dynamo_graph, "own_card", lambda *arguments, **more: OwnCard(card=card))
    model = shard_units(MODELS["two_linears"](), fake_group(2))
    torch.compile(model, backend="graphshard", options={"hardware": "auto"})(example_batch("two_linears"))


def test_cards_lists_kept_cards_and_deletes_them(cache, capsys):
    first, second = (keep_card({"host": host}, NEED, load_card("cpu-loopback")) for host in ("a", "b"))
    assert main(["cards"]) == 0
    shown = capsys.readouterr().out
    assert "h100-sxm" in shown and f"{first.stem}: host a" in shown and f"{second.stem}: host b" in shown
    assert main(["cards", "--delete", "h100-sxm"]) == 2
    assert "no kept card h100-sxm" in capsys.readouterr().err
    assert main(["cards", "--delete", first.stem]) == 0
    assert [each.file for each in kept_cards()] == [second]
    assert main(["cards", "--delete"]) == 0 and kept_cards() == []
    assert str(second) in capsys.readouterr().out
    assert main(["cards", "--delete"]) == 0
    assert "no kept cards" in capsys.readouterr().out


def test_ranks_that_cannot_be_measured_get_the_schedule_by_rules(fake_group, cache, caplog, interpreted):
    model = shard_units(MODELS["two_linears"](), fake_group(2))
    compiled = torch.compile(model, backend="graphshard", options={"hardware": "auto"})
    with caplog.at_level(logging.INFO, "graphshard"):
        compiled(example_batch("two_linears")).sum().backward()
    assert "placed by rules, without a plan: process group '0' is a fake one" in caplog.text
    assert not cache.exists()


@pytest.mark.parametrize("option", [{"memory_budget": "1GiB"}, {"limit_all_gathers": 2}], ids=str)
def test_an_option_that_needs_a_card_is_refused_where_there_is_none(option, fake_group, interpreted):
    model = shard_units(MODELS["two_linears"](), fake_group(2))
    compiled = torch.compile(model, backend="graphshard", options={"hardware": "auto", **option})
    (name,) = option
    with pytest.raises(Exception, match=f"option {name}=.* there is no hardware card of this machine") as raised:
        compiled(example_batch("two_linears"))
    assert isinstance(getattr(raised.value, "inner_exception", raised.value), OptionError)


def test_ranks_that_are_not_compared_share_no_card(fake_group, caplog, interpreted):
    model = shard_units(MODELS["two_linears"](), fake_group(2))
    compiled = torch.compile(model, backend="graphshard", options={"hardware": "auto", "verify": "off"})
    with caplog.at_level(logging.WARNING, "graphshard"):
        compiled(example_batch("two_linears"))
    assert 'verify="off" lets the ranks share neither a card nor a plan' in caplog.text


def test_with_card_keeps_what_the_user_chose():
    card = load_card("cpu-loopback")
    auto = BackendOptions.parse({"hardware": "auto", "bucket": "none"})
    assert auto.with_card(card, "").card is card and auto.with_card(None, "why").bucket == "none"
    assert BackendOptions.parse({"hardware": "auto"}).with_card(None, "why").bucket == "unit"


@pytest.fixture
def narrow_card(monkeypatch):
    """``hardware="auto"`` comes to a card without float32."""
    torch.compiler.reset()  # what another test compiled with these options
    card = replace(load_card("cpu-loopback"), name="narrow", peak_flops={"bfloat16": 1e12})
    monkeypatch.setattr(dynamo_graph, "own_card", lambda *arguments, **more: OwnCard(card=card))
    yield card
    torch.compiler.reset()


@pytest.mark.parametrize("has_gradients", [True, False], ids=["training", "inference"])
def test_an_own_card_that_lacks_a_dtype_gives_the_schedule_by_rules(
    has_gradients, narrow_card, fake_group, caplog, interpreted
):
    model = shard_units(MODELS["two_linears"](), fake_group(2))
    compiled = torch.compile(model, backend="graphshard", options={"hardware": "auto"})
    with caplog.at_level(logging.WARNING, "graphshard"), torch.set_grad_enabled(has_gradients):
        result = compiled(example_batch("two_linears"))
        if has_gradients:
            result.sum().backward()
    (line,) = [each.message for each in caplog.records if "placed by rules" in each.message]
    assert line.endswith("without a plan: card 'narrow' has no peak_flops for float32")


def test_an_own_card_that_has_all_dtypes_plans(narrow_card, fake_group, caplog, interpreted):
    model = shard_units(MODELS["two_linears"]().to(torch.bfloat16), fake_group(2))
    compiled = torch.compile(model, backend="graphshard", options={"hardware": "auto"})
    with caplog.at_level(logging.WARNING, "graphshard"):
        compiled(example_batch("two_linears").to(torch.bfloat16)).sum().backward()
    assert "placed by rules" not in caplog.text


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hardware": "auto", "memory_budget": "1GiB"}, OptionError),
        ({"hardware": "auto", "limit_all_gathers": 2}, OptionError),
        ({"hardware": "named"}, CardError),
    ],
    ids=str,
)
def test_a_card_that_lacks_a_dtype_is_an_error_where_the_user_needs_it(
    options, error, narrow_card, fake_group, interpreted
):
    given = {**options, "hardware": narrow_card} if options["hardware"] == "named" else options
    model = shard_units(MODELS["two_linears"](), fake_group(2))
    compiled = torch.compile(model, backend="graphshard", options=given)
    with pytest.raises(Exception, match="'narrow' has no peak_flops for float32") as raised:
        compiled(example_batch("two_linears"))
    assert isinstance(getattr(raised.value, "inner_exception", raised.value), error)
