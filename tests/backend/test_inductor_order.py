"""The order handed to Inductor, the order read from its source, and the difference in words."""

import operator
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor_config
from support.pinned_models import LateNorm, LateScale
from support.small_graphs import GraphBuilder, aten
from support.torch_versions import NEEDS_MESSAGES
from torch._dynamo.exc import BackendCompilerFailed
from torch._guards import TracingContext, tracing
from torch._inductor.async_compile import AsyncCompile

import graphshard
from graphshard.backend import compilation
from graphshard.backend.inductor import JOINT_PASS, JointPass
from graphshard.backend.inductor.emitted_order import emitted_order, order_difference, planned_order
from graphshard.backend.inductor.inductor_config import config_patches, functorch_patch
from graphshard.backend.inductor.order_pinning import pinning_patch
from graphshard.errors import OptionError
from graphshard.ir.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT, c10d

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
        "run t",
        "run mm",
        "start reduce_scatter_tensor 0",
        "wait all_gather_into_tensor 1",
        "run t",
        "run mm",
        "wait reduce_scatter_tensor 0",
    ]


def test_planned_order_of_a_coalesced_collective():
    build = GraphBuilder()
    inputs = [build.input(f"primals_{i}", 2) for i in range(2)]
    started = build(c10d.all_reduce_coalesced.default, inputs, "sum", GROUP)
    gm = build.finish(*(build(WAIT, build(operator.getitem, started, i)) for i in range(2)))
    assert planned_order(gm) == ["start all_reduce_coalesced 0", *["wait all_reduce_coalesced 0"] * 2]


@NEEDS_MESSAGES
def test_planned_order_of_what_writes_to_memory_it_is_given_is_in_the_words_of_what_is_emitted():
    """Also where the wait reads that memory; messages between two ranks are ordered too."""
    build = GraphBuilder()
    part, whole = build.input("primals_1", 2, 4), build.input("primals_2", 4, 4)
    gathered = build(WAIT, build(c10d.all_gather_into_tensor_out.default, part, 2, GROUP, out=whole))
    value = build(aten.mm.default, gathered, gathered)
    build(c10d.all_reduce_.default, value, "sum", GROUP)
    waited = build(WAIT, value)
    sent = build(WAIT, build(c10d.isend.default, waited, 1, 0, GROUP))
    assert planned_order(build.finish(sent, waited)) == [
        "start all_gather_into_tensor 0",
        "wait all_gather_into_tensor 0",
        "run mm",
        "start all_reduce 0",
        "wait all_reduce 0",
        "start isend 0",
        "wait isend 0",
    ]


def test_planned_order_of_a_graph_without_collectives():
    build = GraphBuilder()
    gm = build.finish(build(aten.relu.default, build.input("primals_1", 2)))
    assert planned_order(gm) == ["run relu"]


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
        buf9 = empty_strided_cpu((2, 12), (12, 1), torch.float32)
        extern_kernels.mm(buf1, reinterpret_tensor(primals_1, (4, 2), (1, 4), 0), out=buf9)
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

COALESCED_IN_PLACE = """
        torch.ops._c10d_functional.all_reduce_coalesced_.default([reinterpret_tensor(buf0, (4, ), (1, ), 0), buf1], 'sum', '0')
        torch.ops._c10d_functional.wait_tensor.default(buf0)
        torch.ops._c10d_functional.wait_tensor.default(buf1)
"""  # noqa: E501

VIEWED = """
        buf1 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf0, 2, '0')
        torch.ops._c10d_functional.wait_tensor.default(reinterpret_tensor(buf1, (2, 8), (8, 1), 0))
"""

RELEASED = """
        buf1 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf0, 2, '0')
        wait_until_released(buf1)
"""

OUT_VARIANT = """
        buf1 = torch.ops._c10d_functional.all_gather_into_tensor_out.default(buf0, 2, '0', out=buf5)
        torch.ops._c10d_functional.wait_tensor.default(buf1)
"""


def test_emitted_order_is_the_order_of_the_calls():
    """Views are no calls."""
    planned = planned_order(_two_gathers_and_a_reduction())
    assert emitted_order(FUNCTIONAL) == [step for step in planned if step != "run t"]
    assert order_difference(planned, emitted_order(FUNCTIONAL)) == ""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (IN_PLACE, ["start all_reduce 0", "wait all_reduce 0"]),
        (
            COALESCED,
            ["start all_gather_into_tensor_coalesced 0", *["wait all_gather_into_tensor_coalesced 0"] * 2],
        ),
        (COALESCED_IN_PLACE, ["start all_reduce_coalesced 0", *["wait all_reduce_coalesced 0"] * 2]),
        (VIEWED, ["start all_gather_into_tensor 0", "wait all_gather_into_tensor 0"]),
        (RELEASED, ["start all_gather_into_tensor 0", "wait all_gather_into_tensor 0"]),
        (OUT_VARIANT, ["start all_gather_into_tensor 0", "wait all_gather_into_tensor 0"]),
        ("buf0 = empty_strided_cpu((2, ), (1, ), torch.float32)", []),
        ("        extern_kernels.bias_addmm(buf1, buf2, buf3, alpha=1, beta=1, out=buf4)", ["run addmm"]),
        ("        buf5 = torch.ops.aten._flash_attention_forward.default(buf1)", ["run _flash_attention_forward"]),
        ("# buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(primals_1, 2, '0')", []),
    ],
    ids=[
        *("in place", "coalesced", "coalesced in place", "view", "released", "out", "no collective", "library"),
        *("aten", "comment"),
    ],
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


@pytest.mark.parametrize(
    ("planned", "emitted", "words"),
    [
        ("0 mm W0 mm 1 W1", "0 mm W0 mm 1 W1", ""),
        ("0 mm W0 1 W1", "0 W0 mm 1 W1", "in front of 'wait g 0': planned 1 times 'run mm', emitted 0"),
        ("0 W0 mm 1 W1", "0 mm W0 1 W1", "in front of 'wait g 0': planned 0 times 'run mm', emitted 1"),
        ("0 bmm mm W0 1 W1", "0 mm bmm W0 1 W1", ""),
        ("0 relu W0 1 W1", "0 W0 1 W1", ""),
        ("0 mm W0 add 1 W1", "0 W0 addmm 1 W1", ""),
        ("0 mm W0 add 1 mm W1", "0 W0 1 addmm mm W1", ""),
        ("0 mm mm W0 add 1 W1", "0 W0 addmm 1 mm W1", "in front of 'wait g 0': planned 2 times 'run mm', emitted 0"),
        ("0 W0 mm 1 add W1", "0 addmm W0 1 W1", "in front of 'wait g 0': planned 0 times 'run mm', emitted 1"),
        ("0 bmm W0 add 1 W1", "0 W0 baddbmm 1 W1", ""),
        ("0 W0 addmm 1 W1", "0 W0 1 addmm W1", "in front of 'start g 1': planned 1 times 'run mm', emitted 0"),
    ],
)
def test_compute_that_crosses_a_start_or_a_wait_is_a_difference(planned, emitted, words):
    """But not ops that others replace; a product that is merged with a sum runs where that stood."""
    names = {"0": "start g 0", "W0": "wait g 0", "1": "start g 1", "W1": "wait g 1"}
    orders = [[names.get(step, f"run {step}") for step in order.split()] for order in (planned, emitted)]
    assert order_difference(*orders) == words


MOVING = [
    ("reorder_for_compute_comm_overlap", True),
    ("reorder_for_peak_memory", True),
    ("bucket_all_gathers_fx", "all"),
    ("triton.reorder_for_reducing_graph_partitions", True),
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


def test_settings_can_be_copied_while_a_joint_pass_is_set():
    """Operators such as ``scan`` compile their functions under a copy of Inductor's settings."""
    holder = SimpleNamespace(lock=threading.RLock())  # as a graph of Dynamo holds
    joint_pass = JointPass(lambda gm: None)
    joint_pass.result = holder
    with inductor_config.patch({JOINT_PASS: joint_pass}):
        assert inductor_config.get_config_copy()[JOINT_PASS] is joint_pass


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
    monkeypatch.setattr(compilation, "emitted_order", _swapped)
    with pytest.raises(BackendCompilerFailed, match=r"ScheduleOrderError: .*left the planned order of the forward: "):
        _step(fake_group, "full")
    with pytest.warns(UserWarning, match=r"Inductor left the planned order of the (for|back)ward: "):
        _step(fake_group, "cheap")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _step(fake_group, "off")


def test_an_order_that_cannot_be_checked_is_an_error_or_a_warning(fake_group, monkeypatch):
    compile_fx_inner = compilation.compile_fx_inner

    def without_source(*args, **kwargs):
        compiled = compile_fx_inner(*args, **kwargs)
        compiled.source_code = None
        return compiled

    monkeypatch.setattr(compilation, "compile_fx_inner", without_source)
    with pytest.raises(BackendCompilerFailed, match=r"ScheduleOrderError: .*shows no source of the forward"):
        _step(fake_group, "full")
    with pytest.warns(UserWarning, match="whether its collectives moved is not known"):
        _step(fake_group, "cheap")


@pytest.mark.usefixtures("brief_plans")
def test_fusions_that_hold_more_are_left_out_under_a_budget(fake_group, monkeypatch):
    """Unless the user says what kernels must share to be fused."""
    name, seen = "score_fusion_memory_threshold", []
    compile_fx_inner = compilation.compile_fx_inner

    def remember(*args, **kwargs):
        seen.append(getattr(inductor_config, name))
        return compile_fx_inner(*args, **kwargs)

    monkeypatch.setattr(compilation, "compile_fx_inner", remember)
    usual = getattr(inductor_config, name)
    for options, expected in (
        ({}, {usual}),
        ({"memory_budget": "1GB"}, {sys.maxsize}),
        ({"memory_budget": "1GB", "inductor": {name: 3}}, {3}),
    ):
        seen.clear()
        _step(fake_group, "cheap", hardware="cpu-loopback", bucket="auto", **options)
        assert set(seen) == expected and len(seen) == 2
    assert getattr(inductor_config, name) == usual


@pytest.mark.usefixtures("brief_plans")
def test_kernels_write_over_what_dies_under_a_budget_unless_the_user_forbids_it(fake_group, monkeypatch):
    seen, compile_fx_inner = [], compilation.compile_fx_inner

    def remember(*args, **kwargs):
        seen.append(inductor_config.inplace_buffers)
        return compile_fx_inner(*args, **kwargs)

    monkeypatch.setattr(compilation, "compile_fx_inner", remember)
    options = {"hardware": "cpu-loopback", "bucket": "auto", "memory_budget": "1GB"}
    with inductor_config.patch(inplace_buffers=False):
        _step(fake_group, "cheap", **options)
    _step(fake_group, "cheap", **options, inductor={"inplace_buffers": False})
    assert seen == [True, True, False, False]


@pytest.mark.usefixtures("brief_plans")
@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"bucket": "unit"}, marks=pytest.mark.slow),
        {"bucket": "none"},
        pytest.param({"bucket": "unit", "hardware": "cpu-ethernet-1g"}, marks=pytest.mark.slow),
        {"bucket": "none", "hardware": "cpu-ethernet-1g", "memory_budget": "1GB"},
        {"bucket": "auto", "hardware": "cpu-ethernet-1g"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [LateScale, LateNorm])
def test_compute_stays_between_the_collectives_it_was_planned_between(kind, options, fake_group, monkeypatch):
    """Only the order counts: nothing is compiled, or computed."""
    orders = []
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    monkeypatch.setattr(
        compilation, "order_difference", lambda *both: orders.append(both) or order_difference(*both)
    )
    torch.compiler.reset()
    model, mesh = kind(), fake_group(2)
    for block in model.blocks:
        graphshard.fully_shard(block, mesh=mesh)
    graphshard.fully_shard(model, mesh=mesh)
    forward = torch.compile(model, backend="graphshard", options={"verify": "full", **options})
    with inductor_config.patch(fx_graph_cache=False):
        forward(torch.zeros(4, 8)).sum().backward()
    assert len(orders) == 2
    for planned, emitted in orders:
        products = [step for step in ("run mm", "run addmm") if step in planned]
        assert products and all(planned.count(step) == emitted.count(step) for step in products)


def _pre_fusion_pass():
    with pinning_patch():
        return inductor_config._pre_fusion_custom_pass


def test_the_users_pass_over_kernels_runs_first(fake_group):
    seen = []

    def look(nodes):
        seen.append(len(nodes))
        return nodes

    with inductor_config.patch(_pre_fusion_custom_pass=look):
        _step(fake_group, "full")
        assert len(seen) == 2
        assert inductor_config._pre_fusion_custom_pass is look
        assert _pre_fusion_pass().uuid() != _pre_fusion_pass().uuid()


def test_a_pinned_order_is_cached_by_its_source_and_the_users_pass():
    class Named(type(_pre_fusion_pass()).__bases__[0]):
        def __init__(self, name):
            self.name = name

        def __call__(self, nodes):
            return nodes

        def uuid(self):
            return self.name

    source, donated, releases = _pre_fusion_pass().uuid()
    assert isinstance(source, bytes) and donated == () and releases is False
    context = TracingContext(None)
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=[1])
    with tracing(context):
        assert _pre_fusion_pass().uuid() == (source, (1,), False)
    uuids = []
    for name in ("a", "b"):
        with inductor_config.patch(_pre_fusion_custom_pass=Named(name)):
            uuids.append(_pre_fusion_pass().uuid())
    assert uuids[0] != uuids[1] and uuids[0][0] == _pre_fusion_pass().uuid()
