"""FullyShardedDataParallel trains as torch's FSDP1 and as the unsharded model do, for each argument."""

import copy
import functools
import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.fsdp1 import Training, full_gradients, full_parameters, start_training, wrap
from support.implementations import GRAPHSHARD, compile_if_asked
from support.toy_models import WORKLOADS, Block, build_mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    enable_wrap,
    transformer_auto_wrap_policy,
)
from torch.distributed.fsdp.wrap import wrap as wrap_if_enabled
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

from graphshard import FullyShardedDataParallel
from graphshard.errors import ParameterStateError

LINEARS = ModuleWrapPolicy({nn.Linear})


def train(training: Training, num_steps: int = 2) -> None:
    for step in range(num_steps):
        training.step(step)


def train_with_strategies(implementation: str) -> None:
    """Each strategy, each prefetch; NO_SHARD inside FULL_SHARD."""
    no_shard = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    mixed = CustomPolicy(lambda module: no_shard if getattr(module, "in_features", 0) == 5 else False)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("mlp_5_rows", {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "backward_prefetch": None}),
        ("mlp_5_rows", {"sharding_strategy": ShardingStrategy.NO_SHARD, "auto_wrap_policy": LINEARS}),
        ("mlp_5_rows", {"auto_wrap_policy": mixed, "forward_prefetch": True, "limit_all_gathers": False}),
    ]
    if implementation == "sharded":
        by_function = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        post = BackwardPrefetch.BACKWARD_POST
        cases.append(("transformer", {"auto_wrap_policy": by_function, "backward_prefetch": post}))
    else:
        cases.append(("mlp_7_15_3", {"auto_wrap_policy": LINEARS, "use_orig_params": True}))
    for workload, options in cases:
        training = start_training(WORKLOADS[workload], implementation, options=lambda _: options)  # noqa: B023
        assert [name for name, _ in training.wrappers[1].named_parameters()] == [
            name for name, _ in training.wrappers[0].named_parameters()
        ]
        train(training)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_strategies(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_with_strategies, implementation)


def train_on_meshes(implementation: str) -> None:
    """Hybrid: a mesh, a pair of groups. A group of some ranks. One axis of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    cases: list[dict[str, Any]] = [
        {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD, "auto_wrap_policy": LINEARS},
        {"process_group": groups, "sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2},
    ]
    for options in cases:
        training = start_training(WORKLOADS["mlp_5_rows"], implementation, options=lambda _: options)  # noqa: B023
        assert {param.placements for param in training.wrappers[1].parameters()} == {(Replicate(), Shard(0))}
        train(training)
        optimizer = training.optimizers[2]
        training.workload.loss(training.wrappers[1], training.workload.batch_of(dist.get_rank(), 9)).backward()
        grads = full_gradients(training.wrappers[1])
        assert_close(training.wrappers[1].clip_grad_norm_(1e9), nn.utils.get_total_norm(list(grads.values())))
        optimizer.zero_grad()
    for options in ({"process_group": mesh.get_group("shard")}, {"device_mesh": mesh["shard"]}):
        wrapper = wrap(implementation, build_mlp((4, 5), (5, 2)), **options)
        assert (wrapper.rank, wrapper.world_size) == (dist.get_rank() % 2, 2)
        batch = torch.full((2, 4), float(dist.get_rank()))
        compile_if_asked(implementation, wrapper)(batch).sum().backward()
        weight = full_gradients(wrapper)["2.bias"]
        assert_close(weight, torch.full_like(weight, 2.0))


def use_other_meshes() -> None:
    """NO_SHARD in a group of some ranks; values of the first rank on all copies; a policy that names other ranks."""
    mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), dist.get_rank()
    no_shard = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    whole = wrap("sharded", build_mlp((4, 5)), process_group=mesh.get_group("shard"), **no_shard)
    whole(torch.full((2, 4), float(rank))).sum().backward()
    assert_close(full_gradients(whole)["0.weight"], torch.full((5, 4), 2.0 * (rank // 2) * 2 + 1.0))
    torch.manual_seed(rank)
    hybrid = wrap(
        "sharded",
        build_mlp((4, 5)),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        sync_module_states=True,
    )
    torch.manual_seed(0)
    assert_close(full_parameters(hybrid)["0.weight"], build_mlp((4, 5))[0].weight.detach())
    below = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    policy = CustomPolicy(lambda module: below if getattr(module, "in_features", 0) == 5 else False)
    torch.manual_seed(0)
    plain = build_mlp((4, 5), (5, 2))
    torch.manual_seed(0)
    mixed = wrap("sharded", build_mlp((4, 5), (5, 2)), auto_wrap_policy=policy)
    assert [len(param.placements) for param in mixed.parameters()] == [1, 1, 2, 2]
    for each in range(4):
        (plain(torch.full((2, 4), float(each))).sum() / 4).backward()
    mixed(torch.full((2, 4), float(rank))).sum().backward()
    assert_close(full_gradients(mixed), {name: param.grad for name, param in plain.named_parameters()})
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert_close(mixed.clip_grad_norm_(0.1), expected)
    assert_close(full_gradients(mixed), {name: param.grad for name, param in plain.named_parameters()})


def test_other_meshes(run_on_gloo_ranks):
    run_on_gloo_ranks(4, use_other_meshes)


def combine_with_tensor_parallelism() -> None:
    """On the other axis of a mesh: training, clipping, state dicts, whole parameters."""
    mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), dist.get_rank()
    torch.manual_seed(0)
    plain = build_mlp((4, 6), (6, 3))
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    wrapper = wrap("sharded", model, device_mesh=mesh["dp"])
    inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(each)) for each in range(2)]
    for each in inputs:
        (plain(each).square().sum() / 2).backward()
    wrapper(inputs[rank // 2]).square().sum().backward()
    assert_close(full_gradients(wrapper), {name: param.grad for name, param in plain.named_parameters()})
    assert_close(wrapper.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    assert_close(full_gradients(wrapper), {name: param.grad for name, param in plain.named_parameters()})
    state = wrapper.state_dict()
    assert_close(dict(state), dict(plain.state_dict()))
    wrapper.load_state_dict({name: 2 * value for name, value in state.items()})
    with FullyShardedDataParallel.summon_full_params(wrapper), torch.no_grad():
        for param in wrapper.parameters():
            param.mul_(2)
    assert_close(full_parameters(wrapper), {name: 4 * value for name, value in plain.state_dict().items()})
    torch.manual_seed(rank // 2)
    model = build_mlp((4, 6), (6, 3))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model.register_buffer("offset", DTensor.from_local(torch.full((3,), 1.0 + rank // 2), mesh["tp"], [Replicate()]))
    wrapper = wrap("sharded", model, device_mesh=mesh["dp"], sync_module_states=True)
    assert_close(full_parameters(wrapper), dict(plain.named_parameters()))
    assert_close(wrapper.offset.to_local(), torch.ones(3))


def test_tensor_parallelism(run_on_gloo_ranks):
    run_on_gloo_ranks(4, combine_with_tensor_parallelism)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_meshes_and_groups(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(4, train_on_meshes, implementation)


class Recording(nn.Module):
    """Notes the dtypes of its input, weight and buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [x.dtype, self.inner.weight.dtype, self.scale.dtype]
        return self.inner(x.to(self.inner.weight.dtype)) * self.scale


def train_in_mixed_precision(implementation: str) -> None:
    """Losses and gradients are FSDP1's; dtypes of inputs, parameters and buffers too."""
    half = {"rtol": 1.6e-2, "atol": 2e-2}
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mixed_precision": policy, "auto_wrap_policy": LINEARS}
    training = start_training(
        WORKLOADS["mlp_7_15_3"], implementation, options=lambda _: options, tolerance=half, against_torch=half
    )
    train(training)
    for casts_root in (True, False):
        precision = MixedPrecision(
            param_dtype=torch.bfloat16, buffer_dtype=torch.float16, cast_root_forward_inputs=casts_root
        )
        seen = []
        for kind in ("fsdp1", implementation):
            torch.manual_seed(0)
            model = nn.Sequential(Recording(), Recording())
            wrapper = wrap(kind, model, mixed_precision=precision, auto_wrap_policy=ModuleWrapPolicy({Recording}))
            wrapper(torch.ones(2, 4))
            seen.append([each.seen for each in wrapper.modules() if isinstance(each, Recording)])
            state = wrapper.module[0].module.scale.dtype
            assert state is torch.float16
        assert seen[0] == seen[1]


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_mixed_precision(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_in_mixed_precision, implementation)


def compute_precisely_in_eval(implementation: str) -> None:
    """With the variable, dtypes follow the mode of each wrapped module, as FSDP1's do; gradients too."""
    warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed")  # Inductor's, of what this asks for
    policy = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.float16)
    options: dict[str, Any] = {"mixed_precision": policy, "auto_wrap_policy": ModuleWrapPolicy({Recording})}
    inputs = torch.linspace(0.1, 0.9, 8).view(2, 4)

    def build(kind: str) -> nn.Module:
        torch.manual_seed(0)
        return wrap(kind, nn.Sequential(Recording(), Recording()), **options)

    with mock.patch.dict(os.environ, FSDP_USE_FULL_PREC_IN_EVAL="1"):
        found = []
        for kind in ("fsdp1", implementation):
            wrapper, steps = build(kind), []
            forward = compile_if_asked(kind, wrapper)
            for part, is_training in ((wrapper, True), (wrapper, False), (wrapper, True), (wrapper.module[1], False)):
                part.train(is_training)
                out = forward(inputs)
                out.float().sum().backward()
                # Buffers of FSDP1 follow the root alone.
                num_seen = 3 if part is wrapper else 2
                seen = [each.seen[:num_seen] for each in wrapper.modules() if isinstance(each, Recording)]
                steps.append((seen, out.detach(), full_gradients(wrapper)))
                wrapper.zero_grad()
            found.append(steps)
        for (seen, out, grads), (torch_seen, torch_out, torch_grads) in zip(found[1], found[0], strict=True):
            assert seen == torch_seen, (seen, torch_seen)
            assert_close((out, grads), (torch_out, torch_grads), rtol=2e-2, atol=2e-2)
        assert found[1][1][0] == [[torch.float32] * 3] * 2
        torch.manual_seed(0)
        plain = nn.Sequential(Recording(), Recording())
        assert_close(found[1][1][1], plain(inputs).detach())
        change_mode_before_backward(build(implementation), found[1][0][2], implementation, inputs)


def change_mode_before_backward(
    wrapper: nn.Module, expected: dict[str, torch.Tensor], implementation: str, inputs: torch.Tensor
) -> None:
    """An evaluation between a forward and its backward changes no gradient; the reverse would lose precision."""
    forward = compile_if_asked(implementation, wrapper)
    loss = forward(inputs).float().sum()
    wrapper.eval()
    with torch.no_grad():
        assert forward(inputs).dtype is torch.float32
    loss.backward()
    assert_close(full_gradients(wrapper), expected, rtol=0, atol=0)
    if implementation == "sharded":
        loss = forward(inputs).sum()
        wrapper.train()
        forward(inputs)
        with pytest.raises(ParameterStateError, match=r"was read in torch\.float32 .* gather it in torch\.bfloat16"):
            loss.backward()


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_full_precision_in_eval(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, compute_precisely_in_eval, implementation)


def keep_low_precision(implementation: str) -> None:
    """Gradients stay in the dtype of the reduction, and add up over two backwards."""
    policy = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    found = []
    for kind in ("fsdp1", implementation):
        torch.manual_seed(0)
        wrapper = wrap(kind, build_mlp((4, 6), (6, 2)), mixed_precision=policy)
        forward = compile_if_asked(kind, wrapper)
        for _ in range(2):
            forward(torch.ones(2, 4)).sum().backward()
        grads = [param.grad for param in wrapper.parameters() if param.grad is not None]
        assert {grad.dtype for grad in grads} == {torch.bfloat16}
        found.append(full_gradients(wrapper) if kind != "fsdp1" else {})
    torch.manual_seed(0)
    plain = build_mlp((4, 6), (6, 2))
    (2 * plain(torch.ones(2, 4)).sum()).backward()
    for name, param in plain.named_parameters():
        assert_close(found[1][name].float(), param.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_low_precision_gradients_are_kept(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, keep_low_precision, implementation)


def keep_normalisation_precise(implementation: str) -> None:
    """BatchNorm gets a wrapper in full precision; a warning names it."""
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    outputs = []
    for kind in ("fsdp1", implementation):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        with pytest.warns(UserWarning, match="BatchNorm1d"):
            wrapper = wrap(kind, model, mixed_precision=policy, auto_wrap_policy=LINEARS)
        norm = wrapper.module[1]
        seen: list[torch.dtype] = []
        norm.module.register_forward_hook(
            lambda module, args, out, seen=seen: seen.extend((args[0].dtype, module.weight.dtype, out.dtype))
        )
        out = wrapper(torch.arange(12.0).view(3, 4))
        assert out.dtype is torch.bfloat16 and set(seen[:2]) == {torch.float32}
        out.float().sum().backward()
        outputs.append((out.detach(), full_gradients(wrapper)))
    assert_close(outputs[1], outputs[0], rtol=2e-2, atol=2e-2)


def test_normalisation_of_batches_stays_precise(run_on_gloo_ranks):
    run_on_gloo_ranks(2, keep_normalisation_precise, "sharded")


def ignore_states(implementation: str) -> None:
    """Ignored modules and parameters stay whole and are not reduced; an outer wrapper knows those of inner ones."""

    def make(name: str, model: nn.Sequential) -> dict[str, Any]:
        given = [model[0]] if "module" in name else [model[0].weight, model[0].bias]
        return {name.removesuffix(" of modules"): given, "auto_wrap_policy": LINEARS}

    for name in ("ignored_modules", "ignored_states of modules", "ignored_states"):
        wrapper = None
        for kind in ("fsdp1", implementation):
            torch.manual_seed(0)
            model = build_mlp((4, 6), (6, 2))
            wrapper = wrap(kind, model, **make(name, model))
            compile_if_asked(kind, wrapper)(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
            first, last = wrapper.module[0], wrapper.module[2]
            # FSDP1 wraps a module whose parameters are ignored, one by one.
            first = getattr(first, "_fsdp_wrapped_module", first)
            assert isinstance(first.weight, nn.Parameter) and first.weight.shape == (6, 4)
            assert not isinstance(first.weight, DTensor)
            if dist.get_rank() == 0:
                assert not first.weight.grad.any()  # this rank's own: its inputs are zeros
        assert isinstance(wrapper, nn.Module) and isinstance(last.weight, DTensor)
    inner = build_mlp((4, 6), (6, 2))
    middle = wrap(implementation, inner, ignored_states=[inner[0].weight])
    outer = wrap(implementation, nn.Sequential(middle, nn.Linear(2, 2)))
    assert not isinstance(inner[0].weight, DTensor)
    assert sum(isinstance(param, DTensor) for param in outer.parameters()) == 5


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_ignored_states(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, ignore_states, implementation)


class OnlyReset(nn.Module):
    """A tied pair of layers, and a buffer that `reset_parameters` sets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("offset", torch.full((4,), 3.0))

    def reset_parameters(self) -> None:
        self.offset.fill_(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) + self.offset


def fill_own(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for value in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.constant_(value, 0.5)


def materialise(implementation: str) -> None:
    """From the meta device: by reset_parameters, by param_init_fn, from the first rank's values."""
    with torch.device("meta"):
        model = nn.Sequential(OnlyReset(), nn.Linear(4, 2))
    wrapper = wrap(implementation, model, auto_wrap_policy=ModuleWrapPolicy({OnlyReset}), sync_module_states=True)
    values = full_parameters(wrapper)
    assert set(values) == {"0.first.weight", "1.weight", "1.bias"}
    assert all(value.abs().sum() > 0 for value in values.values())
    assert wrapper.module[0].module.first.weight is wrapper.module[0].module.second.weight
    assert_close(wrapper.module[0].offset, torch.full((4,), 3.0))
    wrapper(torch.ones(1, 4)).sum().backward()
    with torch.device("meta"):
        model = nn.Sequential(OnlyReset(), nn.Linear(4, 2))
    wrapper = wrap(implementation, model, param_init_fn=fill_own)
    assert all((value == 0.5).all() for value in full_parameters(wrapper).values())
    # The first rank has values, the others none.
    rank = dist.get_rank()
    torch.manual_seed(rank)
    with torch.device("meta" if rank else "cpu"):
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    wrapper = wrap(
        implementation,
        model,
        auto_wrap_policy=LINEARS,
        sync_module_states=True,
        param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
    )
    dist.broadcast_object_list(holder := [expected], src=0)
    assert_close({**full_parameters(wrapper), **dict(wrapper.module.named_buffers())}, holder[0])


def test_meta_modules_and_values_of_the_first_rank(run_on_gloo_ranks):
    run_on_gloo_ranks(2, materialise, "sharded")


def wrap_by_hand(implementation: str) -> None:
    """`wrap` inside `enable_wrap`, wrappers around wrappers, offload; forwarding of attributes and items."""
    losses = []
    for kind in ("fsdp1", implementation):
        torch.manual_seed(0)
        options = {} if kind == "fsdp1" else {"cpu_offload": CPUOffload(offload_params=True)}
        if kind == "fsdp1":
            options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        cls = type(wrap(kind, nn.Linear(1, 1)))
        with enable_wrap(wrapper_cls=cls, **options):
            torch.manual_seed(0)
            model = nn.Sequential(wrap_if_enabled(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 2))
            wrapper = wrap_if_enabled(model)
        assert isinstance(wrapper, cls) and isinstance(wrapper[0], cls) and wrapper.module is model
        assert wrapper[0].in_features == 4 and wrapper[0].module.in_features == 4
        assert [each.check_is_root() for each in (wrapper, wrapper[0])] == [True, False]
        optimizer, forward = torch.optim.Adam(wrapper.parameters()), compile_if_asked(kind, wrapper)
        for _ in range(3):
            loss = forward(torch.ones(3, 4) * (1 + dist.get_rank())).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append((loss.detach(), full_parameters(wrapper)))
    assert_close(losses[1], losses[0])


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_wrapping_by_hand(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, wrap_by_hand, implementation)
