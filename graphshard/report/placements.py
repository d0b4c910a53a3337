"""What a report says about placements on a further mesh axis: where parameters lie, what reshards cost, and
which placements were compared.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedParameters:
    """Parameters of one name, shape and placement in several blocks.

    Attributes:
        name: their name, with "*" for the numbers of blocks.
        count: their number.
        placement: "Shard(0)", say.
        shape: shape of one whole parameter.
        piece: shape of the largest piece, which a rank of the axis gathers from the shards.
    """

    name: str
    count: int
    placement: str
    shape: tuple[int, ...]
    piece: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardCount:
    """Equal reshards of one half that communicate.

    Attributes:
        half: the half.
        reshard: what they do: "Partial(sum) -> Replicate", say.
        module: the module whose value they move, with "*" for the numbers of blocks.
        kind, group, num_bytes: as in :class:`~graphshard.report.CollectiveCount`.
        count: their number in a step, over all micro-batches.
        seconds: time of one.
        exposed_seconds: exposed time of all, in a step.
    """

    half: str
    reshard: str
    module: str
    kind: str
    group: str
    num_bytes: int
    count: int
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCandidate:
    """Placements that were compared to choose the cheapest ones.

    Attributes:
        name: of a ready plan; "replicated" for none.
        step_seconds, exposed_seconds, peak_bytes: as in a report, predicted for the comparison; None if they were not.
        verdict: "chosen", or why not.
        is_chosen: whether the report is of these placements.
    """

    name: str
    step_seconds: float | None = None
    exposed_seconds: float | None = None
    peak_bytes: int | None = None
    verdict: str
    is_chosen: bool = False
