"""Only interop touches what torch keeps to itself: names of torch, or of its objects, that begin with an underscore."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshweave.errors

PACKAGE = Path(meshweave.errors.__file__).parent
# Names with an underscore that are not torch's, by why they are read.
NOT_TORCHS = {
    "_replace": "of a named tuple, whose public method it is",
    "_getframe": "of sys, documented: frames of the user's code",
    "_current_frames": "of sys, documented: frames of other threads",
    "_inst": "of random: the generator behind its functions, which has no other name",
    "_rand": "of numpy.random: the same",
    "_bit_generator": "of numpy.random.RandomState before numpy 1.24: the same",
    "_init_weights": "of a Hugging Face model: the initialiser that its authors define",
    "_tp_plan": "of a Hugging Face model of versions without tp_plan",
    "_prepare_inputs": "of transformers' Trainer: brings a batch to the device, which subclasses override",
}
_IN_TEXT = re.compile(r"\btorch(?:\.\w+)+")
# Methods that torch's modules define without promising them, read where a model's own class is asked for them.
ASKED_FOR = {"_reset_parameters": "of torch.nn.MultiheadAttention and Transformer, which have no reset_parameters"}


def private_names(source: str) -> list[str]:
    """`line: name` of each private name of torch in a module: imported from torch, an attribute on the way from torch
    (`torch.ops.*` are operators, not names of torch's), or an attribute of an object that the module does not define
    itself, read directly or by getattr and the like; also a path in a text, which may be imported by name or shown to
    a user."""
    tree = ast.parse(source)
    aliases = dict(_torch_names(tree))
    own = _own_names(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if _is_torchs(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name) for name in names if not node.level and _is_torchs(name)]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            path = _path(node, aliases)
            if path is not None and path.startswith("torch."):
                if _is_torchs(path):
                    found.append((node.lineno, path))
            elif node.attr not in own:
                found.append((node.lineno, node.attr))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [(node.lineno, path) for path in _IN_TEXT.findall(node.value) if _is_torchs(path)]
        elif isinstance(node, ast.Call) and (name := _asked(node)) and _is_private(name) and name not in own:
            found.append((node.lineno, name))
    allowed = NOT_TORCHS.keys() | ASKED_FOR.keys()
    return [f"{line}: {name}" for line, name in sorted(found) if name not in allowed]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _is_torchs(path: str) -> bool:
    """Whether a dotted path leads through a private name of torch. What `torch.ops` holds is named by operators."""
    parts = path.split(".")
    return parts[0] == "torch" and parts[:2] != ["torch", "ops"] and any(map(_is_private, parts))


def _torch_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What names of a module stand for something of torch's: name, dotted path."""
    yield "torch", "torch"
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            path = _path(node.value, known)
            yield from ((target.id, path) for target in node.targets if isinstance(target, ast.Name) and path)


def _path(node: ast.AST, aliases: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return None
    return ".".join([aliases[node.id], *reversed(parts)])


def _own_names(tree: ast.AST) -> set[str]:
    """Private attributes that a module's own classes define: methods, fields, slots, what they set on self."""
    names: set[str] = set()
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(cls):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    names.add(node.attr)
            elif isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__slots__" for t in node.targets
            ):
                names |= {c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant)}
    return names


def _asked(call: ast.Call) -> str | None:
    """The name that getattr, hasattr, setattr or delattr is called with."""
    is_attr = isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr", "setattr", "delattr")
    name = call.args[1] if is_attr and len(call.args) > 1 else None
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def test_only_interop_touches_private_names_of_torch() -> None:
    modules = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] != "interop"]
    assert len(modules) > 100
    found = [f"{path.relative_to(PACKAGE)}:{line}" for path in modules for line in private_names(path.read_text())]
    assert not found, "\n".join(["these belong in src/meshweave/interop:", *found])


def test_exceptions_are_still_needed() -> None:
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert [name for name in (*NOT_TORCHS, *ASKED_FOR) if name not in text] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch._dynamo", ["1: torch._dynamo"]),
        ("import torch._inductor.config as c", ["1: torch._inductor.config"]),
        (
            "def f():\n    from torch._subclasses.fake_tensor import FakeTensor",
            ["2: torch._subclasses.fake_tensor.FakeTensor"],
        ),
        ("from torch.utils import _pytree as pytree", ["1: torch.utils._pytree"]),
        ("import torch\ntorch._C._current_autograd_node()", ["2: torch._C", "2: torch._C._current_autograd_node"]),
        (
            "import torch.distributed as dist\ndist.distributed_c10d._world",
            ["2: torch.distributed.distributed_c10d._world"],
        ),
        ("x.untyped_storage()._cdata", ["1: _cdata"]),
        ("node.target._schema.arguments", ["1: _schema"]),
        ("getattr(x, '_version')", ["1: _version"]),
        ("import torch\ntorch.ops.aten._softmax.default", []),
        ("import torch\naten = torch.ops.aten\naten._to_copy.default", []),
        ("import torch\nops = torch.ops._c10d_functional", []),
        (
            "class A:\n    def f(self, other):\n        self._x = 1\n        return other._x",
            [],
        ),
        ("class A:\n    def f(self):\n        return self._version", ["3: _version"]),
        ("state._replace(a=1)", []),
        ("x.__class__, from_import", []),
        ("import_module('torch._inductor.config')", ["1: torch._inductor.config"]),
        ('def f():\n    """As torch._grouped_mm(a)."""', ["2: torch._grouped_mm"]),
        ("f'{x}, registered with torch.utils._pytree'", ["1: torch.utils._pytree"]),
        ("'torch.ops.aten._to_copy, torch.__version__, torch.nn.functional.relu_'", []),
    ],
)
def test_the_check_sees_each_kind_of_use(source: str, expected: list[str]) -> None:
    assert private_names(source) == expected
