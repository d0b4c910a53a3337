"""A lower bound on the time of any schedule in any order of compute; :mod:`.search.bound` keeps the order of the tasks.

Only the data flow of the graph constrains such an order:

- The first task starts no sooner than all that leads to it is over; after the last task, all that it leads to is
  still to do.
- Compute cannot overlap a collective it depends on, or one that depends on it. Collectives that each depend on the
  one before run one after the other. Each task that may overlap some of them runs only once. So compute rests for
  the time of these collectives, less that of the tasks that may overlap any of them.
- A collective begins no sooner than the longest path that leads to it takes, and the longest path from it is still
  to do after its end. The collectives of a link run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import fx

from .from_graph import GraphProblem
from .search import links_bound, lower_bounds

#: How many limits are tried on the compute that may overlap each collective of a chain.
_MOST_LIMITS = 16

#: The inputs or the users of a node.
Neighbours = Callable[[fx.Node], Iterable[fx.Node]]


def any_order_seconds(gm: fx.GraphModule, found: GraphProblem) -> float:
    """A lower bound on the time of any order of a graph's compute with any schedule of its collectives.

    It ignores memory. Tasks take their priced time, though kernels may fuse differently in another order.

    Args:
        gm: the graph.
        found: the problem read from it.
    """
    problem, nodes = found.problem, list(gm.graph.nodes)
    tasks = {
        node: task.seconds for node, task in zip(found.tasks, problem.tasks, strict=True) if task.seconds
    }
    ones = dict(zip(found.starts, problem.collectives, strict=True))
    alone = {
        node: problem.prices.collective_seconds(one.kind, one.num_bytes, one.queue)
        for node, one in ones.items()
    }
    seconds = tasks | alone
    before = _longest_ways(nodes, seconds, _inputs)
    behind = _longest_ways(nodes[::-1], seconds, _users)
    longest = max(before[node] + seconds[node] + behind[node] for node in seconds) if seconds else 0.0
    ends = min(map(before.__getitem__, tasks), default=0.0) + min(map(behind.__getitem__, tasks), default=0.0)
    links = links_bound(problem, [before[node] for node in ones], [behind[node] for node in ones])
    around = {node: one.before_seconds + one.after_seconds for node, one in ones.items()}
    rests = _rests(nodes, tasks | around, alone)
    working = sum(tasks.values())
    return max(
        lower_bounds(problem).compute, working + ends, working + sum(around.values()) + rests, longest, links
    )


def _inputs(node: fx.Node) -> Iterable[fx.Node]:
    return node.all_input_nodes


def _users(node: fx.Node) -> Iterable[fx.Node]:
    return node.users


def _longest_ways(
    nodes: Sequence[fx.Node], seconds: Mapping[fx.Node, float], neighbours: Neighbours
) -> dict[fx.Node, float]:
    """The time of the longest path to each node, without the node; in ``nodes`` its neighbours come before it."""
    ways: dict[fx.Node, float] = {}
    for node in nodes:
        ways[node] = max((ways[one] + seconds.get(one, 0.0) for one in neighbours(node)), default=0.0)
    return ways


def _rests(nodes: Sequence[fx.Node], work: Mapping[fx.Node, float], alone: Mapping[fx.Node, float]) -> float:
    """The least time for which compute rests because of collectives that each depend on the one before.

    Args:
        nodes: in an order in which they may run.
        work: seconds of tasks, and of what each collective computes before its start and after its wait.
        alone: seconds of the collectives themselves.
    """
    bit = {node: 1 << place for place, node in enumerate(work)}
    before = _reached(nodes, bit, alone, _inputs)
    behind = _reached(nodes[::-1], bit, alone, _users)
    every, taken = (1 << len(work)) - 1, _added_up(list(work.values()))
    beside = {node: every & ~(before[node] | behind[node] | bit[node]) for node in alone}
    amounts = {node: taken(bits) for node, bits in beside.items()}
    limits = sorted(set(amounts.values()))
    best = 0.0
    for limit in limits[:: max(1, len(limits) // _MOST_LIMITS)]:
        busy, hiding, last = 0.0, 0, 0
        for node, seconds in alone.items():
            if amounts[node] <= limit and before[node] & last == last:
                busy, hiding, last = busy + seconds, hiding | beside[node], bit[node]
        best = max(best, busy - taken(hiding))
    return best


def _added_up(values: Sequence[float]) -> Callable[[int], float]:
    """A function that sums the values whose bits are set, eight of them at a time."""
    sums = []
    for start in range(0, len(values), 8):
        of_byte = [0.0]
        for value in values[start : start + 8]:
            of_byte += [one + value for one in of_byte]
        sums.append(of_byte)

    def added_up(bits: int) -> float:
        return sum(map(list.__getitem__, sums, bits.to_bytes(len(sums), "little")))

    return added_up


def _reached(
    nodes: Sequence[fx.Node],
    bit: Mapping[fx.Node, int],
    wanted: Mapping[fx.Node, float],
    neighbours: Neighbours,
) -> dict[fx.Node, int]:
    """For each wanted node, the tasks and collectives that are reached from it, as bit sets."""
    found: dict[fx.Node, int] = {}
    kept: dict[fx.Node, int] = {}
    for node in nodes:
        reached = 0
        for one in neighbours(node):
            reached |= found[one] | bit.get(one, 0)
        found[node] = reached
        if node in wanted:
            kept[node] = reached
    return kept
