"""What the compilation of one graph leaves for a later process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ...coordination import Transcript
from ...ir import text_fingerprint
from ...progress import LOGGER
from ..halves import CompiledVariant, HalfFacts, State
from ..inductor import VariantCode
from .step_files import forget_step, keep_step


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVariant:
    """A variant of a half on disk: as :class:`~graphshard.backend.halves.CompiledVariant`.

    Attributes:
        said: what the ranks have said to each other when it was compiled.
    """

    code: VariantCode
    collectives: str
    regathered: frozenset[str]
    said: Transcript


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptHalf:
    """A half on disk.

    Attributes:
        facts: what it says of itself.
        variants: by the state of its units.
        source: pickled, what variants for other states are compiled from.
    """

    facts: HalfFacts
    variants: dict[State, KeptVariant]
    source: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStep:
    """The halves of a graph on disk, by their kinds.

    Attributes:
        said: what the ranks have said to each other before they compiled the halves.
        halves: "forward" and "backward", or "inference".
    """

    said: Transcript
    halves: dict[str, KeptHalf]


@dataclass
class _HalfRecord:
    facts: HalfFacts
    text: str
    source: Callable[[], bytes]
    variants: dict[State, KeptVariant] = field(default_factory=dict)
    pickled: bytes = b""

    def on_disk(self) -> KeptHalf:
        self.pickled = self.pickled or self.source()
        variants = {state: replace(each, code=each.code.for_disk()) for state, each in self.variants.items()}
        return KeptHalf(facts=self.facts, variants=variants, source=self.pickled)


class StepRecord:
    """What the compilation of one graph has made so far; it writes it when AOTAutograd has asked for it.

    Args:
        key: all that the code depends on beside the graph and the settings of torch.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._halves: dict[str, _HalfRecord] = {}
        self._name = ""
        self.said: Transcript = ()
        self.refusal = ""

    def add_half(self, kind: str, facts: HalfFacts, text: str, source: Callable[[], bytes]) -> None:
        """Adds a half without variants; ``source`` pickles what they are compiled from.

        ``text`` is that of :func:`half_text`.
        """
        self._halves[kind] = _HalfRecord(facts, text, source)

    def add_variant(self, kind: str, state: State, variant: CompiledVariant, said: Transcript) -> None:
        """Adds a variant, and writes the step again if it was written, or can be now.

        One that cannot be kept is left out: a later process compiles it from the source of the half.
        """
        if variant.code is None or not variant.code.can_be_kept or variant.check is not None:
            if kind != "backward" and not self._halves[kind].variants:
                self.refuse(f"the {kind} cannot be kept")
            return
        self._halves[kind].variants[state] = KeptVariant(
            code=variant.code,
            collectives=variant.collectives,
            regathered=variant.regathered,
            said=said,
        )
        self._write()

    def add_kept(self, name: str, step: KeptStep) -> None:
        """Takes over what an earlier process has kept under a name."""
        self._name, self.said = name, step.said
        for kind, half in step.halves.items():
            self._halves[kind] = _HalfRecord(half.facts, "", lambda: b"", dict(half.variants), half.source)

    def refuse(self, reason: str) -> None:
        """Nothing of this graph is kept."""
        LOGGER.info("the code of this graph is not kept: %s", reason)
        self.refusal = reason
        self.forget()

    def forget(self) -> None:
        """Deletes what was written."""
        if self._name:
            forget_step(self._name)

    def name(self) -> str:
        """The name under which the step is kept; it is made when AOTAutograd keeps what it has made of the graph."""
        if not self._name:
            texts = (f"{kind}\n{half.text}" for kind, half in self._halves.items())
            self._name = text_fingerprint("\n".join([self._key, *texts]))
            self._write()
        return self._name

    def _write(self) -> None:
        last = self._halves.get("backward") or self._halves.get("inference")
        if not self._name or self.refusal or last is None or not last.variants:
            return
        try:
            halves = {kind: half.on_disk() for kind, half in self._halves.items()}
            keep_step(self._name, KeptStep(said=self.said, halves=halves))
        except Exception as error:  # whatever pickle raises: that something is not kept stops no run
            self.refuse(f"it cannot be written ({error!r})")
