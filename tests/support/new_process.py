"""What a new process would find: nothing compiled in memory, and the caches of a folder on disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from graphshard.backend import compilation


@dataclass
class Start:
    """What a start has found and done; complete after the context of :func:`as_new_process`."""

    found: int = 0
    """Graphs that AOTAutograd has found in its cache."""
    compiled: int = 0
    """Variants of halves that were compiled."""

    @property
    def counts(self) -> tuple[int, int]:
        return self.found, self.compiled


@contextmanager
def as_new_process(cache: str) -> Iterator[Start]:
    """A context with the caches of a folder and nothing in memory."""
    torch._dynamo.reset()
    _clear_sharding_prop_cache()
    found = counters["aot_autograd"]["autograd_cache_hit"]
    start = Start()
    real = compilation.compile_variant

    def compile_variant(*arguments: Any) -> Any:
        start.compiled += 1
        return real(*arguments)

    caches = {"GRAPHSHARD_CACHE": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    with (
        mock.patch.dict(os.environ, caches),
        mock.patch.object(compilation, "compile_variant", compile_variant),
    ):
        yield start
    start.found = counters["aot_autograd"]["autograd_cache_hit"] - found
