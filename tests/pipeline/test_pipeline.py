"""Pipelines: contracts checked when built, claims checked when run, text that parses back."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from support.small_graphs import GraphBuilder, ParameterSpec, aten, parameter_graph

from graphshard.backend.options import BackendOptions
from graphshard.backend.pipelines import JOINT_PIPELINE, half_pipeline
from graphshard.cost import load_card
from graphshard.errors import GraphShardError, PassError, PipelineError
from graphshard.ir.collectives import ALL_GATHER
from graphshard.ir.graph_text import graph_text
from graphshard.ir.rewrite import GraphEmitter
from graphshard.passes import (
    KNOWN,
    BucketCollectives,
    LowerShards,
    MergeUnshards,
    ScheduleCollectives,
    TagRecompute,
)
from graphshard.pipeline.context import PassContext
from graphshard.pipeline.facts import Fact
from graphshard.pipeline.pipeline import Pass, PassReport, Pipeline

LOWERED = frozenset({Fact.TYPED, Fact.WAITED, Fact.LOWERED})
CTX = PassContext(full_checks=True)


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """A pass that does what a test tells it to."""

    name: ClassVar[str] = "scripted"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    edit: Any = None
    changed: bool = True
    strength: int = 1

    def run(self, gm, ctx):
        if self.edit is not None:
            self.edit(gm)
        return PassReport(changed=self.changed)


def _small_graph():
    build = GraphBuilder()
    x = build.input("primals_1", 2, 2)
    return build.finish(build(aten.relu.default, x))


def _insert(gm, target, *more, **options):
    """Applies ``target`` to the output of the graph."""
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        node = GraphEmitter(gm.graph)(target, output.args[0][0], *more, **options)
    output.args = ([node],)
    return node


@pytest.mark.parametrize(
    "step", [*(make() for make in KNOWN.values()), Scripted()], ids=lambda step: step.name
)
def test_passes_fit_the_protocol(step):
    assert isinstance(step, Pass)


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ((TagRecompute(),), "tag_recompute requires MERGED, provided by no earlier pass"),
        (
            (LowerShards(), MergeUnshards()),
            "lower_shards requires MERGED, provided by no earlier pass",
        ),
        ((ScheduleCollectives(),), "schedule_collectives requires WAITED, provided by no earlier pass"),
    ],
    ids=["first pass", "swapped", "level"],
)
def test_a_wrong_order_fails_at_construction(passes, message):
    with pytest.raises(PipelineError, match=message) as error:
        Pipeline(*passes)
    assert "; in the order: " + " > ".join(step.name for step in passes) in str(error.value)
    assert isinstance(error.value, GraphShardError) and isinstance(error.value, ValueError)


def test_the_pass_that_broke_a_fact_is_named():
    @dataclass(frozen=True, kw_only=True)
    class NeedsOrder(Scripted):
        name: ClassVar[str] = "needs_order"
        requires: ClassVar[frozenset[Fact]] = frozenset({Fact.SCHEDULED})

    with pytest.raises(PipelineError, match="needs_order requires SCHEDULED, broken by bucket_collectives"):
        Pipeline(ScheduleCollectives(), BucketCollectives(), NeedsOrder(), given=LOWERED)
    Pipeline(BucketCollectives(), ScheduleCollectives(), NeedsOrder(), given=LOWERED)


def test_facts_at_end():
    assert Pipeline().facts_at_end == {Fact.TYPED}
    assert Pipeline(MergeUnshards()).facts_at_end == {Fact.TYPED, Fact.MERGED, Fact.REDUCED}
    scheduled = Pipeline(ScheduleCollectives(), BucketCollectives(), given=LOWERED)
    assert scheduled.facts_at_end == LOWERED | {Fact.BUCKETED}


PIPELINES = [
    Pipeline(MergeUnshards()),
    JOINT_PIPELINE,
    Pipeline(BucketCollectives(), ScheduleCollectives(prefetch=3), given=LOWERED),
    Pipeline(ScheduleCollectives(prefetch=0, reductions_in_flight=5), given=LOWERED),
    Pipeline(),
]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_text_parses_back(pipeline):
    again = Pipeline.parse(str(pipeline), KNOWN, given=pipeline.given)
    assert again.passes == pipeline.passes
    assert str(again) == str(pipeline)


def test_text_shows_options_that_are_not_default():
    pipeline = Pipeline(ScheduleCollectives(prefetch=2), BucketCollectives(), given=LOWERED)
    assert str(pipeline) == "schedule_collectives(prefetch=2) > bucket_collectives"
    assert repr(pipeline) == "Pipeline('schedule_collectives(prefetch=2) > bucket_collectives')"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fuse_everything", "unknown pass 'fuse_everything'; known: bucket_collectives, exchange_reductions"),
        ("schedule_collectives(prefetch=2", "cannot read 'schedule_collectives.prefetch=2'"),
        ("schedule_collectives(prefetch=open)", "cannot read"),
        ("schedule_collectives(depth=2)", "cannot read .*unexpected keyword argument 'depth'"),
        ("schedule_collectives(prefetch=-1)", "cannot read .*prefetch=-1 must be at least 0"),
        ("schedule_collectives(2)", "cannot read .*expected name.option=value"),
        ("schedule_collectives() + 1", "cannot read"),
        ("merge_unshards > ", "unknown pass ''"),
    ],
    ids=["pass", "syntax", "not a literal", "option", "value", "positional", "expression", "dangling"],
)
def test_a_text_that_cannot_be_read(text, message):
    with pytest.raises(PipelineError, match=message):
        Pipeline.parse(text, KNOWN, given=LOWERED)


def test_a_parsed_order_is_checked():
    with pytest.raises(PipelineError, match="lower_shards requires"):
        Pipeline.parse("lower_shards > merge_unshards", KNOWN)


def test_claiming_a_change_that_did_not_happen():
    with pytest.raises(
        PassError, match="scripted reported changed=True, but it did not change the graph text"
    ):
        Pipeline(Scripted(changed=True)).run(_small_graph(), CTX)


def test_a_text_that_the_caller_has_is_not_made_again():
    gm = _small_graph()
    idle = Pipeline(Scripted(changed=False))
    assert idle.run(gm, CTX, before=graph_text(gm))[0].text == graph_text(gm)
    with pytest.raises(PassError, match="reported changed=False, but it changed"):
        idle.run(gm, CTX, before="of another graph")


def test_hiding_a_change():
    step = Scripted(edit=lambda gm: _insert(gm, aten.tanh.default), changed=False)
    with pytest.raises(PassError, match="scripted reported changed=False, but it changed the graph text"):
        Pipeline(step).run(_small_graph(), CTX)


def _drop_output(gm):
    gm.graph.output_node().args = ([],)


def _rename_input(gm):
    old = gm.graph.find_nodes(op="placeholder")[0]
    with gm.graph.inserting_before(old):
        new = gm.graph.placeholder("primals_2")
    new.meta.update(old.meta)
    old.replace_all_uses_with(new)
    gm.graph.erase_node(old)


@pytest.mark.parametrize(
    "edit",
    [
        _drop_output,
        _rename_input,
        lambda gm: _insert(gm, aten.view.default, [4]),
        lambda gm: _insert(gm, aten._to_copy.default, dtype=torch.float32),
    ],
    ids=["an output less", "another input", "another shape", "another dtype"],
)
def test_a_changed_signature_is_caught(edit):
    with pytest.raises(PassError, match="scripted changed the inputs or the types of the outputs"):
        Pipeline(Scripted(edit=edit)).run(_small_graph(), CTX)


def test_strides_of_outputs_may_change():
    edit = lambda gm: _insert(gm, aten.t.default)  # noqa: E731
    (record,) = Pipeline(Scripted(edit=edit)).run(_small_graph(), CTX)
    assert "@(1,2)" in record.text


def _untype(gm):
    del _insert(gm, aten.tanh.default).meta["val"]


def test_a_broken_fact_is_caught():
    with pytest.raises(PassError, match=r"after scripted the graph is not TYPED: .*tanh.*has no fake value"):
        Pipeline(Scripted(edit=_untype)).run(_small_graph(), CTX)


def test_a_fact_broken_on_purpose_is_not_checked():
    @dataclass(frozen=True, kw_only=True)
    class Breaking(Scripted):
        breaks: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})

    # The signature needs the values of the outputs, so break a node behind them.
    def edit(gm):
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(aten.tanh.default, (gm.graph.find_nodes(op="placeholder")[0],))

    Pipeline(Breaking(edit=edit)).run(_small_graph(), CTX)
    with pytest.raises(PassError, match="not TYPED"):
        Pipeline(Scripted(edit=edit)).run(_small_graph(), CTX)


def test_an_unwaited_collective_is_caught():
    def edit(gm):
        with gm.graph.inserting_before(gm.graph.output_node()):
            GraphEmitter(gm.graph)(ALL_GATHER, gm.graph.find_nodes(op="placeholder")[0], 2, "g")

    with pytest.raises(PassError, match="after scripted the graph is not WAITED"):
        Pipeline(Scripted(edit=edit), given=LOWERED).run(_small_graph(), CTX)


def test_a_promised_fact_is_checked():
    @dataclass(frozen=True, kw_only=True)
    class Promising(Scripted):
        provides: ClassVar[frozenset[Fact]] = frozenset({Fact.LOWERED})

    gm, ctx = parameter_graph([ParameterSpec((4, 2))], 2)
    with pytest.raises(PassError, match="after scripted the graph is not LOWERED"):
        Pipeline(Promising(changed=False)).run(gm, ctx)


def test_many_problems_are_cut_short():
    def edit(gm):
        with gm.graph.inserting_before(gm.graph.output_node()):
            for _ in range(8):
                gm.graph.call_function(aten.tanh.default, (gm.graph.find_nodes(op="placeholder")[0],))

    with pytest.raises(PassError, match="; and 3 more"):
        Pipeline(Scripted(edit=edit)).run(_small_graph(), CTX)


def test_an_invalid_graph_is_caught():
    def edit(gm):
        nodes = list(gm.graph.nodes)
        nodes[0].prepend(nodes[1])  # relu before its input

    with pytest.raises(RuntimeError, match="before it has been defined"):
        Pipeline(Scripted(edit=edit)).run(_small_graph(), CTX)


def test_records():
    gm, ctx = parameter_graph([ParameterSpec((5, 2)), ParameterSpec((3,), dtype=torch.float32)], 2)
    pipeline = Pipeline(MergeUnshards(), TagRecompute(), LowerShards())
    records = pipeline.run(gm, ctx)
    assert [record.name for record in records] == ["merge_unshards", "tag_recompute", "lower_shards"]
    assert [record.num_collectives for record in records] == [0, 0, 4]
    # Shards of 3x2 f64 and 2 f32 go out to the gathers, gradients of 6x2 f64 and 4 f32 to the reductions.
    assert records[-1].collective_bytes == (6 + 12) * 8 + (2 + 4) * 4
    assert records[-1].num_nodes == len(gm.graph.nodes)
    assert records[-1].report.counts == {"gathers": 2, "reductions": 2, "pieces": 0}
    assert all(record.seconds >= 0 for record in records)
    assert "reduce_scatter_tensor" in records[-1].text and "unshard" in records[0].text


def test_the_backend_tags_at_level_1_and_lowers_each_half_first():
    joint = [step.name for step in JOINT_PIPELINE.passes]
    assert joint == ["merge_waits", "merge_unshards", "spread_parameters", "tag_recompute"]
    half = [step.name for step in half_pipeline(BackendOptions(hardware=None, bucket="unit")).passes]
    assert half == ["lower_shards", "merge_sums", "join_pointwise", "bucket_collectives", "schedule_collectives"]


def test_the_module_runs_what_the_graph_says():
    """Passes edit the graph; the pipeline recompiles the module."""
    gm = _small_graph()
    x = torch.randn(2, 2)
    Pipeline(Scripted(edit=lambda gm: _insert(gm, aten.neg.default))).run(gm, CTX)
    assert torch.equal(gm(x)[0], -x.relu())


def test_uuid_changes_with_passes_and_options():
    pipelines = [
        Pipeline(BucketCollectives(), given=LOWERED),
        Pipeline(ScheduleCollectives(), given=LOWERED),
        Pipeline(ScheduleCollectives(prefetch=2), given=LOWERED),
        Pipeline(BucketCollectives(), ScheduleCollectives(), given=LOWERED),
        Pipeline(ScheduleCollectives(), BucketCollectives(), given=LOWERED),
    ]
    assert len({pipeline.uuid() for pipeline in pipelines}) == len(pipelines)
    assert pipelines[0].uuid() == Pipeline(BucketCollectives(by="unit"), given=LOWERED).uuid()


def test_uuid_changes_with_the_source_of_a_pass():
    class Plain(Scripted):
        pass

    class Longer(Scripted):
        another_line = True

    assert Pipeline(Plain()).uuid() != Pipeline(Longer()).uuid()


PASS_OF_ITS_OWN = """
import importlib
from dataclasses import dataclass
from typing import ClassVar

from .names import NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    name: ClassVar[str] = NAME
    requires: ClassVar[frozenset] = frozenset()
    provides: ClassVar[frozenset] = frozenset()
    breaks: ClassVar[frozenset] = frozenset()
"""


def test_uuid_changes_with_what_a_pass_calls(tmp_path, monkeypatch):
    """A helper in the package of a pass, and one in a folder of the package below it; not one beside the package."""
    package = tmp_path / "own_passes"
    (package / "deeper").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "own.py").write_text(PASS_OF_ITS_OWN)
    helpers = [package / "names.py", package / "deeper" / "more.py"]
    for helper in helpers:
        helper.write_text("NAME = 'own'\n")
    monkeypatch.syspath_prepend(tmp_path)
    pipeline = Pipeline(importlib.import_module("own_passes.own").Own())
    uuids = [pipeline.uuid()]
    for helper in helpers:
        helper.write_text("NAME = 'own'  # another line\n")
        uuids.append(pipeline.uuid())
    assert len(set(uuids)) == 3
    (tmp_path / "beside.py").touch()
    assert pipeline.uuid() == uuids[-1]


def test_there_is_no_uuid_of_a_class_that_was_typed_in():
    typed = {"__name__": "notebook", "Scripted": Scripted}
    exec("class Typed(Scripted):\n    pass", typed)
    assert Pipeline(typed["Typed"]()).uuid() == ""


def test_the_text_of_options_is_the_same_in_every_process():
    """Ranks find each other's plans by it: addresses, and the order of a set, are those of one process."""
    names = frozenset(map(str, range(9)))
    shown = str(Pipeline(Scripted(edit=({"skip": [print, Scripted.run]}, names, {1}, (), set()))))
    assert shown == (
        "scripted(edit=({'skip': [<built-in function print>, <function Scripted.run>]}, "
        f"frozenset({{{', '.join(map(repr, sorted(names)))}}}), {{1}}, (), set()))"
    )


def test_there_is_no_uuid_of_a_pass_that_holds_a_function():
    """What the function does is in no text."""
    assert Pipeline(Scripted(edit=lambda gm: None)).uuid() == "" != Pipeline(Scripted(edit=1)).uuid()


def test_uuid_covers_what_the_passes_of_graphshard_call():
    """The files of its rooms, and those of passes/ where that is another folder."""
    from graphshard.pipeline import pipeline as module

    files = {file.name for file in module.source_files([BucketCollectives])}
    assert {"entry.py", "rewrite.py", "pipeline.py", "bucket_collectives.py", "plan_collectives.py"} <= files


def test_the_planner_gets_the_users_budget_or_the_default():
    card = load_card("cpu-loopback")
    texts = [
        str(half_pipeline(BackendOptions(hardware=card, bucket="auto", memory_budget=budget)))
        for budget in (None, 4096)
    ]
    assert texts == [
        f"lower_shards > merge_sums > join_pointwise > plan_collectives(memory_budget={budget!r})"
        for budget in ("default", 4096)
    ]
