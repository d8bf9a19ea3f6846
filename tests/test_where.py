"""docs/where.md names files that are there, and says of passes and options what holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshweave.passes import PASSES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "where.md").read_text()
TASKS = ("rule", "communication op", "ring algorithm", "pass", "schedule", "section", "optimizer", "profile", "command")


def named(text: str) -> list[str]:
    return [path for path in re.findall(r"`([\w./-]+(?:\.(?:py|toml|md)|/))`", text) if "NAME" not in path]


def found(path: str) -> Path:
    is_below = path.startswith(("tests/", "docs/", "benchmarks/", "src/"))
    return ROOT / path if is_below else ROOT / "src" / "meshweave" / path


@pytest.mark.parametrize("path", sorted(set(named(PAGE)) - {"src/meshweave/", "tests/", "docs/", "benchmarks/"}))
def test_a_named_file_is_there(path: str) -> None:
    assert found(path).exists()


@pytest.mark.parametrize("task", TASKS)
def test_each_task_names_files(task: str) -> None:
    sections = [part for part in PAGE.split("\n## ")[1:] if task in part.partition("\n")[0]]
    assert sections
    assert all(named(part) for part in sections)


def test_the_architecture_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert len(page.splitlines()) <= 250
    for room in (ROOT / "src" / "meshweave").iterdir():
        if room.is_dir() and (room / "__init__.py").exists():
            assert f"    {room.name}/" in page, room.name


def test_passes_are_in_their_table() -> None:
    text = (ROOT / "src" / "meshweave" / "passes" / "table.py").read_text()
    for name in PASSES:
        assert f'name: ClassVar[str] = "{name}"' in text
