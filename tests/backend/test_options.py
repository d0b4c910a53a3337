"""Backend options: defaults, values, and what users are told about mistakes."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import BackwardPrefetch

import graphshard
from graphshard._compat import gradients_are_boxed
from graphshard.backend.options import BackendOptions
from graphshard.backend.pipelines import half_pipeline
from graphshard.cost import load_card
from graphshard.errors import CardError, GraphShardError, OptionError, OptionTypeError
from graphshard.passes import PlanCollectives
from graphshard.user_cache import CACHE_VARIABLE


@pytest.mark.parametrize("given", [None, {}])
def test_defaults(given, monkeypatch):
    monkeypatch.delenv(CACHE_VARIABLE)
    assert BackendOptions.parse(given) == BackendOptions()
    assert BackendOptions().bucket == "auto" and BackendOptions().overlap is True
    assert BackendOptions().verify == "cheap" and BackendOptions().dump is None


@pytest.mark.parametrize(
    "given",
    [
        {"bucket": "none"},
        {"overlap": False},
        {"overlap": "always"},
        {"verify": "full"},
        {"verify": "off"},
        {"move_compute": False},
        {"share_code": False},
        {"share_code": "always"},
        {"inductor": {"max_autotune": True}},
    ],
    ids=str,
)
def test_values_arrive(given):
    parsed = BackendOptions.parse(given)
    ((name, value),) = given.items()
    assert getattr(parsed, name) == value
    assert parsed != BackendOptions()


def test_hardware_becomes_a_card_and_a_budget_bytes():
    card = load_card("h100-sxm")
    for given in ("h100-sxm", card):
        parsed = BackendOptions.parse({"hardware": given, "memory_budget": "2GiB", "bucket": "auto"})
        assert (parsed.hardware, parsed.memory_budget, parsed.bucket) == (card, 2 * 2**30, "auto")
    assert BackendOptions().hardware == "auto" and BackendOptions().memory_budget is None


@pytest.mark.parametrize(
    ("folder", "given", "hardware", "bucket"),
    [
        ("", {}, None, "unit"),
        ("", {"hardware": "h100-sxm"}, load_card("h100-sxm"), "auto"),
        ("", {"hardware": "auto"}, "auto", "auto"),
        ("/cache", {}, "auto", "auto"),
        ("/cache", {"hardware": "none"}, None, "unit"),
        ("/cache", {"hardware": None}, None, "unit"),
        ("/cache", {"overlap": False}, None, "unit"),
        ("/cache", {"overlap": "always"}, None, "unit"),
    ],
    ids=str,
)
def test_nothing_is_measured_by_default_where_nothing_can_be_kept(folder, given, hardware, bucket, monkeypatch):
    monkeypatch.setenv("GRAPHSHARD_CACHE", folder)
    parsed = BackendOptions.parse(given)
    assert (parsed.hardware, parsed.bucket) == (hardware, bucket)


def test_there_is_one_environment_variable():
    """Besides that of ``check_golden``, a helper for tests of passes."""
    package = Path(graphshard.__file__).parent
    found = {name for file in package.rglob("*.py") for name in re.findall(r"GRAPHSHARD_[A-Z]\w*", file.read_text())}
    assert found - {"GRAPHSHARD_UPDATE_GOLDENS"} == {CACHE_VARIABLE}


def test_an_unknown_card_lists_the_known_ones():
    with pytest.raises(CardError, match="h100-sxm"):
        BackendOptions.parse({"hardware": "h1000"})
    with pytest.raises(OptionError, match="option hardware=3 must be a card, its name or its file"):
        BackendOptions.parse({"hardware": 3})


@pytest.mark.parametrize(
    "given",
    [
        {"memory_budget": "1GiB"},
        {"bucket": "auto"},
        {"limit_all_gathers": True},
        {"backward_prefetch": "pre"},
        {"forward_prefetch": True},
    ],
    ids=str,
)
def test_planning_needs_a_card(given):
    (name,) = given
    with pytest.raises(OptionError, match=f"option {name}=.* needs a cost model: leave out option hardware, or"):
        BackendOptions.parse(given)


@pytest.mark.parametrize(("given", "limit"), [(True, 2), (False, 0), (0, 0), (3, 3)])
def test_gathers_in_flight_as_fsdp1_limits_them(given, limit):
    assert BackendOptions.parse({"hardware": "h100-sxm", "limit_all_gathers": given}).limit_all_gathers == limit


@pytest.mark.parametrize("given", [-1, 1.0, "2"])
def test_limits_that_cannot_be(given):
    with pytest.raises(OptionError, match=f"option limit_all_gathers={given!r} must be True, False, or the number"):
        BackendOptions.parse({"hardware": "h100-sxm", "limit_all_gathers": given})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("pre", "pre"),
        ("post", "post"),
        (None, None),
        (BackwardPrefetch.BACKWARD_PRE, "pre"),
        (BackwardPrefetch.BACKWARD_POST, "post"),
    ],
)
def test_backward_prefetch_takes_words_and_fsdp1s_enum(given, name):
    assert BackendOptions.parse({"hardware": "h100-sxm", "backward_prefetch": given}).backward_prefetch == name


def test_the_planners_options_reach_its_pass():
    options = {"hardware": "h100-sxm", "bucket": "auto", "memory_budget": 5, "limit_all_gathers": 3}
    options |= {"backward_prefetch": "post", "forward_prefetch": True, "move_compute": False}
    *_, place = half_pipeline(BackendOptions.parse(options)).passes
    assert place == PlanCollectives(
        memory_budget=5, max_gathers=3, backward_prefetch="post", forward_prefetch="pre", move_compute=False
    )


@pytest.mark.parametrize(
    ("options", "orders", "expected"),
    [
        ({}, ("", ""), (False, None)),
        ({}, ("pre", "post"), (True, "post")),
        ({}, ("", "none"), (False, "post")),
        ({"backward_prefetch": "pre"}, ("pre", "post"), (True, "pre")),
        ({"hardware": None}, ("pre", "post"), (False, None)),
    ],
)
def test_what_wrappers_ask_for_stands_behind_the_users_options(options, orders, expected):
    given = BackendOptions.parse({"hardware": "h100-sxm", **options}).with_orders(*orders)
    assert (given.forward_prefetch, given.backward_prefetch) == expected


def test_another_backward_prefetch_is_refused():
    with pytest.raises(OptionError, match=r"option backward_prefetch='after' must be 'pre', 'post' or None"):
        BackendOptions.parse({"hardware": "h100-sxm", "backward_prefetch": "after"})


@pytest.mark.parametrize("overlap", [False, "always"])
def test_the_planner_replaces_overlap(overlap):
    with pytest.raises(OptionError, match=f"option overlap={overlap!r} has no meaning with option hardware"):
        BackendOptions.parse({"hardware": "h100-sxm", "overlap": overlap})


@pytest.mark.parametrize(("budget", "error"), [("much", OptionError), (0, OptionError), (1.5, OptionTypeError)])
def test_budgets_that_cannot_be_read(budget, error):
    with pytest.raises(error, match="memory_budget="):
        BackendOptions.parse({"hardware": "h100-sxm", "memory_budget": budget})


@pytest.mark.parametrize("budget", [10**5000, "9" * 400 + ".5", "8388608TiB"], ids=["int", "decimal", "unit"])
def test_budgets_beyond_any_machine(budget):
    with pytest.raises(OptionError, match="memory_budget"):
        BackendOptions.parse({"hardware": "h100-sxm", "memory_budget": budget})


def test_dump_becomes_a_path():
    assert BackendOptions.parse({"dump": "somewhere"}).dump == Path("somewhere")


@pytest.mark.parametrize("below", ["", "/under/it"])
def test_a_dump_that_cannot_be_made_is_refused(tmp_path, below):
    file = tmp_path / "file"
    file.touch()
    folder = f"{file}{below}"
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="graphshard", options={"dump": folder})
    with (
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=f"option dump='{folder}' cannot be made") as error,
        pytest.warns(UserWarning, match="none of the 2 parameters"),
    ):
        compiled(torch.ones(1, 2))
    assert isinstance(error.value.inner_exception, OptionError)


@pytest.mark.parametrize(("name", "warns"), [("h100-sxm", True), ("cpu-loopback", False)])
def test_a_card_of_another_device_is_warned_of(fake_group, name, warns):
    torch.compiler.reset()
    model = graphshard.fully_shard(torch.nn.Linear(2, 2), mesh=fake_group(2))
    compiled = torch.compile(model, backend="graphshard", options={"hardware": name})
    message = "hardware='h100-sxm' is the card of a cuda device, but the model computes on cpu"
    with pytest.warns(UserWarning, match=message) if warns else nullcontext():
        compiled(torch.ones(1, 2))


def test_a_card_of_another_device_is_warned_of_on_one_rank(fake_group):
    torch.compiler.reset()
    model = graphshard.fully_shard(torch.nn.Linear(2, 2), mesh=fake_group(1))
    compiled = torch.compile(model, backend="graphshard", options={"hardware": "h100-sxm"})
    with pytest.warns(UserWarning, match="the card of a cuda device, but the model computes on cpu"):
        compiled(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "max-autotune"}, r"mode='max-autotune' is for Inductor alone.*options=\{'inductor': \{...\}\}"),
        ({"options": "x"}, "options='x' must be a dict of options by name"),
    ],
)
def test_what_is_not_options_is_refused(given, message):
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="graphshard", **given)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as error:
        compiled(torch.ones(1, 2))
    assert isinstance(error.value.inner_exception, OptionError)


def test_compiling_is_told_to_the_logger(fake_group, caplog):
    torch.compiler.reset()
    model = graphshard.fully_shard(torch.nn.Linear(2, 2), mesh=fake_group(2))
    compiled = torch.compile(model, backend="graphshard")
    with caplog.at_level("INFO", logger="graphshard"):
        compiled(torch.ones(1, 2))
    told = [record.message for record in caplog.records if record.name == "graphshard"]
    told = [re.sub(r"\d+(\.\d)?", "N", text) for text in told]
    expected = ["graph N (joint): N nodes, passes", "graph N (forward): N nodes, passes", "graph N (forward): Inductor"]
    assert told == [text for what in expected for text in (f"{what} ...", f"{what} took N s")]


def test_unknown_options_list_the_known_ones():
    with pytest.raises(
        OptionError, match=r"unknown option.s. 'buckets', 'overlaps'; known: bucket, overlap"
    ) as error:
        BackendOptions.parse({"overlaps": True, "buckets": 1})
    assert "options of Inductor go into 'inductor'" in str(error.value)
    assert isinstance(error.value, ValueError) and isinstance(error.value, GraphShardError)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bucket": "units"}, "option bucket='units' must be one of 'unit', 'none', 'auto'"),
        ({"bucket": None}, "option bucket=None must be one of"),
        ({"overlap": "yes"}, "option overlap='yes' must be one of True, False, 'always'"),
        ({"verify": True}, "option verify=True must be one of 'off', 'cheap', 'full'"),
        ({"inductor": "max_autotune"}, "option inductor='max_autotune' must be a dict of Inductor options"),
        ({"inductor": None}, "option inductor=None must be a dict"),
        ({"dump": 3}, "option dump=3 must be"),
        ({"inductor": {"cpp_wrapper": True}}, "option cpp_wrapper cannot be set: the C[+][+] wrapper cannot call"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_values_that_cannot_be(given, message):
    with pytest.raises(OptionError, match=message):
        BackendOptions.parse(given)


def test_the_given_dict_is_not_changed():
    given = {"dump": "somewhere"}
    BackendOptions.parse(given)
    assert given == {"dump": "somewhere"}


@pytest.mark.parametrize("given", [0, -1.0, True, "2", float("nan")])
def test_planning_times_that_cannot_be(given):
    with pytest.raises(OptionError, match=r"option planning_seconds=.* must be a number above 0, or None"):
        BackendOptions.parse({"planning_seconds": given})


def test_compiled_autograd_is_refused(fake_group):
    """It would trace the backward as it was before the passes: wrong gradients, in silence."""
    model = graphshard.fully_shard(torch.nn.Linear(2, 2), mesh=fake_group(2))
    compiled = torch.compile(model, backend="graphshard")
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"compiled autograd is on.*turn it off") as raised,
    ):
        compiled(torch.ones(2, 2))
    assert isinstance(raised.value.inner_exception, OptionError)


@pytest.mark.skipif(not gradients_are_boxed, reason="torch refuses functions that take gradients in a list")
def test_compiled_autograd_of_a_backward_is_refused(fake_group, interpreted):
    """Also where it is turned on after the forward."""
    model = graphshard.fully_shard(torch.nn.Linear(2, 2), mesh=fake_group(2))
    loss = torch.compile(model, backend="graphshard")(torch.ones(2, 2)).sum()
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(RuntimeError, match="not supported with compiled autograd"),
    ):
        loss.backward()
