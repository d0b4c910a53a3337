"""Command-line options of train_gpt.py, checked on every rank before the ranks talk to each other."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from distributed_setup import exit_with_mistake, launched_rank, launched_world_size

_RESHARD_AFTER_FORWARD = {"auto": None, "true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTOptions:
    """What the command line asked for; `--help` says what each one means."""

    steps: int
    batch_size: int
    layers: int
    width: int
    heads: int
    context: int
    lr: float
    seed: int
    out: Path
    checkpoint_every: int
    fresh: bool
    compare_steps: int
    must_fall_to: float
    no_compile: bool
    reshard_after_forward: str

    def __post_init__(self) -> None:
        mistakes = self._not_positive() or self._do_not_fit()
        if mistakes:
            raise ValueError("; ".join(mistakes))

    @property
    def reshard(self) -> bool | None:
        """The value for `fully_shard(reshard_after_forward=...)`."""
        return _RESHARD_AFTER_FORWARD[self.reshard_after_forward]

    def learning_rate(self, step: int) -> float:
        """Linear warm-up over a tenth of the run, then a cosine to a tenth of the peak; from step 1."""
        warmup = max(1, self.steps // 10)
        if step <= warmup:
            return self.lr * step / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * progress))

    def identity(self) -> dict[str, int | float]:
        """The options that decide the losses: a checkpoint made with others is of another run."""
        names = ("steps", "batch_size", "layers", "width", "heads", "context", "lr", "seed")
        return {name: getattr(self, name) for name in names}

    def _not_positive(self) -> list[str]:
        names = (
            "steps",
            "batch_size",
            "layers",
            "width",
            "heads",
            "context",
            "checkpoint_every",
            "compare_steps",
        )
        return [
            f"--{name.replace('_', '-')} is {getattr(self, name)}: give 1 or more"
            for name in names
            if getattr(self, name) < 1
        ]

    def _do_not_fit(self) -> list[str]:
        mistakes = []
        world_size = launched_world_size()
        if self.batch_size % world_size:
            mistakes.append(
                f"--batch-size {self.batch_size} does not split evenly over {world_size} ranks: "
                f"give a multiple of {world_size}"
            )
        if self.width % self.heads:
            mistakes.append(
                f"--width {self.width} is no multiple of --heads {self.heads}: change one of them"
            )
        if self.compare_steps > self.steps:
            mistakes.append(
                f"--compare-steps {self.compare_steps} is more than --steps {self.steps}: give fewer"
            )
        if self.seed < 0:
            mistakes.append(f"--seed is {self.seed}: give 0 or more")
        if not (math.isfinite(self.lr) and self.lr > 0):
            mistakes.append(f"--lr is {self.lr}: give a positive number")
        if not 0 < self.must_fall_to <= 1:
            mistakes.append(f"--must-fall-to is {self.must_fall_to}: give a number above 0, at most 1")
        return mistakes


class _RankZeroParser(argparse.ArgumentParser):
    """Every rank ends on a bad option or on --help; only rank 0 speaks."""

    def error(self, message: str) -> NoReturn:
        exit_with_mistake(f"{self.prog}: error: {message} (--help lists the options)")

    def print_help(self, file: object = None) -> None:
        if launched_rank() == 0:
            super().print_help(file)  # type: ignore[arg-type]


def parse_options(description: str | None) -> GPTOptions:
    """Read the command line; mistakes end the process with exit code 2 and all of them in one message."""
    parser = _RankZeroParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(flag: str, kind: type, default: object, text: str) -> None:
        parser.add_argument(flag, type=kind, default=default, help=f"{text} (default %(default)s)")

    add("--steps", int, 150, "optimizer steps of the whole run")
    add("--batch-size", int, 16, "sequences a step, all ranks together")
    add("--layers", int, 4, "transformer blocks")
    add("--width", int, 256, "model width")
    add("--heads", int, 4, "attention heads")
    add("--context", int, 128, "bytes of context")
    add("--lr", float, 1e-3, "peak learning rate")
    add("--seed", int, 0, "seed of the weights and of the data order")
    add("--out", Path, Path("out/train_gpt"), "folder for losses, curve and checkpoints")
    add("--checkpoint-every", int, 50, "steps between checkpoints, and between held-out losses")
    add("--compare-steps", int, 20, "first steps to repeat on the unsharded model")
    add("--must-fall-to", float, 0.5, "largest allowed last loss, as a part of the first")
    parser.add_argument(
        "--fresh", action="store_true", help="start over: delete the checkpoints and losses in --out"
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="run the sharded model without torch.compile"
    )
    parser.add_argument(
        "--reshard-after-forward",
        choices=tuple(_RESHARD_AFTER_FORWARD),
        default="auto",
        help="whether backward gathers the parameters again (default %(default)s)",
    )
    try:
        return GPTOptions(**vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))
