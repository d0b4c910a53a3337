"""The shape of the project, read from its source: layers, private torch names, module state.

Every rule is a function of source text, tried on small snippets that break it and then on the project.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent

#: The rooms, lowest first. A room may import from the rooms in front of its own line; those of one line are apart.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("graphshard.periods", "graphshard.tensor_trees", "graphshard.units"),
    (
        "graphshard.errors", "graphshard._compat", "graphshard._compat_autograd", "graphshard._compat_composable",
        "graphshard._compat_dtensor", "graphshard._compat_frames", "graphshard._compat_fsdp1",
        "graphshard._compat_gloo", "graphshard._compat_groups", "graphshard._compat_kept", "graphshard.machine",
        "graphshard.processes", "graphshard.progress", "graphshard.shown_progress",
    ),
    ("graphshard.budget_text", "graphshard.setting_checks", "graphshard.user_cache"),
    ("graphshard.ir",),
    (
        "graphshard.coordination", "graphshard.memory", "graphshard.cost", "graphshard.parallel",
        "graphshard.propagation",
    ),
    ("graphshard.pipeline",),
    ("graphshard.planner.search",),
    ("graphshard.planner",),
    ("graphshard.passes",),
    ("graphshard.fsdp.state",),
    ("graphshard.fsdp",),
    ("graphshard.fsdp1", "graphshard.hardware"),
    ("graphshard.backend.inductor",),
    ("graphshard.backend.halves",),
    ("graphshard.backend.second_start",),
    ("graphshard.backend",),
    ("graphshard.capture", "graphshard.precompile"),
    ("graphshard.report",),
    ("graphshard.inspection",),
    ("graphshard.inspection.formulas",),
    ("graphshard.testing", "graphshard"),
    ("graphshard.cli",),
    ("graphshard.__main__",),
)

#: What a room may hold before it is two rooms, and a module before it is two ideas.
MOST_FILES, MOST_LINES = 18, 450

#: The longest chain of imports from the command line down.
MOST_FLOORS = 14

#: Modules that may use private torch names.
MAY_BE_PRIVATE = ("graphshard._compat", "graphshard.backend.inductor", "graphshard.testing")

#: Modules that import behind a door: what a door would load with it takes seconds.
LAZY = {"graphshard"}

#: Private torch names that every module may use, with the reason.
TOLERATED_PRIVATE = {
    "torch._ops.OpOverload": "the type of every op in a graph has no public name",
}

#: Memoised functions, with the reason why their memory is harmless.
TOLERATED_CACHES = {
    "graphshard.coordination.known_steps._steps_by_group": "held weakly, by process group; gone with the group",
    "graphshard.ir.handles._handles_by_memory": "held weakly, by memory; gone with the unit",
    "graphshard.ir.op_traits._can_be_viewed": "a function of numbers; asked of every reshape many times",
    "graphshard.ir.op_traits._traits": "what an op is never changes; asked of every node many times",
    "graphshard.machine._cpu_text": "what the system says of its processor; asked of every plan",
    "graphshard.memory.scratch_calls.may_run_library": "what an op is never changes; asked of every node many times",
    "graphshard.memory.scratch_measured._measured": "what a call allocates on this machine; a kernel runs once for it",
    "graphshard._compat.is_composite": "how torch implements an op; asked of every node",
    "graphshard._compat_dtensor._groups_by_mesh": "held weakly, by mesh; gone with the mesh",
    "graphshard._compat_frames.leave_frames_to_python": "marks the functions of a package for Dynamo; returns nothing",
    "graphshard._compat_gloo._serve_plain_gathers": "registers a kernel with torch, once a process; returns nothing",
    "graphshard.cost.flops._count": "a formula of shapes; the blocks of a model are alike",
    "graphshard.cost.flops._count_parts": "a function of shapes; the blocks of a model are alike",
    "graphshard.fsdp.sharded_class.sharded_class": "equal blocks must share one class; a pure function",
    "graphshard.fsdp.sharded_class.offer_backend": "registers the backend with torch, once a process; returns nothing",
    "graphshard.fsdp.sharded_class.watch_frames": "marks our functions for Dynamo, once a process; returns nothing",
    "graphshard.fsdp.state.watched_optimizers.watch_optimizers": "registers a hook, once a process; returns nothing",
}

MUTATORS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove",
    "setdefault", "sort", "update",
}  # fmt: skip
CONTAINERS = {"dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque", "WeakKeyDictionary",
              "WeakValueDictionary", "WeakSet"}  # fmt: skip


def source_files() -> dict[str, Path]:
    """Module name to file, for everything that is installed."""
    files = {}
    for folder, package in (("graphshard", "graphshard"), ("passes", "graphshard.passes")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            files[".".join(part for part in parts if part != "__init__")] = path
    return files


FILES = source_files()
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}
MODULES = [pytest.param(name, id=name) for name in FILES]


@functools.cache
def parsed(source: str) -> ast.Module:
    """Each file is looked at by several tests."""
    return ast.parse(source)


@functools.cache
def exported_by(door: str) -> set[str]:
    """The names in ``__all__`` of a room's door; a module may share its name with a function it exports."""
    if door not in PACKAGES:
        return set()
    for node in parsed(FILES[door].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


@functools.cache
def imported_modules(name: str, source: str) -> set[str]:
    """Modules of the project that ``source``, the module ``name``, imports anywhere in its text."""
    base = name if name in PACKAGES else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = base.rsplit(".", node.level - 1)[0] if node.level else ""
            stem = ".".join(filter(None, (parent, node.module)))
            for alias in node.names:
                is_module = f"{stem}.{alias.name}" in FILES and alias.name not in exported_by(stem)
                found.add(f"{stem}.{alias.name}" if is_module else stem)
    return {module for module in found if module in FILES}


def room_of(name: str) -> str:
    """The room a module belongs to: the longest that its name begins with."""
    rooms = [room for line in ROOMS for room in line if f"{name}.".startswith(f"{room}.") and room != "graphshard"]
    return max(rooms, key=len, default="graphshard")


def upward_imports(name: str, source: str) -> list[str]:
    """Imports of ``source`` from a room that is not below its own."""
    floor = {room: index for index, line in enumerate(ROOMS) for room in line}
    own = room_of(name)
    return [
        f"{name} imports {target}"
        for target in sorted(imported_modules(name, source))
        if room_of(target) != own and floor[room_of(target)] >= floor[own]
    ]


def deep_imports(name: str, source: str) -> list[str]:
    """Imports of ``source`` from a module behind the door of another room."""
    top = {room for line in ROOMS for room in line}
    return [
        f"{name} imports {target}: import it from {room_of(target)}"
        for target in sorted(imported_modules(name, source))
        if room_of(target) != room_of(name) and target not in top
    ]


@functools.cache
def import_graph() -> nx.DiGraph:
    """Which file imports which; a name that a door exports counts as an import of the door's file."""
    graph = nx.DiGraph()
    graph.add_nodes_from(FILES)
    for name, path in FILES.items():
        graph.add_edges_from((name, target) for target in imported_modules(name, path.read_text()) if target != name)
    return graph


def room_graph() -> nx.DiGraph:
    graph = nx.DiGraph()
    for name, target in import_graph().edges:
        if room_of(name) != room_of(target):
            graph.add_edge(room_of(name), room_of(target))
    return graph


def test_every_module_has_a_room():
    rooms = {room for line in ROOMS for room in line}
    assert {room_of(name) for name in FILES} == rooms


def test_every_package_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(PACKAGES)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down(name):
    found = upward_imports(name, FILES[name].read_text())
    assert not found


@pytest.mark.parametrize("name", MODULES)
def test_rooms_are_entered_by_their_doors(name):
    assert name in LAZY or not deep_imports(name, FILES[name].read_text())


def test_no_files_import_in_a_circle():
    inside = import_graph()
    assert list(nx.simple_cycles(inside)) == []


def test_there_are_few_floors():
    floors = nx.dag_longest_path(room_graph())
    assert len(floors) < MOST_FLOORS, floors


@pytest.mark.parametrize("room", sorted({room_of(name) for name in FILES} - {"graphshard.passes"}))
def test_rooms_are_small(room):
    files = [name for name in FILES if room_of(name) == room and name not in PACKAGES]
    assert len(files) <= MOST_FILES, files


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_short(name):
    assert len(FILES[name].read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize(
    "source",
    [
        "import graphshard.backend",
        "from graphshard.backend import graphshard",
        "from ..backend import graphshard",
        "from .. import backend",
        "from graphshard import passes",
        "def later():\n    from ..passes import MergeUnshards",
    ],
)
def test_an_upward_import_is_found(source):
    assert upward_imports("graphshard.pipeline.facts", source)


def test_an_import_between_rooms_of_one_line_is_found():
    assert upward_imports("graphshard.memory.model", "from ..cost import CostModel")
    assert not upward_imports("graphshard.memory.model", "from .budget import step_bytes")


def test_a_deep_import_is_found():
    assert deep_imports("graphshard.pipeline.facts", "from ..ir.mesh import MeshAxis")
    assert not deep_imports("graphshard.pipeline.facts", "from ..ir import MeshAxis\nfrom .context import PassContext")


def test_a_submodule_imports_relative_to_its_package():
    assert imported_modules("graphshard.testing.capture", "from ..backend import X\nfrom .ranks import Y") == {
        "graphshard.backend",
        "graphshard.testing.ranks",
    }


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Local name to dotted torch name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {local: full for local, full in found.items() if full.split(".")[0] in ("torch", "functorch")}


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """The torch name an attribute chain stands for."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return None
    return ".".join([aliases[node.id], *reversed(parts)])


def _torch_names(source: str) -> Iterator[str]:
    tree = parsed(source)
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := _dotted(node, aliases)):
            yield name


def private_torch_names(source: str) -> set[str]:
    """Names of torch with an underscore in them, but those of ops (`torch.ops._c10d_functional`)."""
    found = set()
    for name in _torch_names(source):
        root, *parts = name.split(".")
        is_private = any(part.startswith("_") and not part.startswith("__") for part in parts)
        if root not in ("torch", "functorch") or not is_private or parts[0] == "ops":
            continue
        if not any(tolerated == name or tolerated.startswith(name + ".") for tolerated in TOLERATED_PRIVATE):
            found.add(name)
    return found


@pytest.mark.parametrize("name", MODULES)
def test_private_torch_names_live_in_the_compat_files(name):
    found = private_torch_names(FILES[name].read_text())
    assert not found or name.startswith(MAY_BE_PRIVATE)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._inductor.config",
        "import torch._dynamo as dynamo",
        "from torch._guards import detect_fake_mode",
        "from torch.distributed.distributed_c10d import _world",
        "import torch\ntorch._dynamo.reset()",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "from torch import _C",
        "from torch._ops import OpOverloadPacket",
    ],
)
def test_a_private_torch_name_is_found(source):
    assert private_torch_names(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops._c10d_functional.wait_tensor",
        "import torch\nisinstance(x, torch._ops.OpOverload)",
        "from __future__ import annotations",
        "from . import _compat",
        "self._local = value._local_tensor",
    ],
)
def test_other_underscores_are_fine(source):
    assert not private_torch_names(source)


def torch_assignments(source: str) -> list[str]:
    """Assignments to attributes of torch."""
    tree = parsed(source)
    aliases = _aliases(tree)
    targets = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    return [name for target in targets if (name := _dotted(target, aliases))]


@pytest.mark.parametrize("name", MODULES)
def test_torch_is_not_patched(name):
    found = torch_assignments(FILES[name].read_text())
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.compile = mine",
        "import torch._dynamo.config as config\nconfig.cache_size_limit += 1",
    ],
)
def test_a_patch_is_found(source):
    assert torch_assignments(source)


def _is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return called in CONTAINERS
    return isinstance(value, (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp))


def _module_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from _module_statements(getattr(node, inner, []))


def mutable_state(name: str, source: str) -> list[str]:
    """Module state that may change: containers not named as constants, constants changed, globals, caches."""
    tree = parsed(source)
    problems = []
    for node in _module_statements(tree.body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if _is_container(getattr(node, "value", None)):
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            problems += [
                f"{word} is not a constant" for word in names if not word.isupper() and word != "__all__"
            ]
        for decorator in getattr(node, "decorator_list", []):
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            is_cache = getattr(called, "attr", getattr(called, "id", "")) in ("cache", "lru_cache")
            if is_cache and f"{name}.{node.name}" not in TOLERATED_CACHES:
                problems.append(f"{node.name} remembers its results")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            problems.append(f"global {', '.join(node.names)}")
        changed = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed = node.func.value
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            changed = node.value
        elif isinstance(node, ast.AugAssign):
            changed = node.target
        if isinstance(changed, ast.Name) and changed.id.isupper():
            problems.append(f"{changed.id} is changed")
    return problems


@pytest.mark.parametrize("name", MODULES)
def test_no_module_level_mutable_state(name):
    found = mutable_state(name, FILES[name].read_text())
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "registry = {}",
        "_seen: set[int] = set()",
        "if True:\n    pending = []",
        "NAMES = {}\ndef f():\n    NAMES['a'] = 1",
        "NAMES = {}\ndef f():\n    del NAMES['a']",
        "from .facts import CHECKERS\nCHECKERS.update({})",
        "NAMES = []\nNAMES += ['a']",
        "def f():\n    global count\n    count = 1",
        "import functools\n@functools.cache\ndef f(): ...",
        "from functools import lru_cache\n@lru_cache(maxsize=None)\ndef f(): ...",
        "from collections import defaultdict\nby_name = defaultdict(list)",
    ],
)
def test_mutable_state_is_found(source):
    assert mutable_state("graphshard.example", source)


@pytest.mark.parametrize(
    "source",
    [
        "_NAMES = {'a': 1}",
        "__all__ = ['a']",
        "def f():\n    found = {}\n    found['a'] = 1",
        "class A:\n    def f(self):\n        self.items = []",
        "size = 3",
    ],
)
def test_constants_and_locals_are_fine(source):
    assert not mutable_state("graphshard.example", source)


def test_tolerated_lists_name_what_exists():
    for name in TOLERATED_CACHES:
        module, _, function = name.rpartition(".")
        assert f"def {function}(" in FILES[module].read_text()


@pytest.mark.parametrize("name", MODULES)
def test_file_names_say_what_is_inside(name):
    assert not {"utils", "util", "helpers", "helper", "common", "misc", "manager"} & set(name.split("."))


def test_the_front_end_loads_no_compiler_of_graphs():
    """Training without a compiler starts without it. Dynamo is loaded by torch's optimizers in any case."""
    heavy = ("torch._functorch.aot_autograd", "torch._inductor.codecache", "torch._inductor.compile_fx", "rich")
    ours = ("graphshard.backend", "graphshard.planner", "graphshard.pipeline", "graphshard.inspection")
    script = (
        "import sys, graphshard\n"
        "graphshard.fully_shard, graphshard.FullyShardedDataParallel\n"
        f"print([name for name in {heavy + ours} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_passes_folder_is_not_a_package_of_its_own():
    """Imported from the repository root it would load every class twice."""
    done = subprocess.run([sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: import this package as graphshard.passes, not as 'passes'" in done.stderr


def test_pass_files_are_named_after_their_pass():
    from graphshard.passes import KNOWN

    files = {name.rpartition(".")[2] for name in FILES if name.startswith("graphshard.passes.")}
    assert files == set(KNOWN)
    for name, step in KNOWN.items():
        assert step.__module__ == f"graphshard.passes.{name}"
        assert step.__name__ == "".join(word.capitalize() for word in name.split("_"))
