"""The shape of the project, read from its source: layers, private torch names, module state.

Every rule is a function of source text, tried on small snippets that break it and then on the project.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: All modules, lowest layer first. A module may import from lower layers only.
LAYERS: tuple[tuple[str, ...], ...] = (
    # errors, and the words of the mesh and the parameters
    (
        "graphshard.errors",
        "graphshard.params",
        "graphshard.mesh",
        "graphshard._compat",
        "graphshard.versions",
        "graphshard.prices",
        "graphshard.rows",
        "graphshard.processes",
        "graphshard.sizes",
    ),
    ("graphshard.budgets",),
    # how compiled code waits
    ("graphshard.released",),
    # how ranks that wait learn that another has stopped
    ("graphshard.refusals", "graphshard.telling"),
    # where another parallelism has the pieces of a parameter
    ("graphshard.outer_layout",),
    # ops, collectives, typed edits
    ("graphshard.buckets", "graphshard.calls", "graphshard.user_comms", "graphshard.lockstep"),
    (
        "graphshard.collectives",
        "graphshard.rewrite",
        "graphshard.casts",
        "graphshard.spread",
        "graphshard.scratch.convolutions",
        "graphshard.scratch.products",
    ),
    ("graphshard.scratch.attention", "graphshard.traits"),
    ("graphshard.scratch",),
    # a unit and its state; the ops find it
    ("graphshard.together", "graphshard.extensions"),
    ("graphshard.unit",),
    ("graphshard.laying_out", "graphshard.uncompiled"),
    ("graphshard.ops",),
    # what can be said about a graph
    (
        "graphshard.graph_text",
        "graphshard.context",
        "graphshard.provenance",
        "graphshard.emitted",
        "graphshard.facts",
        "graphshard.gpu_attention",
        "graphshard.memory",
        "graphshard.repeats",
    ),
    ("graphshard.repeat_export", "graphshard.donations"),
    # what a graph costs on a machine
    ("graphshard.cost.curves", "graphshard.cost.products"),
    ("graphshard.cost.flops",),
    ("graphshard.cost.cards", "graphshard.cost.kernels"),
    (
        "graphshard.cost.compute",
        "graphshard.cost.links",
        "graphshard.cost.overlaps",
        "graphshard.cost.probes",
        "graphshard.cost.tables",
    ),
    ("graphshard.cost.calibrate", "graphshard.cost.model"),
    ("graphshard.cost",),
    # where collectives may stand, and what that costs
    ("graphshard.placement",),
    ("graphshard.fitting", "graphshard.merging", "graphshard.splitting"),
    # what is planned, without graphs
    ("graphshard.planner",),
    ("graphshard.planner.problem",),
    ("graphshard.planner.simulate",),
    (
        "graphshard.planner.bound",
        "graphshard.planner.condense",
        "graphshard.planner.heuristic",
        "graphshard.planner.splits",
    ),
    (
        "graphshard.planner.constraints",
        "graphshard.planner.exact",
        "graphshard.planner.in_turn",
        "graphshard.planner.polish",
    ),
    ("graphshard.planner.plan",),
    ("graphshard.planner.solve",),
    # from graphs and back
    ("graphshard.planner.follow", "graphshard.planner.wishes", "graphshard.planner.writes"),
    ("graphshard.planner.from_graph",),
    ("graphshard.planner.any_order", "graphshard.planner.apply", "graphshard.planner.moving", "graphshard.keeping"),
    ("graphshard.planner.moves",),
    ("graphshard.graph_plan", "graphshard.recomputing"),
    ("graphshard.schedule",),
    ("graphshard.pipeline",),
    (
        "graphshard.passes.bucket_collectives",
        "graphshard.passes.exchange_reductions",
        "graphshard.passes.insert_shards",
        "graphshard.passes.join_pointwise",
        "graphshard.passes.keep_gathered",
        "graphshard.passes.lower_shards",
        "graphshard.passes.merge_unshards",
        "graphshard.passes.merge_sums",
        "graphshard.passes.merge_waits",
        "graphshard.passes.schedule_collectives",
        "graphshard.passes.spread_parameters",
        "graphshard.passes.tag_recompute",
    ),
    # asks what others would make of a graph; tags as another does
    ("graphshard.passes.plan_collectives", "graphshard.passes.recompute_activations"),
    ("graphshard.passes",),
    # what the backend is made of
    (
        "graphshard.options",
        "graphshard.agreement",
        "graphshard.shared_plan",
        "graphshard.boundary",
        "graphshard.inductor",
        "graphshard.halves",
        "graphshard.running_sizes",
    ),
    ("graphshard.joint_trials",),
    ("graphshard.micro_batches",),
    ("graphshard.planning",),
    ("graphshard.backend", "graphshard.capture"),
    ("graphshard.resharding", "graphshard.resizing"),
    ("graphshard.plain_copy",),
    # reports: what a scheduled graph costs, and how that is shown
    (
        "graphshard.report.data",
        "graphshard.report.line_diff",
        "graphshard.report.units",
        "graphshard.report.walk",
    ),
    (
        "graphshard.report",
        "graphshard.report.categories",
        "graphshard.report.compare",
        "graphshard.report.exposure",
        "graphshard.report.formulas",
        "graphshard.report.optimizers",
        "graphshard.report.polynomials",
        "graphshard.report.summary",
        "graphshard.report.sweep_data",
        "graphshard.report.text",
        "graphshard.report.trace",
        "graphshard.report.worlds",
    ),
    (
        "graphshard.report.compare_tables",
        "graphshard.report.half",
        "graphshard.report.html_parts",
        "graphshard.report.link_formulas",
        "graphshard.report.step",
        "graphshard.report.sweep_views",
    ),
    ("graphshard.report.html_passes",),
    ("graphshard.report.html",),
    ("graphshard.inspection_settings", "graphshard.persistent_bytes", "graphshard.stages"),
    ("graphshard.inspected_choice",),
    ("graphshard.inspection", "graphshard.graph_inspection"),
    ("graphshard.formula_sampling", "graphshard.sweeping"),
    ("graphshard.mesh_formulas",),
    ("graphshard.formula_fitting",),
    ("graphshard.testing.capture", "graphshard.testing.golden", "graphshard.testing.ranks"),
    ("graphshard.testing",),
    # the front end: knows the ops, and nothing of the compiler
    ("graphshard.naming", "graphshard.copying", "graphshard.fsdp_module", "graphshard.layouts"),
    ("graphshard.module", "graphshard.api"),
    ("graphshard",),
    ("graphshard.diff_command", "graphshard.inspect_command"),
    ("graphshard.sweep_command",),
    ("graphshard.cli",),
)

#: Imports within a layer: importer, imported.
SAME_LAYER = {
    ("graphshard.provenance", "graphshard.context"),
    ("graphshard.provenance", "graphshard.graph_text"),
    ("graphshard.facts", "graphshard.context"),
    ("graphshard.facts", "graphshard.graph_text"),
    ("graphshard.facts", "graphshard.provenance"),
    ("graphshard.copying", "graphshard.naming"),
    ("graphshard.fsdp_module", "graphshard.copying"),
    ("graphshard.api", "graphshard.module"),
}

#: Modules that may use private torch names.
MAY_BE_PRIVATE = ("graphshard._compat", "graphshard.inductor", "graphshard.testing")

#: Private torch names that every module may use, with the reason.
TOLERATED_PRIVATE = {
    "torch._ops.OpOverload": "the type of every op in a graph has no public name",
}

#: Memoised functions, with the reason why their memory is harmless.
TOLERATED_CACHES = {
    "graphshard.traits._can_be_viewed": "a function of numbers; asked of every reshape many times",
    "graphshard.traits._traits": "what an op is never changes; asked of every node many times",
    "graphshard._compat.is_composite": "how torch implements an op; asked of every node",
    "graphshard.cost.flops._count": "a formula of shapes; the blocks of a model are alike",
    "graphshard.cost.flops._count_parts": "a function of shapes; the blocks of a model are alike",
    "graphshard.module.sharded_class": "equal blocks must share one class; a pure function of its arguments",
    "graphshard.versions.watch_optimizers": "registers one hook with torch, once a process; returns nothing",
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


def imported_modules(name: str, source: str) -> set[str]:
    """Modules of the project that ``source``, the module ``name``, imports anywhere in its text."""
    base = name if name in PACKAGES else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = base.rsplit(".", node.level - 1)[0] if node.level else ""
            stem = ".".join(filter(None, (parent, node.module)))
            for alias in node.names:
                is_module = f"{stem}.{alias.name}" in FILES
                found.add(f"{stem}.{alias.name}" if is_module else stem)
    return {module for module in found if module in FILES}


def upward_imports(name: str, source: str) -> list[str]:
    """Imports of ``source`` that do not go down."""
    layer = {module: index for index, modules in enumerate(LAYERS) for module in modules}
    return [
        f"{name} imports {target}"
        for target in sorted(imported_modules(name, source))
        if layer[target] >= layer[name] and (name, target) not in SAME_LAYER
    ]


def test_every_module_has_one_layer():
    listed = [module for layer in LAYERS for module in layer]
    assert sorted(listed) == sorted(FILES)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down(name):
    found = upward_imports(name, FILES[name].read_text())
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import graphshard.backend",
        "from graphshard.backend import graphshard",
        "from .backend import graphshard",
        "from . import backend",
        "from graphshard import passes",
        "def later():\n    from .passes import MergeUnshards",
    ],
)
def test_an_upward_import_is_found(source):
    assert upward_imports("graphshard.facts", source)


def test_a_sideways_import_is_found():
    assert upward_imports("graphshard.context", "from .facts import Fact")
    assert not upward_imports("graphshard.facts", "from .context import PassContext")


def test_a_submodule_imports_relative_to_its_package():
    assert imported_modules(
        "graphshard.testing.capture", "from ..backend import X\nfrom .ranks import Y"
    ) == {
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
    tree = ast.parse(source)
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
    tree = ast.parse(source)
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
    tree = ast.parse(source)
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
    for importer, imported in SAME_LAYER:
        assert imported in imported_modules(importer, FILES[importer].read_text()), (importer, imported)


@pytest.mark.parametrize("name", MODULES)
def test_file_names_say_what_is_inside(name):
    assert not {"utils", "util", "helpers", "helper", "common", "misc", "manager"} & set(name.split("."))


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
