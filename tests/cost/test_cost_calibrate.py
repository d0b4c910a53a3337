"""Calibration at tiny sizes: real probes, a real group, a card that reads back."""

import importlib
import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import graphshard.cost.collective_probes as collective_probes
import graphshard.cost.probes as probes_module
from graphshard.cost import CostModel, GroupTopology, load_card
from graphshard.cost.calibration import CalibrationJob, calibrate, describe_machine
from graphshard.cost.cards import COLLECTIVE_KINDS, KERNEL_CLASSES, LinkClass
from graphshard.cost.collective_probes import CommProbe, _Asked, _Timing, probe_collectives
from graphshard.cost.probes import ProbeSizes, probe_compute, typical
from graphshard.errors import CalibrationError

#: By its name: the door gives the function of that name.
calibrate_module = importlib.import_module("graphshard.cost.calibration")

CPU = torch.device("cpu")
QUICK = ProbeSizes.for_device("cpu", quick=True)


def _job(out, **changes):
    return CalibrationJob(out=Path(out), device_type="cpu", sizes=QUICK, num_threads=1, **changes)


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """What a large cache holds takes seconds to fill, for each product; spawned ranks fill the one that is there."""
    monkeypatch.setattr(probes_module, "largest_cache_bytes", lambda: 2**20)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A card measured on two spawned ranks."""
    out = tmp_path_factory.mktemp("calibrate") / "here.json"
    return calibrate(_job(out)), out


def test_the_card_that_was_written_is_the_card(written):
    card, out = written
    assert load_card(out) == card
    assert card.name == "here"
    assert card.ranks_per_node == 2
    assert "2 ranks of gloo" in card.summary


def test_everything_measured_has_a_source(written):
    card, _ = written
    data = card.as_dict()
    sources = data.pop("sources")
    covered = set(sources) | {"name", "summary"}
    assert set(data) <= covered | {"efficiency"}
    assert sources["inter_node"] == "not measured; as intra_node"
    assert "measured by graphshard calibrate" in sources["memory_bandwidth"]


def test_no_measured_efficiency_is_above_the_peak_that_was_measured(written):
    card, _ = written
    assert set(card.efficiency) == set(KERNEL_CLASSES)
    assert max(value for _, value in card.efficiency["matmul"].rows) == 1.0
    assert max(value for _, value in card.efficiency["memory"].rows) == 1.0


def test_the_measured_collectives_are_what_the_model_answers_with(written):
    card, _ = written
    rows = card.intra_node.measured
    assert {row.op for row in rows} == set(COLLECTIVE_KINDS)
    assert {row.num_ranks for row in rows} == {2}
    assert card.inter_node.measured == ()
    model = CostModel(card=card, groups={"shard": GroupTopology(num_ranks=2, ranks_per_node=2)})
    smallest = next(row for row in rows if row.op == "all_gather")
    assert model.collective_seconds("all_gather", smallest.num_bytes, "shard") == smallest.seconds


def test_another_card_gives_the_links_that_were_not_measured(tmp_path, monkeypatch, gloo_alone):
    gloo_alone(monkeypatch)
    told = []
    card = calibrate(_job(tmp_path / "here.json", like="cpu-ethernet-1g"), report=told.append)
    stages = [line for line in told if line.startswith("measure ")]
    assert stages == ["measure compute, then collectives", "measure collectives, then write the card"]
    assert told.index(stages[0]) == 0 and told[told.index(stages[1]) - 1].startswith("vector: ")
    assert card.inter_node == load_card("cpu-ethernet-1g").inter_node
    assert card.sources["inter_node"] == "card cpu-ethernet-1g"


def test_all_that_was_probed_of_collectives_is_in_the_card(tmp_path, monkeypatch, gloo_alone):
    gloo_alone(monkeypatch)
    probed = CommProbe(
        link=LinkClass(latency_seconds=1.0, bandwidth=2.0, efficiency=0.5),
        collective_start_seconds=0.125,
        overlapped_latency_seconds=0.25,
        collective_spread_seconds=0.375,
        comm_compute_seconds_per_byte=0.5,
    )
    monkeypatch.setattr(calibrate_module, "probe_collectives", lambda *_, **__: probed)
    card = calibrate(_job(tmp_path / "here.json"))
    assert card.intra_node == probed.link
    for each in fields(probed)[1:]:
        assert getattr(card, each.name) == getattr(probed, each.name), each.name


@pytest.fixture
def gloo_alone():
    """A group of two fake ranks in this process, as if torchrun had started it on one node."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(monkeypatch, local_ranks=2, num_ranks=2):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        for name in names:
            monkeypatch.setenv(name, "0")
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))

    yield start
    dist.destroy_process_group()


def test_under_torchrun_one_rank_a_node_measures_the_network(tmp_path, monkeypatch, gloo_alone):
    gloo_alone(monkeypatch, local_ranks=1)
    card = calibrate(_job(tmp_path / "here.json"))
    assert card.ranks_per_node == 1
    assert card.inter_node.measured
    assert card.sources["intra_node"] == "not measured; as inter_node"


def test_several_nodes_with_several_ranks_cannot_be_told_apart(tmp_path, monkeypatch, gloo_alone):
    gloo_alone(monkeypatch, local_ranks=2, num_ranks=4)
    with pytest.raises(CalibrationError, match=r"4 ranks, 2 of them in a node: .* or one rank on each node"):
        calibrate(_job(tmp_path / "here.json"))


def test_one_launched_rank_has_nobody_to_talk_to(tmp_path, monkeypatch, gloo_alone):
    gloo_alone(monkeypatch, local_ranks=1, num_ranks=1)
    with pytest.raises(CalibrationError, match="at least 2 ranks; start more with --nproc-per-node"):
        calibrate(_job(tmp_path / "here.json"))


@pytest.mark.parametrize("is_launched", [False, True], ids=["alone", "torchrun"])
def test_one_rank_takes_the_links_of_another_card(tmp_path, monkeypatch, is_launched):
    """A machine with one GPU can measure its compute."""
    if is_launched:
        for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    told = []
    card = calibrate(_job(tmp_path / "here.json", like="h100-sxm"), num_ranks=1, report=told.append)
    assert told[0] == "measure compute, then write the card"
    like = load_card("h100-sxm")
    assert (card.intra_node, card.inter_node) == (like.intra_node, like.inter_node)
    assert (card.ranks_per_node, card.collective_start_seconds) == (8, like.collective_start_seconds)
    assert card.sources["intra_node"] == card.sources["ranks_per_node"] == "card h100-sxm"
    assert card.device_type == "cpu" and card.peak_flops != like.peak_flops
    assert card.sources["peak_flops"].startswith("measured by graphshard calibrate")


def test_one_rank_without_another_card_is_refused(tmp_path):
    with pytest.raises(CalibrationError, match=r"not 1; give more \(--nproc\), or name the card .* \(--like\)"):
        calibrate(_job(tmp_path / "here.json"), num_ranks=1)


def test_collectives_are_probed_at_each_size(gloo_alone, monkeypatch):
    gloo_alone(monkeypatch)
    lines = []
    probe = probe_collectives(CPU, QUICK, report=lines.append)
    assert [row.num_bytes for row in probe.link.measured] == list(QUICK.collective_bytes) * len(
        COLLECTIVE_KINDS
    )
    assert [line.partition(":")[0] for line in lines] == list(COLLECTIVE_KINDS)
    assert probe.link.bandwidth > 0
    assert probe.link.latency_seconds > 0


@pytest.mark.parametrize(
    ("config", "is_exchange"), [("cpu:gloo,cuda:nccl", True), ("cpu:fake,cuda:gloo", False)], ids=["gloo", "other"]
)
def test_reductions_are_exchanges_where_gloo_has_the_cpu(gloo_alone, monkeypatch, config, is_exchange):
    gloo_alone(monkeypatch)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        probe_collectives(CPU, QUICK)
    ran = {event.name for event in trace.events()}
    assert ("graphshard::add_rows" in ran) == is_exchange
    assert ("c10d::_reduce_scatter_base_" in ran) != is_exchange


def _time_with(monkeypatch, timing):
    """Timings are those that ``timing(op, num_bytes, at_once)`` says."""

    def timings(asked, *_):
        return {each: timing(each.op, each.num_bytes, each.at_once) for each in asked}

    monkeypatch.setattr(collective_probes, "_timings", timings)


def test_what_a_gather_takes_of_the_core_is_probed(gloo_alone, monkeypatch):
    gloo_alone(monkeypatch)

    def timing(op, num_bytes, _):
        seconds = num_bytes / 1e9
        return _Timing(seconds, 0.0, 0.5 + num_bytes / 1e6 if op == "all_gather" else 9.0)

    _time_with(monkeypatch, timing)
    probe = probe_collectives(CPU, QUICK)
    assert probe.collective_start_seconds == 0.5 + QUICK.collective_bytes[0] / 1e6
    assert probe.comm_compute_seconds_per_byte == pytest.approx(1e-6)


@pytest.mark.parametrize(("overlapped", "expected"), [(0.0, 0.0), (0.25, 0.25), (0.75, 0.75)])
def test_how_much_of_their_latency_gathers_share_is_probed(gloo_alone, monkeypatch, overlapped, expected):
    """Gathers of 1 s and a little, each ended so much sooner by the one before; some share more, some less."""
    gloo_alone(monkeypatch)

    def timing(_, num_bytes, at_once):
        shared = overlapped + {2**13: 0.125, 2**16: 0.0, 2**19: -0.125}.get(num_bytes, 9.0)
        seconds = 1.0 + num_bytes / 1e9 + (at_once - 1) * (1.0 + num_bytes / 1e9 - shared)
        return _Timing(seconds, 0.0, 0.0)

    _time_with(monkeypatch, timing)
    assert probe_collectives(CPU, ProbeSizes()).overlapped_latency_seconds == pytest.approx(expected)


def test_no_latency_is_shared_where_collectives_slow_each_other_down(gloo_alone, monkeypatch):
    gloo_alone(monkeypatch)
    _time_with(monkeypatch, lambda op, num_bytes, at_once: _Timing(at_once**2, 0.0, 0.0))
    assert probe_collectives(CPU, QUICK).overlapped_latency_seconds == 0.0


def test_collectives_take_no_less_than_they_add_behind_others(gloo_alone, monkeypatch):
    """A link of 1 MB/s that lets 512 KiB through at once after a pause."""
    gloo_alone(monkeypatch)
    at_once_bytes = 2**19
    _time_with(
        monkeypatch, lambda _, size, num: _Timing(max(num * size - at_once_bytes, 0) / 1e6, 0.0, 0.0)
    )
    rows = {(row.op, row.num_bytes): row.seconds for row in probe_collectives(CPU, ProbeSizes()).link.measured}
    assert len(rows) == len(COLLECTIVE_KINDS) * len(ProbeSizes().collective_bytes)
    for (_, size), seconds in rows.items():
        is_queued = size in (2**19, 2**22, 2**24)
        expected = size if is_queued else max(size - at_once_bytes, 0)
        assert seconds == pytest.approx(expected / 1e6)


def test_what_is_added_behind_others_has_no_part_of_the_latency(gloo_alone, monkeypatch):
    """A link with a second of latency that passes beside others; 512 KiB take two more, but for those after a pause."""
    gloo_alone(monkeypatch)
    _time_with(
        monkeypatch, lambda _, size, num: _Timing(1.0 + max(num * size - 2**19, 0) / 2**18, 0.0, 0.0)
    )
    probe = probe_collectives(CPU, ProbeSizes())
    assert probe.overlapped_latency_seconds == pytest.approx((1 + 1 - 1) / 3)
    rows = {(row.op, row.num_bytes): row for row in probe.link.measured}
    for op in COLLECTIVE_KINDS:
        row = rows[op, 2**19]
        assert row.overlapped_seconds == probe.overlapped_latency_seconds
        assert row.seconds == pytest.approx(2 + row.overlapped_seconds)
        larger = rows[op, 2**22]
        assert larger.seconds - larger.overlapped_seconds == pytest.approx(2**22 / 2**18)


def test_collectives_that_share_their_latency_take_what_they_take_alone(gloo_alone, monkeypatch):
    gloo_alone(monkeypatch)
    _time_with(monkeypatch, lambda _, size, num: _Timing(1.0 + num * size / 1e9, 0.0, 0.0))
    rows = probe_collectives(CPU, ProbeSizes()).link.measured
    assert [row.seconds for row in rows] == [1.0 + row.num_bytes / 1e9 for row in rows]


def test_how_much_of_large_collectives_passes_beside_others_is_probed(gloo_alone, monkeypatch):
    """A quarter of gathers passes beside the one in front, nothing of reductions; others are slowed."""
    gloo_alone(monkeypatch)
    share = {"all_gather": 0.25, "reduce_scatter": 0.0}
    _time_with(
        monkeypatch,
        lambda op, size, num: _Timing(size * (1.0 + (num - 1) * (1.0 - share.get(op, -0.5))), 0.0, 0.0),
    )
    probe = probe_collectives(CPU, ProbeSizes())
    rows = {(row.op, row.num_bytes): row for row in probe.link.measured}
    for op in COLLECTIVE_KINDS:
        for size in (2**22, 2**24):
            row = rows[op, size]
            assert row.overlapped_seconds == pytest.approx(share.get(op, 0.0) * size)
            assert row.seconds == pytest.approx(size if op in share else 1.5 * size)
        assert rows[op, 2**25].overlapped_seconds is None  # not measured
        for size in (2**10, 2**13, 2**16, 2**19):
            assert rows[op, size].overlapped_seconds == min(probe.overlapped_latency_seconds, size)


def test_no_more_of_a_collective_passes_beside_others_than_it_takes(gloo_alone, monkeypatch):
    """Three end sooner than one, by chance."""
    gloo_alone(monkeypatch)
    _time_with(monkeypatch, lambda op, size, num: _Timing(size / num, 0.0, 0.0))
    rows = {(row.op, row.num_bytes): row for row in probe_collectives(CPU, ProbeSizes()).link.measured}
    for op in COLLECTIVE_KINDS:
        for size in (2**10, 2**13, 2**16, 2**22, 2**24):
            assert rows[op, size].overlapped_seconds == rows[op, size].seconds
        assert 0 < rows[op, 2**19].overlapped_seconds < rows[op, 2**19].seconds  # the mean of usual sizes


def test_the_collectives_of_a_device_are_measured_one_at_a_time(gloo_alone, monkeypatch):
    gloo_alone(monkeypatch)
    nums = []
    _time_with(monkeypatch, lambda _, size, num: nums.append(num) or _Timing(1.0 + size / 1e9, 0.0, 0.0))
    probe = probe_collectives(torch.device("cuda"), ProbeSizes())
    assert set(nums) == {1}
    assert {row.overlapped_seconds for row in probe.link.measured} == {None}


def test_how_far_the_ends_of_gathers_are_spread_is_probed(gloo_alone, monkeypatch):
    gloo_alone(monkeypatch)

    def timing(op, num_bytes, at_once):
        is_usual = op == "all_gather" and at_once == 1
        deviation = {2**13: 0.25, 2**16: 0.5, 2**19: 0.75}.get(num_bytes, 9.0) if is_usual else 9.0
        return _Timing(float(at_once), deviation, 0.0)

    _time_with(monkeypatch, timing)
    probe = probe_collectives(CPU, ProbeSizes())
    assert {row.seconds for row in probe.link.measured} == {1.0}
    assert probe.collective_spread_seconds == 1.0


def test_evenly_spread_calls_give_their_mean_and_half_their_spread(gloo_alone, monkeypatch):
    """Of nine calls in rows of three, behind one that does not count, the slowest is left out."""
    gloo_alone(monkeypatch)
    calls = iter([99.0, 5.0, 1.0, 7.0, 99.0, 3.0, 8.0, 6.0, 0.0, 2.0, 4.0, 50.0])
    monkeypatch.setattr(collective_probes._Beside, "seconds", lambda self, _: (float(next(calls)), 0.5))
    asked = _Asked("all_gather", 64)
    (timing,) = collective_probes._timings([asked], CPU, ProbeSizes(num_samples=8, enough_seconds=1000.0)).values()
    assert (timing.seconds, timing.lost_seconds) == (4.5, 0.5)
    assert timing.deviation_seconds == pytest.approx((3.5 + 2.5 + 2.5 + 1.5 + 1.5 + 0.5 + 0.5 + 3.5) / 8)


def test_the_calls_of_all_ranks_count(gloo_alone, monkeypatch):
    gloo_alone(monkeypatch)
    monkeypatch.setattr(collective_probes.dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(
        collective_probes,
        "gather_single",
        lambda found, own, group: found.copy_(torch.cat([own, own + torch.tensor([2.0, 1.0])])),
    )
    assert collective_probes._timing([(1.0, 0.5), (1.0, 0.5)], CPU) == _Timing(5 / 3, pytest.approx(8 / 9), 5 / 6)


def test_collectives_take_turns(gloo_alone, monkeypatch):
    """The machine becomes slower in the middle, which all of them feel."""
    gloo_alone(monkeypatch)
    ran = []

    def seconds(self, collectives):
        ran.append(len(collectives))
        return float(len(collectives)) * (1.0 if len(ran) <= 16 else 3.0), 0.0

    monkeypatch.setattr(collective_probes._Beside, "seconds", seconds)
    one, two = _Asked("all_gather", 64), _Asked("broadcast", 64, 2)
    found = collective_probes._timings([one, two], CPU, ProbeSizes(num_samples=11, enough_seconds=1000.0))
    assert ran == [1, 1, 1, 1, 2, 2, 2, 2] * 4
    assert (found[one].seconds, found[two].seconds) == (pytest.approx(13 / 7), pytest.approx(26 / 7))  # of two ranks
    assert found[one].deviation_seconds * 2 == pytest.approx(found[two].deviation_seconds)


def test_slow_collectives_are_timed_until_all_ranks_have_enough(gloo_alone, monkeypatch):
    """The other rank takes twice as long: two rows of it are enough, of the fast one five are asked for."""
    gloo_alone(monkeypatch)
    slow, fast = _Asked("all_gather", 64), _Asked("broadcast", 64, 2)
    met, ran = [], []

    def seconds(self, collectives):
        ran.append(len(collectives))
        return 0.15 if len(collectives) == 1 else 1e-3, 0.0

    monkeypatch.setattr(collective_probes._Beside, "seconds", seconds)
    monkeypatch.setattr(collective_probes, "slowest", lambda device, spent, group: 2 * spent)
    monkeypatch.setattr(dist, "barrier", lambda group: met.append(len(ran)))
    collective_probes._timings([slow, fast], CPU, ProbeSizes(num_samples=15))
    assert (ran.count(1), ran.count(2)) == (2 * 4, 5 * 4)
    assert met == list(range(0, len(ran), 4))


class _Clock:
    """A second for each block of compute that runs alone, two for one beside a collective."""

    def __init__(self) -> None:
        self.now, self.is_busy = 0.0, False

    def perf_counter(self) -> float:
        return self.now

    def block(self) -> None:
        self.now += 2.0 if self.is_busy else 1.0


class _Work:
    """Done after three blocks."""

    def __init__(self, clock: _Clock) -> None:
        self._clock, self._began = clock, clock.now
        clock.is_busy = True

    def get_future(self) -> "_Work":
        return self

    def done(self) -> bool:
        return self._clock.now >= self._began + 6.0

    def wait(self) -> None:
        self._clock.is_busy = False


@pytest.mark.parametrize(("is_gloo", "expected"), [(True, (6.25, 3.0)), (False, (0.25, 0.0))], ids=["gloo", "other"])
def test_a_rank_computes_beside_a_collective_of_gloo(gloo_alone, monkeypatch, is_gloo, expected):
    gloo_alone(monkeypatch)
    monkeypatch.setattr(collective_probes, "uses_gloo", lambda group: is_gloo)
    clock = _Clock()
    monkeypatch.setattr(collective_probes, "time", clock)
    monkeypatch.setattr(collective_probes.torch, "mm", lambda *_, **__: clock.block())

    def finish() -> None:
        clock.now += 0.25

    collective = collective_probes._Collective(lambda: _Work(clock), finish)
    assert collective_probes._Beside(CPU).seconds([collective]) == expected
    seconds, lost = expected
    both = collective_probes._Beside(CPU).seconds([collective, collective])
    assert both == (seconds + 0.25, lost)


def test_ranks_compute_before_a_collective_of_gloo(gloo_alone, monkeypatch):
    gloo_alone(monkeypatch)
    monkeypatch.setattr(collective_probes, "uses_gloo", lambda group: True)
    clock, done = _Clock(), []
    monkeypatch.setattr(collective_probes, "time", clock)
    monkeypatch.setattr(collective_probes, "_APART_SECONDS", 3.5)
    monkeypatch.setattr(collective_probes.torch, "mm", lambda *_, **__: (done.append("computed"), clock.block()))

    def start() -> _Work:
        done.append("started")
        return _Work(clock)

    collective_probes._Beside(CPU).seconds([collective_probes._Collective(start)])
    assert done == [*["computed"] * 4, "started", *["computed"] * 3]


def test_compute_that_becomes_faster_loses_what_starting_takes(gloo_alone, monkeypatch):
    gloo_alone(monkeypatch)
    monkeypatch.setattr(collective_probes, "uses_gloo", lambda group: True)
    clock = _Clock()
    monkeypatch.setattr(collective_probes, "time", clock)
    monkeypatch.setattr(collective_probes.torch, "mm", lambda *_, **__: clock.block())
    beside = collective_probes._Beside(CPU)
    monkeypatch.setattr(beside, "_block_seconds", lambda: 4.0)

    def start() -> _Work:
        clock.now += 0.125
        return _Work(clock)

    assert beside.seconds([collective_probes._Collective(start)]) == (6.125, 0.125)


def test_compute_is_probed_with_progress_and_in_step_with_the_other_ranks():
    lines, met, compared = [], [], []

    def slowest(seconds):
        assert len(met) == len(compared) + 1
        compared.append(seconds)
        return 2.0

    probe = probe_compute(CPU, QUICK, report=lines.append, together=lambda: met.append(True), slowest=slowest)
    assert [line.partition(":")[0] for line in lines] == [
        "matmul float32", "matmul float64", "matmul bfloat16", "matmul float16", "attention", "memory", "vector",
    ]  # fmt: skip
    assert len(met) == len(QUICK.matmul) + 3 + 2 * len(QUICK.attention) + 1 + len(QUICK.memory_bytes) + 4
    assert len(compared) == len(met)
    assert probe.peak_flops["float32"] == 2.0 * QUICK.matmul[-1] ** 3 / 2.0
    assert probe.kernel_overhead_seconds == 2.0
    assert probe.memory_bytes > 2**30


def test_the_slowest_rank_counts(gloo_alone, monkeypatch):
    gloo_alone(monkeypatch)
    asked, answered = [], []

    def all_reduce(found, op, group):
        asked.append((found.item(), op))
        found.fill_(0.5)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)

    def probe(*_, slowest, **__):
        answered.append(slowest(0.25))
        raise CalibrationError("enough")

    monkeypatch.setattr(calibrate_module, "probe_compute", probe)
    with pytest.raises(CalibrationError, match="enough"):
        calibrate_module.measure_group(_job("here.json"), 1)
    assert (asked, answered) == ([(0.25, dist.ReduceOp.MAX)], [0.5])


@pytest.mark.parametrize(("cached", "bytes_read", "period"), [(0, 2**26, 22), (2**26, 2**27, 43)])
def test_products_are_probed_on_operands_that_no_cache_holds(monkeypatch, cached, bytes_read, period):
    read = []
    monkeypatch.setattr(probes_module, "largest_cache_bytes", lambda: cached)
    monkeypatch.setattr(probes_module.torch, "mm", lambda left, right, out: read.append((left, right, out)))
    multiply = probes_module.cold_product(CPU, torch.float32, 512)
    for _ in range(2 * period + 1):
        multiply()
    held = {tensor.data_ptr(): tensor.nbytes for operands in read for tensor in operands}
    assert sum(held.values()) >= bytes_read
    first = [tensor.data_ptr() for tensor in read[0]]
    assert [i for i, operands in enumerate(read) if operands[0].data_ptr() == first[0]] == [0, period, 2 * period]


def test_the_mean_without_the_slowest_is_typical():
    assert typical([9.0, 1.0, 2.0, 3.0]) == 2.0
    assert typical([1.0, 4.0, 1.0]) == 2.0
    assert typical([5.0]) == 5.0
    assert typical([7.0, *[1.0] * 14, 8.0]) == 1.0


@pytest.mark.slow
def test_a_rank_that_fails_is_reported(tmp_path):
    missing = tmp_path / "here.json"
    missing.symlink_to(missing)  # cannot be written to
    with pytest.raises(CalibrationError, match=r"a rank failed: [\s\S]*OSError: .*symbolic links"):
        calibrate(_job(missing))


def test_collectives_need_two_ranks(tmp_path):
    with pytest.raises(CalibrationError, match="at least 2 ranks, not 1"):
        calibrate(_job(tmp_path / "here.json"), num_ranks=1)


def test_a_device_needs_torchrun(tmp_path):
    job = CalibrationJob(out=tmp_path / "here.json", device_type="cuda", sizes=QUICK)
    with pytest.raises(CalibrationError, match="without torchrun only the CPU"):
        calibrate(job)


def test_the_folder_must_exist(tmp_path):
    with pytest.raises(CalibrationError, match=r"no folder .*gone to write here\.json to"):
        calibrate(_job(tmp_path / "gone" / "here.json"))


def test_the_machine_is_described():
    assert torch.__version__ in describe_machine("cpu")
    assert "thread" in describe_machine("cpu")


def test_sizes_grow_with_the_device():
    assert max(ProbeSizes.for_device("cuda").matmul) > max(ProbeSizes.for_device("cpu").matmul)
    assert json.dumps(QUICK.matmul) == "[64, 128]"


def test_products_are_probed_on_random_operands(monkeypatch):
    """A GPU multiplies equal values faster than those of a step."""
    given = []
    monkeypatch.setattr(torch, "mm", lambda left, right, *, out: given.extend([left, right]))
    probes_module.cold_product(CPU, torch.float32, 64)()
    assert all(operand.std() > 0.5 for operand in given) and len(given) == 2
