"""Functions are short and have few parameters."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshweave.errors

PACKAGE = Path(meshweave.errors.__file__).parent
MAX_LINES = 60
MAX_PARAMETERS = 8
# By reason; a name is the file below the package, then the function.
EXCEPTIONS = {
    "options of public functions, which callers pass by keyword": (
        "compile.py:compile",
        "hardware/profile.py:scaled",
        "torch_compile/backend.py:backend",
        "torch_compile/backend.py:inductor_pass",
    ),
    "called with the arguments of an op of torch": (
        "capture/embeddings.py:_embedding_bag",
        "capture/embeddings.py:_embedding_bag_backward",
        "capture/embeddings.py:_embedding_bag_dense_backward",
        "capture/functions.py:_batch_norm",
        "capture/functions.py:_instance_norm",
        "capture/normalize.py:_attention",
        "capture/normalize.py:_attention_backward",
    ),
    "ops of meshweave's own, whose schema has tensors and numbers only, and the kernel of one": (
        "ir/attention.py:backward",
        "ir/ops.py:attention",
        "ir/ops.py:attention_backward",
    ),
}
NAMES = {name for names in EXCEPTIONS.values() for name in names}


def too_large(source: str) -> Iterator[tuple[str, str]]:
    """Functions of a module, nested ones too, beyond a limit: the name, and what is too large."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if (lines := node.end_lineno - node.lineno + 1) > MAX_LINES:
                yield node.name, f"{lines} lines"
            if (parameters := _num_parameters(node.args)) > MAX_PARAMETERS:
                yield node.name, f"{parameters} parameters"


def _num_parameters(args: ast.arguments) -> int:
    """Without self and cls."""
    positional = [*args.posonlyargs, *args.args]
    is_method = bool(positional) and positional[0].arg in ("self", "cls")
    return len(positional) - is_method + len(args.kwonlyargs) + (args.vararg is not None) + (args.kwarg is not None)


def found() -> list[tuple[str, str]]:
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 100
    paths = [(path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in modules]
    return [(f"{path}:{name}", what) for path, source in paths for name, what in too_large(source)]


def test_functions_are_small() -> None:
    assert [f"{name}: {what}" for name, what in found() if name not in NAMES] == []


def test_exceptions_are_still_needed() -> None:
    assert NAMES - {name for name, _ in found()} == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a, b, c, d, e, f, g, h):\n" + "    pass\n" * 59, []),
        ("def f():\n" + "    pass\n" * 60, [("f", "61 lines")]),
        ("def f(a, b, c, d, *e, f, g, h, **i): pass", [("f", "9 parameters")]),
        ("class C:\n    def f(self, a, b, /, c, d, e, f, g, h): pass", []),
        ("class C:\n    def f(self, a, b, /, c, d, e, f, g, h, i): pass", [("f", "9 parameters")]),
        ("def f():\n    async def g(a, b, c, d, e, f, g, h, i): pass", [("g", "9 parameters")]),
    ],
)
def test_the_check_sees_every_function(source: str, expected: list[tuple[str, str]]) -> None:
    assert list(too_large(source)) == expected
