"""Waits that last until the backend holds nothing of the collective."""

import operator
import re
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from support.small_graphs import GraphBuilder, aten
from torch._inductor.async_compile import AsyncCompile

import graphshard
from graphshard._compat import num_holders, num_memory_holders
from graphshard.backend import compilation
from graphshard.backend.inductor import gloo_release
from graphshard.backend.inductor.emitted_order import emitted_order, order_difference, planned_order
from graphshard.backend.inductor.gloo_release import wait_until_released, wait_until_released_in_place
from graphshard.backend.inductor.inductor_config import compile_fx_inner
from graphshard.backend.inductor.order_pinning import pinning_patch
from graphshard.ir.collectives import ALL_GATHER, ALL_REDUCE, WAIT, c10d


class _Holder:
    """Holds a tensor as a backend does, out of sight of Python: saved for a derivative."""

    def __init__(self, tensor):
        self._result = tensor * torch.ones((), requires_grad=True)

    def let_go(self):
        self._result = None


def test_python_names_hold_nothing():
    tensor = torch.zeros(4, 2)
    names = [tensor, {"again": tensor}]
    assert num_holders(tensor) == 0 and len(names) == 2


def test_a_holder_out_of_sight_counts():
    tensor = torch.zeros(4)
    holder = _Holder(tensor)
    assert num_holders(tensor) > 0
    holder.let_go()
    assert num_holders(tensor) == 0


class _MemoryHolder:
    """Holds the memory of a tensor, as a backend does between letting go of the tensor and of the last view of it."""

    def __init__(self, tensor):
        self._view = tensor.detach()

    def let_go(self):
        self._view = None


@pytest.mark.parametrize(
    ("holds", "wait"),
    [
        (_Holder, wait_until_released),
        (_Holder, wait_until_released_in_place),
        (_MemoryHolder, wait_until_released),
    ],
)
def test_a_wait_lasts_until_the_other_thread_has_let_go(holds, wait):
    tensor = torch.zeros(4)
    holder = holds(tensor)
    let_go = threading.Timer(0.2, holder.let_go)
    let_go.start()
    wait(tensor)
    assert num_holders(tensor) == num_memory_holders(tensor) == 0
    let_go.join()


def test_memory_that_others_may_share_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it sleeps"))
    tensor = torch.zeros(4)
    holder = _MemoryHolder(tensor)
    assert num_holders(tensor) == 0 and num_memory_holders(tensor) == 1
    wait_until_released_in_place(tensor)
    holder.let_go()


def test_what_nobody_holds_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it sleeps"))
    wait_until_released(torch.zeros(4))


def test_what_is_held_for_good_is_a_warning_and_no_hang(monkeypatch):
    monkeypatch.setattr(gloo_release, "PATIENCE_SECONDS", 0.05)
    tensor = torch.zeros(4, 3)
    holder = _Holder(tensor)
    with pytest.warns(UserWarning, match=r"shape \(4, 3\) 0.05 s after its wait.*more than its memory_budget"):
        wait_until_released(tensor)
    holder.let_go()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wait_until_released(tensor)


def _group(fake_group):
    """The name of a group of two ranks."""
    return fake_group(2).get_group().group_name


def _waits(gm, monkeypatch, *, has_budget=True):
    """The waits that Inductor emits of a graph: what is called, and on what, without its number."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with inductor_config.patch(fx_graph_cache=False), pinning_patch(releases=has_budget):
        source = compile_fx_inner(gm, inputs).source_code
    assert order_difference(planned_order(gm), emitted_order(source)) == ""
    calls = re.findall(r"^ *(?P<function>[\w.]*wait_\w+[\w.]*)\((?P<argument>.*)\)$", source, re.MULTILINE)
    return [(function, re.sub(r"\d+", "", argument)) for function, argument in calls]


RELEASED, IN_PLACE = ("wait_until_released", "buf"), ("wait_until_released_in_place", "buf")
PLAIN = ("torch.ops._c10d_functional.wait_tensor.default", "buf")


def _gather_and_reduction(group):
    build = GraphBuilder()
    a, b = build.input("primals_1", 4, 4), build.input("primals_2", 2, 4)
    gathered = build(WAIT, build(ALL_GATHER, b, 2, group))
    value = build(aten.mm.default, gathered, a)
    return build.finish(build(WAIT, build(ALL_REDUCE, value, "sum", group)))


def test_with_a_budget_waits_last_until_all_is_released(fake_group, monkeypatch):
    assert _waits(_gather_and_reduction(_group(fake_group)), monkeypatch) == [RELEASED, IN_PLACE]


def test_without_a_budget_they_do_not(fake_group, monkeypatch):
    assert _waits(_gather_and_reduction(_group(fake_group)), monkeypatch, has_budget=False) == [PLAIN, PLAIN]


def test_of_a_coalesced_collective_only_the_last_wait_is_for_all(fake_group, monkeypatch):
    """Torch itself holds the collective until all its results are waited for."""
    group = _group(fake_group)
    build = GraphBuilder()
    inputs = [build.input(f"primals_{index}", 2, 4) for index in range(2)]
    started = build(c10d.all_gather_into_tensor_coalesced.default, inputs, 2, group)
    parts = [build(WAIT, build(operator.getitem, started, index)) for index in range(2)]
    assert _waits(build.finish(*parts), monkeypatch) == [PLAIN, RELEASED]


def test_of_coalesced_collectives_in_place_too(fake_group, monkeypatch):
    group = _group(fake_group)
    build = GraphBuilder()
    values = [build(aten.mm.default, value, value) for value in (build.input(f"primals_{i}", 4, 4) for i in range(2))]
    started = build(c10d.all_reduce_coalesced.default, values, "sum", group)
    parts = [build(WAIT, build(operator.getitem, started, index)) for index in range(2)]
    assert _waits(build.finish(*parts), monkeypatch) == [PLAIN, IN_PLACE]


def test_torch_holds_a_collective_of_which_a_result_is_not_waited_for(fake_group, monkeypatch):
    group = _group(fake_group)
    build = GraphBuilder()
    inputs = [build.input(f"primals_{index}", 2, 4) for index in range(2)]
    started = build(c10d.all_gather_into_tensor_coalesced.default, inputs, 2, group)
    gm = build.finish(build(WAIT, build(operator.getitem, started, 1)))
    assert _waits(gm, monkeypatch) == [PLAIN]


def test_what_is_gathered_and_then_summed_in_place_is_waited_for_by_how_it_came(fake_group, monkeypatch):
    group = _group(fake_group)
    build = GraphBuilder()
    gathered = build(WAIT, build(ALL_GATHER, build.input("primals_1", 2, 4), 2, group))
    gm = build.finish(build(WAIT, build(ALL_REDUCE, gathered, "sum", group)))
    assert _waits(gm, monkeypatch) == [RELEASED, IN_PLACE]


def test_what_the_caller_started_or_owns_may_be_held_by_others(fake_group, monkeypatch):
    group = _group(fake_group)
    build = GraphBuilder()
    started, whole = build.input("primals_1", 4, 4), build.input("primals_2", 4, 4)
    build(c10d.all_reduce_.default, whole, "sum", group)
    gm = build.finish(build(WAIT, started), build(WAIT, whole))
    assert _waits(gm, monkeypatch) == [(PLAIN[0], "primals_")] * 2


def test_what_is_waited_for_as_a_view_is_held_as_a_whole(fake_group, monkeypatch):
    group = _group(fake_group)
    build = GraphBuilder()
    started = build(ALL_GATHER, build.input("primals_1", 2, 4), 2, group)
    gm = build.finish(build(WAIT, build(aten.view.default, started, [2, 8])))
    assert _waits(gm, monkeypatch) == [RELEASED]


def test_nor_does_a_view_of_a_view_hide_it(fake_group, monkeypatch):
    group = _group(fake_group)
    build = GraphBuilder()
    started = build(ALL_GATHER, build.input("primals_1", 2, 4), 2, group)
    part = build(aten.slice.Tensor, build(aten.view.default, started, [2, 8]), 0, 0, 1)
    assert _waits(build.finish(build(WAIT, part)), monkeypatch) == [RELEASED]


def test_a_kernel_is_not_taken_from_a_cache_of_one_without_a_budget():
    uuids = []
    for has_budget in (False, True, True):
        with pinning_patch(releases=has_budget):
            uuids.append(inductor_config._pre_fusion_custom_pass.uuid())
    assert uuids[0] != uuids[1] and uuids[1] == uuids[2]


def test_other_backends_than_gloo_are_not_waited_for(fake_group, monkeypatch):
    """The fake group is one; that halves on gloo are, the memory of their steps shows."""
    asked = []
    monkeypatch.setattr(
        compilation, "pinning_patch", lambda releases: asked.append(releases) or pinning_patch(releases=releases)
    )
    torch.compiler.reset()
    model = graphshard.fully_shard(torch.nn.Linear(8, 8), mesh=fake_group(2))
    options = {"hardware": "cpu-loopback", "bucket": "auto", "memory_budget": "1GB"}
    torch.compile(model, backend="graphshard", options=options)(torch.zeros(4, 8)).sum().backward()
    assert asked == [False, False]


def test_a_pinned_order_is_cached_by_the_source_of_the_waits_that_it_calls(tmp_path, monkeypatch):
    source, keys = Path(gloo_release.__file__).read_text(), []
    for name, text in (("first", source), ("equal", source), ("edited", f"{source}# another line\n")):
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        monkeypatch.setattr(gloo_release, "__file__", str(file))
        with pinning_patch():
            keys.append(inductor_config._pre_fusion_custom_pass.uuid())
    assert keys[0] == keys[1] != keys[2]
