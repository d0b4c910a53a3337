"""What a kernel allocates is measured: ops of known amounts run once for a call and a machine, and leave no trace.

No figure here is one of a processor.
"""

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.allocations import peak_bytes
from support.small_graphs import GraphBuilder, aten
from torch._subclasses.fake_tensor import FakeTensorMode

from graphshard.errors import TableError
from graphshard.machine import Machine
from graphshard.memory import (
    UNMEASURED,
    KernelMeasurements,
    KernelScratch,
    ScratchTable,
    memory_timeline,
    scratch_measured,
    scratch_of_card,
    table_beside,
)
from graphshard.memory.scratch_calls import KernelCall, TensorSpec, kernel_call
from graphshard.memory.scratch_measured import measure

#: What the op was called with, and what it allocated.
CALLS: list[tuple[torch.Tensor, int]] = []
HELD: list[weakref.ref] = []

LIBRARY = torch.library.Library("graphshard_scratch", "DEF")
LIBRARY.define("allocate(Tensor source, int first, int second, bool at_once) -> Tensor")
LIBRARY.define("allocate_per_thread(Tensor source, int num_bytes) -> Tensor")
LIBRARY.define("draw(Tensor source) -> Tensor")
LIBRARY.define("fail(Tensor source) -> Tensor")


def _allocate(source: torch.Tensor, first: int, second: int, at_once: bool) -> torch.Tensor:
    CALLS.append((source, torch.get_num_threads()))
    result = torch.empty_like(source)
    one = torch.empty(first, dtype=torch.uint8)
    HELD.append(weakref.ref(one))
    if not at_once:
        del one
    torch.empty(second, dtype=torch.uint8)
    return result


def _allocate_per_thread(source: torch.Tensor, num_bytes: int) -> torch.Tensor:
    result = source.clone()
    torch.empty(torch.get_num_threads(), num_bytes, dtype=torch.uint8)
    return result


def _fail(source: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not on this processor")


LIBRARY.impl("allocate", _allocate, "CPU")
LIBRARY.impl("allocate_per_thread", _allocate_per_thread, "CPU")
LIBRARY.impl("draw", lambda source: source + torch.rand_like(source), "CPU")
LIBRARY.impl("fail", _fail, "CPU")
OPS = torch.ops.graphshard_scratch


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Nothing is known of earlier tests."""
    scratch_measured._measured.cache_clear()
    CALLS.clear()
    HELD.clear()
    yield
    scratch_measured._measured.cache_clear()


def _spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.of(torch.empty(shape, dtype=dtype))


def _call(first: int = 1000, second: int = 300, at_once: bool = True, spec: TensorSpec | None = None) -> KernelCall:
    return KernelCall(OPS.allocate.default, (spec or _spec(4, 8), first, second, at_once))


def test_an_op_takes_what_it_allocates_at_its_peak_beside_its_operands_and_its_result():
    assert measure(_call(1000, 300), Machine.here()) == 1300
    assert measure(_call(1000, 300, at_once=False), Machine.here()) == 1000
    assert measure(_call(0, 0), Machine.here()) == 0


def test_a_call_runs_once_on_one_machine():
    for _ in range(3):
        measure(_call(), Machine.here())
    assert len(CALLS) == 1


def test_sizes_strides_dtypes_arguments_threads_and_processors_are_told_apart(threads, monkeypatch):
    same = _spec(4, 8)
    turned = TensorSpec((4, 8), (1, 4), torch.float32)
    wide = _spec(4, 8, dtype=torch.float64)
    others = [_call(spec=same), _call(spec=turned), _call(spec=wide), _call(spec=_spec(8, 4)), _call(second=301)]
    for call in others:
        measure(call, Machine.here())
    assert len(CALLS) == len(set(map(str, others))) == len(others)
    threads(2)
    measure(others[0], Machine.here())
    assert [num_threads for _, num_threads in CALLS] == [1] * len(others) + [2]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    measure(others[0], Machine.here())
    assert len(CALLS) == len(others) + 2


def test_operands_lie_as_the_call_says():
    measure(_call(spec=TensorSpec((4, 8), (1, 4), torch.bfloat16)), Machine.here())
    measure(_call(spec=TensorSpec((4, 8), (0, 1), torch.float32)), Machine.here())
    (turned, _), (expanded, _) = CALLS
    assert (turned.shape, turned.stride(), turned.dtype) == ((4, 8), (1, 4), torch.bfloat16)
    assert expanded.stride() == (0, 1) and expanded.untyped_storage().nbytes() == 8 * 4


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_kernel_runs_with_the_threads_of_the_process(threads, num_threads):
    threads(num_threads)
    call = KernelCall(OPS.allocate_per_thread.default, (_spec(4), 1000))
    assert measure(call, Machine.here()) == 1000 * num_threads


def test_the_callers_profiler_modes_and_autograd_are_not_touched():
    with (
        torch.profiler.profile(profile_memory=True),
        FakeTensorMode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.device("meta"),
    ):
        assert measure(_call(), Machine.here()) == 1300
        assert torch.autograd._profiler_enabled()
    ((source, _),) = CALLS
    assert type(source) is torch.Tensor and source.device.type == "cpu"
    assert not source.requires_grad


def test_random_numbers_of_the_caller_stay_what_they_are():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert measure(KernelCall(OPS.draw.default, (_spec(16),)), Machine.here()) is not None
    assert torch.equal(torch.rand(3), expected)


def test_nothing_stays_allocated():
    measure(_call(), Machine.here())
    assert [held() for held in HELD] == [None]


def test_what_cannot_be_run_is_not_known(monkeypatch):
    assert measure(KernelCall(OPS.fail.default, (_spec(4),)), Machine.here()) is None
    offsets = _spec(4, dtype=torch.int32)
    assert measure(_call(spec=offsets), Machine.here()) is None
    monkeypatch.setattr(scratch_measured, "_available_bytes", lambda: 100)
    assert measure(_call(spec=_spec(4, 9)), Machine.here()) is None
    assert not CALLS


def test_memory_that_is_left_is_asked_of_the_system():
    assert scratch_measured._available_bytes() > 2**20


def test_products_of_blas_are_not_run(monkeypatch):
    monkeypatch.setattr(scratch_measured, "_peak_of", lambda call: pytest.fail("it is run"))
    build = GraphBuilder()
    node = build(aten.mm.default, build.input("x", 4, 4), build.input("y", 4, 4))
    assert measure(kernel_call(node), Machine.here()) == 0


def _graph(rows: int = 8):
    """A convolution and a sum of float32."""
    build = GraphBuilder()
    source = build.input("primals_1", 2, 16, rows, 8, dtype=torch.float32)
    weight = build.input("primals_2", 32, 16, 3, 3, dtype=torch.float32)
    node = build(aten.convolution.default, source, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    again = build(aten.convolution.default, source, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return build.finish(build(aten.add.Tensor, node, again)), node


@pytest.fixture
def runs(monkeypatch) -> list[KernelCall]:
    """Each call that is run, in place of running it: it takes 12,345 bytes."""
    found: list[KernelCall] = []

    def peak_of(call: KernelCall) -> int:
        found.append(call)
        return 12_345

    monkeypatch.setattr(scratch_measured, "_peak_of", peak_of)
    return found


def test_the_kernels_of_a_graph_are_measured_once_each(runs):
    gm, node = _graph()
    kernels = KernelMeasurements()
    assert kernels.scratch().bytes_of(node, "cpu") == UNMEASURED.bytes_of(node, "cpu") != 12_345
    scratch = kernels.of(gm)
    assert [call.op for call in runs] == [aten.convolution.default]
    assert scratch.bytes_of(node, "cpu") == 12_345 and scratch.bytes_of(node, "cuda") == 0
    kernels.of(gm)
    assert len(runs) == 1
    kernels.of(_graph(rows=9)[0])
    assert len(runs) == 2


def test_of_a_graph_for_another_device_nothing_is_run(runs):
    assert KernelMeasurements().of(_graph()[0], "cuda").known == {}
    assert not runs


def test_the_memory_model_counts_it_while_the_kernel_runs_only(runs):
    gm, node = _graph()
    kept = gm.graph.find_nodes(op="placeholder")
    timeline = memory_timeline(gm, kept=kept, scratch=KernelMeasurements().of(gm))
    live = dict(zip(timeline.nodes, timeline.live_bytes, strict=True))
    result = 4 * 2 * 32 * 64
    assert live[node] == result + 12_345
    assert live[gm.graph.output_node()] == result
    assert memory_timeline(gm, kept=kept, device_type="cuda").live_bytes[2] == result


def test_a_real_convolution_takes_what_the_allocator_counts():
    gm, node = _graph()
    source, weight = torch.zeros(2, 16, 8, 8), torch.zeros(32, 16, 3, 3)
    arguments = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    peak = min(peak_bytes(lambda: aten.convolution.default(source, weight, *arguments)) for _ in range(2))
    assert KernelMeasurements().of(gm).bytes_of(node, "cpu") == peak - 4 * 2 * 32 * 64


def test_measurements_are_kept_beside_the_card(runs, tmp_path: Path):
    gm, node = _graph()
    file = table_beside(tmp_path / "here.json")
    assert file.name == "here.scratch.json"
    KernelMeasurements(file).of(gm)
    scratch_measured._measured.cache_clear()  # another process
    assert KernelMeasurements(file).of(gm).bytes_of(node, "cpu") == 12_345
    assert len(runs) == 1
    KernelMeasurements(file).of(_graph(rows=9)[0])
    assert len(ScratchTable.load(file).known(Machine.here())) == 2


def test_rows_of_another_machine_say_nothing(runs, tmp_path: Path, threads, monkeypatch):
    gm, _ = _graph()
    file = tmp_path / "here.scratch.json"
    KernelMeasurements(file).of(gm)
    threads(2)
    assert KernelMeasurements(file).scratch().known == {}
    KernelMeasurements(file).of(gm)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    KernelMeasurements(file).of(gm)
    assert len(runs) == 3 and len(ScratchTable.load(file).rows) == 3


def test_a_folder_that_cannot_be_written_is_told_of(runs, tmp_path: Path):
    gm, node = _graph()
    kernels = KernelMeasurements(tmp_path / "missing" / "here.scratch.json")
    with pytest.warns(UserWarning, match="cannot be kept in .*here.scratch.json"):
        assert kernels.of(gm).bytes_of(node, "cpu") == 12_345


@pytest.mark.parametrize("is_broken_now", [True, False])
def test_a_broken_table_in_the_users_cache_is_measured_again(runs, tmp_path: Path, is_broken_now):
    gm, node = _graph()
    file = tmp_path / "here.scratch.json"
    if is_broken_now:
        file.write_text("[1")
    kernels = KernelMeasurements(file, is_cached=True)
    file.write_text("[1")  # by another process
    assert kernels.of(gm).bytes_of(node, "cpu") == 12_345
    assert len(ScratchTable.load(file).known(Machine.here())) == 1


def test_a_cache_that_cannot_be_written_is_no_warning(runs, tmp_path: Path, recwarn):
    gm, node = _graph()
    kernels = KernelMeasurements(tmp_path / "missing" / "here.scratch.json", is_cached=True)
    assert kernels.of(gm).bytes_of(node, "cpu") == 12_345
    assert not recwarn.list


def test_a_rank_that_follows_takes_the_numbers_of_the_one_that_plans(runs, monkeypatch):
    gm, node = _graph()
    planner, follower = KernelMeasurements(), KernelMeasurements()
    planner.of(gm)
    planner.of(_graph(rows=9)[0])
    sent = ScratchTable.from_data(planner.rows_of(gm).as_data())
    assert len(sent.known(Machine.here())) == 1  # of this graph alone
    monkeypatch.setattr(scratch_measured, "_peak_of", lambda call: 99)
    scratch_measured._measured.cache_clear()
    follower.of(gm)
    assert follower.scratch().bytes_of(node, "cpu") == 99
    follower.adopt(sent)
    assert follower.of(gm).bytes_of(node, "cpu") == 12_345


def test_a_rank_on_another_processor_measures_itself(runs, monkeypatch):
    gm, node = _graph()
    planner, follower = KernelMeasurements(), KernelMeasurements()
    planner.of(gm)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(scratch_measured, "_peak_of", lambda call: 99)
    follower.adopt(planner.rows_of(gm))
    follower.adopt(planner.table)
    assert follower.of(gm).bytes_of(node, "cpu") == 99


def test_a_card_of_this_machine_is_measured_one_of_another_never(runs, tmp_path: Path):
    gm, node = _graph()
    here = Machine.here()
    other = Machine(processor="another", num_threads=3)
    assert scratch_of_card(here, None, gm).bytes_of(node, "cpu") == 12_345
    assert scratch_of_card(here, None).known == {}
    assert len(runs) == 1
    assert scratch_of_card(None, None, gm) is UNMEASURED
    assert scratch_of_card(other, None, gm) == KernelScratch(num_threads=3)
    assert scratch_of_card(here, None, gm, "cuda").known == {}
    assert len(runs) == 1


def test_rows_beside_the_card_of_another_machine_hold_for_it(runs, tmp_path: Path):
    gm, node = _graph()
    other = Machine(processor="another", num_threads=3)
    text = str(kernel_call(node))
    ScratchTable(rows={other: {text: 7}}).save(tmp_path / "there.scratch.json")
    assert scratch_of_card(other, tmp_path / "there.json", gm).bytes_of(node, "cpu") == 7
    assert not runs


@pytest.mark.parametrize(
    "text", ["{", "[1]", '[{"processor": "a", "num_threads": 1, "bytes": {"x": -1}}]', '[{"processor": "a"}]']
)
def test_a_file_that_is_no_table_is_refused_by_name(tmp_path: Path, text: str):
    file = tmp_path / "here.scratch.json"
    file.write_text(text)
    with pytest.raises(TableError, match=r"here\.scratch\.json is no table of measured kernels .*delete it"):
        KernelMeasurements(file)


def test_a_table_comes_back_as_it_was_saved(tmp_path: Path):
    one, other = (Machine(processor=name, num_threads=number) for name, number in (("a", 1), ("b, c", 2)))
    table = ScratchTable(rows={one: {"mm(x)": 3}, other: {"mm(x)": 4, "mm(y)": 0}})
    table.save(tmp_path / "t.json")
    assert ScratchTable.load(tmp_path / "t.json") == table
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert ScratchTable.load(tmp_path / "none.json") == ScratchTable()
    newer = ScratchTable(rows={one: {"mm(x)": 5, "mm(z)": 6}})
    assert table.updated(newer).known(one) == {"mm(x)": 5, "mm(z)": 6}
    assert table.updated(newer).known(other) == table.known(other)


def test_a_table_may_be_read_by_whoever_may_read_the_card(tmp_path: Path):
    (tmp_path / "card.json").write_text("{}")
    ScratchTable().save(tmp_path / "t.json")
    assert (tmp_path / "t.json").stat().st_mode == (tmp_path / "card.json").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["card.json", "t.json"]
