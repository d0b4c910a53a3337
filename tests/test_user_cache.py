"""The cache folder where it cannot be had or written, and what is deleted in it."""

import logging
import os
import time
from pathlib import Path

import pytest

from graphshard.backend import default_hardware
from graphshard.user_cache import cache_folder, keep_newest, write_in_one_step


def test_without_a_home_folder_nothing_is_kept_and_the_machine_is_measured_all_the_same(monkeypatch, caplog):
    """As the other ranks do, which may have one."""

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("GRAPHSHARD_CACHE")
    with caplog.at_level(logging.INFO, "graphshard"):
        assert cache_folder("plans") is None
    assert "Could not determine home directory" in caplog.text
    assert default_hardware() == "auto"
    monkeypatch.setenv("GRAPHSHARD_CACHE", "")
    assert cache_folder() is None and default_hardware() == "none"


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    real = Path.write_bytes

    def write_bytes(self, content):
        real(self, content[:3])
        raise OSError(28, "No space left on device")

    file = tmp_path / "plan.json"
    assert write_in_one_step(file, "before")
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    assert not write_in_one_step(file, "after")
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_processes_with_one_number_write_apart(tmp_path, monkeypatch):
    """Those of two containers that share the folder."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    written, replace = [], Path.replace

    def remember(self, target):
        written.append(self.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", remember)
    for text in ("one", "other"):
        assert write_in_one_step(tmp_path / "plan.json", text)
    assert len(set(written)) == 2


@pytest.mark.parametrize("most", [1, 2, 9])
def test_the_newest_stay_with_what_belongs_to_them(tmp_path, most):
    for number in range(4):
        for end in (".json", ".scratch.json"):
            (tmp_path / f"{number}{end}").touch()
        os.utime(tmp_path / f"{number}.json", (number, number))
    keep_newest(tmp_path, most, beside=".scratch.json")
    kept = [f"{number}{end}" for number in range(4)[-most:] for end in (".json", ".scratch.json")]
    assert sorted(file.name for file in tmp_path.iterdir()) == kept


def test_what_a_killed_process_has_left_goes_and_what_another_writes_stays(tmp_path):
    old, new = (tmp_path / f"plan.json.{number}" for number in (1, 2))
    for file in (old, new):
        file.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    keep_newest(tmp_path, 9)
    assert list(tmp_path.iterdir()) == [new]
    keep_newest(tmp_path / "missing", 9)
