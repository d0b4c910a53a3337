"""Repeated blocks are exported once: the graph is that of a plain export, whatever the blocks hold."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import graphshard.capture.export_blocks as repeat_export
from graphshard._compat import storage_id
from graphshard.capture.capture_step import CapturedStep, capture_step
from graphshard.capture.find_blocks import find_blocks
from graphshard.capture.rules import ShardingRules
from graphshard.errors import CaptureError
from graphshard.ir.graph_text import graph_text

WIDTH = 8


class Block(nn.Module):
    """Attention-like and feed-forward parts with views, a residual each, and a table that all blocks read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, dim=-1)
        scores = ((query + table) @ key.transpose(-1, -2)).softmax(-1)
        x = x + scores @ value
        return x + self.down(F.gelu(self.up(x)))


class Repeating(nn.Module):
    """Blocks between an embedding and a head; ``run`` says how a block is called."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = Block,
        count: int = 4,
        run: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda block, x, table: block(x, table),
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([make() for _ in range(count)])
        self.head = nn.Linear(WIDTH, 11)
        self.run = run

    def forward(self, tokens: Tensor) -> Tensor:
        table = torch.arange(WIDTH, dtype=torch.float32).cos()
        x = self.tokens(tokens)
        for block in self.blocks:
            x = self.run(block, x, table)
        return self.head(x).square().mean()


class Dropped(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return F.dropout(super().forward(x, table), 0.1)


class InPlace(Block):
    """Writes on what it made itself."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        y.mul_(2).relu_()
        return x + self.down(y) * table


class TwoLayers(nn.Module):
    """A block of two unlike layers: the period is both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), InPlace()

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.second(self.first(x, table), table)


class Half(Block):
    """Casts inside, and a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = super().forward(x.bfloat16().float(), table)
        return y + self.idle.detach()


class Counting(Block):
    """Writes on a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x, table)


class Overwriting(Block):
    """Writes on its input, which the caller does not read again."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x.add_(super().forward(x, table).detach())


class Scaled(Repeating):
    """All blocks read one parameter, whose gradient is the sum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.scale)
        return self.head(x).sum()


class Tied(Repeating):
    """Blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight = self.blocks[0].up.weight


class Skipping(Repeating):
    """The output of each block is read at the end, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        table = torch.arange(WIDTH, dtype=torch.float32).cos()
        outputs = [self.tokens(tokens)]
        for block in self.blocks:
            outputs.append(block(outputs[-1], table))
        return self.head(torch.stack(outputs).sum(0)).sum()


class Autocast(Repeating):
    """The type of compute is a state around the blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(tokens).float()


class TableWithoutGradient(Repeating):
    """Modes are switched before and behind the blocks, and back before them: the rotary embedding of transformers."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            table = torch.arange(WIDTH, dtype=torch.float32).cos()
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, table)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(x).float().sum()


class WithoutGradient(Repeating):
    """The blocks record nothing for autograd."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = super().forward(tokens)
        return self.head(self.tokens(tokens)).sum() + hidden


class Frozen(Repeating):
    """Nothing but the head is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens.requires_grad_(False)
        self.blocks.requires_grad_(False)


class Transposed(Repeating):
    """The gradient that enters the last block lies in memory in another order than its output."""

    def forward(self, tokens: Tensor) -> Tensor:
        table = torch.arange(WIDTH, dtype=torch.float32).cos()
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, table)
        return (x.transpose(0, 1).reshape(-1) * torch.arange(float(x.numel()))).sum()


class Turned(Block):
    """Turns pairs of numbers as complex ones, by those of the table."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.up(self.norm(x)).unflatten(-1, (-1, 2)))
        return x + self.down(torch.view_as_real(pairs * table).flatten(-2))


class Rotated(Turned):
    """Its complex table is made inside."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x, torch.polar(table, table))


class Conjugated(Repeating):
    """All blocks read a conjugate view."""

    def __init__(self) -> None:
        super().__init__(Turned)

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.arange(WIDTH, dtype=torch.float32)
        table = torch.polar(angles.cos(), angles).conj()
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, table)
        return self.head(x).sum()


class Negated(Block):
    """Reads imaginary parts of conjugates: views of values with the other sign."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.up(self.norm(x)).unflatten(-1, (-1, 2)))
        return x + pairs.conj().imag * table


class Viewed(Repeating):
    """Two views of what each block makes are read at the end."""

    def forward(self, tokens: Tensor) -> Tensor:
        table = torch.arange(WIDTH, dtype=torch.float32).cos()
        x = self.tokens(tokens)
        views = []
        for block in self.blocks:
            x = block(x, table)
            views += [x.detach(), x.detach().transpose(0, 1)]
        return self.head(x).sum() + sum(view.mean() for view in views)


class Operands(Block):
    """Every other block reads its values in another pattern."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.is_odd = bool(Operands.made % 2)
        Operands.made += 1

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = self.down(self.up(self.norm(x)))
        return torch.addcmul(x, y, x if self.is_odd else y)


class Annotated(Block):
    """The user writes something else on the nodes of each block."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.note = Annotated.made
        Annotated.made += 1

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        with torch.fx.traceback.annotate({"note": self.note}):
            return super().forward(x, table)


class Tanh(Block):
    """Its backward reads its result."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.tanh(super().forward(x, table))


class WrittenAfter(Repeating):
    """What the backward of the last block reads is overwritten: torch refuses that."""

    def __init__(self) -> None:
        super().__init__(Tanh)

    def forward(self, tokens: Tensor) -> Tensor:
        table = torch.arange(WIDTH, dtype=torch.float32).cos()
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, table)
        x.mul_(2)
        return self.head(x).sum()


SAVES_PRODUCTS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
SAVES_NOTHING = partial(create_selective_checkpoint_contexts, [])


class Selective(Repeating):
    """Two blocks save more than the others."""

    def __init__(self) -> None:
        super().__init__(run=_selectively)
        for index, block in enumerate(self.blocks):
            block.is_early = index < 2


def _selectively(block: nn.Module, x: Tensor, table: Tensor) -> Tensor:
    """The first two blocks save their products, the others nothing."""
    context_fn = SAVES_PRODUCTS if block.is_early else SAVES_NOTHING
    return checkpoint(block, x, table, use_reentrant=False, context_fn=context_fn)


def _checkpointed(block: nn.Module, x: Tensor, table: Tensor) -> Tensor:
    return checkpoint(block, x, table, use_reentrant=False)


#: What other cases contain as well.
CONTAINED = {
    *("three", "dropout", "in_place", "checkpointed", "casts_and_idle", "complex", "skips"),
    *("other_strides", "negated_views"),
}

REPEATED = {
    "blocks": (Repeating, 4),
    "three": (lambda: Repeating(count=3), 3),
    "dropout": (lambda: Repeating(Dropped), 4),
    "in_place": (lambda: Repeating(InPlace), 4),
    "modes_before_and_behind": (lambda: TableWithoutGradient(count=3), 3),
    "two_layers": (lambda: Repeating(TwoLayers, 3), 3),
    "casts_and_idle": (lambda: Repeating(Half), 4),
    "complex": (lambda: Repeating(Rotated), 4),
    "skips": (Skipping, 3),  # a block begins inside a layer: its output is read by nothing but the end
    "checkpointed": (lambda: Repeating(run=_checkpointed), 4),
    "checkpointed_dropout": (lambda: Repeating(Dropped, 3, run=_checkpointed), 3),
}

#: No block is found.
NOT_FOUND = {
    "two": lambda: Repeating(count=2),
    "shared_parameter": Scaled,
    "tied": Tied,
    "autocast": Autocast,
    "frozen": Frozen,
    "without_gradient": WithoutGradient,
    "writes_on_input": lambda: Repeating(Overwriting),
    "other_operands": lambda: Repeating(Operands),
    "annotated": lambda: Repeating(Annotated),
    "conjugate_input": Conjugated,
    "views_of_one_value": Viewed,
    "checkpointed_other_operands": lambda: Repeating(Operands, run=_checkpointed),
    "checkpointed_annotated": lambda: Repeating(Annotated, run=_checkpointed),
    "selectively_checkpointed": Selective,
}

#: Blocks are found, and turn out to be more than their own graph says: a plain export follows.
GIVEN_UP = {
    "buffer": lambda: Repeating(Counting, 3),
    "other_strides": Transposed,
    "negated_views": lambda: Repeating(Negated),
}


def _captured(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], plain: bool
) -> tuple[CapturedStep, list[int]]:
    """The step, and how many blocks were put into it."""
    put = []

    def counted(joint: fx.GraphModule, exported: object, traced: fx.GraphModule, blocks: tuple) -> None:
        put.append(len(blocks))
        put_blocks(joint, exported, traced, blocks)

    put_blocks = repeat_export._put_blocks
    with monkeypatch.context() as patch:
        patch.setattr(repeat_export, "_put_blocks", counted)
        if plain:
            patch.setattr(repeat_export, "find_blocks", lambda traced: ())
        rules = ShardingRules(mesh={"shard": 2}, units=["blocks.*"])
        torch.manual_seed(0)
        return capture_step(make(), (torch.zeros(3, 5, dtype=torch.long),), rules=rules), put


_known: list[tuple[CapturedStep, list[int]]] = []


def _plain_blocks(monkeypatch: pytest.MonkeyPatch) -> tuple[CapturedStep, list[int]]:
    """The plain export of `Repeating`, captured once; its graphs are only read."""
    if not _known:
        _known.append(_captured(monkeypatch, Repeating, plain=True))
    return _known[0]


def _plainly_named(gm: fx.GraphModule) -> str:
    """The graph's text; names of saved values, which come from names of the capture, by number."""
    text = graph_text(gm)
    saved = [line.split(":")[0] for line in text.splitlines() if line.startswith("%saved.")]
    numbers = {name: f"%saved_{number}" for number, name in enumerate(saved)}
    for name in sorted(numbers, key=len, reverse=True):
        text = text.replace(name, numbers[name])
    return text


def _modules(gm: fx.GraphModule) -> list[list[str]]:
    stacks = [
        node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        for node in gm.graph.nodes
    ]
    return [[str(path) for path, _ in stack.values()] for stack in stacks]


def _memory(gm: fx.GraphModule) -> list[int]:
    """For each value the number of the first value in the same memory."""
    first: dict[int, int] = {}
    values = [node.meta.get("val") for node in gm.graph.nodes]
    return [
        first.setdefault(storage_id(value), number) if isinstance(value, Tensor) else -1
        for number, value in enumerate(values)
    ]


def _tags(gm: fx.GraphModule) -> list[object]:
    return [(node.meta.get("recompute"), node.meta.get("partitioner_tag")) for node in gm.graph.nodes]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in CONTAINED else name for name in (*REPEATED, *GIVEN_UP)],
)
def test_the_graph_is_that_of_a_plain_export(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, count = REPEATED[name] if name in REPEATED else (GIVEN_UP[name], 0)
    found = []
    monkeypatch.setattr(repeat_export, "find_blocks", lambda traced: found.append(find_blocks(traced)) or found[-1])
    step, put = _captured(monkeypatch, make, plain=False)
    assert len(found) == 1 and found[0]
    plain, none = _plain_blocks(monkeypatch) if name == "blocks" else _captured(monkeypatch, make, plain=True)
    assert (put, none) == ([count] if count else [], [])
    assert step.text == plain.text
    assert graph_text(step.joint) == graph_text(plain.joint)
    for half, plain_half in ((step.forward, plain.forward), (step.backward, plain.backward)):
        assert _plainly_named(half) == _plainly_named(plain_half)
        assert _modules(half) == _modules(plain_half)
        assert _tags(half) == _tags(plain_half)
        assert _memory(half) == _memory(plain_half)


class _Found(BaseException):
    """What follows, a plain export, is of no interest. No error, after which a plain export would follow too."""


@pytest.mark.parametrize("name", NOT_FOUND)
def test_blocks_that_share_more_than_values_are_not_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = []

    def find_and_stop(traced: fx.GraphModule) -> tuple:
        found.append(find_blocks(traced))
        raise _Found

    monkeypatch.setattr(repeat_export, "find_blocks", find_and_stop)
    with pytest.raises(_Found):
        _captured(monkeypatch, NOT_FOUND[name], plain=False)
    assert found == [()]


def test_blocks_begin_where_one_value_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    real = find_blocks
    monkeypatch.setattr(
        repeat_export, "find_blocks", lambda traced: found.extend(real(traced)) or tuple(found)
    )
    _captured(monkeypatch, Repeating, plain=False)
    assert [len(block.outputs) for block in found] == [1, 1, 1, 1]
    parameters = len(list(Block().parameters()))
    assert [len(block.inputs) for block in found] == [parameters + 2] * 4  # the value before and the table
    assert all(before.outputs[0] in after.inputs for before, after in itertools.pairwise(found))


class BrokenAtEnd(Repeating):
    """What follows the blocks depends on data."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + torch.nonzero(tokens).sum()


class Broken(Block):
    """What a block does depends on data."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x, table) + torch.nonzero(x).sum()


@pytest.mark.parametrize("make", [lambda: Repeating(Broken), BrokenAtEnd])
def test_what_depends_on_data_is_reported_as_ever(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(CaptureError, match="depends on data"):
        capture_step(
            make(), (torch.zeros(3, 5, dtype=torch.long),), rules=ShardingRules(mesh={"shard": 2})
        )


def test_what_torch_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = []
    for plain in (False, True):
        with pytest.raises(CaptureError, match="modified by an inplace operation") as caught:
            _captured(monkeypatch, WrittenAfter, plain)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("failing", [1, 2], ids=["the block's", "that of the whole"])
def test_when_an_export_fails_a_plain_one_follows(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    calls = []

    def export_joint(*args: object) -> fx.GraphModule:
        calls.append(args)
        if len(calls) == failing:
            raise AssertionError("torch has no type for this")
        return real(*args)

    real = repeat_export.export_joint
    plain, _ = _plain_blocks(monkeypatch)
    monkeypatch.setattr(repeat_export, "export_joint", export_joint)
    step, put = _captured(monkeypatch, Repeating, plain=False)
    assert (len(calls), put) == (failing + 1, [])
    assert step.text == plain.text and _plainly_named(step.backward) == _plainly_named(plain.backward)
