"""Every error graphshard raises on purpose.

All derive from :class:`GraphShardError`. Where torch's FSDP2 raises a known type for a known
mistake, ours is a subclass of both, so existing ``except`` clauses keep working.
"""


class GraphShardError(Exception):
    """Root of graphshard's errors."""


class OptionError(GraphShardError, ValueError):
    """An option of the backend, of ``fully_shard`` or of a pass has a value it cannot take."""


class OptionTypeError(GraphShardError, TypeError):
    """An option has a value of the wrong type."""


class ShardingError(GraphShardError, ValueError):
    """A model, mesh or parameter cannot be sharded as asked."""


class UnsupportedShardingError(GraphShardError, NotImplementedError):
    """The request makes sense, but graphshard does not do it."""


class AlreadyShardedError(GraphShardError, AssertionError):
    """A module that is already a unit was given to ``fully_shard`` again, or copied."""


class UnnamedMeshError(GraphShardError, AssertionError):
    """A 2-D mesh whose axes have no names: which one copies and which one cuts is not said."""


class ShardDimError(GraphShardError, AssertionError):
    """A placement names a dim that the parameter does not have."""


class ParameterStateError(GraphShardError, RuntimeError):
    """A sharded parameter is not in a state in which the forward could use it."""


class NotRootError(GraphShardError, RuntimeError):
    """A method that concerns the whole model was called on one of its inner units."""


class ConflictingCommError(GraphShardError, AssertionError):
    """A setting of a unit's collectives contradicts one that was made before."""


class ExtensionError(GraphShardError, AssertionError):
    """A tensor's all-gather extension is incomplete, or returns what cannot be gathered."""


class StaleOptimizerError(GraphShardError, RuntimeError):
    """An optimizer holds parameters that ``fully_shard`` has replaced."""


class PipelineError(GraphShardError, ValueError):
    """Passes in an order that cannot work, or a pipeline text that cannot be read."""


class PassError(GraphShardError, RuntimeError):
    """A pass left the graph in a state that breaks a fact, or misreported what it did."""


class CaptureError(GraphShardError, RuntimeError):
    """A model could not be captured as one training step."""


class AgreementError(GraphShardError, RuntimeError):
    """The ranks would not issue the same collectives."""


class RefusedError(AgreementError):
    """Another rank has stopped with an error, which the message tells, before this one could run its graph."""


class ScheduleOrderError(GraphShardError, RuntimeError):
    """Inductor emitted collectives in another order than the planned one."""


class CardError(GraphShardError, ValueError):
    """A hardware card is unknown, unreadable, or has entries that are missing or make no sense."""


class TableError(GraphShardError, ValueError):
    """A table of measured collectives cannot be read, or cannot answer."""


class UnknownGroupError(GraphShardError, KeyError):
    """A collective runs over a group whose topology the cost model was not given."""

    def __str__(self) -> str:
        return str(self.args[0])


class BudgetError(GraphShardError, ValueError):
    """A training step does not fit the memory that a rank may use.

    Attributes:
        budget_bytes: what it may use.
        needed_bytes: what ``what`` needs.
    """

    def __init__(self, budget_bytes: int, needed_bytes: int, what: str) -> None:
        super().__init__(
            f"memory_budget: {budget_bytes} bytes a rank, but {what} needs "
            f'{needed_bytes} bytes; allow that much, or use plan="auto", checkpoint="units", a smaller batch, '
            "or more ranks"
        )
        self.budget_bytes, self.needed_bytes = budget_bytes, needed_bytes


class FormulaError(GraphShardError, ValueError):
    """What a step costs is not the formula that was looked for, or there is nothing to solve."""


class ReportFileError(GraphShardError, ValueError):
    """A file holds no report that this version can read."""


class CalibrationError(GraphShardError, RuntimeError):
    """This machine could not be measured as asked."""


class UsageError(GraphShardError, ValueError):
    """The command line asks for something that does not exist or cannot be."""
