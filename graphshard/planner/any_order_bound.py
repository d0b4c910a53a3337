"""What no schedule can beat in whatever order compute runs: :mod:`.bound` takes the order of the tasks as it is.

What is left of a graph then is what its data say:

- Some task is the first, and some the last: no sooner than what leads to it is over, and with all to do that it leads
  to.
- Beside a collective runs no compute that it is made of, nor any that is made of it. Collectives each of which is made
  of the one in front of it take turns, and all that may run beside any of them runs once: by what they take longer than
  that, compute rests.
- A collective begins no sooner than the longest way that leads to it takes, and behind it is no less to do than the
  longest way from it; in between the collectives of a link run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import fx

from .from_graph import GraphProblem
from .search import links_bound, lower_bounds

#: Rows of collectives are looked at with so many limits on what may run beside each.
_MOST_LIMITS = 16

#: The nodes that a node is made of, or that are made of it.
Neighbours = Callable[[fx.Node], Iterable[fx.Node]]


def any_order_seconds(gm: fx.GraphModule, found: GraphProblem) -> float:
    """A lower bound on the time of any order of a graph's compute with any schedule of its collectives.

    Memory is not looked at. Tasks take what they are priced at here, though kernels that are fused may change with the
    order.

    Args:
        gm: the graph.
        found: what was read of it.
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
    """How long the longest way to each node takes, itself left out; in ``nodes`` its neighbours stand before it."""
    ways: dict[fx.Node, float] = {}
    for node in nodes:
        ways[node] = max((ways[one] + seconds.get(one, 0.0) for one in neighbours(node)), default=0.0)
    return ways


def _rests(nodes: Sequence[fx.Node], work: Mapping[fx.Node, float], alone: Mapping[fx.Node, float]) -> float:
    """How long compute rests at least, for the sake of collectives each of which is made of the one in front of it.

    Args:
        nodes: in an order in which they may run.
        work: seconds of tasks, and of what each collective computes in front of it and behind it.
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
    """The sum of the values whose bits are set, eight of them at a time."""
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
    """For each wanted node the tasks and collectives that are reached from it, as bit sets."""
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
