"""What a later process finds of a compiled step: everything if nothing has changed, else nothing."""

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.new_process import with_nothing_in_memory
from torch import nn
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.traceback import annotate
from torch.nn import functional

import graphshard
from graphshard.backend.halves.half import HalfFacts
from graphshard.backend.halves.half_variants import PLAIN_STATE, CompiledVariant
from graphshard.backend.inductor import VariantCode
from graphshard.backend.inductor.compile_pieces import PieceRow
from graphshard.backend.second_start import HalfSource, StepRecord, half_text
from graphshard.memory import DONATED
from graphshard.passes import ScheduleCollectives

pytestmark = pytest.mark.inductor


class Net(nn.Module):
    """Two units, and a function between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


class Starts:
    """Starts a training again and again, as in new processes that share a cache folder."""

    def __init__(self, mesh: Any, folder: Path) -> None:
        self.mesh, self.folder = mesh, folder
        self.result = 0.0

    def start(
        self,
        *,
        between: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
        batch: int = 3,
        prepare: Callable[[nn.Module], Any] = lambda model: None,
        dynamic: bool | None = None,
        grad: bool = True,
        **options: Any,
    ) -> tuple[int, list[str]]:
        """Steps of all ranks of a new process: graphs found in AOTAutograd's cache, and halves that were compiled."""
        with with_nothing_in_memory() as start:
            model = Net(between)
            for unit in (model.first, model.second, model):
                graphshard.fully_shard(unit, mesh=self.mesh)
            prepare(model)
            options = {"hardware": None, **options}
            step = torch.compile(model, backend="graphshard", options=options, dynamic=dynamic)
            with nullcontext() if grad else torch.no_grad():
                result = step(torch.ones(batch, 4)).sum()
            self.result = result.item()
            if grad:
                result.backward()
        return start.found, start.compiled

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("steps/*.step"))


@pytest.fixture
def starts(
    fake_group: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Starts:
    monkeypatch.setenv("GRAPHSHARD_CACHE", str(tmp_path))
    return Starts(fake_group(2), tmp_path)


ANEW, KEPT = (0, ["forward", "backward"]), (1, [])


@pytest.mark.parametrize("hardware", [None, "cpu-ethernet-1g"], ids=["by rules", "planned"])
def test_a_later_process_compiles_nothing(starts, hardware):
    assert starts.start(hardware=hardware) == ANEW
    assert starts.start(hardware=hardware) == KEPT
    (file,) = starts.files
    before = file.read_bytes()
    assert starts.start(hardware=hardware) == KEPT
    assert file.read_bytes() == before, "what is found is not written again"


def test_what_autograd_gives_away_is_kept(starts):
    """Further variants of a backward may write over the same inputs."""
    starts.start(hardware="cpu-ethernet-1g", memory_budget="1GiB")
    (file,) = starts.files
    context = TracingContext(FakeTensorMode())
    with tracing(context):
        source = HalfSource.from_bytes(pickle.loads(file.read_bytes()).halves["backward"].source)
    inputs = source.gm.graph.find_nodes(op="placeholder")
    given = [index for index, node in enumerate(inputs) if node.meta.get(DONATED)]
    assert given and context.fw_metadata.bw_donated_idxs == given


def test_an_evaluation_is_kept_too(starts):
    assert starts.start(grad=False) == (0, ["inference"])
    assert starts.start(grad=False) == (1, [])
    assert starts.start() == ANEW, "with gradients it is another step"


def _frozen(model: nn.Module) -> None:
    model.first.weight.requires_grad_(False)


def _regathered_never(model: nn.Module) -> None:
    model.set_reshard_after_forward(False)


@pytest.mark.parametrize(
    "changed",
    [
        {"between": torch.sigmoid},
        {"between": lambda x: functional.dropout(x, 0.5)},
        {"batch": 5},
        {"prepare": _frozen},
        {"prepare": _regathered_never},
        {"hardware": "cpu-ethernet-1g"},
        {"overlap": "always"},
        {"bucket": "none"},
        {"share_code": "always"},
        {"verify": "full"},
        {"inductor": {"max_fusion_size": 8}},
        {"passes": {"schedule_collectives": [ScheduleCollectives(prefetch=0)]}},
    ],
    ids=lambda changed: ", ".join(changed),
)
def test_whatever_changes_is_compiled_anew(starts, changed):
    starts.start()
    found, compiled = starts.start(**changed)
    assert found == 0 and compiled == ["forward", "backward"]
    assert starts.start() == KEPT, "what was kept first is still there"


def _by_one(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([1.0] * 6)


def _by_two(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([2.0] * 6)


def test_steps_that_differ_in_a_constant_alone_have_files_of_their_own(starts):
    """The text of their graphs is the same."""
    results = []
    for between, expected in [(_by_one, ANEW), (_by_two, ANEW), (_by_one, KEPT), (_by_two, KEPT)]:
        assert starts.start(between=between) == expected
        results.append(starts.result)
    assert len(starts.files) == 2 and results[:2] == results[2:] and results[0] != results[1]


def _half(*, op: Any = torch.ops.aten.relu.default, group: str = "1", device: str = "cpu", constant: Any = None) -> Any:
    """A graph that reduces the sum of an input and a constant over a group."""
    graph = torch.fx.Graph()
    root = nn.Module()
    root.register_buffer("constant", torch.ones(3) if constant is None else constant)
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, device=device)
    added = graph.call_function(torch.ops.aten.add.Tensor, (x, graph.get_attr("constant")))
    reduced = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (added, "sum", group))
    graph.output(graph.call_function(op, (reduced,)))
    return torch.fx.GraphModule(root, graph)


def test_a_half_is_told_apart_by_operators_groups_devices_and_constants():
    changes = [
        {}, {"op": torch.ops.prims.abs.default}, {"op": torch.ops.aten.abs.default}, {"group": "2"}, {"device": "meta"},
        {"constant": torch.zeros(3)},
    ]  # fmt: skip
    assert len({half_text(_half(**changed)) for changed in changes}) == len(changes)
    assert half_text(_half()) == half_text(_half())
    with FakeTensorMode():
        assert half_text(_half(constant=torch.ones(3))) == "", "a fake constant holds nothing"


def test_annotations_count(starts):
    """A pass of the user may read them."""

    def annotated(factor: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def between(x: torch.Tensor) -> torch.Tensor:
            with annotate({"factor": factor}):
                return torch.tanh(x)

        return between

    assert starts.start(between=annotated(1)) == ANEW
    assert starts.start(between=annotated(2)) == ANEW
    assert starts.start(between=annotated(1)) == KEPT


OP = """
import torch

@torch.library.custom_op("graphshard_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: 2 * grad)
"""


def test_the_source_of_a_custom_op_counts(starts, tmp_path, caplog):
    """How it is differentiated is traced."""
    file = tmp_path / "ops.py"
    file.write_text(OP)
    defined = {}
    exec(compile(OP, file, "exec"), defined)
    doubled = defined["doubled"]
    assert starts.start(between=doubled) == ANEW
    assert starts.start(between=doubled) == KEPT
    file.write_text(OP + "# changed\n")
    assert starts.start(between=doubled) == ANEW
    file.unlink()
    with caplog.at_level("INFO", logger="graphshard"):
        assert starts.start(between=doubled) == ANEW
    assert "a custom op has no source file" in caplog.text


@pytest.mark.parametrize("setting", ["autocast", "torch's settings", "AOTAutograd's settings", "threads"])
def test_settings_outside_of_the_options_count(starts, setting):
    starts.start()
    threads = torch.get_num_threads()
    changed = {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "torch's settings": lambda: inductor_config.patch({"epilogue_fusion": False}),
        "AOTAutograd's settings": lambda: functorch_config.patch({"aggressive_recomputation": True}),
        "threads": nullcontext,
    }
    try:
        torch.set_num_threads(threads + 1 if setting == "threads" else threads)
        with changed[setting]():
            assert starts.start()[0] == 0
    finally:
        torch.set_num_threads(threads)


def test_source_of_graphshard_counts(starts, monkeypatch):
    starts.start()
    monkeypatch.setattr("graphshard.pipeline.Pipeline.uuid", lambda self: f"other source of {self}")
    assert starts.start() == ANEW
    monkeypatch.setattr("graphshard.pipeline.Pipeline.uuid", lambda self: "")
    assert starts.start() == ANEW, "source that is not known"
    assert len(starts.files) == 2


@pytest.mark.parametrize("reason", ["dump", "verify", "sizes", "no folder", "no cache of torch"])
def test_what_is_never_kept(starts, reason, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="graphshard")
    options: dict[str, Any] = {
        "dump": {"dump": tmp_path / "dump"},
        "verify": {"verify": "off"},
        "sizes": {"dynamic": True},
    }.get(reason, {})
    if reason == "no folder":
        monkeypatch.setenv("GRAPHSHARD_CACHE", "")
    with functorch_config.patch({"enable_autograd_cache": reason != "no cache of torch"}):
        for _ in range(2):
            assert starts.start(**options) == ANEW
    assert not starts.files and caplog.text.count("its code is not kept") == (
        0 if reason == "no folder" else 2
    )


@pytest.mark.parametrize("damage", ["lost", "cut", "another", "unloadable"])
def test_a_damaged_file_is_written_again(starts, damage, monkeypatch):
    starts.start()
    (file,) = starts.files
    whole = file.read_bytes()
    if damage == "lost":
        file.unlink()
    elif damage == "unloadable":
        monkeypatch.setattr(VariantCode, "loaded", _fail)
        assert starts.start() == (1, ["forward", "backward"])
        return
    else:
        file.write_bytes(whole[:1000] if damage == "cut" else pickle.dumps("another"))
    assert starts.start() == ANEW
    assert starts.files == [file] and file.stat().st_size > 1000
    assert starts.start() == KEPT


def test_another_plan_is_followed_also_where_nothing_can_be_deleted(starts, monkeypatch):
    starts.start()
    monkeypatch.setattr("graphshard.backend.loaded_step.say_again", lambda *_: False)
    monkeypatch.setattr(Path, "unlink", _deny)
    assert starts.start() == (1, ["forward", "backward"])


def _deny(*_: Any, **__: Any) -> Any:
    raise PermissionError(13, "Permission denied")


def _fail(*_: Any) -> Any:
    raise RuntimeError("no such kernel")


def test_what_cannot_be_written_stops_no_run(starts, monkeypatch):
    monkeypatch.setattr("graphshard.backend.second_start.half_source.pickled", _fail)
    assert starts.start() == ANEW and not starts.files
    monkeypatch.undo()


def test_old_steps_make_room(starts, monkeypatch):
    monkeypatch.setattr("graphshard.backend.second_start.step_files._MOST_STEPS", 1)
    starts.start()
    starts.start(batch=5)
    assert len(starts.files) == 1
    assert starts.start(batch=5) == KEPT


def test_only_graphs_that_inductor_keeps_are_kept():
    code = VariantCode(compiled=(lambda args: args,), names={})
    assert not code.can_be_kept
    assert not VariantCode(compiled=(), row=PieceRow((), (), (torch.ones(1),), 0), names={}).can_be_kept
    assert VariantCode(compiled=(), row=PieceRow((), (), (), 0), names={}).can_be_kept
    record = StepRecord("key")
    record.add_half("forward", HalfFacts(is_backward=False), "", lambda: b"")
    record.add_variant("forward", PLAIN_STATE, CompiledVariant(run=code.run(), code=code), ())
    assert "cannot be kept" in record.refusal


def test_a_step_is_named_by_its_halves():
    names = set()
    for key, text in [("key", "one"), ("other", "one"), ("key", "two")]:
        record = StepRecord(key)
        record.add_half("inference", HalfFacts(is_backward=False), text, lambda: b"")
        names.add(record.name())
    assert len(names) == 3
