"""Predicted against published: Llama-3.1-8B on H100s, local batch 2, sequence 8192, selective checkpointing.

Published: torchtitan's performance page of December 2024 (H100 of 96 GB, limited to 500 W, 8 a node, RoCE of
400 Gb/s), rows "FSDP + compile". Its selective checkpointing saves attention and every second matrix product. One
number is fitted, on the first row: what share of the card's peak a chip limited to 500 W has. The other row's
time and both rows' memory are predictions. There the loss is not compiled, so its float32 steps are ops of their
own here, each of which stores its result.

The published memory is what CUDA's allocator had reserved under FSDP2. `reserved_by_fsdp2` adds to the live bytes of
our graph what FSDP2 does otherwise, from its source: nothing of it is fitted.

    python benchmarks/published.py [--layers 32]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import graphshard
from graphshard.cost import HardwareCard, load_card
from graphshard.report.data import CATEGORIES

sys.path.append(str(Path(__file__).parents[1] / "examples"))
llama_model = importlib.import_module("llama_model")

GIB = 2**30
TOKENS = 2 * 8192

#: GPUs: tokens a second and GPU, peak GiB.
PUBLISHED = {8: (6667, 77.0), 128: (6514, 62.0)}

_aten = torch.ops.aten
_SAVED = {
    _aten.mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _step_of_loss(name, run, like):
    """An op that no compiler fuses: ``run`` eagerly, a result of shape and dtype as ``like`` says."""
    op = torch.library.custom_op(f"published::{name}", mutates_args=())(run)
    op.register_fake(like)
    return op


def _to_float(x: Tensor) -> Tensor:
    return x.float()


def _to_bfloat16(grad: Tensor) -> Tensor:
    return grad.bfloat16()


def _log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def _log_softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    return _aten._log_softmax_backward_data(grad, y, -1, torch.float32)


def _nll(y: Tensor, targets: Tensor) -> Tensor:
    return -y.gather(1, targets[:, None]).mean()


def _nll_backward(grad: Tensor, y: Tensor, targets: Tensor) -> Tensor:
    return torch.zeros_like(y).scatter(1, targets[:, None], -1.0 / len(y)) * grad


to_float = _step_of_loss("to_float", _to_float, lambda x: torch.empty_like(x, dtype=torch.float32))
to_bfloat16 = _step_of_loss("to_bfloat16", _to_bfloat16, lambda x: torch.empty_like(x, dtype=torch.bfloat16))
log_softmax = _step_of_loss("log_softmax", _log_softmax, torch.empty_like)
log_softmax_backward = _step_of_loss(
    "log_softmax_backward", _log_softmax_backward, lambda grad, y: torch.empty_like(y)
)
nll = _step_of_loss("nll", _nll, lambda y, targets: y.new_empty(()))
nll_backward = _step_of_loss("nll_backward", _nll_backward, lambda grad, y, targets: torch.empty_like(y))

to_float.register_autograd(lambda ctx, grad: to_bfloat16(grad))
log_softmax.register_autograd(
    lambda ctx, grad: log_softmax_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)
nll.register_autograd(
    lambda ctx, grad: (nll_backward(grad, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class SelectiveLlama(llama_model.Llama):
    """Saves attention and every second product of each layer."""

    def run_layer(self, layer: nn.Module, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        return checkpoint(layer, x, cosine, sine, use_reentrant=False, context_fn=_contexts)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return nll(log_softmax(to_float(logits)), targets)


def _contexts():
    seen = [0, 0]

    def policy(ctx, op, *args, **kwargs):
        if op is _aten.mm.default:
            seen[ctx.is_recompute] += 1
            if seen[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def limited(card: HardwareCard, share: float) -> HardwareCard:
    """The card with this share of its peaks."""
    peaks = {dtype: share * peak for dtype, peak in card.peak_flops.items()}
    return replace(card, peak_flops=peaks)


def predict(num_gpus: int, card: HardwareCard, num_layers: int) -> graphshard.Report:
    """The report of one row."""
    config = replace(llama_model.LLAMA_3_8B, num_layers=num_layers)
    with torch.device("meta"):
        model, tokens = SelectiveLlama(config), torch.zeros(2, 8192, dtype=torch.long)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return graphshard.inspect(
        model, (tokens, tokens), mesh={"shard": num_gpus}, hardware=card, units=["layers.*"], mp_policy=policy
    )


def reserved_by_fsdp2(report: graphshard.Report) -> dict[str, float]:
    """GiB that CUDA's allocator has to reserve for this step under FSDP2, as torchtitan calls it.

    A stream's memory stays in the pool of that stream: what FSDP2 allocates in its streams for gathers (copies in)
    and for reduce-scatters adds up with the peak of the compute stream, whenever it is live. At that peak, the
    beginning of the backward, FSDP2 also holds the root unit as a whole, of which our graph has freed the
    embedding, and the last layer, which torchtitan does not reshard.
    """
    itemsize = torch.bfloat16.itemsize
    gathered = {unit.name: unit.num_elements * itemsize for unit in report.model.units}
    root, last = gathered.pop("root"), list(gathered.values())[-1]
    peak = dict(zip(CATEGORIES, max((half.peak.num_bytes for half in report.halves), key=sum), strict=True))
    (gradients,) = (
        dict(zip(CATEGORIES, half.peak.num_bytes, strict=True))["gradients"]
        for half in report.halves
        if half.name == "optimizer"
    )
    parts = {
        "live in our graph": report.memory.peak_bytes,
        "the rest of the root, and the last layer, gathered": root - peak["gathered"] + last,
        "pool of gathers: root and one layer": root + last,
        "pool of reduce-scatters: gradients": gradients - peak["gradients"],
    }
    return {name: num_bytes / GIB for name, num_bytes in parts.items()}


def main() -> None:
    """Fits one number on the first row and prints all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    card = load_card("h100-sxm")
    first = min(PUBLISHED)
    seconds = functools.partial(_seconds, num_gpus=first, card=card, num_layers=options.layers)
    whole, part = seconds(1.0), seconds(0.75)
    slope = (part - whole) / (1 / 0.75 - 1)  # seconds are nearly linear in 1 / share
    share = slope / (TOKENS / PUBLISHED[first][0] - whole + slope)
    print(f"with the whole peak: {TOKENS / whole:.0f} tokens/s a GPU on {first}; fitted share {share:.3f}")
    print("| GPUs | tokens/s published | predicted | error | GiB published | live | with FSDP2's pools | error |")
    print("|---|---|---|---|---|---|---|---|")
    for num_gpus, (speed, memory) in PUBLISHED.items():
        report = predict(num_gpus, limited(card, share), options.layers)
        parts = reserved_by_fsdp2(report)
        found, live, reserved = TOKENS / report.step_seconds, report.memory.peak_bytes / GIB, sum(parts.values())
        note = " (fitted)" if num_gpus == first else ""
        print(
            f"| {num_gpus} | {speed} | {found:.0f}{note} | {100 * (found / speed - 1):+.1f} % "
            f"| {memory} | {live:.1f} | {reserved:.1f} | {100 * (reserved / memory - 1):+.1f} % |"
        )
        print("  ", {name: round(size / GIB, 2) for name, size in report.memory.categories.items() if size})
        print("  ", {name: round(size, 2) for name, size in parts.items()})


def _seconds(share: float, *, num_gpus: int, card: HardwareCard, num_layers: int) -> float:
    return predict(num_gpus, limited(card, share), num_layers).step_seconds


if __name__ == "__main__":
    main()
