"""The options of ``torch.compile(model, backend="graphshard", options={...})``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import BackwardPrefetch

from ..budget_text import parse_bytes
from ..cost import HardwareCard, load_card
from ..errors import OptionError
from ..pipeline import Pass
from ..user_cache import is_switched_off

#: Options that need a hardware card.
_NEED_HARDWARE = ("memory_budget", "bucket", "limit_all_gathers", "backward_prefetch", "forward_prefetch")

#: ``hardware`` as the card of the machine at hand, and as no card.
AUTO, NO_CARD = "auto", "none"

#: Gathers in flight in FSDP1 with ``limit_all_gathers=True``.
_FSDP1_GATHERS = 2

#: Key of the passes that name no pass to follow.
DEFAULT_PLACE = ""

_CHOICES = {
    "bucket": ("unit", "none", "auto"),
    "move_compute": (True, False),
    "overlap": (True, False, "always"),
    "forward_prefetch": (True, False),
    "progress": (True, False),
    "share_code": (True, False, "always"),
    "verify": ("off", "cheap", "full"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Validated backend options.

    Attributes:
        bucket: "auto" merges what the planner finds best (needs ``hardware``, and is the default with it). "unit"
            merges the collectives of each ``fully_shard`` unit. "none" leaves one per parameter.
        overlap: True leaves it to the planner or, without ``hardware``, starts gathers before the compute that precedes
            their use, and waits for reductions late, where that does not raise the predicted peak of memory. "always"
            does so whatever it holds. False starts and waits in place. Both stand for ``hardware=None``.
        hardware: a hardware card (its name, its file, or itself). The planner places collectives where the predicted
            time is least. "auto" takes the card of this machine: the shipped card of its GPU, a card that an earlier
            run has kept, or one that is measured when the first graph is compiled (:mod:`graphshard.hardware`). None or
            "none": no planner; collectives are placed by rules. That is the default where no cache folder may be used
            (:func:`default_hardware`).
        memory_budget: the most that may be live on a rank while one graph runs: bytes, or a text like "60GiB" (needs
            ``hardware``). It counts the inputs of the step (shards of all its parameters, saved activations), gradients
            that wait for a later micro-batch and gathered parameters; not the caller's reduced gradients and optimizer
            state. The planner keeps it, by recomputing activations if it must, or raises an error that names what it
            needs. It spends the rest on units that keep their parameters for the backward, and between micro-batches
            whose gradients are not reduced. None with ``hardware``: no more than FSDP2's order of units holds.
        limit_all_gathers: all-gathers that may be in flight at a time; a bucket counts once. True is FSDP1's two; 0 or
            False leaves it to the planner (needs ``hardware``; without it one is ahead).
        backward_prefetch: when the backward gathers the next unit, as in FSDP1 (needs ``hardware``; without it one is
            ahead). "pre" (or ``BACKWARD_PRE``) gathers one bucket a unit, right after the previous unit is gathered.
            "post" (``BACKWARD_POST``) does not gather before the previous unit's gradients exist. None leaves it to the
            planner. Units with prefetches of their own (``set_modules_to_backward_prefetch``) keep those.
        forward_prefetch: True has the forward gather one bucket a unit, right after the previous unit is gathered
            (needs ``hardware``; without it one is ahead). False leaves it to the planner.
        move_compute: with ``hardware``, compute may move beside collectives whose result is read soon, those of tensor
            parallelism for instance. False keeps the order of compute.
        planning_seconds: the most that the planning of a step may take, in seconds of the thread that plans. Past it,
            the best plan so far is taken. None: a fifth of what the compilation takes by experience, and at least 3.
        share_code: True has Inductor compile equal parts of a graph once, those of a model's repeated blocks, where at
            most half of the ops are then left to it, and without ``memory_budget``. "always" does so wherever it can.
            False compiles each graph as a whole.
        progress: rank 0 shows on stderr what takes longer than two seconds: a line that changes on a terminal, and one
            line a stage elsewhere. False shows nothing.
        verify: "cheap" compares the collectives across ranks before the first one of a new graph, and checks the order
            that Inductor emits. "full" also recomputes every fake value after each pass, and makes another order an
            error. "off" does neither.
        dump: folder for the graph text after each pass, one file a graph and stage; None for none.
        inductor: options for Inductor, as ``torch.compile(options=...)`` takes them.
        passes: passes of the user (docs/extend/writing-a-pass.md), by the name of the pass that they follow: one of the
            joint graph, one that lowers and merges, or the one that places the collectives. A plain sequence runs on
            both halves once they are lowered, before collectives are merged. All ranks need the same.
    """

    bucket: str = "auto"
    overlap: bool | str = True
    hardware: HardwareCard | str | None = AUTO
    memory_budget: int | None = None
    limit_all_gathers: int = 0
    backward_prefetch: str | None = None
    forward_prefetch: bool = False
    move_compute: bool = True
    planning_seconds: float | None = None
    share_code: bool | str = True
    progress: bool = True
    verify: str = "cheap"
    dump: Path | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    passes: Mapping[str, tuple[Pass, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                listed = ", ".join(map(repr, choices))
                raise OptionError(f"graphshard backend: option {name}={value!r} must be one of {listed}")
        if type(self.limit_all_gathers) is not int or self.limit_all_gathers < 0:
            raise OptionError(
                f"graphshard backend: option limit_all_gathers={self.limit_all_gathers!r} must be True, False, or the "
                "number of gathers that may be in flight, 0 for any number"
            )
        seconds = self.planning_seconds
        if seconds is not None and (type(seconds) not in (int, float) or not seconds > 0):
            raise OptionError(
                f"graphshard backend: option planning_seconds={seconds!r} must be a number above 0, or None"
            )
        if self.backward_prefetch not in (None, "pre", "post"):
            raise OptionError(
                f"graphshard backend: option backward_prefetch={self.backward_prefetch!r} must be 'pre', 'post' or None"
            )
        needing = [name for name in _NEED_HARDWARE if getattr(self, name) not in (None, 0, "unit", "none")]
        if needing and self.hardware is None:
            raise OptionError(
                f"graphshard backend: option {needing[0]}={getattr(self, needing[0])!r} needs a cost model: "
                "leave out option hardware, or give the name or the file of a card (`graphshard cards` lists them)"
            )
        if self.hardware is not None and self.overlap is not True:
            raise OptionError(
                f"graphshard backend: option overlap={self.overlap!r} has no meaning with option hardware, "
                "since the planner places the collectives; leave out one of them"
            )
        if not isinstance(self.inductor, Mapping):
            raise OptionError(
                f"graphshard backend: option inductor={self.inductor!r} must be a dict of Inductor options"
            )

        if self.inductor.get("cpp_wrapper"):
            raise OptionError(
                "graphshard backend: Inductor option cpp_wrapper cannot be set: the C++ wrapper cannot call "
                "graphshard's ops, and the order of the collectives is read from the Python wrapper; leave it out"
            )

    @staticmethod
    def parse(options: Mapping[str, Any] | None) -> BackendOptions:
        """Reads and checks the dict that a user gave.

        Raises:
            OptionError: an unknown key (the known ones are listed) or a value that is not allowed.
            CardError: an unknown or malformed card.
        """
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"graphshard backend: options={options!r} must be a dict of options by name")
        given = dict(options or {})
        known = [option.name for option in fields(BackendOptions)]
        if unknown := sorted(set(given) - set(known)):
            raise OptionError(
                f"graphshard backend: unknown option(s) {', '.join(map(repr, unknown))}; "
                f"known: {', '.join(known)} (options of Inductor go into 'inductor')"
            )
        if "hardware" not in given and given.get("overlap", True) is True:
            given["hardware"] = default_hardware()
        hardware = given.get("hardware")
        if isinstance(hardware, (str, Path)) and str(hardware) != AUTO:
            given["hardware"] = None if str(hardware) == NO_CARD else load_card(hardware)
        elif hardware not in (None, AUTO) and not isinstance(hardware, HardwareCard):
            raise OptionError(
                f"graphshard backend: option hardware={hardware!r} must be a card, its name or its file, "
                f"{AUTO!r}, or None for no planner"
            )
        given.setdefault("hardware", None)
        if given["hardware"] is None:
            given.setdefault("bucket", "unit")
        dump = given.get("dump")
        if dump is not None:
            if not isinstance(dump, (str, Path)):
                raise OptionError(f"graphshard backend: option dump={dump!r} must be the path of a folder")
            given["dump"] = Path(dump)
        if type(given.get("limit_all_gathers")) is bool:
            given["limit_all_gathers"] = _FSDP1_GATHERS if given["limit_all_gathers"] else 0
        if isinstance(given.get("backward_prefetch"), BackwardPrefetch):
            given["backward_prefetch"] = given["backward_prefetch"].name.removeprefix("BACKWARD_").lower()
        if given.get("memory_budget") is not None:
            given["memory_budget"] = parse_bytes(given["memory_budget"])
        if "passes" in given:
            given["passes"] = _read_passes(given["passes"])
        return BackendOptions(**given)

    @property
    def card(self) -> HardwareCard | None:
        """The hardware card; None if there is none, or if it is not known yet."""
        return self.hardware if isinstance(self.hardware, HardwareCard) else None

    def with_orders(self, forward_order: str, backward_order: str) -> BackendOptions:
        """These options with what FSDP1's wrappers ask for, where the user gave none and a planner can follow it."""
        if self.hardware is None:
            return self
        backward = "post" if backward_order == "none" else backward_order
        return replace(
            self,
            forward_prefetch=self.forward_prefetch or forward_order == "pre",
            backward_prefetch=self.backward_prefetch or backward or None,
        )

    @property
    def needs_card(self) -> str:
        """An option that has no meaning without a card, by its name; "" if there is none."""
        names = (name for name in _NEED_HARDWARE if name != "bucket")
        return next((name for name in names if getattr(self, name) not in (None, 0)), "")

    def with_card(self, card: HardwareCard | None, reason: str) -> BackendOptions:
        """These options with the card that ``hardware="auto"`` has come to, or with the schedule by rules.

        Args:
            card: the card; None if there is none.
            reason: why there is none.

        Raises:
            OptionError: there is none, and an option needs one.
        """
        if card is not None:
            return replace(self, hardware=card)
        if needing := self.needs_card:
            raise OptionError(
                f"graphshard backend: option {needing}={getattr(self, needing)!r} needs a cost model, and there is "
                f"no hardware card of this machine: {reason}; give option hardware, the name or the file of a card"
            )
        return replace(self, hardware=None, bucket="unit" if self.bucket == "auto" else self.bucket)


def default_hardware() -> str:
    """The default of ``hardware``: none where ``GRAPHSHARD_CACHE`` is empty, since nothing measured could be kept."""
    return NO_CARD if is_switched_off() else AUTO


def _read_passes(given: Any) -> dict[str, tuple[Pass, ...]]:
    """Passes by the name of the pass that they follow.

    Raises:
        OptionError: not a sequence of passes, nor a dict of such.
    """
    by_name = given if isinstance(given, Mapping) else {DEFAULT_PLACE: given}
    for name, steps in by_name.items():
        if not isinstance(name, str) or not isinstance(steps, Sequence) or isinstance(steps, str):
            raise OptionError(
                f"graphshard backend: option passes={given!r} must be a list of passes, or a dict of such lists by the "
                "name of the pass that they follow"
            )
        for step in steps:
            if isinstance(step, type) or not isinstance(step, Pass):
                raise OptionError(
                    f"graphshard backend: option passes: {step!r} is no pass: it needs name, requires, provides, "
                    "breaks and run(gm, ctx), and is an instance, not a class (docs/extend/writing-a-pass.md)"
                )
    return {name: tuple(steps) for name, steps in by_name.items() if steps}
