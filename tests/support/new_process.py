"""What a new process would find: nothing compiled in memory, and caches on disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from graphshard.backend import compilation


@dataclass
class Start:
    """What a start has found and done; complete after its context."""

    found: int = 0
    """Graphs that AOTAutograd has found in its cache."""
    compiled: list[str] = field(default_factory=list)
    """The kinds of the halves whose variants were compiled."""

    @property
    def counts(self) -> tuple[int, int]:
        return self.found, len(self.compiled)


@contextmanager
def with_nothing_in_memory() -> Iterator[Start]:
    """A context that begins as a new process does, with the caches on disk that this one has."""
    torch._dynamo.reset()
    _clear_sharding_prop_cache()
    found = counters["aot_autograd"]["autograd_cache_hit"]
    start = Start()
    real = compilation.compile_variant

    def compile_variant(task: Any, variant: Any) -> Any:
        start.compiled.append(task.kind)
        return real(task, variant)

    with mock.patch.object(compilation, "compile_variant", compile_variant):
        yield start
    start.found = counters["aot_autograd"]["autograd_cache_hit"] - found


@contextmanager
def as_new_process(cache: str) -> Iterator[Start]:
    """The same, with the caches of a folder."""
    caches = {"GRAPHSHARD_CACHE": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    with mock.patch.dict(os.environ, caches), with_nothing_in_memory() as start:
        yield start
