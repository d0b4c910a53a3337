"""The page's arithmetic once more in Python: a report's schedule with other prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graphshard.cost import HardwareCard
from graphshard.cost.cards import LinkClass
from graphshard.cost.prices import behind_wait
from graphshard.report import Report
from graphshard.report.data import CollectivePrice, HalfReport, World


def with_links(card: HardwareCard, bandwidth: float, latency: float) -> HardwareCard:
    """The card with all links so many times as quick and as late."""
    near, far = (_link(link, bandwidth, latency) for link in (card.intra_node, card.inter_node))
    return replace(card, intra_node=near, inter_node=far)


def _link(link: LinkClass, bandwidth: float, latency: float) -> LinkClass:
    protocols = [replace(one, latency_seconds=one.latency_seconds * latency) for one in link.protocols]
    return replace(
        link,
        bandwidth=link.bandwidth * bandwidth,
        latency_seconds=link.latency_seconds * latency,
        protocols=tuple(protocols),
    )


def at_mesh(report: Report, mesh: Mapping[str, int]) -> World:
    (found,) = (world for world in report.worlds if world.mesh == mesh)
    return found


def neutral(report: Report) -> World:
    return at_mesh(report, report.mesh)


def replay(
    report: Report, world: World, *, bandwidth: float = 1.0, latency: float = 1.0, shard_factor: float = 1.0
) -> tuple[float, float]:
    """Step and exposed seconds."""
    prices = {(one.kind, one.group, one.num_bytes): one for one in world.prices}
    step = exposed = 0.0
    for half in report.halves:
        seconds, waited = _replay_half(half, prices, bandwidth, latency)
        if half.name == "optimizer":
            seconds *= shard_factor
        step += half.repeats * seconds
        exposed += half.repeats * waited
    return step, exposed


def _replay_half(
    half: HalfReport, prices: Mapping[tuple[str, str, int], CollectivePrice], bandwidth: float, latency: float
) -> tuple[float, float]:
    waited = 0.0
    free: dict[str, tuple[float, float]] = {}  # when it ends, and by how much it may overlap
    finish: dict[int, tuple[float, float]] = {}
    for step in half.schedule:
        clock = step.busy_seconds + waited
        one = half.collectives[step.collective]
        if step.is_start:
            price = prices[one.kind, one.group, one.num_bytes]
            quickest = min(max(latency * a + b / bandwidth for a, b in way) for way in price.ways)
            seconds = price.fixed_seconds + quickest
            delay = price.overlapped_latency_seconds
            overlapped = latency * delay + (price.overlapped_seconds - delay) / bandwidth
            overlapped = min(overlapped, seconds)
            front, of_front = free.get(one.group, (0.0, 0.0))
            ended = max(clock, front - min(overlapped, of_front)) + seconds
            free[one.group] = ended, overlapped
            finish[step.collective] = ended, price.spread_seconds
        else:
            waited += behind_wait(clock, *finish[step.collective]) - clock
    return half.compute_seconds + waited, waited
