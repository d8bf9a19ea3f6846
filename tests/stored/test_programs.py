"""A program that is loaded equals the program that was built, and nothing after capture runs again."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from tests.stored.starts import STARTS, read_from

from meshweave import build

QUICK = ("mlp dp", "accumulate", "without passes")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWEAVE_CACHE", str(tmp_path))
    return tmp_path / "programs"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in STARTS]
)
def test_a_loaded_program_equals_the_built_program(name: str, cache: Path) -> None:
    start = STARTS[name]
    built = start.program()
    assert len(list(cache.iterdir())) == 1 + (built.ahead is not None)
    with patch.object(build, "expand", side_effect=AssertionError("it was expanded again")):
        loaded = start.program()
    expected, found = read_from(built), read_from(loaded)
    for part, value in expected.items():
        assert found[part] == value, part
    assert loaded.storage == ""


def test_a_program_of_the_same_state_keeps_its_layouts(cache: Path) -> None:
    """A second batch shape: stored under its own key, since it shares layouts of the first."""
    start = STARTS["mlp dp"]
    first = start.program()
    built, loaded = start.program(like=first), start.program(like=first)
    assert read_from(built) == read_from(loaded)
    assert len(list(cache.iterdir())) == 2
