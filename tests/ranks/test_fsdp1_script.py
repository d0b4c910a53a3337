"""The same training script under both imports: written for torch's FSDP1, run with graphshard's wrapper."""

from pathlib import Path

import pytest
import torch

from ranks.test_same_script import printed_values, run_script

SCRIPT = """
import functools
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from {package} import FullyShardedDataParallel as FSDP

VOCABULARY, DIM, LENGTH = 12, 16, 8
NUM_EPOCHS, NUM_STEPS, NUM_MICRO_BATCHES = 2, 2, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.expand = nn.Linear(DIM, 2 * DIM)
        self.contract = nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.contract(F.gelu(self.expand(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.Sequential(Block(), Block())
        self.output = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens):
        return self.output(self.blocks(self.tokens(tokens)))


def wrap(model):
    return FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={{Block}}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        limit_all_gathers=True,
    )


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    starts = torch.randint(VOCABULARY, (4, 1), generator=generator)
    return (starts + 5 * torch.arange(LENGTH + 1)) % VOCABULARY


def train(model, optimizer, epoch):
    model.train()
    for step in range(NUM_STEPS):
        batches = [batch(100 * epoch + 10 * step + index) for index in range(NUM_MICRO_BATCHES)]
        with model.no_sync():
            for tokens in batches[:-1]:
                (loss_of(model, tokens) / NUM_MICRO_BATCHES).backward()
        loss = loss_of(model, batches[-1])
        (loss / NUM_MICRO_BATCHES).backward()
        norm = model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = torch.stack([loss.detach(), norm])
        dist.all_reduce(total)
        print(f"epoch {{epoch}} loss {{total[0].item():.9f}} norm {{total[1].item():.9f}}")


@torch.no_grad()
def evaluate(model):
    model.eval()
    loss = loss_of(model, batch(7))
    dist.all_reduce(loss)
    print(f"evaluation {{loss.item():.9f}}")


def save(model, optimizer):
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    )
    return model.state_dict(), FSDP.optim_state_dict(model, optimizer)


def load(model, optimizer, states):
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states[1]))


def main():
    warnings.simplefilter("ignore", FutureWarning)
    torch.manual_seed(0)
    model = wrap(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    {compile_line}
    for epoch in range(NUM_EPOCHS):
        train(model, optimizer, epoch)
        scheduler.step()
        evaluate(model)
    states = save(model, optimizer)
    print("keys", " ".join(states[0]))
    model = wrap(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    load(model, optimizer, states)
    {compile_line}
    train(model, optimizer, NUM_EPOCHS)
    evaluate(model)
    with FSDP.summon_full_params(model, writeback=False):
        print("sum", sum(param.sum().item() for param in model.parameters()))


if __name__ == "__main__":
    main()
"""

#: In place: names in state dicts stay. torch.compile(model) puts "_orig_mod." in front of them, as for any model.
COMPILE_LINE = 'model.compile(backend="graphshard")'
IMPORTS = {"fsdp1": "torch.distributed.fsdp", "sharded": "graphshard", "compiled": "graphshard"}


def script_text(implementation: str) -> str:
    compile_line = COMPILE_LINE if implementation == "compiled" else ""
    return SCRIPT.format(package=IMPORTS[implementation], compile_line=compile_line)


def test_the_scripts_differ_by_the_import_and_one_line():
    fsdp1, sharded, compiled = (script_text(implementation).splitlines() for implementation in IMPORTS)
    assert [line for line in sharded if line not in fsdp1] == [
        "from graphshard import FullyShardedDataParallel as FSDP"
    ]
    assert {line for line in compiled if line not in sharded} == {f"    {COMPILE_LINE}"}


@pytest.mark.parametrize(
    "implementations", [("sharded",), pytest.param(("sharded", "compiled"), marks=pytest.mark.slow)]
)
def test_same_losses(run_on_gloo_ranks, tmp_path: Path, implementations):
    printed = {}
    for implementation in ("fsdp1", *implementations):
        path = tmp_path / f"{implementation}.py"
        path.write_text(script_text(implementation))
        printed[implementation] = run_on_gloo_ranks(2, run_script, str(path), "")
    losses = printed_values(printed["fsdp1"][0], "loss")
    assert len(losses) == 6 and losses[-1] < 0.9 * losses[0], "the script does not train"
    for implementation in implementations:
        for rank in range(2):
            for what in ("loss", "norm", "evaluation", "sum"):
                expected = printed_values(printed["fsdp1"][rank], what)
                found = printed_values(printed[implementation][rank], what)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            keys = {printed[each][rank].split("keys ")[1].splitlines()[0] for each in ("fsdp1", implementation)}
            assert len(keys) == 1
