"""Entries that cannot be used: the program is built anew, a note says why, and nothing in them is executed."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.models import mlp
from tests.stored.starts import Start

from meshweave import build
from meshweave.disk_cache import CacheEntry
from meshweave.program import PlanInputs, Program
from meshweave.search import Budget, Gathered
from meshweave.stored import programs

START = Start(lambda: mlp(batch=4), "dp=2", passes="exact")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWEAVE_CACHE", str(tmp_path))
    return tmp_path / "programs"


def text_of(program: Program) -> str:
    return "".join(role.text() for role in (program.captured, program.placed, *program.roles))


def is_loaded(start: Start = START, **changes: Any) -> bool:
    with patch.object(build, "expand", wraps=build.expand) as expand:
        start.program(**changes)
    return not expand.called


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """An entry that is intact, with another program."""
    lines = path.read_text().split("\n", 2)
    entry = CacheEntry(path.parent, json.loads(lines[1].removeprefix("# ")), ".program")
    assert entry.path == path
    form = programs._unpacked(entry.read()[0])
    change(form)
    assert entry.write(programs._packed(form)) == ""


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text[:-9] + ("A" if text[-9] != "A" else "B") + text[-8:],
        lambda text: text.replace("torch", "Torch", 1),
    ],
    ids=["cut off", "empty", "a changed letter", "another key"],
)
def test_a_damaged_entry_is_replaced(cache: Path, damage: Callable[[str], str]) -> None:
    built = START.program()
    (path,) = cache.iterdir()
    path.write_text(damage(path.read_text()))
    again = START.program()
    assert again.storage == f"the program was built anew: {path} is damaged"
    assert again.storage in again.notes
    assert text_of(again) == text_of(built)
    assert is_loaded()


def at_first(kind: str, entry: list[Any]) -> Callable[[dict[str, Any]], object]:
    """A change of the first entry of this kind in the table."""

    def change(form: dict[str, Any]) -> None:
        table = form["table"]
        table[next(i for i, each in enumerate(table) if each[0] == kind)] = entry

    return change


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "an operator of others": at_first("operator", ["operator", "os.system.default"]),
    "an operator of another namespace": at_first("operator", ["operator", "inductor.accumulate_grad_.default"]),
    "no operator": at_first("operator", ["operator", "aten.nothing.default"]),
    "an operator's attribute": at_first("operator", ["operator", "aten.mm.__class__"]),
    "an operator that writes": at_first("operator", ["operator", "aten.add_.Tensor"]),
    "a function": at_first("operator", ["function", "os.system"]),
    "a builtin": at_first("operator", ["function", "builtins.eval"]),
    "a class": at_first("Spec", ["subprocess.Popen", "$true"]),
    "a class of meshweave": at_first("Spec", ["CacheEntry", "$/tmp", "$key", "$.json"]),
    "other fields": at_first("Spec", ["Spec", [2, 2]]),
    "no dtype": at_first("dtype", ["dtype", "hub"]),
    "a known value that is unknown": at_first("dtype", ["known", "everything"]),
    "a later entry": at_first("Spec", ["Spec", [2], "#100000"]),
    "a layout on no axis": at_first("DimSharding", ["DimSharding", ["$nowhere"], 1]),
    "a node of another kind": lambda form: form["placed"][0][0].__setitem__(0, 3),
    "a name that is taken": lambda form: form["placed"][0][1].__setitem__(1, form["placed"][0][0][1]),
    "a node that does not exist": lambda form: form["placed"][0][-1].__setitem__(3, ["%100000"]),
    "a string without a mark": lambda form: form["placed"][0][-1].__setitem__(3, ["import os"]),
    "no such role": lambda form: form.update(stages=[[0], [0], [7]]),
    "too few stages": lambda form: form.update(stages=[[0]]),
    "no table": lambda form: form.pop("table"),
    "a deep nest": lambda form: form.update(outcome=json.loads("[" * 900 + "]" * 900)),
    "a missing input": lambda form: form["placed"][1].pop(),
}


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> tuple[programs.Storage, str]:
    """Where a program is, and the text of its entry."""
    directory, found = tmp_path_factory.mktemp("entry"), list[programs.Storage]()

    def noted(inputs: PlanInputs) -> tuple[programs.Storage | None, str]:
        storage, trouble = programs.storage_of(inputs)
        assert storage is not None
        found.append(storage)
        return storage, trouble

    with patch.dict(os.environ, {"MESHWEAVE_CACHE": str(directory)}), patch.object(build, "storage_of", noted):
        START.program()
    return found[0], found[0].entry.path.read_text()


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_entry_executes_nothing(
    entry: tuple[programs.Storage, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, text = entry
    storage.entry.path.write_text(text)
    assert storage.read()[0] is not None
    rewritten(storage.entry.path, FORGED[name])
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it was executed"))
    planned, trouble = storage.read()
    assert planned is None
    assert trouble.startswith(f"{storage.entry.path} has no program of this step (")


@pytest.mark.parametrize("name", ["an operator of others", "an operator that writes", "a class"])
def test_a_forged_entry_is_replaced(cache: Path, name: str) -> None:
    built = START.program()
    (path,) = cache.iterdir()
    rewritten(path, FORGED[name])
    again = START.program()
    assert again.storage.startswith(f"the program was built anew: {path} has no program of this step (")
    assert text_of(again) == text_of(built)
    assert is_loaded()


@pytest.mark.parametrize("text", ["", "!", "eJwDAAAAAAE=", "W10=", "[]", "{}", "null"])
def test_a_text_that_is_no_program(entry: tuple[programs.Storage, str], text: str) -> None:
    storage, _ = entry
    assert storage.entry.write(text) == ""
    planned, trouble = storage.read()
    assert planned is None
    assert (trouble != "") == (text != "")


def test_a_directory_that_takes_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file")
    program = START.program()
    assert "it could not be stored" in program.storage
    cache.unlink()

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as changed:
        changed.setattr(os, "fsync", full)
        assert "No space left on device" in START.program().storage
    assert list(cache.iterdir()) == []
    assert not is_loaded()
    assert is_loaded()


def test_other_versions_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    START.program()
    assert is_loaded()
    monkeypatch.setattr(programs, "package_digest", lambda: "another version")
    assert not is_loaded()


def test_the_oldest_entries_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_MOST_ENTRIES", 1)
    START.program()
    replace(START, mesh="dp=4").program()
    assert len(list(cache.iterdir())) == 1
    assert not is_loaded()


def answers(*answers: Callable[[int], tuple[int, ...]]) -> Gathered:
    """What two processes pass, call by call: their keys, their entries, whether they can read them. Later both pass the
    same."""
    left = iter(answers)
    return lambda number: next(left, both)(number)


def both(number: int) -> tuple[int, ...]:
    return number, number


def other(number: int) -> tuple[int, ...]:
    return number, number - 1


def test_a_program_counts_only_if_all_processes_have_it() -> None:
    START.program()
    assert not is_loaded(gathered=answers(other))
    assert START.program(gathered=answers(other)).storage.endswith("other processes have other keys")
    assert not is_loaded(gathered=answers(both, other))
    assert not is_loaded(gathered=answers(both, both, other))
    assert is_loaded(gathered=answers(both, both, both))


def test_a_search_that_was_cut_short_is_not_stored(cache: Path) -> None:
    start = replace(START, mesh="tp=2", passes="default")
    program = start.program(budget=Budget(-1.0))
    assert any(variant.is_untried for variant in program.optimized.variants)
    assert not cache.exists()
    start.program()
    assert is_loaded(start, budget=Budget(-1.0))


def start_at_once(pipe: Connection) -> None:
    pipe.recv()
    program = START.program()
    pipe.send((text_of(program), program.storage))


def test_two_processes_at_once(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    jobs = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        job = context.Process(target=start_at_once, args=(theirs,))
        job.start()
        jobs.append((job, ours))
    for _, pipe in jobs:
        pipe.send("go")
    found = [pipe.recv() for _, pipe in jobs]
    for job, _ in jobs:
        job.join()
    program = START.program()
    assert found == [(text_of(program), "")] * 2
    assert is_loaded()
    assert [path.suffix for path in cache.iterdir()] == [".program"]
