"""Interpreted halves compute what compiled ones do, without Inductor's code generation."""

from unittest import mock

import pytest
import torch
from support.interpreted_halves import interpreted_halves
from support.small_models import MODELS, example_batch, shard_units
from torch._dynamo.exc import BackendCompilerFailed

from graphshard.backend.inductor import compile_fx_inner


def _step(mesh, verify: str) -> None:
    torch.compiler.reset()
    model = shard_units(MODELS["two_linears"](), mesh)
    forward = torch.compile(model, backend="graphshard", options={"verify": verify})
    forward(example_batch("two_linears")).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_nothing_is_generated(fake_group):
    class GeneratedError(Exception):
        pass

    mesh = fake_group(2)
    generates = mock.patch("torch._inductor.compile_fx.fx_codegen_and_compile", side_effect=GeneratedError)
    with generates, torch._inductor.config.patch(fx_graph_cache=False):
        with interpreted_halves():
            _step(mesh, "full")
        with pytest.raises(BackendCompilerFailed, match="GeneratedError"):
            _step(mesh, "full")


def test_afterwards_inductor_compiles_again():
    from graphshard.backend import compilation

    with interpreted_halves():
        assert compilation.compile_fx_inner is not compile_fx_inner
    assert compilation.compile_fx_inner is compile_fx_inner
