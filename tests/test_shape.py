"""The house style where a program can check it: sizes of functions, names of classes, words in names, meta keys."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {str(path.relative_to(ROOT / "src")): path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))}
MAX_LINES, MAX_PARAMETERS, MAX_FILE = 60, 8, 800
# Functions with more parameters: those of public API, and those whose parameters are the arguments of an op.
PUBLIC = {"compile", "backend", "scaled", "best_schedule", "simulate", "pipeline_times"}
OPS = {
    f"meshweave/{name}.py"
    for name in ("ir/ops", "ir/attention", *(f"capture/{x}" for x in ("decompositions", "functions", "normalize")))
}
# Words that say nothing as names; "held out" (of data), "one hot" and "one round" are terms.
EMPTY_WORDS = {"one", "ones", "made", "found", "held", "told", "said"}
TERMS = re.compile(r"held_out|one_hot|one_round|of_one_batch", re.IGNORECASE)


@cache
def nodes() -> tuple[tuple[str, tuple[ast.AST, ...]], ...]:
    """The nodes of each file."""
    return tuple((path, tuple(ast.walk(ast.parse(text)))) for path, text in SOURCES.items())


def too_large(path: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name in PUBLIC:
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        names = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
        num_parameters = len([name for name in names if name not in ("self", "cls")])
        if num_lines > MAX_LINES or (num_parameters > MAX_PARAMETERS and path not in OPS):
            yield f"{path}:{node.lineno}: {node.name} has {num_lines} lines, {num_parameters} parameters"


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def test_functions_are_small() -> None:
    large = [line for path, its in nodes() for line in too_large(path, its)]
    assert not large, "\n".join(large)


@pytest.mark.parametrize(
    ("source", "num_large"),
    [
        ("def f(a, b, c, d, e, f, g, h):\n" + "    pass\n" * 59, 0),
        ("def f():\n" + "    pass\n" * 60, 1),
        ("class C:\n    def f(self, a, b, /, c, d, e, f, g, h): pass", 0),
        ("class C:\n    def f(self, a, b, /, c, d, e, f, g, *, h, i): pass", 1),
        ("def f():\n    async def g(a, b, c, d, e, f, g, h, i): pass", 1),
    ],
)
def test_which_functions_are_large(source: str, num_large: int) -> None:
    assert len([*too_large("f.py", ast.walk(ast.parse(source)))]) == num_large


def test_files_are_a_subject_each() -> None:
    assert not {path: size for path, text in SOURCES.items() if (size := text.count("\n")) > MAX_FILE}


def test_no_two_classes_have_the_same_name() -> None:
    classes = defaultdict(list)
    for path, its in nodes():
        for node in its:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{path}:{node.lineno}")
    assert len(classes) > 500
    assert not {name: places for name, places in classes.items() if len(places) > 1}


def test_names_say_something() -> None:
    empty = {(path, name) for path, its in nodes() for name in bound_names(its) if is_empty(name)}
    assert empty == set()


def is_empty(name: str) -> bool:
    return bool(EMPTY_WORDS & set(TERMS.sub("", name).lower().split("_")))


@pytest.mark.parametrize(
    ("name", "expected"), [("found", True), ("_is_made", True), ("is_held_out", False), ("on", False)]
)
def test_which_names_say_nothing(name: str, expected: bool) -> None:
    assert is_empty(name) is expected


def test_rooms_communicate_through_the_meta_keys_that_the_architecture_lists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    documented = set(re.findall(r'`meta\["(\w+)"\]`', page))
    rooms = "\n".join(text for path, text in SOURCES.items() if "/interop/" not in path)
    used = set(re.findall(r'\.meta(?:\.get|\.pop|\.setdefault)?[\[(]"(\w+)"', rooms))
    used |= set(re.findall(r'"(\w+)" (?:not )?in \w+\.meta\b', rooms))
    assert used <= documented
    assert documented - used <= {"fixed", "loose"}  # read by the constants of optimize/decompose/cut.py
