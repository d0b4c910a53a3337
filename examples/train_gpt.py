"""Train a GPT, fully sharded, on the Python standard library's own source text.

One machine with two CPU cores or two GPUs (gloo on CPUs, NCCL with one rank per GPU):

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

Two machines with eight GPUs each, --out on storage both can see; run on each with its own --node-rank:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id gpt \\
        --rdzv-endpoint FIRST-MACHINE:29400 examples/train_gpt.py --batch-size 256 --out /shared/train_gpt

`python examples/train_gpt.py` is one rank. An interrupted run (Ctrl-C, SIGTERM, a kill, a lost machine) goes
on from its last checkpoint when the same command is given again, with the losses it would have had without
the interruption. After Ctrl-C or SIGTERM the ranks finish their step, save, say so and exit with 0; torchrun
then reports the signal with a traceback of its own. A second Ctrl-C ends everything at once.

The run ends with a checked summary; a failed check makes the exit code 1, a wrong option 2. OUT holds
losses.csv, loss_curve.png and checkpoints/.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import nn
from tqdm import tqdm

from checkpoint_folder import CheckpointFolder
from distributed_setup import Ranks, UsageError, run_example, running_ranks
from gpt_model import GPT, GPTConfig
from gpt_options import GPTOptions, parse_options
from graphshard import fully_shard
from interruption import StopRequest, exit_with_launcher
from loss_log import LossLog, LossRow, draw_loss_curve
from measurements import HeldBytes, collectives_per_step, held_bytes, memory_bytes
from source_text import SourceText, draw_batch, read_standard_library
from unsharded_reference import (
    Batch,
    LossFunction,
    StepResult,
    backward_and_clip,
    compare_steps,
    train_step,
    train_steps,
)

MAX_GRAD_NORM = 1.0
HELD_OUT_BATCHES = 8
HELD_OUT_SEED = 7_919
UNSHARDED_LIMIT = timedelta(minutes=30)

# Padding of uneven shards and one step counter per parameter come on top of an even split.
EVEN_SPLIT_ALLOWANCE = 1.05


# ---------------------------------------------------------------------------------- model, optimizer, data


def make_model(options: GPTOptions) -> GPT:
    """The plain model, with the same weights on every rank."""
    torch.manual_seed(options.seed)
    return GPT(
        GPTConfig(
            num_layers=options.layers, width=options.width, num_heads=options.heads, context=options.context
        )
    )


def make_optimizer(model: nn.Module, options: GPTOptions) -> torch.optim.AdamW:
    """AdamW over whatever the parameters are now: made after sharding, its state is sharded too."""
    return torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)


def shard(model: GPT, options: GPTOptions, ranks: Ranks) -> None:
    """One unit per block, the rest in the root."""
    for block in model.blocks:
        fully_shard(block, mesh=ranks.mesh, reshard_after_forward=options.reshard)
    fully_shard(model, mesh=ranks.mesh, reshard_after_forward=options.reshard)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """The schedule is a function of the step, so it needs no state of its own."""
    for group in optimizer.param_groups:
        group["lr"] = value


# ----------------------------------------------------------------------------------------------- training


@dataclass(slots=True, kw_only=True)
class Run:
    """One rank's training: who it is, what it trains, how far it is and where it writes."""

    options: GPTOptions
    ranks: Ranks
    text: SourceText
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_of: LossFunction
    checkpoints: CheckpointFolder
    log: LossLog | None
    """The loss file, on rank 0 only."""
    step: int
    step_seconds: list[float] = field(default_factory=list)

    def training_batch(self, step: int) -> Batch:
        """Tokens and targets of all ranks, int64 [batch_size, context] each; `step` counts from 1."""
        options = self.options
        return draw_batch(
            self.text.train,
            seed=options.seed,
            step=step,
            batch_size=options.batch_size,
            context=options.context,
        )

    def held_out_batch(self, index: int) -> Batch:
        """Like `training_batch`, from files that training never sees; the same in every run."""
        options = self.options
        return draw_batch(
            self.text.held_out,
            seed=HELD_OUT_SEED,
            step=index,
            batch_size=options.batch_size,
            context=options.context,
        )


def prepare(options: GPTOptions, ranks: Ranks) -> Run:
    """Build, shard and compile the model; go on from the latest checkpoint if there is one."""
    text = read_standard_library()
    if len(set(ranks.gather_on_all(text.digest))) > 1:
        raise UsageError("the ranks read different standard libraries: use the same Python on every machine")
    if options.context >= len(text.held_out):
        raise UsageError(
            f"--context {options.context}: give less than the {len(text.held_out)} held-out bytes"
        )
    checkpoints = CheckpointFolder(
        options.out / "checkpoints", ranks, {**options.identity(), "text": text.digest}
    )
    if options.fresh:
        checkpoints.delete_all()
    step = checkpoints.latest_step() or 0
    log = ranks.only_on_rank_0(lambda: LossLog(options.out / "losses.csv", step))
    model = make_model(options).to(ranks.device)
    shard(model, options, ranks)
    optimizer = make_optimizer(model, options)
    if step:
        checkpoints.load(step, model, optimizer)
        ranks.say(f"resuming after step {step} of {options.steps} ({options.out})")
    loss_of = model if options.no_compile else torch.compile(model, backend="graphshard", fullgraph=True)
    return Run(
        options=options,
        ranks=ranks,
        text=text,
        model=model,
        optimizer=optimizer,
        loss_of=loss_of,
        checkpoints=checkpoints,
        log=log,
        step=step,
    )


def held_out_loss(run: Run) -> float:
    """Mean loss over a few held-out batches.

    Runs the sharded model as it is: so few batches are not worth compiling a forward without gradients.
    """
    with torch.no_grad():
        losses = [
            run.model(*run.ranks.rows_of(run.held_out_batch(index))).item()
            for index in range(HELD_OUT_BATCHES)
        ]
    return run.ranks.mean_over_ranks(statistics.fmean(losses))


def train(run: Run) -> bool:
    """Train to the last step; False if a signal stopped the run before it. The state is saved either way."""
    options = run.options
    terminal = sys.stderr.isatty()
    bar = tqdm(
        total=options.steps,
        initial=run.step,
        desc="train_gpt",
        unit="step",
        dynamic_ncols=terminal,
        mininterval=0.2 if terminal else 10,
        disable=run.ranks.rank != 0,
    )
    with StopRequest() as stop, bar:
        while run.step < options.steps:
            num_stops = next_step(run, stop, bar)
            stop.has_progress = True
            if num_stops and run.step < options.steps:
                return False
    return True


def next_step(run: Run, stop: StopRequest, bar: tqdm) -> int:
    """Train, record and (when due) save one step; return how many ranks were asked to stop."""
    options, ranks = run.options, run.ranks
    started = time.perf_counter()
    set_learning_rate(run.optimizer, options.learning_rate(run.step + 1))
    batch = ranks.rows_of(run.training_batch(run.step + 1))
    loss, norm = train_step(run.model, run.optimizer, run.loss_of, batch, MAX_GRAD_NORM)
    # One message carries both, so that all ranks agree after which step they stop.
    loss_sum, num_stops = ranks.sum_over_ranks([loss.item(), float(stop.requested)])
    run.step += 1
    run.step_seconds.append(time.perf_counter() - started)
    due = run.step % options.checkpoint_every == 0 or run.step == options.steps
    held_out = held_out_loss(run) if due else None
    row = LossRow(step=run.step, loss=loss_sum / ranks.world_size, grad_norm=norm.item(), held_out=held_out)
    if run.log is not None:
        run.log.append(row)
        show_progress(run, row, bar)
    if due or num_stops:
        if run.log is not None:
            run.log.sync()
        run.checkpoints.save(run.step, run.model, run.optimizer)
    return int(num_stops)


def show_progress(run: Run, row: LossRow, bar: tqdm) -> None:
    """Move the bar of rank 0 by one step."""
    tokens = run.options.batch_size * run.options.context
    numbers = {
        "loss": f"{row.loss:.3f}",
        "tokens/s": f"{tokens / run.step_seconds[-1]:,.0f}",
        "memory/rank": f"{memory_bytes(run.ranks.device) / 2**20:,.0f} MiB",
    }
    bar.set_postfix(numbers, refresh=False)
    bar.update()


# ------------------------------------------------------------------------------------- checks and summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One sharded step without its optimizer step, measured on every rank."""

    collectives: dict[str, int]
    bytes_of_ranks: list[HeldBytes]
    memory_of_ranks: list[int]


def measure(run: Run) -> Measured:
    """Count the collectives of a step and the bytes it leaves; the parameters stay as they are."""
    batch = run.ranks.rows_of(run.training_batch(1))
    memory = memory_bytes(run.ranks.device)
    backward_and_clip(run.model, run.loss_of, batch, MAX_GRAD_NORM)
    run.optimizer.zero_grad()
    collectives = collectives_per_step(
        lambda: backward_and_clip(run.model, run.loss_of, batch, MAX_GRAD_NORM)
    )
    held = held_bytes(run.model, run.optimizer)
    run.optimizer.zero_grad()
    return Measured(
        collectives=collectives,
        bytes_of_ranks=run.ranks.gather_on_all(held),
        memory_of_ranks=run.ranks.gather_on_all(memory),
    )


def repeat_unsharded(run: Run) -> tuple[list[StepResult], HeldBytes]:
    """The first steps once more, on the plain model with the whole batches of all ranks, in this process."""
    options = run.options
    model = make_model(options).to(run.ranks.device)
    optimizer = make_optimizer(model, options)

    def batches() -> Iterator[Batch]:
        for step in range(1, options.compare_steps + 1):
            set_learning_rate(optimizer, options.learning_rate(step))
            yield to_device(run.training_batch(step))

    def to_device(batch: Batch) -> Batch:
        return tuple(part.to(run.ranks.device) for part in batch)

    results = train_steps(model, optimizer, model, batches(), MAX_GRAD_NORM)
    # One more backward, for the gradients that held_bytes counts.
    backward_and_clip(model, model, to_device(run.training_batch(1)), MAX_GRAD_NORM)
    return results, held_bytes(model, optimizer)


def summarise(run: Run, log: LossLog, measured: Measured) -> bool:
    """Repeat the first steps unsharded, draw the curve, print what was measured; True if all checks hold."""
    options, ranks = run.options, run.ranks
    started = time.perf_counter()
    unsharded, unsharded_bytes = repeat_unsharded(run)
    compare_seconds = time.perf_counter() - started
    curve = options.out / "loss_curve.png"
    title = f"GPT {options.layers}x{options.width}, world size {ranks.world_size} on {ranks.device.type}"
    draw_loss_curve(curve, log.rows, [result.loss for result in unsharded], title)
    print(f"\n{title}; losses in {log.path}, curve in {curve}")
    print_speed(run, compare_seconds)
    memory = ", ".join(f"{value / 2**20:,.0f}" for value in measured.memory_of_ranks)
    print(f"memory per rank: {memory} MiB")
    counts = ", ".join(f"{count} {kind}" for kind, count in measured.collectives.items()) or "none"
    print(f"collectives per step: {counts}")
    checks = [
        check_loss(log.rows, options),
        compare_steps([StepResult(row.loss, row.grad_norm) for row in log.rows], unsharded),
        check_bytes(measured.bytes_of_ranks, unsharded_bytes),
    ]
    for passed, text in checks:
        print(f"{'ok    ' if passed else 'FAILED'} {text}")
    return all(passed for passed, _ in checks)


def print_speed(run: Run, compare_seconds: float) -> None:
    """Times of this process: the first step holds the compilation."""
    if len(run.step_seconds) < 2:
        print("time: no steps trained by this process")
        return
    median = statistics.median(run.step_seconds[1:])
    tokens = run.options.batch_size * run.options.context
    print(
        f"time: first step {run.step_seconds[0]:.1f} s, then {median:.3f} s a step (median, "
        f"{tokens / median:,.0f} tokens/s); "
        f"{run.options.compare_steps} unsharded steps {compare_seconds:.1f} s"
    )


def check_loss(rows: list[LossRow], options: GPTOptions) -> tuple[bool, str]:
    """The loss has fallen by the stated factor; the last loss is a mean over ten steps, which are noisy."""
    first, last = rows[0].loss, statistics.fmean(row.loss for row in rows[-10:])
    limit = options.must_fall_to * first
    held_out = f", held out {rows[-1].held_out:.3f}" if rows[-1].held_out is not None else ""
    return (
        last < limit,
        f"loss {first:.3f} -> {last:.3f} in {len(rows)} steps (must be under {limit:.3f}){held_out}",
    )


def check_bytes(of_ranks: list[HeldBytes], unsharded: HeldBytes) -> tuple[bool, str]:
    """No rank holds more than its even part of parameters, gradients and optimizer state, but for padding."""
    largest = max(of_ranks, key=lambda held: held.total)
    limit = unsharded.total * EVEN_SPLIT_ALLOWANCE / len(of_ranks)
    text = (
        f"bytes per rank: parameters {largest.parameters:,} + gradients {largest.gradients:,} + "
        f"optimizer {largest.optimizer:,} = {largest.total:,} (must be under {limit:,.0f}); "
        f"unsharded {unsharded.total:,}"
    )
    return 0 < largest.total < limit and largest.gradients > 0, text


def main() -> bool:
    """Train, then check; True if the checks passed or the run was asked to stop."""
    options = parse_options(__doc__)
    exit_with_launcher()
    with running_ranks() as ranks:
        run = prepare(options, ranks)
        if not train(run):
            ranks.say(f"stopped and saved after step {run.step}: give the same command again to go on")
            return True
        measured = measure(run)
        passed = summarise(run, run.log, measured) if run.log is not None else True
        ranks.wait_for_all(UNSHARDED_LIMIT)
        return passed


if __name__ == "__main__":
    run_example(main)
