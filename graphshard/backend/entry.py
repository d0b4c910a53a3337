"""The ``torch.compile`` backend: what Dynamo calls, and what Inductor calls back.

Dynamo hands over one graph per piece of the model. Inductor's decompositions, partitioner and caches stay in use. It
calls back twice: the joint passes hang on its ``joint_custom_pre_pass``; the steps on the forward and the backward run
in front of its inner compiler, before its cache is looked up, so a cached artefact belongs to exactly the planned graph
(docs/decisions/0001). A later process finds the whole step in AOTAutograd's cache (:mod:`.second_start`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .._compat_autograd import compiles_backwards
from .._compat_frames import inline_regions, leave_frames_to_python
from .._compat_kept import forget_hashes
from ..coordination import recording, refusing
from ..errors import OptionError
from ..memory import outputs_with_parameters, take_back_donations
from .compilation import HalfTask, compile_half
from .dtensor_boundary import Boundary, enter_boundary
from .dynamo_graph import DynamoGraph, groups_of, read_graph
from .halves import Half
from .inductor import JOINT_PASS, JointPass, compile_fx, functorch_patch, type_rng_states, unwrap_undrawn
from .joint import ExtendedInputsOf, JointResult, run_joint_passes
from .loaded_step import LoadedStep
from .observer import Observer
from .options import BackendOptions
from .pipelines import half_pipelines, joint_pipeline
from .second_start import KeptStep, StepRecord, StoredCode, loading
from .step_key import step_key


def graphshard(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """``torch.compile(model, backend="graphshard", options={...})``.

    torch.compile wraps these errors in its own ``BackendCompilerFailed``, as ``inner_exception``.

    Args:
        gm: what Dynamo captured.
        example_inputs: its inputs.
        options: see :class:`graphshard.backend.options.BackendOptions`.
        mode: refused: the modes of ``torch.compile`` are Inductor's.

    Raises:
        OptionError: an unknown option or value, a mode, or compiled autograd is on.
        PipelineError: a pass of the user does not fit where it is to run.
        AgreementError: the ranks would issue different collectives.
        RefusedError: another rank has stopped with an error.
        InfeasibleBudgetError: no plan keeps the user's memory budget.
    """
    leave_frames_to_python("graphshard.backend")
    # A card's file, for instance, may lack on one node.
    with refusing(groups_of(example_inputs), "read the options of the backend"):
        if mode is not None:
            raise OptionError(
                f"graphshard backend: mode={mode!r} is for Inductor alone; give the settings that it stands for "
                f"(torch._inductor.list_mode_options({mode!r})) in options={{'inductor': {{...}}}}"
            )
        if compiles_backwards():
            raise OptionError(
                "graphshard backend: compiled autograd is on, and would run the backward as it was before the passes; "
                "turn it off (torch._dynamo.config.compiled_autograd = False); the backward is compiled as it is"
            )
        parsed = BackendOptions.parse(options)
    return compile_graph(gm, example_inputs, parsed)


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: BackendOptions, *, is_ahead: bool = False
) -> Callable[..., Any]:
    """:func:`graphshard` with options that were read.

    Args:
        gm: what Dynamo captured.
        example_inputs: its inputs.
        options: the user's.
        is_ahead: it is compiled for a later run. What is returned computes nothing: its results are empty memory.
    """
    half_pipelines(options)  # passes that do not fit are refused before anything runs
    inline_regions(gm)
    graph = read_graph(gm, example_inputs, options, is_ahead=is_ahead)
    with graph.refusing("", gm):
        boundary = enter_boundary(gm, example_inputs)
        key = step_key(gm, graph, boundary)
        with graph.progress.stage(f"compiling graph {graph.index}"):
            compiled, forward = _compile(gm, boundary, graph, key)
        return boundary.wrap(compiled, forward.regathered)


def _compile(
    gm: fx.GraphModule, boundary: Boundary, graph: DynamoGraph, key: str, *, loads: bool = True
) -> tuple[Callable[..., Any], _ForwardResult]:
    """Compiled code of a graph; with ``loads``, or what an earlier process has kept of it.

    ``key`` is that of the step for later processes; "" to keep nothing.
    """
    callbacks = _Callbacks(graph, boundary.extended_inputs, key)
    forget_hashes(boundary.inputs)
    with functorch_patch(keeps_code=bool(key)), loading(callbacks if loads else None):
        compiled = compile_fx(
            gm, boundary.inputs, inner_compile=callbacks.compile_half, config_patches=callbacks.patches
        )
    if callbacks.loaded is None or callbacks.loaded.resume():
        return compiled, callbacks.forward
    return _compile(gm, boundary, graph, key, loads=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForwardResult:
    """What the backward and the boundary need to know of the forward.

    Attributes:
        with_parameters: its outputs that lie in the memory of full parameters.
        regathered: the parameters whose shards it keeps for the backward to gather again.
    """

    with_parameters: frozenset[str] = frozenset()
    regathered: frozenset[str] = frozenset()


class _Callbacks:
    """What Inductor calls while it compiles one graph: the joint passes, then the forward, then the backward.

    Each call runs one step on plain data. What a later call needs is kept here: the result of the joint passes, and
    that of the forward. AOTAutograd calls for halves that it finds in its cache instead (``load_half``).

    Args:
        graph: the graph of Dynamo.
        extended_inputs: finds the inputs of its joint graph that stand for parameters with gather extensions.
        key: of the step for later processes; "" to keep nothing.
    """

    def __init__(self, graph: DynamoGraph, extended_inputs: ExtendedInputsOf, key: str) -> None:
        self._graph, self._extended_inputs = graph, extended_inputs
        self._observer = Observer(folder=graph.options.dump, index=graph.index, progress=graph.progress)
        uuid = joint_pipeline(graph.options).uuid
        self._joint_pass = JointPass(self._run_joint, uuid)
        self._record = StepRecord(key) if key else None
        self.loaded: LoadedStep | None = None
        self._forward = _ForwardResult()
        # AOTAutograd's key takes in ours; those of single graphs, which Inductor looks up, do not.
        whole = JointPass(self._run_joint_of_step, lambda: key) if key else self._joint_pass
        self.patches = {**graph.inductor, JOINT_PASS: whole}
        self._inner_patches = {**graph.inductor, JOINT_PASS: self._joint_pass}

    @property
    def forward(self) -> _ForwardResult:
        """What the boundary needs to know of the forward."""
        return self._forward if self.loaded is None else _ForwardResult(regathered=self.loaded.regathered)

    def _run_joint_of_step(self, gm: fx.GraphModule) -> None:
        self._joint_pass(gm.graph)

    def _run_joint(self, gm: fx.GraphModule) -> JointResult:
        with self._graph.refusing(" (joint)", gm), self._observer.passes("joint", gm), recording() as said:
            self._graph = self._priced(gm)
            result = run_joint_passes(gm, self._graph, self._observer, self._extended_inputs)
        if self._record is not None:
            self._record.said = tuple(said)
        return result

    def _priced(self, gm: fx.GraphModule) -> DynamoGraph:
        priced = self._graph.priced(gm)
        if priced is not self._graph and self._record is not None:
            self._record.refuse("the card of this machine does not price it")
        return priced

    def compile_half(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **arguments: Any) -> Any:
        """Stands for Inductor's inner compiler; ``arguments`` are those of that compiler."""
        unwrap_undrawn(gm)
        type_rng_states(gm)
        with self._graph.refusing("", gm):
            self._graph = self._priced(gm)  # a graph without gradients has no joint passes
        is_backward = bool(arguments.get("is_backward"))
        if is_backward:
            take_back_donations(gm, self._forward.with_parameters)
        with_parameters = frozenset() if is_backward else outputs_with_parameters(gm)
        task = HalfTask(
            graph=self._graph,
            joint=self._joint_pass.result or JointResult(),
            observer=self._observer,
            kind="backward" if is_backward else "inference" if arguments.get("is_inference") else "forward",
            gm=gm,
            example_inputs=tuple(example_inputs),
            patches=self._inner_patches,
            compiler_arguments=arguments,
            record=self._record,
        )
        compiled, regathered = compile_half(task)
        if not is_backward:
            self._forward = _ForwardResult(with_parameters=with_parameters, regathered=regathered)
        return compiled if self._record is None else StoredCode(compiled, self._record, task.kind)

    def load_half(self, name: str, kind: str, step: KeptStep, arguments: Mapping[str, Any]) -> Half:
        """Stands for ``compile_half`` where AOTAutograd has found the half in its cache."""
        if self.loaded is None:
            assert self._record is not None
            self._record.add_kept(name, step)
            self.loaded = LoadedStep(
                step=step,
                graph=self._graph,
                observer=self._observer,
                patches=self._inner_patches,
                record=self._record,
            )
        return self.loaded.half(kind, arguments)
