"""Passes of the user in the backend's pipelines: option ``passes``."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from support.parity import check_sharded_parity, make_adam
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphshard import fully_shard
from graphshard.backend import BackendOptions, half_pipelines, joint_pipeline
from graphshard.errors import AgreementError, OptionError, PipelineError
from graphshard.ir import ALL_GATHER
from graphshard.pipeline import Fact, PassContext, PassReport

sys.path.append(str(Path(__file__).parents[2] / "examples"))


#: Gathers that each watch has seen at each of its runs. A pass keeps nothing itself: its fields are its options.
SEEN: dict[str, list[int]] = {}


@dataclass(frozen=True, kw_only=True)
class Watch:
    """watch: counts the gathers that it sees, and changes nothing."""

    name: ClassVar[str] = "watch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    place: str = ""

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        gathers = gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
        SEEN.setdefault(self.place, []).append(len(gathers))
        return PassReport(changed=False)


@dataclass(frozen=True, kw_only=True)
class NeedsCollectives(Watch):
    """needs_collectives: as watch, on lowered graphs."""

    name: ClassVar[str] = "needs_collectives"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.LOWERED})


def _model(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    fully_shard(model, mesh=mesh)
    return model


def _train(passes: Any, hardware: str | None, dump: str | None = None) -> None:
    """Three steps beside the unsharded model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    model = _model(mesh)
    options = {"passes": passes, "hardware": hardware, "dump": dump}
    compiled = torch.compile(model, backend="graphshard", fullgraph=True, options=options)
    optimizers = [make_adam(each.parameters()) for each in (reference, model)]
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for run in (reference, compiled):
            run(x).square().mean().backward()
        check_sharded_parity(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _train_flattened(hardware: str | None, folder: str) -> list[int]:
    from write_a_pass import FlattenGathers

    SEEN.clear()
    place = "schedule_collectives" if hardware is None else "plan_collectives"
    passes = {"join_pointwise": [FlattenGathers(), Watch()], place: [Watch(place=place)]}
    _train(passes, hardware, f"{folder}/{dist.get_rank()}")
    return SEEN[""]


@pytest.mark.parametrize("hardware", [None, "cpu-loopback"])
def test_a_pass_that_rewrites_gathers_trains(
    run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path, hardware: str | None
) -> None:
    """In front of the buckets: four parameters in a forward; the backward regathers what it reads.

    Dumps have the graph after each pass, and the plan, which is made in front of the last one.
    """
    found = run_on_gloo_ranks(2, _train_flattened, hardware, str(tmp_path))
    assert [seen[0] for seen in found] == [4, 4]
    dumps = {file.name.split(".", 1)[1]: file for file in (tmp_path / "0").glob("graph0.*")}
    (flattened,) = (file for name, file in dumps.items() if re.fullmatch(r"forward\.\d-flatten_gathers\.txt", name))
    assert "= view(" in flattened.read_text()
    assert sum(name.startswith("forward.") and name.endswith("-watch.txt") for name in dumps) == 2
    assert ("forward.plan.txt" in dumps) is (hardware is not None)


def test_passes_and_their_options_are_part_of_the_keys_of_caches() -> None:
    def keys(name: str, *steps: Watch) -> tuple[str, str]:
        options = BackendOptions(passes={name: steps})
        return joint_pipeline(options).uuid(), half_pipelines(options).planned.uuid()

    joint, half = keys("merge_waits")
    on_joint = [keys("merge_waits", Watch(place=place)) for place in ("a", "b")]
    on_half = [keys("lower_shards", Watch(place=place)) for place in ("a", "b")]
    assert len({joint, *(each[0] for each in on_joint)}) == 3 and {each[1] for each in on_joint} == {half}
    assert len({half, *(each[1] for each in on_half)}) == 3 and {each[0] for each in on_half} == {joint}


def _train_everywhere() -> dict[str, list[int]]:
    places = ("merge_waits", "lower_shards", "bucket_collectives", "schedule_collectives")
    SEEN.clear()
    _train({place: [Watch(place=place)] for place in places}, None)
    return dict(SEEN)


def test_a_pass_follows_the_pass_that_it_names(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    """Gathers it sees: none at the level of shard ops, one a parameter once lowered, one a unit once merged."""
    seen, _ = run_on_gloo_ranks(2, _train_everywhere)
    assert seen["merge_waits"] == [0]
    assert seen["lower_shards"][0] == 4
    assert seen["bucket_collectives"][0] == seen["schedule_collectives"][0] == 1
    assert [len(each) for each in seen.values()] == [1, 2, 2, 2]


def _differ() -> str:
    from write_a_pass import FlattenGathers

    model = _model(init_device_mesh("cpu", (2,)))
    options = {"bucket": "none", "passes": [FlattenGathers()] if dist.get_rank() == 0 else []}
    compiled = torch.compile(model, backend="graphshard", options=options)
    # The rank that compares first names the difference; the other may be told by it.
    with pytest.raises(Exception, match="the ranks would issue different collectives") as found:
        compiled(torch.ones(2, 6))
    assert isinstance(found.value.inner_exception, AgreementError)
    return str(found.value)


def test_ranks_with_other_passes_are_told(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    for message in run_on_gloo_ranks(2, _differ):
        assert "all_gather_into_tensor(f32[24])" in message and "all_gather_into_tensor(f32[4, 6])" in message


@pytest.mark.parametrize(
    ("passes", "error", "message"),
    [
        ({"lower": [Watch()]}, OptionError, "no pass 'lower' to follow; on the joint graph there are merge_waits,"),
        ({"tag_recompute": [Watch()]}, OptionError, "no pass 'tag_recompute' to follow"),
        ({"plan_collectives": [Watch()]}, OptionError, "with these options, lower_shards, .*schedule_collectives"),
        ([Watch], OptionError, "is no pass: it needs name, requires, .* and is an instance, not a class"),
        ([print], OptionError, "is no pass"),
        ("watch", OptionError, "must be a list of passes, or a dict of such lists"),
        ({1: [Watch()]}, OptionError, "must be a list of passes, or a dict of such lists"),
        ({"merge_waits": [NeedsCollectives()]}, PipelineError, "needs_collectives requires LOWERED, provided by no"),
    ],
)
def test_passes_that_cannot_run_are_refused(
    fake_group: Callable[..., DeviceMesh], passes: Any, error: type[Exception], message: str
) -> None:
    model = _model(fake_group(2))
    compiled = torch.compile(model, backend="graphshard", options={"passes": passes})
    with pytest.raises(Exception, match=message) as found:
        compiled(torch.ones(2, 6))
    assert isinstance(getattr(found.value, "inner_exception", found.value), error)
