"""Training text found on every machine with Python: the standard library's own source, as bytes.

Which bytes a step trains on depends on (seed, step) alone, and a rank takes its slice of them: a run that
resumes needs no data state but the step, and an unsharded run can see the very same global batch.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_HELD_OUT_EVERY = 20


@dataclass(frozen=True, slots=True)
class SourceText:
    """`train` and `held_out` are uint8 [bytes], from different files; `digest` identifies both."""

    train: Tensor
    held_out: Tensor
    digest: str


def read_standard_library() -> SourceText:
    """Read every module of the standard library in path order; each 20th file is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for index, path in enumerate(sorted(_source_files(root))):
        parts[index % _HELD_OUT_EVERY == 0].append((root / path).read_bytes())
    train, held_out = (b"".join(parts[key]) for key in (False, True))
    digest = hashlib.sha256(train + b"\0" + held_out).hexdigest()[:16]
    return SourceText(_as_tensor(train), _as_tensor(held_out), digest)


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _source_files(root: Path) -> Iterator[str]:
    """Paths of the .py files under `root`, relative to it, tests and installed packages left out."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        inside = Path(folder).relative_to(root)
        yield from ((inside / name).as_posix() for name in files if name.endswith(".py"))


def draw_batch(text: Tensor, *, seed: int, step: int, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, int64 [batch_size, context], at places drawn from (seed, step)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - context, (batch_size,), generator=generator)
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
