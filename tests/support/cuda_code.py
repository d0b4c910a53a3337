"""What Inductor generates for a CUDA device, without one and without Triton: the code is only written.

Inductor asks the device for its properties, and Triton for a key of its caches. Both answers are given here.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.compile_fx import record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("cuda:0")

#: Of an H100.
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    warp_size=32,
    total_memory=80 * 2**30,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)


@contextlib.contextmanager
def pretended_cuda() -> Iterator[None]:
    """While this is open, Inductor finds one CUDA device and Triton."""
    answers = {
        "torch.cuda.get_device_properties": PROPERTIES,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda.current_device": 0,
        "torch.cuda.device_count": 1,
        "torch._inductor.scheduler.has_triton": True,
        "torch.utils._triton.triton_hash_with_backend": "none",
    }
    interface = {
        "get_device_properties": PROPERTIES,
        "get_compute_capability": 90,
        "is_available": True,
        "current_device": 0,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, lambda *_, answer=answer, **__: answer))
        for name, answer in interface.items():
            function = staticmethod(lambda *_, answer=answer, **__: answer)
            stack.enter_context(mock.patch.object(CudaInterface, name, function))
        stack.enter_context(
            mock.patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: PROPERTIES))
        )
        yield


def code_for_cuda(gm: fx.GraphModule, example_inputs: Sequence[Any], *, is_backward: bool) -> str:
    """The source that Inductor generates for a graph whose tensors are all on a CUDA device.

    Args:
        gm: a graph with fake CPU tensors in ``meta["val"]``; it is not changed.
        example_inputs: its fake inputs.
    """
    gm = copy.deepcopy(gm)
    with FakeTensorMode() as mode:
        inputs = tree_map_only(Tensor, _on_cuda, list(example_inputs))
        for node in gm.graph.nodes:
            node.args, node.kwargs = tree_map_only(torch.device, lambda _: DEVICE, (node.args, node.kwargs))
            if "val" in node.meta:
                node.meta["val"] = tree_map_only(Tensor, _on_cuda, node.meta["val"])
    record_original_output_strides(gm)
    with pretended_cuda(), V.set_fake_mode(mode), DebugContext():
        lowering = GraphLowering(gm, example_inputs=inputs, is_backward=is_backward)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            code, _ = lowering.codegen()
    return getattr(code, "value", code)


def _on_cuda(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
