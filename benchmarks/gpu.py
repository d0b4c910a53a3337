"""One GPU, measured in under five minutes: parity, memory, compute, emulated links, CUDA graphs, offload.

    python benchmarks/gpu.py --json out/gpu.json
    python benchmarks/gpu.py --device cpu --parts "links 200,card"     # tries the code with tiny sizes

Each part is a process of its own (gpu_parts.py, gpu_subjects.py). All compile at once, on as many cores as there are;
each holds a lock while it times. Ranks other than one are emulated (emulated_links.py). Nothing needs to be
installed beside torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from gpu_parts import PARTS
from gpu_subjects import Place


def choose(text: str) -> list[str]:
    """Read names of parts; all that others need come first."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    return list(dict.fromkeys(["card", *names]))


def run_part(name: str, device: str, folder: Path) -> None:
    """Write what one part found, or its error, to a file of its own."""
    place = Place(device=torch.device(device), lock=folder / "lock", card=folder / "here.json")
    if place.is_gpu:
        torch.cuda.set_device(0)
    try:
        found: dict[str, Any] = PARTS[name](place)
    except Exception:
        found = {"failed": traceback.format_exc()[-4000:]}
    (folder / f"{name}.result").write_text(json.dumps(found))


def run_all(names: list[str], device: str, limit: float, folder: Path) -> dict[str, Any]:
    """All parts at once; what is not done in time is ended."""
    base = [sys.executable, __file__, "--device", device, "--folder", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    logs = {name: (folder / f"{name}.log").open("w") for name in names}
    running = {
        name: subprocess.Popen([*base, "--part", name], stdout=logs[name], stderr=subprocess.STDOUT, env=env)
        for name in names
    }
    deadline = time.monotonic() + limit
    found: dict[str, Any] = {}
    for name, process in running.items():
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        result = folder / f"{name}.result"
        log = (folder / f"{name}.log").read_text()
        found[name] = json.loads(result.read_text()) if result.exists() else {"failed": log[-3000:] or "no answer"}
    return found


def describe(device: str) -> dict[str, str]:
    """What ran it."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "cuda": str(torch.version.cuda)}


def main() -> int:
    """Prints the results as JSON; 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", type=choose, default=list(PARTS), help="names, a comma apart")
    parser.add_argument("--limit", type=float, default=285, help="seconds for all (default 285)")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="an empty folder for the parts' logs, which stay there")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu tries the code with tiny sizes")
    if options.part:
        run_part(options.part, options.device, options.folder)
        return 0
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = run_all(options.parts, options.device, options.limit, folder)
    result = {**describe(options.device), "seconds": round(time.monotonic() - start, 1), "parts": found}
    text = json.dumps(result, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)
    return int(any("failed" in part for part in found.values()))


if __name__ == "__main__":
    sys.exit(main())
