"""The blocks of docs/use/checkpoints.md run as they stand, in order, and do what the page says."""

import contextlib
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.testing import assert_close

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PAGE = ROOT / "docs" / "use" / "checkpoints.md"
NUM_BLOCKS = 6


def whole_values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


def run_blocks(folder: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == NUM_BLOCKS
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    with contextlib.chdir(folder):
        run_in_order(blocks, names)
    assert_close(whole_values(names["pretrained"]), names["values_of_file"], rtol=0, atol=0)
    dist.destroy_process_group(names["checkpoint_group"])


def run_in_order(blocks: list[str], names: dict[str, Any]) -> None:
    for number, block in enumerate(blocks):
        before = whole_values(names["model"]) if "model" in names else {}
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
        if number == 1:
            check_resumed(names)
        elif number == 2:
            check_written(names, before)
        elif number == 3:
            check_whole(names)


def check_resumed(names: dict[str, Any]) -> None:
    """Model and optimizer: a further step of both gives the same values; so does an unsharded model."""
    assert_close(whole_values(names["resumed"]), whole_values(names["model"]), rtol=0, atol=0)
    plain = names["build"]()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    names["load"]("checkpoint", plain, plain_optimizer)
    for model, optimizer in (
        (names["resumed"], names["resumed_optimizer"]),
        (plain, plain_optimizer),
        (names["model"], names["optimizer"]),
    ):
        names["train_step"](model, optimizer)
    assert_close(whole_values(names["resumed"]), whole_values(names["model"]), rtol=0, atol=0)
    assert_close(dict(plain.state_dict()), whole_values(names["model"]))


def check_written(names: dict[str, Any], before: dict[str, Tensor]) -> None:
    """The values written are those of the call, not those of the step beside it."""
    found = {name: torch.empty_like(value) for name, value in before.items()}
    dcp.load({"model": found}, checkpoint_id="checkpoint_while_training")
    assert_close(found, before, rtol=0, atol=0)
    assert not torch.equal(whole_values(names["model"])["0.weight"], before["0.weight"])


def check_whole(names: dict[str, Any]) -> None:
    names["values_of_file"] = whole_values(names["model"])
    if dist.get_rank() == 0:
        plain = names["build"]()
        plain.load_state_dict(torch.load("model.pt"))
        assert_close(dict(plain.state_dict()), names["values_of_file"], rtol=0, atol=0)
    else:
        assert names["whole"] == {}


def test_blocks_run_and_do_what_they_say(run_on_gloo_ranks, tmp_path: Path) -> None:
    run_on_gloo_ranks(2, run_blocks, str(tmp_path))
    assert (tmp_path / "average" / ".metadata").exists()
