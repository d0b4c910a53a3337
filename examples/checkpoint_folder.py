"""Checkpoints of a sharded run that survive a kill at any moment.

    OUT/checkpoints/step-000050/   written by torch.distributed.checkpoint, every rank its own shards
    OUT/checkpoints/step-000100/
    OUT/checkpoints/latest         one line, the name of the folder to resume from

A save writes a new step folder and, when all ranks have finished, moves `latest` onto it by an atomic rename.
A kill before the rename leaves `latest` on the previous, untouched folder. The last two folders are kept.
With ranks on several machines OUT must be on storage they all share.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from distributed_setup import Ranks, UsageError

RUN_FILE = "run.json"


class CheckpointFolder:
    """Saves and loads (model, optimizer, step) under `folder`; every method is called by all ranks together.

    `run` holds whatever decides the losses (options, data); a checkpoint of another run is refused.
    """

    def __init__(self, folder: Path, ranks: Ranks, run: dict[str, Any]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.run = run

    def latest_step(self) -> int | None:
        """Step of the checkpoint to resume from, None without one. UsageError if it is of another run."""
        found = self.ranks.from_rank_0(self._read_latest)
        if found is None:
            return None
        different = [
            f"{name} was {found['run'].get(name)!r}, now {value!r}"
            for name, value in self.run.items()
            if found["run"].get(name) != value
        ]
        if different:
            raise UsageError(
                f"the checkpoint in {self.folder} is of another run: {'; '.join(different)}. "
                "Give the same options to resume it, another --out to keep it, or --fresh to delete it"
            )
        return found["step"]

    def load(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Fill `model` and `optimizer` in place; the number of ranks may differ from the one that saved."""
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=self._step_folder(step))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Write the state after `step` steps, point `latest` at it, drop all but the one before."""
        target = self._step_folder(step)
        # A kill during an earlier save may have left half a folder of this name; `latest` never points at it.
        self.ranks.from_rank_0(lambda: shutil.rmtree(target, ignore_errors=True))
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=target)
        self.ranks.wait_for_all()
        self.ranks.from_rank_0(lambda: self._publish(target, step))

    def delete_all(self) -> None:
        """Forget every checkpoint of this folder."""
        self.ranks.from_rank_0(lambda: shutil.rmtree(self.folder, ignore_errors=True))

    def _step_folder(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _read_latest(self) -> dict[str, Any] | None:
        pointer = self.folder / "latest"
        if not pointer.exists():
            return None
        return json.loads((self.folder / pointer.read_text().strip() / RUN_FILE).read_text())

    def _publish(self, target: Path, step: int) -> None:
        pointer = self.folder / "latest"
        previous = pointer.read_text().strip() if pointer.exists() else None
        write_durably(target / RUN_FILE, json.dumps({"step": step, "run": self.run}, indent=1))
        write_durably(pointer, target.name + "\n")
        for old in self.folder.glob("step-*"):
            if old.name not in (target.name, previous):
                shutil.rmtree(old)


def write_durably(path: Path, text: str) -> None:
    """Replace `path` in one step: whoever reads it, even after a power cut, sees the old text or the new."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
