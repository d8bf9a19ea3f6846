"""A room imports only from rooms above it."""

import ast
from pathlib import Path

import pytest

import meshweave.errors

PACKAGE = Path(meshweave.errors.__file__).parent
ROOMS = (
    "errors",
    "disk_cache",
    "search",
    "interop",
    "ir",
    "replay",
    "hardware",
    "ops",
    "engine",
    "simulate",
    "capture",
    "sharding",
    "movement",
    "expand",
    "problem",
    "buckets",
    "gathers",
    "schedule",
    "chunks",
    "rings",
    "rows",
    "regions",
    "runtime",
    "calibrate",
    "check",
    "report",
    "passes",
    "torch_compile",
    "program",
    "stored",
    "expert_chunks",
    "variants",
    "train_step",
    "build",
    "compile",
    "whatif",
    "integrations",
    "cli",
    "__main__",
    "__init__",
)


def violations(module: Path, source: str) -> list[str]:
    """What `module` (its path below the package) imports from its own room's level or below, lazily or not."""
    room = module.parts[0].removesuffix(".py")
    if room == "__init__":
        return []
    if room not in ROOMS:
        return [f"{module}: '{room}' is no room; add it to ROOMS where it belongs"]
    tree = ast.parse(source)
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
        names = [f"{stem}.{alias.name}" for alias in node.names] if stem == "meshweave" else [stem]
    else:
        return []
    parts = [name.split(".") for name in names]
    # What the package itself offers comes from its __init__, which stands below every room.
    return [p[1] if len(p) > 1 and p[1] in ROOMS else "__init__" for p in parts if p[0] == "meshweave"]


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
        ("engine/x.py", "from ..simulate import run", ["engine/x.py:1: engine may not import simulate"]),
        ("engine/x.py", "from meshweave import cli", ["engine/x.py:1: engine may not import cli"]),
        ("engine/x.py", "import meshweave", ["engine/x.py:1: engine may not import __init__"]),
        ("cli.py", "from meshweave.compile import compile\nfrom meshweave import report", []),
        ("__init__.py", "from meshweave.cli import main", []),
        ("misc.py", "", ["misc.py: 'misc' is no room; add it to ROOMS where it belongs"]),
    ],
)
def test_the_check_sees_each_kind_of_import(module: str, source: str, expected: list[str]) -> None:
    assert violations(Path(module), source) == expected
