"""Methods of FullyShardedDataParallel: what they do is what torch's FSDP1 and the unsharded model do."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from support.fsdp1 import full_gradients, full_parameters, wrap
from support.implementations import GRAPHSHARD, compile_if_asked
from support.toy_models import build_mlp
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from graphshard import FullyShardedDataParallel
from graphshard.errors import NotRootError, ParameterStateError, TrainingStateError, UnsupportedShardingError

LINEARS = ModuleWrapPolicy({nn.Linear})
NO_SHARD = {"sharding_strategy": ShardingStrategy.NO_SHARD}
LAST_WHOLE = CustomPolicy(lambda module: NO_SHARD if getattr(module, "out_features", 0) == 2 else False)


def make_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return build_mlp((4, 5), (5, 2))


def batch(micro_batch: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * micro_batch + dist.get_rank()))


def clip(implementation: str) -> None:
    """The same norms as FSDP1's, of sharded parameters, whole ones, and a mixture."""
    mixture, inf = {"auto_wrap_policy": LAST_WHOLE}, float("inf")
    for norm_type, options in ((1, mixture), (2, mixture), (inf, mixture), (2, {}), (inf, {}), (2, NO_SHARD)):
        model = make_mlp()
        for rank in range(2):
            data = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
            (model(data).square().sum() / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
        assert norm > 0.5
        expected = {name: param.grad for name, param in model.named_parameters()}
        for kind in ("fsdp1", implementation):
            wrapper = wrap(kind, make_mlp(), **options)
            wrapper(batch()).square().sum().backward()
            assert_close(wrapper.clip_grad_norm_(0.5, norm_type), norm)
            assert_close(full_gradients(wrapper), expected)


def test_clip_grad_norm(run_on_gloo_ranks):
    run_on_gloo_ranks(2, clip, "sharded")


def clip_edges() -> None:
    """No gradients; float64 and bfloat16 gradients; offloaded ones; inner wrappers; inside a forward."""
    wrapper = wrap("sharded", make_mlp(), auto_wrap_policy=LINEARS)
    with pytest.warns(UserWarning, match="this rank has no gradients"):
        assert wrapper.clip_grad_norm_(1.0) == 0
    for dtype in (torch.float64, torch.bfloat16):
        wrapper = wrap("sharded", make_mlp().to(dtype), cpu_offload=CPUOffload(offload_params=True))
        wrapper(batch().to(dtype)).sum().backward()
        assert wrapper.clip_grad_norm_(1e9).dtype is dtype
    inner = wrap("sharded", make_mlp(), auto_wrap_policy=LINEARS)[0]
    for method in (lambda: inner.clip_grad_norm_(1.0), lambda: inner.no_sync().__enter__()):
        with pytest.raises(NotRootError, match="was called on an inner wrapper"):
            method()
    caught: list[str] = []

    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for ask in (lambda: wrapper.no_sync().__enter__(), lambda: wrapper.clip_grad_norm_(1.0)):
                with pytest.raises(ValueError, match="inside a forward"):
                    ask()
                caught.append("forward")
            with pytest.raises(AssertionError, match="inside a forward"):
                FullyShardedDataParallel.summon_full_params(wrapper).__enter__()
            return super().forward(x)

    def in_backward(grad: torch.Tensor) -> None:
        with pytest.raises(TrainingStateError, match="inside a backward"):
            wrapper.no_sync().__enter__()
        caught.append("backward")

    wrapper = wrap("sharded", Asking(4, 4))
    out = wrapper(batch())
    out.register_hook(in_backward)
    out.sum().backward()
    assert caught == ["forward", "forward", "backward"]


def test_states_and_dtypes_of_clipping(run_on_gloo_ranks):
    run_on_gloo_ranks(2, clip_edges)


def summon(implementation: str) -> None:
    """Whole parameters and gradients as in FSDP1; writes are kept or dropped; clean names."""
    policy = MixedPrecision(param_dtype=torch.bfloat16) if implementation == "sharded" else None
    plain = dict(make_mlp().named_parameters())
    wrapper = wrap(implementation, make_mlp(), auto_wrap_policy=LINEARS, mixed_precision=policy)
    wrapper.module.register_buffer("offset", torch.ones(1))
    forward = compile_if_asked(implementation, wrapper)
    forward(batch()).sum().backward()
    cls = FullyShardedDataParallel
    gradients = full_gradients(wrapper)
    with cls.summon_full_params(wrapper, with_grads=True):
        shown = dict(wrapper.named_parameters())
        assert list(dict(wrapper.named_buffers())) == ["offset"]
        assert list(shown) == list(plain) and all(isinstance(each, nn.Parameter) for each in shown.values())
        assert_close({name: each.detach() for name, each in shown.items()}, {k: v.detach() for k, v in plain.items()})
        assert_close({name: each.grad for name, each in shown.items()}, gradients)
        with torch.no_grad():
            shown["0.weight"].fill_(2.0 + dist.get_rank())
            shown["0.weight"].grad.fill_(5.0)
        with pytest.raises(TrainingStateError, match="would train nothing"):
            wrapper(batch())
        with pytest.raises(AssertionError, match="inside summon_full_params"):
            cls.summon_full_params(wrapper).__enter__()
    assert [isinstance(param, DTensor) for param in wrapper.parameters()] == [True] * 4
    pieces = torch.chunk(torch.arange(5), 2)
    expected = torch.cat([torch.full((len(piece), 4), 2.0 + rank) for rank, piece in enumerate(pieces)])
    assert_close(full_parameters(wrapper)["0.weight"], expected)
    assert_close(full_gradients(wrapper)["0.weight"], torch.full((5, 4), 5.0))
    with cls.summon_full_params(wrapper, writeback=False), torch.no_grad():
        wrapper.module[2].module.weight.fill_(7.0)
    assert_close(full_parameters(wrapper)["2.weight"], plain["2.weight"].detach())
    with cls.summon_full_params(wrapper, writeback=False, rank0_only=True, offload_to_cpu=True):
        is_whole = not isinstance(wrapper.module[0].module.weight, DTensor)
        assert is_whole == (dist.get_rank() == 0)
    with cls.summon_full_params(wrapper[2], recurse=False):
        assert not isinstance(wrapper.module[2].module.weight, DTensor)
        assert isinstance(wrapper.module[0].module.weight, DTensor)
    forward(batch()).sum().backward()


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_summon_full_params(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, summon, implementation)


class Generating(nn.Module):
    """A method that calls the module itself, as the generate() of language models does."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.relu(self.enter(x)))

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self(x)
        return x


def summon_more() -> None:
    """generate() of the module inside, whole strategies, copies, apply, refusals."""
    torch.manual_seed(0)
    plain = Generating()
    policy = CustomPolicy(lambda module: getattr(module, "in_features", 0) == 4 and module is not model.enter)
    model = copy.deepcopy(plain)
    wrapper = wrap("sharded", model, auto_wrap_policy=policy)
    cls = FullyShardedDataParallel
    with cls.summon_full_params(wrapper, writeback=False, recurse=False):
        assert_close(wrapper.generate(batch()), plain.generate(batch()))
    whole = wrap("sharded", make_mlp(), **NO_SHARD)
    with cls.summon_full_params(whole, writeback=False), torch.no_grad():
        whole.module[0].weight.zero_()
    assert whole.module[0].weight.to_local().any()
    twin = copy.deepcopy(wrapper)
    with cls.summon_full_params(twin), torch.no_grad():
        twin.enter.weight.zero_()
    assert wrapper.enter.weight.to_local().any() and not twin.enter.weight.to_local().any()
    assert_close(twin(batch())[:, 0], twin(torch.zeros(3, 4))[:, 0])

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert tuple(module.weight.shape) == (4, 4) and not isinstance(module.weight, DTensor)
            nn.init.constant_(module.weight, 3.0)

    assert wrapper.apply(fill) is wrapper
    assert all((value == 3.0).all() for name, value in full_parameters(wrapper).items() if "weight" in name)
    for options, text in (
        ({"with_grads": True, "offload_to_cpu": True}, "with_grads=True and offload_to_cpu=True"),
        ({"writeback": True, "rank0_only": True}, "writeback=True and rank0_only=True"),
    ):
        with pytest.raises(UnsupportedShardingError, match=text):
            cls.summon_full_params(wrapper, **options).__enter__()
    with pytest.warns(UserWarning, match="pass rank0_only=True"), cls.summon_full_params(wrapper, offload_to_cpu=True):
        pass
    with cls.summon_full_params(nn.Linear(1, 1), recurse=False):
        pass


def test_uses_of_whole_parameters(run_on_gloo_ranks):
    run_on_gloo_ranks(2, summon_more)


def summon_between_forward_and_backward() -> None:
    """Only what is written counts as a change: by an op, through .data, or not at all."""
    plain, cls = make_mlp(), FullyShardedDataParallel
    data = torch.linspace(-1.0, 1.0, 12).view(3, 4)
    wrapper = wrap("sharded", copy.deepcopy(plain), auto_wrap_policy=LINEARS)
    loss = wrapper(data).square().sum()
    with cls.summon_full_params(wrapper):
        pass
    (loss + wrapper(2 * data).square().sum()).backward()
    (plain(data).square().sum() + plain(2 * data).square().sum()).backward()
    assert_close(full_gradients(wrapper), {name: param.grad for name, param in plain.named_parameters()})
    with cls.summon_full_params(wrapper):
        wrapper.module[0].module.weight.data.fill_(2.0)
    assert (full_parameters(wrapper)["0.weight"] == 2.0).all()
    loss = wrapper(data).square().sum()
    with cls.summon_full_params(wrapper), torch.no_grad():
        wrapper.module[2].module.weight.add_(1.0)
    with pytest.raises(ParameterStateError, match="changed after the forward"):
        loss.backward()
    lost = wrapper.module[0].module.weight
    lost.data = torch.zeros_like(lost)
    for read in (cls.summon_full_params(wrapper).__enter__, wrapper.state_dict):
        with pytest.raises(ParameterStateError, match=r"0\.weight: its \.data was assigned to"):
            read()


def test_summon_between_forward_and_backward(run_on_gloo_ranks):
    run_on_gloo_ranks(2, summon_between_forward_and_backward)


def scale_gradients(implementation: str) -> None:
    """ShardedGradScaler: one rank's overflow is every rank's skipped step."""
    wrapper = wrap(implementation, make_mlp(), auto_wrap_policy=LINEARS)
    forward = compile_if_asked(implementation, wrapper)
    # Of torch, about how the scaler calls a DTensor's op.
    warnings.filterwarnings("ignore", message="Found a non-scalar tensor with numel=1")
    scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=1)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    before = full_parameters(wrapper)
    for step in range(2):
        data = batch() * (float("inf") if step == 0 and dist.get_rank() == 1 else 1.0)
        scaler.scale(forward(data).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (2.0 if step == 0 else 4.0)
        is_same = torch.equal(full_parameters(wrapper)["0.weight"], before["0.weight"])
        assert is_same == (step == 0)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_sharded_grad_scaler(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, scale_gradients, implementation)
