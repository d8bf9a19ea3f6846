"""A room imports only from rooms above it."""

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

import meshweave.errors

PACKAGE = Path(meshweave.errors.__file__).parent
ROOMS = (
    "errors",
    "disk_cache",
    "user_code",
    "search",
    "interop",
    "ir",
    "replay",
    "ops",
    "engine",
    "cost",
    "capture",
    "place",
    "place.movement",
    "place.expand",
    "optimize.prefetch",
    "optimize.overlap",
    "optimize.decompose",
    "optimize.batch_split",
    "runtime.regions",
    "runtime",
    "calibrate",
    "check",
    "report",
    "passes",
    "torch_compile",
    "pipeline",
    "program",
    "stored",
    "expert_chunks",
    "microbatches",
    "variants",
    "train_step",
    "build",
    "compile",
    "whatif",
    "short_pipeline",
    "study",
    "integrations",
    "cli",
    "__main__",
    "__init__",
)


def room_of(parts: Sequence[str]) -> str:
    """The room of a module below the package: the longest name in ROOMS that its path begins with, "" if there is none.

    What the package itself offers comes from its __init__, which stands below every room."""
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return next((name for name in reversed(names) if name in ROOMS), "" if parts else "__init__")


def violations(module: Path, source: str) -> list[str]:
    """What `module` (its path below the package) imports from its own room's level or below, lazily or not."""
    parts = module.with_suffix("").parts
    room = room_of(parts)
    if room == "__init__":
        return []
    tree = ast.parse(source)
    if not room:
        return [f"{module}: '{parts[0]}' is no room; add it to ROOMS where it belongs"] if source else []
    found = []
    for node in ast.walk(tree):
        for target in _imported_rooms(node, module):
            above = target in ROOMS and ROOMS.index(target) < ROOMS.index(room)
            if not (target == room or above):
                found.append(f"{module}:{node.lineno}: {room} may not import {target}")
    return found


def _imported_rooms(node: ast.AST, module: Path) -> list[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        package = ("meshweave", *module.parts[:-1])
        base = package[: len(package) - node.level + 1] if node.level else ()
        stem = ".".join([*base, *([node.module] if node.module else [])])
        names = [f"{stem}.{alias.name}" for alias in node.names]
    else:
        return []
    parts = [name.split(".") for name in names]
    return [room_of(p[1:]) or "__init__" for p in parts if p[0] == "meshweave"]


def test_every_room_imports_only_from_rooms_above() -> None:
    modules = sorted(PACKAGE.rglob("*.py"))
    assert PACKAGE / "ir" / "mesh.py" in modules
    found = [line for path in modules for line in violations(path.relative_to(PACKAGE), path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("ir/x.py", "from meshweave.errors import MeshError", []),
        ("ir/x.py", "from meshweave.ir.mesh import Mesh\nfrom . import mesh\nfrom .mesh import Mesh", []),
        ("ir/x.py", "from meshweave.interop.storages import storage_key", []),
        ("interop/x.py", "from meshweave.ir.mesh import Mesh", ["interop/x.py:1: interop may not import ir"]),
        ("interop/x.py", "def f():\n    import meshweave.ir", ["interop/x.py:2: interop may not import ir"]),
        ("ir/x.py", "def f():\n    import meshweave.engine.loop", ["ir/x.py:2: ir may not import engine"]),
        ("engine/x.py", "from ..cost.simulate import run", ["engine/x.py:1: engine may not import cost"]),
        ("engine/x.py", "from meshweave import cli", ["engine/x.py:1: engine may not import cli"]),
        ("engine/x.py", "import meshweave", ["engine/x.py:1: engine may not import __init__"]),
        ("cli.py", "from meshweave.compile import compile\nfrom meshweave import report", []),
        ("__init__.py", "from meshweave.cli import main", []),
        ("misc.py", "x = 1", ["misc.py: 'misc' is no room; add it to ROOMS where it belongs"]),
    ],
)
def test_the_check_sees_each_kind_of_import(module: str, source: str, expected: list[str]) -> None:
    assert violations(Path(module), source) == expected
