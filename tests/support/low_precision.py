"""Tensor classes whose values travel in fewer bytes."""

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


class Scaled(Tensor):
    """A weight in float32 that is gathered as 8-bit codes with a scale in bfloat16 for each row."""

    _data: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def __tensor_flatten__(self) -> Any:
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_data"])

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scale = self._data.abs().amax(1, keepdim=True).clamp(1e-6) / 127
        return ((self._data / scale).round().to(torch.int8), scale.to(torch.bfloat16)), "metadata"

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata == "metadata"
        codes, scale = gathered
        full = codes.to(dtype) * scale.to(dtype)
        if out is not None:  # FSDP2 makes the parameter once, and later has it filled again
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(full)
            return None
        return full, (*gathered, full)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(cls, lambda each: each._data, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func.__name__.split(".")[0].endswith("_"):
            return args[0]
        return pytree.tree_map_only(Tensor, cls, result)


class HeldFlat(Scaled):
    """Holds its rows one after the other, so that it cannot be padded along dim 0."""

    def __tensor_flatten__(self) -> Any:
        return ["_flat"], self._data.shape

    @property
    def _flat(self) -> Tensor:
        return self._data.flatten()

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], shape: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_flat"].view(shape))
