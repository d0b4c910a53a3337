"""A second, plain implementation of the planner's rules, and a search through all that they allow.

It shares no code with the planner: every sequence of starts, waits and tasks is tried, and its time
and memory are computed from the rules as docs/reference/planning.md states them. Sequences that have led to
the very same state, with no less memory, are tried once. ``prunes`` looks for the least time alone, and
leaves out what has done the same as another with no clock earlier, and what cannot end before the best:
for up to ten collectives, and itself compared with the search that does not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass
class Best:
    """The least time within the budget, and the least peak of memory at all."""

    seconds: float
    peak_bytes: int


def expected_wait(ahead, spread):
    """The mean of ``max(0, ahead + x)`` for x between -spread and spread: the area of a triangle or trapezium."""
    longest, shortest = max(0.0, ahead + spread), max(0.0, ahead - spread)
    if not spread:
        return longest
    share = (longest - shortest) / (2 * spread)  # of the x for which there is a wait
    return share * (longest + shortest) / 2 if share < 1 else ahead


def all_schedules(problem, *, prunes: bool = False) -> Best:
    """Tries every schedule of a small problem."""
    best = Best(float("inf"), 10**30)
    ones = problem.collectives
    everything = frozenset(range(len(ones)))
    rest = [sum(task.seconds for task in problem.tasks[gap:]) for gap in range(len(problem.tasks) + 1)]
    links = {
        one.queue: next((min(link) for link in problem.shared_links if one.queue in link), one.queue)
        for one in ones
    }
    queues = sorted(set(links.values()))
    seen = {}

    def live_between(gap, waiting, flights, waited):
        base = problem.end_bytes if gap == len(problem.tasks) else problem.tasks[gap].before_bytes
        return base + held(gap, waiting, flights, waited)

    def held(gap, unstarted, flights, waited):
        total = sum(ones[m].ready_bytes for m in unstarted if exists(m, gap, waited))
        for members, _, linked in flights:
            total += sum(ones[m].out_bytes + ones[m].copy_bytes for m in members)
            if len(members) == 1 or lie_together(members):
                total += sum(ones[m].staged_bytes + ones[m].ready_bytes for m in members)
            elif linked:
                total += sum(ones[m].ready_bytes for m in members)
            else:
                total += sum(ones[m].in_bytes for m in members)
        return total + sum(ones[m].kept_bytes for m in waited if ones[m].deadline >= gap)

    def lie_together(members):
        found = sorted((one.place.row, one.place.first, one.place.numel) for m in members if (one := ones[m]).place)
        if len(found) < len(members) or len({row for row, *_ in found}) > 1:
            return False
        gaps = [nxt[1] - one[1] - one[2] for one, nxt in itertools.pairwise(found)]
        return not any(gaps)

    def exists(m, gap, waited):
        return all(other in waited for other in ones[m].after) if ones[m].after else ones[m].earliest <= gap

    def is_known(gap, clock, free, flights, waited, linked, peak):
        if not prunes:
            key = (gap, clock, tuple(sorted(free.items())), flights, waited, linked)
            if seen.get(key, peak + 1) <= peak:
                return True
            seen[key] = peak
            return False
        too_much = problem.budget_bytes is not None and peak > problem.budget_bytes
        if too_much or clock + rest[gap] >= best.seconds:
            return True
        ordered = sorted(flights)
        of_queues = itertools.chain.from_iterable(free.get(q, (0.0, 0.0)) for q in queues)
        clocks = (clock, *of_queues, *(finish for _, finish, _ in ordered))
        known = seen.setdefault((gap, tuple((m, is_l) for m, _, is_l in ordered), waited, linked), [])
        if any(all(a <= b for a, b in zip(other, clocks, strict=True)) for other in known):
            return True
        known.append(clocks)
        return False

    def visit(gap, clock, free, flights, waited, linked, peak):
        if is_known(gap, clock, free, flights, waited, linked, peak):
            return
        unstarted = everything - waited - {m for members, _, _ in flights for m in members}
        now = live_between(gap, unstarted, flights, waited)
        peak = max(peak, now)
        fits = problem.budget_bytes is None or peak <= problem.budget_bytes
        if gap == len(problem.tasks) and waited == everything:
            best.peak_bytes = min(best.peak_bytes, peak)
            if fits:
                best.seconds = min(best.seconds, clock)
        if gap < len(problem.tasks) and all(m in waited for m in everything if ones[m].deadline <= gap):
            task = problem.tasks[gap]
            kept = sum(ones[m].kept_bytes for m in waited if ones[m].deadline == gap)
            used = task.live_bytes + held(gap, unstarted, flights, waited) - kept
            visit(gap + 1, clock + task.seconds, free, flights, waited, linked, max(peak, used))
        can = [m for m in sorted(unstarted) if ones[m].earliest <= gap and exists(m, gap, waited)]
        for size in range(1, len(can) + 1):
            for members in itertools.combinations(can, size):
                start(gap, clock, free, flights, waited, linked, peak, members, now)
        for flight in flights:
            wait(gap, clock, free, flights, waited, linked, peak, flight, unstarted)

    def start(gap, clock, free, flights, waited, linked, peak, members, now):
        first = ones[members[0]]
        if len(members) > 1 and (first.merge_key is None or len({ones[m].merge_key for m in members}) > 1):
            return
        fixed = [bucket for bucket in problem.fixed_buckets if set(bucket) & set(members)]
        if any(tuple(sorted(bucket)) != members for bucket in fixed):
            return
        limit = {"gather": problem.max_gathers, "reduction": problem.max_reductions}.get(first.limit, 0)
        if limit and sum(ones[flight[0][0]].limit == first.limit for flight in flights) >= limit:
            return
        is_linked = len(members) > 1 and frozenset(members) in linked
        clock += sum(ones[m].before_seconds for m in members)
        if len(members) > 1 and not is_linked and not lie_together(members):
            clock += problem.prices.copy_seconds(sum(ones[m].in_bytes for m in members))
            staging = sum(ones[m].staged_bytes + ones[m].in_bytes for m in members)
            peak = max(peak, now + staging)
        num_bytes = sum(max(ones[m].in_bytes, ones[m].out_bytes) for m in members)
        clock += problem.prices.core_seconds(first.kind, num_bytes, first.queue)
        seconds = problem.prices.collective_seconds(first.kind, num_bytes, first.queue)
        beside = problem.prices.overlapped_seconds(first.kind, num_bytes, first.queue)
        front, opens = free.get(links[first.queue], (0.0, 0.0))
        finish = max(clock, front - beside, opens) + seconds
        free = {**free, links[first.queue]: (finish, finish - beside)}
        left = frozenset(group for group in linked if not group & set(members))
        visit(gap, clock, free, (*flights, (members, finish, is_linked)), waited, left, peak)

    def wait(gap, clock, free, flights, waited, linked, peak, flight, unstarted):
        members, finish, _ = flight
        copies_out = len(members) > 1 and not ones[members[0]].views_result
        now = live_between(gap, unstarted, flights, waited)
        made = sum(ones[m].fresh_bytes for m in members)
        if copies_out:
            together = lie_together(members)
            freed = [ones[m].copy_bytes + (ones[m].staged_bytes if together else ones[m].in_bytes) for m in members]
            made += sum(ones[m].out_bytes for m in members) - sum(freed)
        elif len(members) == 1:
            made = ones[members[0]].fresh_bytes
        peak = max(peak, now + max(made, 0))
        first = ones[members[0]]
        num_bytes = sum(max(ones[m].in_bytes, ones[m].out_bytes) for m in members)
        spread = problem.prices.spread_seconds(first.kind, num_bytes, first.queue)
        clock += expected_wait(finish - clock, spread) + sum(ones[m].after_seconds for m in members)
        if copies_out:
            clock += problem.prices.copy_seconds(sum(ones[m].out_bytes for m in members))
        fed = [d for d, one in enumerate(ones) if set(one.after) & set(members)]
        is_link = len(members) > 1 and sorted(ones[d].after for d in fed) == [(m,) for m in members]
        if is_link and not any(ones[d].staged_bytes for d in fed):
            linked = linked | {frozenset(fed)}
        rest = tuple(other for other in flights if other is not flight)
        visit(gap, clock, free, rest, waited | set(members), linked, peak)

    visit(0, 0.0, {}, (), frozenset(), frozenset(), 0)
    return best
