"""A machine is told from another by what libraries choose kernels by."""

import pytest
import torch

from graphshard import machine
from graphshard.machine import Machine, largest_cache_bytes, this_processor


def test_it_names_the_processor_torch_and_its_settings():
    text = this_processor()
    assert torch.__version__ in text and torch.backends.cpu.get_cpu_capability() in text
    assert "\n" not in text and text == this_processor()


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"])
def test_limits_of_the_environment_make_another_processor(monkeypatch, name):
    before = this_processor()
    monkeypatch.setenv(name, "AVX2")
    assert this_processor() != before and f"{name}=AVX2" in this_processor()


def test_settings_of_onednn_make_another_processor(monkeypatch):
    before = this_processor()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert this_processor() != before


def test_the_number_of_threads_makes_another_machine(threads):
    one = Machine.here()
    threads(2)
    assert Machine.here() != one and Machine.here().processor == one.processor


def test_a_system_that_says_nothing_of_its_processor_has_a_name(monkeypatch):
    class _NoFile:
        def __init__(self, path: str) -> None:
            pass

        def read_text(self) -> str:
            raise FileNotFoundError

    machine._cpu_text.cache_clear()
    monkeypatch.setattr(machine, "Path", _NoFile)
    assert this_processor()
    machine._cpu_text.cache_clear()


@pytest.mark.parametrize(("texts", "expected"), [([], 0), (["32K\n", "1024K\n", "96M\n"], 96 * 2**20), (["odd"], 0)])
def test_the_largest_cache_is_the_systems(monkeypatch, tmp_path, texts, expected):
    for index, text in enumerate(texts):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(text)
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path)
    assert largest_cache_bytes() == expected


def test_it_comes_back_from_data():
    here = Machine.here()
    assert Machine.from_data(here.as_data()) == here
    with pytest.raises(KeyError):
        Machine.from_data({"processor": "a"})
