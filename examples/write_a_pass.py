"""Write a pass, run it in a pipeline, and test it: one process, no GPU, no other ranks.

    python examples/write_a_pass.py

The pass `flatten_gathers` makes every all-gather send one flat buffer. docs/extend/writing-a-pass.md explains the
parts; tests/test_docs_writing_a_pass.py runs this file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphshard import fully_shard
from graphshard.errors import PipelineError
from graphshard.ir import ALL_GATHER, WAIT, GraphEmitter, copy_graph, graph_text
from graphshard.pipeline import Fact, PassContext, PassRecord, PassReport, Pipeline
from graphshard.testing import CapturedGraphs, capture_graphs, check_golden, run_on_all_ranks

aten = torch.ops.aten
GOLDEN = Path(__file__).parent / "goldens" / "flatten_gathers.txt"
NUM_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class FlattenGathers:
    """flatten_gathers: an all-gather sends a flat view of its shard, and its result gets the shape back.

    Before:
        %gather: f32[8, 8] = all_gather_into_tensor(%shard, 2, axis=shard)
        %full: f32[8, 8] = wait_tensor(%gather)
    After:
        %view_0: f32[32] = view(%shard, [32])
        %gather: f32[64] = all_gather_into_tensor(%view_0, 2, axis=shard)
        %wait: f32[64] = wait_tensor(%gather)
        %full: f32[8, 8] = view(%wait, [8, 8])

    Numerics: exact, since a gather concatenates along dim 0.

    Does not handle:
        - a shard that is not contiguous: it would need a copy.
    """

    name: ClassVar[str] = "flatten_gathers"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.WAITED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    min_bytes: int = 0

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts the gathers that are flat now."""
        num_flattened = 0
        skipped = []
        for gather in list(gm.graph.find_nodes(op="call_function", target=ALL_GATHER)):
            shard = gather.args[0].meta["val"]
            if shard.dim() == 1 or shard.nbytes < self.min_bytes:
                continue
            if not shard.is_contiguous():
                skipped.append(f"{gather.name}: its shard is not contiguous, and a flat view would copy it")
                continue
            _flatten(gm.graph, gather)
            num_flattened += 1
        counts = {"gathers flattened": num_flattened}
        return PassReport(changed=num_flattened > 0, counts=counts, skipped=tuple(skipped))


def _flatten(graph: fx.Graph, gather: fx.Node) -> None:
    shard, num_ranks, group = gather.args
    (wait,) = gather.users  # the fact WAITED: only one wait reads a collective
    emit = GraphEmitter(graph, origin=gather)
    with graph.inserting_before(gather):
        flat = emit(aten.view.default, shard, [shard.meta["val"].numel()])
        flat_gather = emit(ALL_GATHER, flat, num_ranks, group)
    with graph.inserting_before(wait):
        full = emit(aten.view.default, emit(WAIT, flat_gather), list(wait.meta["val"].shape))
    wait.replace_all_uses_with(full)
    graph.erase_node(wait)
    graph.erase_node(gather)


@contextmanager
def fake_ranks(num_ranks: int) -> Iterator[DeviceMesh]:
    """A mesh of ranks that do not exist: enough to shard and to capture, not to run."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield init_device_mesh("cpu", (num_ranks,))
    finally:
        dist.destroy_process_group()


def capture() -> CapturedGraphs:
    """The graphs of a sharded model: `joint` has shard ops, `forward` and `backward` have collectives."""
    with fake_ranks(NUM_RANKS) as mesh:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        fully_shard(model, mesh=mesh)
        return capture_graphs(model, torch.randn(16, 8))


# `lower_shards` has run on captured halves, so the facts that it provides are given.
LOWERED = frozenset({Fact.TYPED, Fact.WAITED, Fact.LOWERED, Fact.GATHERED})


def run(gm: fx.GraphModule, context: PassContext, **options: Any) -> PassRecord:
    """Runs the pass on `gm` in place; the pipeline checks the report, the signature and the facts."""
    (record,) = Pipeline(FlattenGathers(**options), given=LOWERED).run(gm, context)
    return record


def refused_order() -> str:
    """The error of a pipeline whose first pass needs a fact that nothing provides."""
    try:
        Pipeline(FlattenGathers())  # given: TYPED alone, as in a joint graph
    except PipelineError as error:
        return str(error)
    raise AssertionError("the pipeline was built")


def inputs_of_rank(gm: fx.GraphModule) -> list[Tensor]:
    """A value for each input of a half: random shards, batch and saved values, and empty handles."""
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    handle = torch.empty(0, dtype=torch.int8)
    return [handle if value.dtype is torch.int8 else torch.randn(value.shape) for value in values]


def check_parity(before: fx.GraphModule, after: fx.GraphModule, context: PassContext) -> None:
    """Runs both graphs for all ranks in this process and compares the outputs bit by bit."""
    inputs = [inputs_of_rank(before) for _ in range(NUM_RANKS)]
    expected, actual = (run_on_all_ranks(gm, inputs, context.mesh) for gm in (before, after))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def main() -> None:
    """Captures, runs the pass, and tests it."""
    graphs = capture()
    context = graphs.context.for_forward()
    before, after = copy_graph(graphs.forward), graphs.forward

    record = run(after, context)
    print(f"{record.name}: {dict(record.report.counts)}")
    print(record.text)

    check_golden(graph_text(after, mesh=context.mesh, parameters=context.parameters), GOLDEN)
    check_parity(before, after, context)
    assert not run(after, context).report.changed, "a second run changes nothing"
    assert not run(before, context, min_bytes=2**20).report.changed, "small gathers are left alone"
    assert "requires WAITED" in refused_order()
    print("golden, parity, second run, option and refusal: all right")


if __name__ == "__main__":
    main()
