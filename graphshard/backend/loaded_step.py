"""A step that an earlier process has compiled and kept, at work in this process.

Each variant is loaded when its state is first met, and the rank then takes part in what the others say of it, as if it
compiled. Where they have decided otherwise by now, and for a state that was not kept, it compiles the variant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..coordination import refusing, say_again
from ..progress import LOGGER
from .compilation import HalfTask, compiler_of_states
from .dynamo_graph import DynamoGraph
from .halves import CompiledVariant, Half, State
from .inductor import compile_later, count_loaded
from .observer import Observer
from .second_start import HalfSource, KeptHalf, KeptStep, KeptVariant, StepRecord


@dataclass(kw_only=True, eq=False)
class LoadedStep:
    """The halves of a kept step.

    Attributes:
        step: what was kept.
        graph: the graph of Dynamo in this process.
        observer: sees what is compiled after all.
        patches: Inductor's settings.
        record: takes what is compiled after all.
        regathered: parameters whose shards the forward keeps for the backward to gather again.
    """

    step: KeptStep
    graph: DynamoGraph
    observer: Observer
    patches: Mapping[str, Any]
    record: StepRecord
    regathered: frozenset[str] = frozenset()
    _halves: dict[str, Half] = field(default_factory=dict)

    def half(self, kind: str, arguments: Mapping[str, Any]) -> Half:
        """The half of a kind; ``arguments`` are those that torch gives to kept code."""
        kept = self.step.halves[kind]
        self._halves[kind] = Half(facts=kept.facts, compile_state=self._states(kind, kept, arguments))
        return self._halves[kind]

    def resume(self) -> bool:
        """Says what was said before the halves were compiled, and loads the forward, as a compilation ends with it.

        Returns:
            False if the ranks have decided otherwise: then nothing is kept any more, and the graph must be compiled.
        """
        if not say_again(self.step.said, self.graph.models):
            LOGGER.info("graph %d: the ranks have another plan than the kept code", self.graph.index)
            self.record.forget()
            return False
        for half in self._halves.values():
            if not half.is_backward:
                self.regathered = half.compile().regathered
        LOGGER.info("graph %d: code of an earlier run is used", self.graph.index)
        return True

    def _states(
        self, kind: str, kept: KeptHalf, arguments: Mapping[str, Any]
    ) -> Callable[[State], CompiledVariant]:
        later = compile_later(self.patches)
        task: HalfTask | None = None

        def compile_state(state: State) -> CompiledVariant:
            nonlocal task
            with later(), refusing(self.graph.groups, f"load graph {self.graph.index} ({kind})"):
                if (variant := kept.variants.get(state)) and (loaded := self._loaded(variant, arguments)):
                    return loaded
                task = task or self._task(kind, kept)
                return compiler_of_states(task)(state)

        return compile_state

    def _loaded(self, variant: KeptVariant, arguments: Mapping[str, Any]) -> CompiledVariant | None:
        """A kept variant, or None if the ranks have decided otherwise, or if it cannot be loaded."""
        if not say_again(variant.said, self.graph.models):
            return None
        try:
            code = variant.code.loaded(arguments)
        except Exception as error:  # whatever Inductor raises: what lies in a cache stops no run
            LOGGER.info("graph %d: kept code cannot be loaded (%r)", self.graph.index, error)
            return None
        count_loaded(len(code.compiled))
        return CompiledVariant(
            run=code.run(is_ahead=self.graph.is_ahead),
            collectives=variant.collectives,
            regathered=variant.regathered,
            code=code,
        )

    def _task(self, kind: str, kept: KeptHalf) -> HalfTask:
        source = HalfSource.from_bytes(kept.source)
        return HalfTask(
            graph=self.graph,
            joint=source.joint,
            observer=self.observer,
            kind=kind,
            gm=source.gm,
            example_inputs=source.example_inputs,
            patches=self.patches,
            compiler_arguments=source.arguments,
            record=self.record,
        )
