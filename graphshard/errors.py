"""Every public error of graphshard.

All derive from :class:`GraphShardError`. Where torch's FSDP2 raises a known type for a known mistake, ours is a
subclass of both, so existing ``except`` clauses keep working. A message names what is wrong and what to do about it.
Every error pickles and copies with its attributes, since a rank's error travels between processes.

Exceptions that steer control flow inside one file are private and stay in that file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .units import exact_size


class GraphShardError(Exception):
    """Root of graphshard's errors. Catch it to catch all of them."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the message and the attributes. ``__init__``, which may take other arguments, is not called."""
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[GraphShardError], args: tuple[Any, ...]) -> GraphShardError:
    return kind.__new__(kind, *args)


# ---- Options and the command line


class OptionError(GraphShardError, ValueError):
    """An option of the backend, of a public function or of a pass has a value it cannot take.

    Remedy: give one of the values that the message lists.
    """


class OptionTypeError(GraphShardError, TypeError):
    """An option has a value of the wrong type. Remedy: give the type that the message names."""


class StateDictConfigError(OptionTypeError, RuntimeError):
    """A config is not one of the type of state dict. FSDP1's is a RuntimeError. Remedy: give the type that is named."""


class UsageError(GraphShardError, ValueError):
    """The command line names something that does not exist or cannot be used.

    Remedy: correct the argument that the message quotes.
    """


# ---- Sharding a model


class ShardingError(GraphShardError, ValueError):
    """A model, mesh or parameter cannot be sharded as asked.

    Remedy: change the mesh, the placement or the parameter that the message names.
    """


class UnsupportedShardingError(GraphShardError, NotImplementedError):
    """The request is valid, but graphshard does not implement it. Remedy: use what the message names instead."""


class AlreadyShardedError(GraphShardError, AssertionError):
    """``fully_shard`` was called again on a unit, or a unit was copied that cannot be.

    Remedy: call ``fully_shard`` once per module; build a second model and load the state instead of copying.
    """


class UnnamedMeshError(GraphShardError, AssertionError):
    """A 2-D mesh has no axis names, so nothing says which axis replicates and which one shards.

    Remedy: pass ``mesh_dim_names`` to ``init_device_mesh``.
    """


class ShardDimError(GraphShardError, AssertionError):
    """``shard_placement_fn`` names a dim that the parameter does not have. Remedy: return a dim in the range given."""


class ParameterStateError(GraphShardError, RuntimeError):
    """A sharded parameter cannot be used as it is: on the meta device, replaced, or changed before its backward.

    Remedy: initialise, load or update parameters at the place in the training loop that the message names.
    """


class NotRootError(GraphShardError, RuntimeError):
    """A method that concerns the whole model was called on an inner unit. Remedy: call it on the outermost unit."""


class TrainingStateError(GraphShardError, AssertionError, ValueError, RuntimeError):
    """A method of a wrapper was called in a state in which it cannot run: inside a forward, for instance.

    Remedy: call it at the place that the message names, between training steps most often.
    """


class FlatParameterError(GraphShardError, AttributeError):
    """An attribute of FSDP1's flat parameters was read, which ``FullyShardedDataParallel`` here does not have.

    Remedy: read the parameters, which are DTensors of their own shapes, or use the method that the message names.
    """


class ConflictingCommError(GraphShardError, AssertionError):
    """A setting of a unit's collectives contradicts an earlier one. Remedy: leave out one of the two settings."""


class ExtensionError(GraphShardError, AssertionError):
    """A tensor's all-gather extension is incomplete, or returns values that cannot be gathered.

    Remedy: define both hooks with the signature, and return the shapes, that the message states.
    """


class StaleOptimizerError(GraphShardError, RuntimeError):
    """An optimizer holds parameters that ``fully_shard`` has replaced. Remedy: make the optimizer after sharding."""


# ---- Passes and captures


class PipelineError(GraphShardError, ValueError):
    """Passes stand in an order that cannot work, or the text of a pipeline cannot be read.

    Remedy: reorder the passes so that each requirement is established first; correct the text.
    """


class PassError(GraphShardError, RuntimeError):
    """A pass broke a fact about the graph, misreported a change, or lacks what it needs in its context.

    Remedy: mend the pass that the message names; the dump of the graph before it shows its input.
    """


class CaptureError(GraphShardError, RuntimeError):
    """A model cannot be captured as one training step. Remedy: change the line of the model that the message shows."""


class UntypedGraphError(GraphShardError, ValueError):
    """Nodes of a graph to plan have no ``meta["val"]``, or fake tensors of several modes.

    Remedy: trace the graph on fake tensors, ``make_fx(..., tracing_mode="fake")`` for instance.
    """


# ---- Agreement between ranks


class AgreementError(GraphShardError, RuntimeError):
    """Ranks would issue different collectives, or one of them did not compile what the others did.

    Remedy: build the same model and take the same branches on every rank; the message names the first difference.
    """


class RefusedError(AgreementError):
    """Another rank stopped with an error before this rank could run its graph. Remedy: that of the error quoted."""


class ScheduleOrderError(GraphShardError, RuntimeError):
    """Inductor emitted collectives in another order than planned, with ``verify="full"``.

    Remedy: report it with the dump; ``verify="cheap"`` makes it a warning, and results are right either way.
    """


class CollectiveMismatchError(GraphShardError, RuntimeError):
    """Ranks that run in one process for a test reached different collectives, or one that cannot run there.

    Remedy: correct the pass under test, so that all ranks reach the same collectives in the same order.
    """


# ---- Costs and plans


class CardError(GraphShardError, ValueError):
    """A hardware card is unknown or unreadable, or its entries are missing or make no sense.

    Remedy: ``graphshard cards`` lists the known cards; correct the entries that the message lists.
    """


class TableError(GraphShardError, ValueError):
    """A table of measured collectives cannot be read. Remedy: correct the lines that the message lists."""


class CalibrationError(GraphShardError, RuntimeError):
    """This machine cannot be measured as asked. Remedy: correct the output path, or start ranks as the message says."""


class UnknownGroupError(GraphShardError, KeyError):
    """A collective runs over a group whose topology the cost model was not given.

    Remedy: pass the topology in ``CostModel(groups=...)``.
    """

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would show the repr of the message


class UnpricedGroupError(GraphShardError, ValueError):
    """A collective of a graph to plan runs on a process group that has no price.

    Remedy: say how many ranks the group has, ``groups={name: ranks}``.
    """


class PriceError(GraphShardError, ValueError):
    """A price is negative, infinite or not a number. Remedy: correct the function or the card that gave it."""


class ProblemError(GraphShardError, ValueError):
    """A planning problem contradicts itself: sizes, buckets, prefetches or limits that no schedule can have.

    Remedy: correct what the message lists, or ask for fewer buckets and prefetches.
    """


class PlanError(GraphShardError, RuntimeError):
    """A schedule or a plan to follow cannot be carried out on this problem.

    Remedy: make the plan for this very graph; on several ranks, compile the same graph with the same options.
    """


class InfeasibleBudgetError(GraphShardError, ValueError):
    """No schedule keeps the memory budget. Remedy: allow the bytes that the message names, or use a smaller batch.

    Args:
        budget_bytes: the budget that is not kept, memory held outside of the graph included.
        smallest_bytes: a budget that is kept, without memory held outside of the graph.
        is_smallest: as below.
        held_bytes: memory held outside of the graph.

    Attributes:
        smallest_bytes: the budget that is kept, memory held outside of the graph included.
        is_smallest: no smaller budget can be kept; only small problems can prove it.
    """

    def __init__(
        self, budget_bytes: int, smallest_bytes: int, *, is_smallest: bool, held_bytes: int = 0
    ) -> None:
        self.smallest_bytes, self.is_smallest = smallest_bytes + held_bytes, is_smallest
        word = "the smallest feasible one is" if is_smallest else "the smallest found that is kept is"
        held = (
            f", in which {exact_size(held_bytes)} outside of the graph count (shards that it does not read, "
            "gradients that wait for a later micro-batch, gathered parameters)"
            if held_bytes
            else ""
        )
        super().__init__(
            f"no schedule keeps a memory budget of {exact_size(budget_bytes)}{held}; {word} "
            f"{exact_size(self.smallest_bytes)}: "
            "allow that much, or use a smaller batch or more ranks"
        )


class OutgrownBudgetError(InfeasibleBudgetError):
    """A graph compiled for any size does not keep the memory budget at the sizes of this call. It has not run.

    Remedy: ``torch.compile(dynamic=False)``, which plans each size by itself, a smaller batch, or a larger budget.

    Args:
        what: the half, for the message.
        budget_bytes: the budget.
        needed_bytes: what the plan needs at these sizes; ``smallest_bytes`` of the error.
        sizes, planned: the sizes of this call and those that were planned for, in one order.
    """

    def __init__(
        self, what: str, budget_bytes: int, needed_bytes: int, sizes: Sequence[int], planned: Sequence[int]
    ) -> None:
        self.smallest_bytes, self.is_smallest = needed_bytes, False
        grown = ", ".join(
            f"{size} where {before} was planned for"
            for size, before in zip(sizes, planned, strict=True)
            if size > before
        )
        # Not the initialiser of the base class: its message is another.
        GraphShardError.__init__(
            self,
            f"{what} is compiled for any size and was planned for one; at size {grown}, its plan needs "
            f"{exact_size(needed_bytes)} of a memory budget of {exact_size(budget_bytes)}. "
            f"torch.compile(dynamic=False) plans each size by itself; or take a smaller batch, or allow "
            f"{exact_size(needed_bytes)}",
        )


class BudgetError(GraphShardError, ValueError):
    """An inspected training step does not fit the memory that a rank may use.

    Remedy: allow the bytes needed, ``plan="auto"``, ``checkpoint="units"``, a smaller batch, or more ranks.

    Attributes:
        budget_bytes: what a rank may use.
        needed_bytes: what ``what`` needs.
    """

    def __init__(self, budget_bytes: int, needed_bytes: int, what: str) -> None:
        super().__init__(
            f"memory_budget: {exact_size(budget_bytes)} a rank, but {what} needs "
            f'{exact_size(needed_bytes)}; allow that much, or use plan="auto", checkpoint="units", a smaller batch, '
            "or more ranks"
        )
        self.budget_bytes, self.needed_bytes = budget_bytes, needed_bytes


# ---- Reports


class FormulaError(GraphShardError, ValueError):
    """The cost of a step is not the formula that was looked for. Remedy: inspect the sizes you need one by one."""


class ReportFileError(GraphShardError, ValueError):
    """A file holds no report that this version can read. Remedy: write it again with ``graphshard inspect --json``."""
