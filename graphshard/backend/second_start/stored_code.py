"""What AOTAutograd's cache keeps of a half: the name of the step, and which of its halves it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..._compat_kept import BypassAOTAutogradCache, FXGraphCacheMiss, OutputCode
from .step_files import read_step
from .step_record import KeptStep, StepRecord


class Loader(Protocol):
    """Makes a half of a kept step run in this process."""

    def load_half(
        self, name: str, kind: str, step: KeptStep, arguments: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """The half of a kind, of the step of a name; ``arguments`` are those that torch gives to kept code."""
        ...


@dataclass(frozen=True, slots=True)
class _Compilation:
    """The compilation of a graph: its loader, and the steps that were read, since both halves ask for one."""

    loader: Loader
    steps: dict[str, KeptStep | None] = field(default_factory=dict)

    def step(self, name: str) -> KeptStep | None:
        if name not in self.steps:
            step = read_step(name)
            self.steps[name] = step if isinstance(step, KeptStep) else None
        return self.steps[name]


_compilation: ContextVar[_Compilation | None] = ContextVar("graphshard_compilation", default=None)


@contextmanager
def loading(loader: Loader | None) -> Iterator[None]:
    """A context in which halves that AOTAutograd finds in its cache are loaded by ``loader``; None: they are not."""
    token = _compilation.set(_Compilation(loader) if loader is not None else None)
    try:
        yield
    finally:
        _compilation.reset(token)


class StoredCode(OutputCode):
    """A half, as AOTAutograd calls and pickles it.

    Args:
        run: the half.
        record: what is kept of its graph.
        kind: "forward", "backward" or "inference".
    """

    def __init__(self, run: Callable[..., Any] | None, record: StepRecord | None, kind: str) -> None:
        self._run, self._record, self._kind = run, record, kind
        self._name = ""
        self._boxed_call = True
        self.source_code = None

    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert self._run is not None
        return self._run(inputs)

    def prepare_for_serialization(self) -> None:
        """Keeps nothing of a graph that cannot be kept.

        Raises:
            BypassAOTAutogradCache: it cannot be kept.
        """
        assert self._record is not None
        if self._record.refusal:
            raise BypassAOTAutogradCache(self._record.refusal)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._record is None:
            return _stored, (self._name, self._kind)
        return _stored, (self._record.name(), self._kind)

    def __copy__(self) -> StoredCode:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredCode:
        return self

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Loads a half that AOTAutograd has found in its cache.

        Raises:
            FXGraphCacheMiss: the step is no longer kept; AOTAutograd then compiles the graph.
        """
        compilation = _compilation.get()
        step = compilation.step(self._name) if compilation is not None else None
        if compilation is None or step is None or self._kind not in step.halves:
            raise FXGraphCacheMiss("the step is no longer kept")
        self._run = compilation.loader.load_half(self._name, self._kind, step, graph_kwargs)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing: the graphs of a variant carry their own."""


def _stored(name: str, kind: str) -> StoredCode:
    """A half that AOTAutograd has found in its cache, before it is loaded."""
    code = StoredCode(None, None, kind)
    code._name = name
    return code
