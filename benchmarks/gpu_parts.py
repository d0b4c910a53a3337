"""What gpu.py measures: one function a part. Each returns plain data, and runs on a CPU with tiny sizes, too."""

from __future__ import annotations

import functools
import importlib.util
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import graphshard
from emulated_links import EmulatedGroup, emulated_ranks
from gpu_memory import live_at_peak
from gpu_subjects import (
    Place,
    Subject,
    gpt_subject,
    llama_subject,
    make,
    policy,
    ratio,
    runner,
    shard,
    time_in_turns,
    timed_first,
)
from graphshard.cost import (
    CalibrationJob,
    CostModel,
    GroupTopology,
    HardwareCard,
    ProbeSizes,
    calibrate,
    load_card,
)
from simple_fsdp import compile_with_overlap, shard_simply

NUM_RANKS = 8
#: Whose links a card of one GPU takes.
LIKE = "h100-sxm"
#: Gbit/s of a rank's link, each rank on a node of its own.
LINKS = (100, 200, 400)
#: Sequences of a step over emulated links.
LINK_BATCH = 2
#: Placed by rules, as `hardware=None` has it: one bucket a unit, overlap where the predicted memory stays.
RULES = {"hardware": None, "bucket": "unit"}
#: What the profiler calls the kernels of each class.
PROFILED = {
    "attention": ("aten::_scaled_dot_product_", "aten::_flash_attention", "aten::_efficient_attention", "aten::_cudnn"),
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
}


def card(place: Place) -> dict[str, Any]:
    """Calibrates this device alone."""
    made = place.card.with_suffix(".part")
    sizes = ProbeSizes.for_device(place.device.type, quick=not place.is_gpu)
    start = time.perf_counter()
    with place.alone():
        found = calibrate(
            CalibrationJob(out=made, device_type=place.device.type, sizes=sizes, like=LIKE), num_ranks=1
        )
    assert found is not None
    # What plans need: a card of GPUs, whose name is that of its file.
    replace(found, name=place.card.stem, device_type="cuda", machine=None, file=None).save(made)
    made.rename(place.card)
    shown = found.as_dict()
    return {
        "seconds": time.perf_counter() - start,
        **{name: shown[name] for name in ("summary", "peak_flops", "vector_flops", "efficiency", "memory_bandwidth",
                                          "host_bandwidth", "kernel_overhead_seconds")},
    }  # fmt: skip


def _one_rank(place: Place) -> None:
    backend = "cpu:gloo,cuda:nccl" if place.is_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def world1(place: Place, subject: Subject) -> dict[str, Any]:
    """One rank, bfloat16 weights: losses, gradients and step time against plain ``torch.compile``."""
    _one_rank(place)
    mesh = init_device_mesh(place.device.type, (1,))
    models = {"plain": make(subject, place).bfloat16()}
    models |= {
        name: shard(make(subject, place).bfloat16(), subject, mesh) for name in ("graphshard", "planned")
    }
    options = {"graphshard": {}, "planned": {"hardware": place.measured_card(), "bucket": "auto"}}
    calls = {"plain": torch.compile(models["plain"], fullgraph=True)}
    calls |= {
        name: torch.compile(models[name], backend="graphshard", fullgraph=True, options=given)
        for name, given in options.items()
    }
    steps = {name: runner(models[name], calls[name], subject.batch) for name in calls}
    firsts: dict[str, float] = {}
    losses = {name: timed_first(name, steps, firsts) for name in steps}
    differ = {name: _largest_difference(models["plain"], models[name]) for name in options}
    with place.alone():
        found = time_in_turns(steps, place)
    return {
        "losses": losses,
        "largest_difference_of_gradients": differ,
        "first_seconds": firsts,
        "step_seconds": {name: statistics.median(each) for name, each in found.items()},
        "ratio": {name: ratio(found, name, "plain") for name in options},
    }


def _largest_difference(plain: nn.Module, sharded: nn.Module) -> float:
    """Of gradients, relative to the largest of each parameter."""
    worst = 0.0
    for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
        found = other.grad.full_tensor().float()
        worst = max(worst, ((found - one.grad.float()).abs().max() / one.grad.float().abs().max()).item())
    return worst


def memory(place: Place, way: str) -> dict[str, Any]:
    """Eight fake ranks: what the allocator was asked for at the peak of a step, without cuBLAS's workspaces.

    ``way``: "unit", "auto", or "budget": as "auto", with a budget of :func:`_budget`.
    """
    subject = llama_subject(place)
    options: dict[str, Any] = {"verify": "full", **RULES}
    if way != "unit":
        options |= {"hardware": place.measured_card(), "bucket": "auto"}
    if way == "budget":
        report = _predicted(place, subject, "unit")
        # The backend's budget leaves out the optimizer's state and the reduced gradients.
        always = report.memory.categories["optimizer"] + report.memory.categories["gradients"]
        options["memory_budget"] = _budget(report) - always
    with emulated_ranks(NUM_RANKS, place.device, lambda kind, num_bytes: 0.0):
        mesh = init_device_mesh(place.device.type, (NUM_RANKS,))
        model = shard(make(subject, place), subject, mesh, mp_policy=policy())
        call = torch.compile(model, backend="graphshard", fullgraph=True, options=options)
        step = runner(model, call, subject.batch)
        for _ in range(3):
            step()
        held = sum(parameter.to_local().nbytes for parameter in model.parameters())
        held += sum(each.nbytes for each in subject.batch)
        peak = min(_peak_bytes(model, step, place) for _ in range(3))
        return {"measured_bytes": held + peak, "live_at_peak": live_at_peak(step) if place.is_gpu else []}


def _budget(report: graphshard.Report) -> int:
    """Between what parameters, optimizer and gradients always take and the peak of the default schedule."""
    return int(0.85 * report.memory.peak_bytes)


def predict_memory(place: Place, way: str) -> dict[str, Any]:
    """What ``inspect`` says of :func:`memory`; the optimizer's state, which is not there, is left out."""
    subject = llama_subject(place)
    given: dict[str, Any] = {"plan": "unit" if way == "unit" else "auto"}
    if way == "budget":
        given["memory_budget"] = _budget(_predicted(place, subject, "unit"))
    report = _predicted(place, subject, **given)
    categories = {name: size for name, size in report.memory.categories.items() if size}
    return {
        "predicted_bytes": report.memory.peak_bytes - categories["optimizer"],
        "categories": categories,
        "budget": given.get("memory_budget"),
    }


def predict_links(place: Place, gbits: int) -> dict[str, Any]:
    """What ``inspect`` says of :func:`links`."""
    card = _with_links(place.measured_card(), gbits)
    subject = llama_subject(place, batch=LINK_BATCH)
    reports = {plan: _predicted(place, subject, plan, hardware=card) for plan in ("unit", "auto")}
    return {
        "predicted_step_seconds": {plan: report.step_seconds for plan, report in reports.items()},
        "predicted_exposed_seconds": {plan: report.exposed_seconds for plan, report in reports.items()},
    }


def _predicted(place: Place, subject: Subject, plan: str, **settings: Any) -> graphshard.Report:
    with torch.device("meta"):
        model = subject.make()
    tokens = tuple(torch.empty_like(each, device="meta") for each in subject.batch)
    settings.setdefault("hardware", place.measured_card())
    return graphshard.inspect(
        model, tokens, mesh={"shard": NUM_RANKS}, units=[subject.pattern], mp_policy=policy(), plan=plan, **settings
    )


def _peak_bytes(model: nn.Module, step: Callable[[], object], place: Place) -> int:
    """What a step asks of the allocator above what is there at its start, gradients included; 0 on a CPU."""
    for parameter in model.parameters():
        parameter.grad = None
    if not place.is_gpu:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"]) - before


def compute(place: Place) -> dict[str, Any]:
    """The cost model against the profiler: seconds of a step's kernels by class, unsharded."""
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    from predicted_compute import predicted_by_class

    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        graphs.append(gm)
        return compile_fx_inner(gm, inputs, **kwargs)

    subject = llama_subject(place, layers=2)
    model = make(subject, place).bfloat16()
    call = torch.compile(model, fullgraph=True, backend=lambda gm, inputs: compile_fx(gm, inputs, inner_compile=keep))
    step = runner(model, call, subject.batch)
    with functorch_config.patch(enable_autograd_cache=False):
        step()
    by_class = {
        name: dict(predicted_by_class(graphs, each))
        for name, each in (("measured card", place.measured_card()), (LIKE, load_card(LIKE)))
    }
    with place.alone():
        for _ in range(3):
            step()
        (seconds,) = (statistics.median(each) for each in time_in_turns({"step": step}, place).values())
        measured = _kernels_by_class(step, place)
    return {"predicted": by_class, "measured": measured, "step_seconds": seconds}


def _kernels_by_class(step: Callable[[], object], place: Place, steps: int = 4) -> dict[str, float]:
    """Seconds that the device spends in the kernels of each class, in a step."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.is_gpu else [])]
    with profile(activities=activities) as record:
        for _ in range(steps):
            step()
        place.synchronize()
    found: Counter[str] = Counter()
    for event in record.key_averages():
        micro = event.self_device_time_total if place.is_gpu else event.self_cpu_time_total
        if place.is_gpu and event.device_type != torch.autograd.DeviceType.CPU:
            found["all"] += micro
            continue
        for name, starts in PROFILED.items():
            if event.key.startswith(starts):
                found[name] += micro
    return {name: micro * 1e-6 / steps for name, micro in found.items()}


def links(place: Place, gbits: int) -> dict[str, Any]:
    """Emulated links: step time of graphshard and FSDP2 in turns, exposed communication against the plan's."""
    subject = llama_subject(place, batch=LINK_BATCH)
    link_card = _with_links(place.measured_card(), gbits)
    prices = CostModel(card=link_card, groups={"all": GroupTopology(num_ranks=NUM_RANKS, ranks_per_node=1)})

    def price(kind: str, num_bytes: int) -> float:
        return prices.collective_seconds(kind, num_bytes, "all")

    with emulated_ranks(NUM_RANKS, place.device, price) as group:
        mesh = init_device_mesh(place.device.type, (NUM_RANKS,))
        steps = {"fsdp2": _fsdp2(subject, place, mesh)}
        if place.is_gpu:
            simple = shard_simply(make(subject, place), mesh.get_group())
            steps["inductor"] = runner(simple, compile_with_overlap(simple, price), subject.batch)
        for name, given in {"unit": RULES, "auto": {"hardware": link_card, "bucket": "auto"}}.items():
            model = shard(make(subject, place), subject, mesh, mp_policy=policy())
            call = torch.compile(model, backend="graphshard", fullgraph=True, options=given)
            steps[name] = runner(model, call, subject.batch)
        firsts: dict[str, float] = {}
        losses = {name: timed_first(name, steps, firsts) for name in steps}
        with place.alone():
            found = time_in_turns(steps, place, rounds=2)
            asked = {name: _asked(group, step) for name, step in steps.items()}
            group.price = lambda kind, num_bytes: 0.0
            free = time_in_turns(steps, place, rounds=1)
            torch.cuda.empty_cache()
    step_seconds = {name: statistics.median(each) for name, each in found.items()}
    without = {name: statistics.median(each) for name, each in free.items()}
    return {
        "losses": losses,
        "first_seconds": firsts,
        "step_seconds": step_seconds,
        "without_links_seconds": without,
        "link_seconds": {name: sum(seconds for _, _, seconds in rows) for name, rows in asked.items()},
        "collectives": {name: len(rows) for name, rows in asked.items()},
        "ratio_to_fsdp2": {name: ratio(found, name, "fsdp2") for name in steps if name != "fsdp2"},
        "exposed_seconds": {name: step_seconds[name] - without[name] for name in steps},
    }


def _with_links(measured: HardwareCard, gbits: int) -> HardwareCard:
    """Each rank on a node of its own, whose link moves so many Gbit/s."""
    link = replace(measured.inter_node, bandwidth=gbits * 1e9 / 8)
    return replace(measured, ranks_per_node=1, inter_node=link, name=f"emulated-{gbits}", file=None)


def _asked(group: EmulatedGroup, step: Callable[[], object]) -> list[tuple[str, int, float]]:
    group.log.rows, group.log.is_on = [], True
    step()
    group.log.is_on = False
    return group.log.rows


def _fsdp2(subject: Subject, place: Place, mesh: Any) -> Callable[[], Tensor]:
    """FSDP2 with each unit compiled, then the root: torchtitan's order."""
    model = make(subject, place)
    mixed = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in subject.units(model):
        unit.compile(fullgraph=True)
        torch_fsdp.fully_shard(unit, mesh=mesh, mp_policy=mixed)
    torch_fsdp.fully_shard(model, mesh=mesh, mp_policy=mixed)
    return runner(model, model, subject.batch)


def cuda_graphs(place: Place, plan: str) -> dict[str, Any]:
    """Inductor's CUDA graphs around a step of eight emulated ranks: losses with and without."""
    subject = llama_subject(replace(place, device=torch.device("cpu")))
    subject = replace(subject, batch=tuple(each.to(place.device) for each in subject.batch))
    hardware = {"hardware": place.measured_card(), "bucket": "auto"} if plan == "auto" else RULES
    with emulated_ranks(NUM_RANKS, place.device, lambda kind, num_bytes: 0.0):
        mesh = init_device_mesh(place.device.type, (NUM_RANKS,))
        losses: dict[str, list[float]] = {}
        steps: dict[str, Callable[[], Tensor]] = {}
        for name, given in {"without": {}, "with": {"triton.cudagraphs": True}}.items():
            model = shard(make(subject, place), subject, mesh)
            call = torch.compile(
                model, backend="graphshard", fullgraph=True, options={**hardware, "inductor": given}
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            step = runner(model, call, subject.batch)
            losses[name] = []
            for _ in range(5):
                losses[name].append(step().item())
                optimizer.step()
            steps[name] = step
        with place.alone():
            found = time_in_turns(steps, place, rounds=2)
    return {"losses": losses, "step_seconds": {name: statistics.median(each) for name, each in found.items()}}


def offload(place: Place) -> dict[str, Any]:
    """CPU offload with pinned memory on eight emulated ranks: what a step takes longer, and what its copies take."""
    subject, host = llama_subject(place, layers=2), replace(place, device=torch.device("cpu"))
    steps, held = {}, 0
    with emulated_ranks(NUM_RANKS, place.device, lambda kind, num_bytes: 0.0):
        mesh = init_device_mesh(place.device.type, (NUM_RANKS,))
        for name, settings in {"device": {}, "host": {"offload_policy": graphshard.CPUOffloadPolicy()}}.items():
            model = make(subject, place if name == "device" else host)
            shard(model, subject, mesh, mp_policy=policy(), **settings)
            held = sum(parameter.to_local().nbytes for parameter in model.parameters())
            call = torch.compile(model, backend="graphshard", fullgraph=True)
            steps[name] = runner(model, call, subject.batch)
        losses = {name: step().item() for name, step in steps.items()}
        with place.alone():
            found = time_in_turns(steps, place, rounds=2)
    return {
        "losses": losses,
        "step_seconds": {name: statistics.median(each) for name, each in found.items()},
        "copies_seconds": 2 * held / place.measured_card().host_bandwidth,
    }


def float8(place: Place) -> dict[str, Any]:
    """Linears of torchao in float8 on links of 200 Gbit/s, gathered in bfloat16 or in float8, against bfloat16."""
    if importlib.util.find_spec("torchao") is None:
        return {"skipped": "torchao is not installed"}
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    subject = llama_subject(place, layers=2)
    card = _with_links(place.measured_card(), 200)
    prices = CostModel(card=card, groups={"all": GroupTopology(num_ranks=NUM_RANKS, ranks_per_node=1)})
    steps, first = {}, {}
    with emulated_ranks(
        NUM_RANKS, place.device, lambda kind, num_bytes: prices.collective_seconds(kind, num_bytes, "all")
    ) as group:
        mesh = init_device_mesh(place.device.type, (NUM_RANKS,))
        for name in ("bfloat16", "float8", "float8 gathers"):
            model = make(subject, place)
            if name != "bfloat16":
                config = Float8LinearConfig(
                    enable_fsdp_float8_all_gather=name == "float8 gathers", emulate=not place.is_gpu
                )
                convert_to_float8_training(
                    model, config=config, module_filter_fn=lambda module, path: path.startswith("layers.")
                )
            shard(model, subject, mesh, mp_policy=policy())
            options = {"hardware": card, "bucket": "auto"}
            call = torch.compile(model, backend="graphshard", fullgraph=True, options=options)
            steps[name] = runner(model, call, subject.batch)
        losses = {name: timed_first(name, steps, first) for name in steps}
        with place.alone():
            found = time_in_turns(steps, place, rounds=2)
            asked = {name: _asked(group, step) for name, step in steps.items()}
    return {
        "losses": losses,
        "first_seconds": first,
        "step_seconds": {name: statistics.median(each) for name, each in found.items()},
        "gathered_bytes": {
            name: sum(size for kind, size, _ in rows if kind == "all_gather") for name, rows in asked.items()
        },
    }


def _parts() -> dict[str, Callable[[Place], dict[str, Any]]]:
    parts: dict[str, Callable[[Place], dict[str, Any]]] = {"card": card}
    for gbits in LINKS:
        parts[f"links {gbits}"] = functools.partial(links, gbits=gbits)
        parts[f"predict links {gbits}"] = functools.partial(predict_links, gbits=gbits)
    for way in ("unit", "auto", "budget"):
        parts[f"memory {way}"] = functools.partial(memory, way=way)
        parts[f"predict memory {way}"] = functools.partial(predict_memory, way=way)
    parts["world1 gpt"] = lambda place: world1(place, gpt_subject(place))
    parts["world1 llama"] = lambda place: world1(place, llama_subject(place, layers=2))
    parts["compute"] = compute
    for plan in ("unit", "auto"):
        parts[f"cudagraphs {plan}"] = functools.partial(cuda_graphs, plan=plan)
    parts["offload"] = offload
    parts["float8"] = float8
    return parts


#: Name to function.
PARTS = _parts()
