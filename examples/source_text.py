"""Training text found on every machine with Python: the standard library's own source, as bytes.

Which bytes a step trains on depends on (seed, step) alone, and a rank takes its slice of them: a run that
resumes needs no data state but the step, and an unsharded run can see the very same global batch.
"""

import hashlib
import sysconfig
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
    paths = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    paths = [p for p in paths if not _LEFT_OUT.intersection(Path(p).parts)]
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for index, path in enumerate(paths):
        parts[index % _HELD_OUT_EVERY == 0].append((root / path).read_bytes())
    train, held_out = (b"".join(parts[key]) for key in (False, True))
    digest = hashlib.sha256(train + b"\0" + held_out).hexdigest()[:16]
    return SourceText(
        *(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, held_out)), digest
    )


def draw_batch(text: Tensor, *, seed: int, step: int, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, int64 [batch_size, context], at places drawn from (seed, step)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - context, (batch_size,), generator=generator)
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
