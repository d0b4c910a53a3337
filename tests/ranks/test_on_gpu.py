"""What the other tests of ranks run on gloo, on NCCL: one rank of it, for machines with one GPU."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.fsdp as fsdp
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.ir.bucket_ops import ADD_ROWS, JOIN, PACK, UNPACK
from graphshard.ir.shard_rows import lie_in_a_row, moved_to_row

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
#: The same on the CPU, so that the tests themselves are tested.
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=NEEDS_GPU)]


@contextlib.contextmanager
def _one_rank(device: str) -> Iterator[dist.ProcessGroup]:
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shards_in_a_row_are_sent_as_they_lie(device: str, dtype: torch.dtype) -> None:
    pieces = [torch.randn(size, device=device).to(dtype) for size in (16, 32, 8)]
    row = moved_to_row(pieces)
    assert lie_in_a_row(row) and all(piece.data_ptr() % 16 == 0 for piece in row)
    for piece, moved in zip(pieces, row, strict=True):
        torch.testing.assert_close(moved, piece, rtol=0, atol=0)
    joined = JOIN(row)
    assert joined.data_ptr() == row[0].data_ptr()
    with _one_rank(device) as group:
        name = group.group_name
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(joined, 1, name)
        gathered = torch.ops._c10d_functional.wait_tensor(gathered)
        torch.testing.assert_close(gathered, torch.cat(pieces), rtol=0, atol=0)
        how = "avg" if device == "cuda" else "sum"
        reduced = torch.ops._c10d_functional.reduce_scatter_tensor(gathered, how, 1, name)
        torch.testing.assert_close(torch.ops._c10d_functional.wait_tensor(reduced), gathered, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_copies_into_buckets_and_out(device: str) -> None:
    pieces = [torch.randn(4, 3, device=device), torch.randn(8, device=device)]
    packed = PACK(pieces, 2)
    expected = torch.cat([piece.reshape(2, -1) for piece in pieces], 1)
    torch.testing.assert_close(packed, expected.reshape(-1), rtol=0, atol=0)
    for piece, found in zip(pieces, UNPACK(packed, 2, [6, 4]), strict=True):
        torch.testing.assert_close(found, piece.reshape(-1), rtol=0, atol=0)
    torch.testing.assert_close(ADD_ROWS(packed, 2, True), expected.mean(0))


@pytest.mark.parametrize("device", DEVICES)
def test_a_planned_graph_of_collectives_trains(device: str) -> None:
    """The plan's order is checked in the code that Inductor makes."""

    def step(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        for shard in (first, second):
            x = torch.nn.functional.gelu(x @ gather(shard, 0, group))
        return funcol.all_reduce(x.square().mean().detach(), "sum", group) + x.square().mean()

    torch.manual_seed(0)
    # Its name since torch 2.13, and before.
    gather = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
    given = [torch.randn(32, 32, device=device) for _ in range(3)]
    shards = [each.clone().requires_grad_() for each in given[1:]]
    plain = [each.clone().requires_grad_() for each in given[1:]]
    options = {"hardware": "h100-sxm" if device == "cuda" else "cpu-loopback", "verify": "full"}
    with _one_rank(device) as group:
        found = torch.compile(step, backend="graphshard", options=options)(given[0], *shards)
        found.backward()
        expected = step(given[0], *plain)
        expected.backward()
    torch.testing.assert_close(found, expected)
    for one, other in zip(shards, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def _block() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    return torch.nn.Sequential(layer, torch.nn.Linear(32, 8), torch.nn.Tanh())


def _trained(model: torch.nn.Module, call: Callable[..., torch.Tensor], device: str) -> list[torch.Tensor]:
    """Losses of five AdamW steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(step)).to(device)
        loss = call(x).float().square().mean()
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", ["nothing", "model", "block"])
def test_mixed_precision_trains_as_fsdp2_does(device: str, compiled: str) -> None:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    losses = []
    with _one_rank(device):
        mesh = init_device_mesh(device, (1,))
        for library, policy in ((fsdp, fsdp.MixedPrecisionPolicy), (graphshard, graphshard.MixedPrecisionPolicy)):
            model = _block().to(device)
            for unit in (model[0], model):
                library.fully_shard(unit, mesh=mesh, mp_policy=policy(**dtypes))
            is_ours = library is graphshard
            if is_ours and compiled == "block":
                model[0].compile()
            call = torch.compile(model, backend="graphshard") if is_ours and compiled == "model" else model
            losses.append(_trained(model, call, device))
    torch.testing.assert_close(losses[1], losses[0], rtol=0 if compiled == "nothing" else 2e-2, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hardware", [None, "h100-sxm"])
@pytest.mark.filterwarnings("ignore:graphshard. option hardware='h100-sxm' is the card of a cuda device")
def test_cuda_graphs_around_a_step(device: str, hardware: str | None) -> None:
    losses = []
    with _one_rank(device):
        mesh = init_device_mesh(device, (1,))
        for has_graphs in (False, True):
            model = _block().to(device)
            for unit in (model[0], model):
                graphshard.fully_shard(unit, mesh=mesh)
            options = {"hardware": hardware, "inductor": {"triton.cudagraphs": has_graphs}}
            losses.append(_trained(model, torch.compile(model, backend="graphshard", options=options), device))
    torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strategy", [fsdp.ShardingStrategy.FULL_SHARD, fsdp.ShardingStrategy.SHARD_GRAD_OP], ids=str)
def test_fsdp1_accumulates_with_offload(device: str, strategy: fsdp.ShardingStrategy) -> None:
    """The offloaded part of FSDP1's accumulation matrix: three batches in `no_sync`, the last one synchronised."""
    with _one_rank(device):
        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2)).to(device)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
        model.load_state_dict(plain.state_dict())
        with pytest.warns(UserWarning, match="on one rank is NO_SHARD"):
            wrapper = graphshard.FullyShardedDataParallel(
                model,
                cpu_offload=fsdp.CPUOffload(offload_params=True),
                sharding_strategy=strategy,
                device_id=torch.device(device, 0) if device == "cuda" else torch.device("cpu"),
            )
        batches = [torch.randn(3, 4, device=device) for _ in range(3)]
        plain(torch.cat(batches)).square().sum().backward()
        for index, batch in enumerate(batches):
            with wrapper.no_sync() if index < 2 else contextlib.nullcontext():
                wrapper(batch).square().sum().backward()
        for param, expected in zip(wrapper.parameters(), plain.parameters(), strict=True):
            assert param.grad.to_local().device.type == "cpu"
            torch.testing.assert_close(param.grad.to_local(), expected.grad.cpu())
        wrapper.clip_grad_norm_(1.0)
        torch.optim.SGD(wrapper.parameters(), lr=0.1).step()
        with graphshard.FullyShardedDataParallel.summon_full_params(wrapper):
            assert {param.device.type for param in wrapper.parameters()} == {device}
        assert set(wrapper.state_dict()) == set(plain.state_dict())
