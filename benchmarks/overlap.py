"""Planned steps on slow and fast links: against FSDP2, against the best a step could be, and against predictions.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --models 4x256 --links loopback,1gbit --rounds 4

For each model (layers x width) and link, two ranks take turns at training with each contender (step_time.py). A
hardware card is measured on that link before each round, for the machine drifts; the planned contender plans with the
first. Predicted is the median of what `graphshard.inspect` says of both schedules with each card. "best" is the longer
of computing (the unsharded step and the core's own share of communication) and moving the bytes over the link: what a
schedule that hides everything would come near to. The exit status is 1 if a contender's losses are not the others'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

import graphshard
from gpt import Gpt, GptConfig, next_token_loss
from graphshard.cost import HardwareCard, load_card
from shaped_link import ShapedLinkError, find_obstacle
from step_report import MIB, Row, format_table
from step_time import NetworkResult, RankFailedError, check_rate, describe_machine, measure_network, positive
from step_worker import NUM_RANKS

CONTENDERS = ("unsharded", "fsdp2-compile", "graphshard", "graphshard-planned")
PLANS = {"graphshard": "unit", "graphshard-planned": "auto"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What `graphshard.inspect` says of one schedule; `wire_s` and `core_s` are those of its collectives."""

    step_s: float
    peak_bytes: float
    wire_s: float
    core_s: float


def predict(config: GptConfig, batch: int, card: HardwareCard, plan: str, gbits: float) -> Prediction:
    """A step of the benchmark's model on two ranks of this machine, with a link of so many Gbit/s."""
    with torch.device("meta"):
        model = Gpt(config)
        tokens = torch.zeros(batch, config.context, dtype=torch.long)
    report = graphshard.inspect(
        model,
        (tokens,),
        mesh={"shard": NUM_RANKS},
        hardware=card,
        units=["blocks.*"],
        loss=lambda logits: next_token_loss(logits, logits.new_zeros(logits.shape[:-1], dtype=torch.long)),
        plan=plan,
    )
    moved = sum(each.num_bytes * each.count for each in report.collectives)
    sent = moved * (NUM_RANKS - 1) / NUM_RANKS
    return Prediction(
        step_s=report.step_seconds,
        peak_bytes=report.memory.peak_bytes,
        wire_s=sent * 8 / (gbits * 1e9),
        core_s=moved * card.comm_compute_seconds_per_byte,
    )


def size(text: str) -> tuple[int, int]:
    """Read "4x256": layers and width."""
    layers, _, width = text.partition("x")
    return positive(layers), positive(width)


def link(text: str) -> str:
    """Read "loopback" or a rate."""
    return text if text == "loopback" else check_rate(text)


def list_of(read):
    """Return a reader of comma-separated values."""

    def parse(text: str) -> list:
        try:
            return [read(part.strip()) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def parse_options() -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [(4, 256), (4, 512), (8, 256)]
    parser.add_argument("--models", type=list_of(size), default=models, help="layers x width, a comma apart")
    parser.add_argument(
        "--links", type=list_of(link), default=["loopback", "10gbit", "1gbit", "300mbit"],
        help="loopback, or a rate of a link between two namespaces (needs root)",
    )  # fmt: skip
    parser.add_argument("--batch", type=positive, default=4, help="sequences per rank")
    parser.add_argument("--rounds", type=positive, default=6)
    parser.add_argument("--steps-per-round", type=positive, default=2)
    parser.add_argument("--limit", type=positive, default=1200, metavar="S", help="seconds per point at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser.parse_args()


def middle_prediction(predictions: Sequence[Prediction]) -> Prediction:
    """The median of each figure."""
    return Prediction(
        **{each.name: statistics.median(getattr(one, each.name) for one in predictions) for each in fields(Prediction)}
    )


def measure(
    options: Namespace, config: GptConfig, where: str, scratch: Path
) -> tuple[NetworkResult, list[HardwareCard]]:
    """All contenders at one point of the grid, and the cards that were measured there, one a round."""
    network = "loopback" if where == "loopback" else "shaped"
    job = Namespace(
        model=config,
        batch=options.batch,
        rounds=options.rounds,
        steps_per_round=options.steps_per_round,
        contenders=CONTENDERS,
        micro_batches=1,
        num_cards=options.rounds,
        networks=(network,),
        rate=where,
        limit=options.limit,
    )
    result = measure_network(network, job, scratch)
    return result, [load_card(scratch / network / f"card{turn}.json") for turn in range(options.rounds)]


def summarise(
    rows: dict[str, Row], predictions: dict[str, list[Prediction]]
) -> tuple[list[str], dict[str, dict[str, float | list[float]]]]:
    """Lines about one point of the grid, and the same as data."""
    lines, data = [], {}
    for name, of_cards in predictions.items():
        row, predicted = rows[name], middle_prediction(of_cards)
        each_ms = [1e3 * one.step_s for one in of_cards]
        compute_ms = rows["unsharded"].median_ms + 1e3 * predicted.core_s
        best_ms = max(compute_ms, 1e3 * predicted.wire_s)
        measured_bytes = row.peak_bytes + row.parameter_bytes + row.optimizer_bytes
        error = 1e3 * predicted.step_s / row.median_ms - 1
        memory_error = predicted.peak_bytes / measured_bytes - 1
        values = {
            "ratio_to_fsdp2": row.ratio,
            "measured_ms": row.median_ms,
            "predicted_ms": 1e3 * predicted.step_s,
            "predicted_each_ms": each_ms,
            "best_ms": best_ms,
            "wire_ms": 1e3 * predicted.wire_s,
            "compute_and_gloo_ms": compute_ms,
            "measured_bytes": measured_bytes,
            "predicted_bytes": predicted.peak_bytes,
        }
        data[name] = values
        lines.append(
            f"{name}: {row.ratio:.2f} of FSDP2; {row.median_ms / best_ms:.2f} of the best, {best_ms:.0f} ms "
            f"(wire {1e3 * predicted.wire_s:.0f}, compute and gloo {compute_ms:.0f}); predicted "
            f"{1e3 * predicted.step_s:.0f} ms ({100 * error:+.0f} %; {min(each_ms):.0f} to {max(each_ms):.0f}); "
            f"memory {measured_bytes / MIB:.1f} MiB, predicted {predicted.peak_bytes / MIB:.1f} "
            f"({100 * memory_error:+.1f} %)"
        )
    preferred = min(data, key=lambda name: data[name]["predicted_ms"])
    slower = rows[preferred].median_ms / min(rows[name].median_ms for name in data) - 1
    lines.append(f"predicted to be the fastest of these: {preferred}, {100 * slower:.1f} % above what was the fastest")
    return lines, data


def main() -> int:
    """Prints a table and its summary for each model and link."""
    options = parse_options()
    sys.stdout.reconfigure(line_buffering=True)
    if (obstacle := find_obstacle()) and options.links != ["loopback"]:
        print(f"shaped links SKIPPED: {obstacle}")
        options.links = [each for each in options.links if each == "loopback"]
    print("  ".join(f"{name} {value}" for name, value in describe_machine().items()))
    points: list[dict[str, object]] = []
    is_wrong = False
    for num_layers, width in options.models:
        config = GptConfig(num_layers=num_layers, width=width)
        for where in options.links:
            print(f"\n== {num_layers} layers of width {width}, {where} ==")
            with tempfile.TemporaryDirectory(prefix="overlap-", ignore_cleanup_errors=True) as scratch:
                try:
                    result, cards = measure(options, config, where, Path(scratch))
                except (ShapedLinkError, RankFailedError) as error:
                    sys.exit(f"{where}: {error}")
            print(f"link measured at {result.link_gbits:.2f} Gbit/s each way")
            print(format_table(result.rows))
            print(*(f"WRONG {gap}\n" for gap in result.loss_gaps), sep="", end="")
            is_wrong |= bool(result.loss_gaps)
            gbits = result.link_gbits
            predictions = {
                name: [predict(config, options.batch, card, plan, gbits) for card in cards]
                for name, plan in PLANS.items()
            }
            lines, data = summarise({row.contender: row for row in result.rows}, predictions)
            print(*lines, sep="\n")
            points.append({"layers": num_layers, "width": width, "link": where, "gbits": gbits, **data})
            if options.json:
                options.json.write_text(json.dumps(points, indent=1) + "\n")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
