"""Quantised parameters: tensor subclasses that hold codes and scales, as NF4 of torchao does.

Their `clone` and copies to other dtypes quantise again, which changes values; `split` and `detach` do not.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.implementations import GRAPHSHARD, compile_if_asked, pick_fully_shard, world_mesh
from torch import Tensor, nn
from torch.testing import assert_close

from graphshard import fully_shard
from graphshard.errors import ExtensionError, GraphShardError, UnsupportedShardingError

Run = Callable[..., list[Any]]
aten = torch.ops.aten


class Quantised(Tensor):
    """8-bit codes with a scale for each row, in units of one factor for the whole tensor."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, factor: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, factor: Tensor) -> None:
        self.codes, self.scales, self.factor = codes, scales, factor

    @classmethod
    def quantise(cls, full: Tensor) -> Any:
        largest = full.abs().amax(1)
        factor = largest.amax() / 15
        scales = (largest / factor).ceil().clamp(1).to(torch.uint8)
        codes = (full / (scales[:, None] * factor) * 127).round().to(torch.int8)
        return cls(codes, scales, factor)

    def dequantise(self) -> Tensor:
        return self.codes * (self.scales[:, None] * self.factor) / 127

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scales", "factor"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scales"], inner["factor"])

    @classmethod
    def split(cls, value: Any, size: int) -> list[Any]:
        return [
            cls(codes, scales, value.factor)
            for codes, scales in zip(value.codes.split(size), value.scales.split(size), strict=True)
        ]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = args[0]
        if func in (aten.detach.default, aten.alias.default) or (
            func is aten.view.default and args[1] == [*value.shape]
        ):
            return cls(value.codes, value.scales, value.factor)
        if func is aten.clone.default:
            return cls.quantise(value.dequantise())
        if func is aten.split.Tensor:
            return cls.split(value, args[1])
        if func is aten.slice.Tensor and list(args[1:]) == [0, 0, 0]:
            return cls(value.codes[:0], value.scales[:0], value.factor)
        raise NotImplementedError(f"{func} of {cls.__name__}")

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.codes, self.scales), self.factor

    def fsdp_post_all_gather(self, gathered: Any, factor: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        return type(self)(*gathered, factor), gathered


class SplitsAnew(Quantised):
    """`split` quantises each piece again."""

    @classmethod
    def split(cls, value: Any, size: int) -> list[Any]:
        return [cls.quantise(piece) for piece in value.dequantise().split(size)]


class GathersCodesOnly(Quantised):
    """The scales of one rank are taken for those of all."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.codes,), (self.scales, self.factor, mesh.size())

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        scales, factor, num_ranks = metadata
        return type(self)(gathered[0], scales.repeat(num_ranks), factor), gathered


class NoExtension(Quantised):
    fsdp_pre_all_gather: Any = property(lambda self: _raise_missing())
    fsdp_post_all_gather: Any = property(lambda self: _raise_missing())


def _raise_missing() -> Any:
    raise AttributeError("no extension")


class Adapted(nn.Module):
    """A frozen quantised weight and trained low-rank ones."""

    def __init__(self, kind: type[Quantised] = Quantised, rows: int = 6) -> None:
        super().__init__()
        full = torch.randn(rows, 4) * torch.tensor([4.0] * (rows // 2) + [0.3] * (rows - rows // 2))[:, None]
        self.weight = nn.Parameter(kind.quantise(full), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(rows, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.dequantise().t() + x @ self.down.t() @ self.up.t()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(), nn.Linear(6, 2))


def train_with_a_quantised_weight(implementation: str) -> None:
    """The loss of each step is the unsharded one, to the bit; `dequantise` breaks the graph."""
    reference, model = _model(), _model()
    shard = pick_fully_shard(implementation)
    shard(model[0], mesh=world_mesh())
    shard(model, mesh=world_mesh())
    forward = compile_if_asked(implementation, model, fullgraph=False)
    mine = torch.optim.SGD(model.parameters(), lr=0.01)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.01)
    batches = [torch.full((2, 4), 0.5 + rank) for rank in range(dist.get_world_size())]
    for _ in range(3):
        assert_close(
            forward(batches[dist.get_rank()]), reference(batches[dist.get_rank()]), rtol=1e-6, atol=1e-6
        )
        for each in batches:
            (reference(each).sum() / len(batches)).backward()
        forward(batches[dist.get_rank()]).sum().backward()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    shard_of = model[0].weight.to_local()
    assert torch.equal(shard_of.codes, reference[0].weight.codes.chunk(len(batches))[dist.get_rank()])
    assert torch.equal(shard_of.scales, reference[0].weight.scales.chunk(len(batches))[dist.get_rank()])


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_training_beside_a_quantised_weight(run_on_gloo_ranks: Run, implementation: str) -> None:
    run_on_gloo_ranks(2, train_with_a_quantised_weight, implementation)


def copy_a_quantised_model() -> None:
    model = _model()
    x = torch.ones(2, 4)
    expected = model(x)
    fully_shard(model, mesh=world_mesh())
    assert torch.equal(copy.deepcopy(model)(x), expected) and torch.equal(model(x), expected)


def test_copies_keep_the_bits(run_on_gloo_ranks: Run) -> None:
    run_on_gloo_ranks(2, copy_a_quantised_model)


REFUSED: list[tuple[type[Quantised], type[GraphShardError], str]] = [
    (SplitsAnew, ExtensionError, "cutting parameter 0.weight, a SplitsAnew .* changes its values: codes"),
    (GathersCodesOnly, ExtensionError, r"gathering parameter 0.weight, a GathersCodesOnly .* \(scales\)"),
    (NoExtension, UnsupportedShardingError, "0.weight is a NoExtension, .* define fsdp_pre_all_gather"),
]


def refuse_changed_values(index: int) -> None:
    kind, error, text = REFUSED[index]
    torch.manual_seed(0)
    with pytest.raises(error, match=text):
        fully_shard(nn.Sequential(Adapted(kind)), mesh=world_mesh())
    ignoring = nn.Sequential(Adapted(kind))
    expected = ignoring(torch.ones(2, 4))
    fully_shard(ignoring, mesh=world_mesh(), ignored_params={ignoring[0].weight})
    assert torch.equal(ignoring(torch.ones(2, 4)), expected)


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_changed_values_are_refused(run_on_gloo_ranks: Run, index: int) -> None:
    run_on_gloo_ranks(2, refuse_changed_values, index)


def refuse_an_uneven_cut(rows: int) -> None:
    with pytest.raises(ExtensionError, match=r"0\.weight, a Quantised .* is cut unevenly over 2 ranks"):
        fully_shard(nn.Sequential(Adapted(rows=rows)), mesh=world_mesh())


@pytest.mark.parametrize("rows", [5, 1])
def test_an_uneven_cut_is_refused_on_every_rank(run_on_gloo_ranks: Run, rows: int) -> None:
    run_on_gloo_ranks(2, refuse_an_uneven_cut, rows)


class Unsplit(Quantised):
    @classmethod
    def split(cls, value: Any, size: int) -> list[Any]:
        raise NotImplementedError("no split")


class SplitsInOne(Quantised):
    @classmethod
    def split(cls, value: Any, size: int) -> list[Any]:
        return [cls(value.codes, value.scales, value.factor)]


def refuse_a_class_that_cannot_be_cut() -> None:
    for kind, text in (
        (Unsplit, "cannot cut parameter 0.weight.*no split"),
        (SplitsInOne, r"0.weight.*gives rank 0 a piece of shape \(6, 4\)"),
    ):
        with pytest.raises(UnsupportedShardingError, match=text):
            fully_shard(nn.Sequential(Adapted(kind)), mesh=world_mesh())


def test_a_class_that_cannot_be_cut(run_on_gloo_ranks: Run) -> None:
    run_on_gloo_ranks(2, refuse_a_class_that_cannot_be_cut)
