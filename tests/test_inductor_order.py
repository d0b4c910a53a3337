"""The order handed to Inductor, the order read from its source, and the difference in words."""

import operator
import re
import sys
import warnings

import pytest
import torch
import torch._inductor.config as inductor_config
from small_graphs import GraphBuilder, aten
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.fx_passes.control_dependencies import control_deps

import graphshard
from graphshard import backend
from graphshard.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT, c10d
from graphshard.errors import OptionError
from graphshard.inductor import (
    config_patches,
    emitted_order,
    functorch_patch,
    order_difference,
    pin_order,
    planned_order,
)

GROUP = "g"


def _two_gathers_and_a_reduction():
    build = GraphBuilder()
    a, b, x = (build.input(name, 2, 4) for name in ("primals_1", "primals_2", "primals_3"))
    first, second = build(ALL_GATHER, a, 2, GROUP), build(ALL_GATHER, b, 2, GROUP)
    value = build(aten.mm.default, build(WAIT, first), build(aten.t.default, x))
    started = build(REDUCE_SCATTER, value, "sum", 2, GROUP)
    later = build(aten.mm.default, build(WAIT, second), build(aten.t.default, x))
    return build.finish(later, build(WAIT, started))


def test_planned_order_counts_each_kind():
    assert planned_order(_two_gathers_and_a_reduction()) == [
        "start all_gather_into_tensor 0",
        "start all_gather_into_tensor 1",
        "wait all_gather_into_tensor 0",
        "start reduce_scatter_tensor 0",
        "wait all_gather_into_tensor 1",
        "wait reduce_scatter_tensor 0",
    ]


def test_planned_order_of_a_coalesced_collective():
    build = GraphBuilder()
    inputs = [build.input(f"primals_{i}", 2) for i in range(2)]
    started = build(c10d.all_reduce_coalesced.default, inputs, "sum", GROUP)
    gm = build.finish(*(build(WAIT, build(operator.getitem, started, i)) for i in range(2)))
    assert planned_order(gm) == ["start all_reduce_coalesced 0", *["wait all_reduce_coalesced 0"] * 2]


def test_planned_order_of_a_graph_without_collectives():
    build = GraphBuilder()
    assert planned_order(build.finish(build(aten.relu.default, build.input("primals_1", 2)))) == []


FUNCTIONAL = """
def call(self, args):
        primals_1, primals_2 = args
        buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(primals_1, 2, '0')
        assert_size_stride(buf0, (8, 4), (4, 1), 'torch.ops._c10d_functional.all_gather_into_tensor.default')
        buf1 = torch.ops._c10d_functional.all_gather_into_tensor.default(primals_2, 2, '0')
        torch.ops._c10d_functional.wait_tensor.default(buf0)
        buf4 = empty_strided_cpu((2, 12), (12, 1), torch.float32)
        extern_kernels.mm(buf0, reinterpret_tensor(primals_1, (4, 2), (1, 4), 0), out=buf4)
        buf8 = torch.ops._c10d_functional.reduce_scatter_tensor.default(reinterpret_tensor(buf4, (24, ), (1, ), 0), 'sum', 2, '0')
        torch.ops._c10d_functional.wait_tensor.default(buf1)
        del buf1
        buf9 = torch.ops._c10d_functional.wait_tensor.default(buf8)
        return (buf9, )
"""  # noqa: E501

IN_PLACE = """
        buf2 = primals_1; del primals_1  # reuse
        torch.ops._c10d_functional.all_reduce_.default(buf2, 'sum', '0')
        buf3 = buf2; del buf2  # reuse
        torch.ops._c10d_functional.wait_tensor.default(buf3)
"""

COALESCED = """
        buf0 = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([arg0_1, arg1_1], 2, '0')
        buf1 = buf0[0]
        buf2 = buf0[1]
        torch.ops._c10d_functional.wait_tensor.default(buf1)
        torch.ops._c10d_functional.wait_tensor.default(buf2)
"""

OUT_VARIANT = """
        buf1 = torch.ops._c10d_functional.all_gather_into_tensor_out.default(buf0, 2, '0', out=buf5)
        torch.ops._c10d_functional.wait_tensor.default(buf1)
"""


def test_emitted_order_is_the_order_of_the_calls():
    assert emitted_order(FUNCTIONAL) == planned_order(_two_gathers_and_a_reduction())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (IN_PLACE, ["start all_reduce 0", "wait all_reduce 0"]),
        (
            COALESCED,
            ["start all_gather_into_tensor_coalesced 0", *["wait all_gather_into_tensor_coalesced 0"] * 2],
        ),
        (OUT_VARIANT, ["start all_gather_into_tensor 0", "wait all_gather_into_tensor 0"]),
        ("buf0 = empty_strided_cpu((2, ), (1, ), torch.float32)", []),
        ("# buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(primals_1, 2, '0')", []),
    ],
    ids=["in place", "coalesced", "out", "no collective", "comment"],
)
def test_emitted_order_of_other_forms(source, expected):
    assert emitted_order(source) == expected


def test_a_moved_call_is_a_difference():
    lines = FUNCTIONAL.splitlines()
    second = next(i for i, line in enumerate(lines) if "buf1 = torch.ops" in line)
    wait = next(i for i, line in enumerate(lines) if "wait_tensor.default(buf0)" in line)
    lines.insert(wait, lines.pop(second))
    planned = planned_order(_two_gathers_and_a_reduction())
    assert order_difference(planned, emitted_order("\n".join(lines))) == (
        "step 1: planned 'start all_gather_into_tensor 1', emitted 'wait all_gather_into_tensor 0'"
    )


@pytest.mark.parametrize(
    ("planned", "emitted", "words"),
    [
        (["start a 0"], ["start a 0"], ""),
        ([], [], ""),
        (["start a 0", "wait a 0"], ["start a 0"], "step 1: planned 'wait a 0', emitted 'nothing'"),
        (["start a 0"], ["start a 0", "wait a 0"], "step 1: planned 'nothing', emitted 'wait a 0'"),
    ],
    ids=["equal", "empty", "dropped", "added"],
)
def test_order_difference(planned, emitted, words):
    assert order_difference(planned, emitted) == words


def test_ties_run_from_starts_to_waits_and_back():
    gm = _two_gathers_and_a_reduction()
    pin_order(gm)
    tied = gm.graph.find_nodes(op="call_function", target=control_deps)
    # Wait 0 after start 1, the reduction after wait 0, wait 1 after the reduction; wait 2 follows a wait.
    assert [[dep.name for dep in node.args[0]] for node in tied] == [
        ["all_gather_into_tensor_default_1"],
        ["wait_tensor_default"],
        ["reduce_scatter_tensor_default"],
    ]
    assert all(dep in tied or dep.op == "call_function" for node in tied for dep in node.args[0])
    gm.graph.lint()


def test_pinning_nothing_changes_nothing():
    build = GraphBuilder()
    gm = build.finish(build.gather(build.input("primals_1", 2), 2))
    before = [node.name for node in gm.graph.nodes]
    pin_order(gm)
    assert [node.name for node in gm.graph.nodes] == before


MOVING = [
    ("reorder_for_compute_comm_overlap", True),
    ("reorder_for_peak_memory", True),
    ("bucket_all_gathers_fx", "all"),
    ("aten_distributed_optimizations.enable_overlap_scheduling", True),
]


@pytest.mark.parametrize(("name", "value"), MOVING, ids=[name for name, _ in MOVING])
def test_options_that_move_collectives_are_refused(name, value):
    with pytest.raises(OptionError, match=f"Inductor option.s. {name} would move the collectives"):
        config_patches({name: value})


@pytest.mark.parametrize(("name", "value"), MOVING, ids=[name for name, _ in MOVING])
def test_options_that_move_collectives_are_off(name, value):
    assert config_patches({})[name] != value
    assert config_patches({"max_autotune": True})[name] != value


def test_all_clashes_are_listed():
    with pytest.raises(OptionError, match="bucket_all_gathers_fx, reorder_for_peak_memory would move"):
        config_patches({"reorder_for_peak_memory": True, "bucket_all_gathers_fx": "all"})


def test_saying_what_holds_anyway_is_fine():
    assert config_patches({"reorder_for_peak_memory": False})["reorder_for_peak_memory"] is False


def test_options_inductor_lacks_are_refused():
    with pytest.raises(OptionError, match=r"Inductor has no option\(s\) fuse_it_all, triton.fly"):
        config_patches({"triton.fly": 1, "fuse_it_all": True})


def test_option_of_functorch_is_refused_with_its_place():
    with pytest.raises(OptionError, match=r"set torch\._functorch\.config\.activation_memory_budget instead"):
        config_patches({"activation_memory_budget": 0.5})


def test_user_options_arrive():
    patches = config_patches({"max_autotune": True, "triton.cudagraphs": False})
    assert patches["max_autotune"] is True and patches["triton.cudagraphs"] is False


def test_with_a_budget_convolutions_get_no_copies_in_channels_last():
    name = "layout_optimization"
    assert name not in config_patches({})
    assert config_patches({}, has_budget=True)[name] is False
    assert config_patches({name: True}, has_budget=True)[name] is True


def test_a_joint_pass_of_the_user_is_not_dropped_silently():
    """The backend's own joint passes hang on this option."""
    with pytest.raises(OptionError, match="joint_custom_pre_pass"):
        config_patches({"joint_custom_pre_pass": lambda graph: None})


def test_every_patch_is_a_setting_of_this_torch():
    with torch._inductor.config.patch(config_patches({}, has_budget=True)):
        assert torch._inductor.config.layout_optimization is False
        assert torch._inductor.config.reorder_for_peak_memory is False


def test_functorch_settings_are_scoped():
    import torch._functorch.config as functorch_config

    before = functorch_config.enable_autograd_cache
    with functorch_patch():
        assert functorch_config.enable_autograd_cache is False
    assert functorch_config.enable_autograd_cache == before


def _swapped(source):
    """The order of the source with its first two steps the other way round."""
    first, second, *rest = emitted_order(source)
    return [second, first, *rest]


def _step(fake_group, verify, **options):
    torch.compiler.reset()
    mesh = fake_group(2)
    model = torch.nn.Sequential(*(graphshard.fully_shard(torch.nn.Linear(8, 8), mesh=mesh) for _ in range(2)))
    model = graphshard.fully_shard(model, mesh=mesh)
    forward = torch.compile(model, backend="graphshard", options={"verify": verify, **options})
    forward(torch.zeros(4, 8)).sum().backward()


def test_an_order_that_inductor_changed_is_an_error_or_a_warning(fake_group, monkeypatch):
    _step(fake_group, "full")
    monkeypatch.setattr(backend, "emitted_order", _swapped)
    with pytest.raises(BackendCompilerFailed, match=r"ScheduleOrderError: .*moved collectives of the forward: "):
        _step(fake_group, "full")
    with pytest.warns(UserWarning, match=r"Inductor moved collectives of the (for|back)ward: "):
        _step(fake_group, "cheap")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _step(fake_group, "off")


def test_an_order_that_cannot_be_checked_is_an_error_or_a_warning(fake_group, monkeypatch):
    compile_fx_inner = backend.compile_fx_inner

    def without_source(*args, **kwargs):
        compiled = compile_fx_inner(*args, **kwargs)
        compiled.source_code = None
        return compiled

    monkeypatch.setattr(backend, "compile_fx_inner", without_source)
    with pytest.raises(BackendCompilerFailed, match=r"ScheduleOrderError: .*shows no source of the forward"):
        _step(fake_group, "full")
    with pytest.warns(UserWarning, match="whether its collectives moved is not known"):
        _step(fake_group, "cheap")


def test_fusions_that_hold_more_are_left_out_where_a_plan_comes_near_its_budget(fake_group, monkeypatch):
    """Unless the user says what kernels must share to be fused."""
    name, seen = "score_fusion_memory_threshold", []
    compile_fx_inner = backend.compile_fx_inner

    def remember(*args, **kwargs):
        seen.append(getattr(inductor_config, name))
        return compile_fx_inner(*args, **kwargs)

    monkeypatch.setattr(backend, "compile_fx_inner", remember)
    usual = getattr(inductor_config, name)
    with pytest.raises(BackendCompilerFailed) as refused:
        _step(fake_group, "cheap", hardware="cpu-loopback", memory_budget=1)
    smallest = int(re.search(r"is (\d+) bytes", str(refused.value))[1])
    for options, expected in (
        ({}, {usual}),
        ({"memory_budget": "1GB"}, {usual}),
        ({"memory_budget": smallest}, {sys.maxsize}),
        ({"memory_budget": smallest, "inductor": {name: 3}}, {3}),
    ):
        seen.clear()
        _step(fake_group, "cheap", hardware="cpu-loopback", bucket="auto", **options)
        assert set(seen) == expected and len(seen) == 2
    assert getattr(inductor_config, name) == usual
