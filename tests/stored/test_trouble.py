"""Entries that cannot be used: the program is built anew, a note says why, and nothing in them is executed."""

from __future__ import annotations

import builtins
import errno
import json
import multiprocessing
import os
import pickle
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.models import mlp
from tests.stored.starts import Start

from meshweave import build, stored
from meshweave.disk_cache import CacheEntry
from meshweave.ir.graph import Spec
from meshweave.ir.layout import Layout
from meshweave.program import PlanInputs, Planned, Program
from meshweave.search import Budget, Gathered

START = Start(lambda: mlp(batch=4), "dp=2", passes="none")


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


@pytest.mark.slow_rows("empty", "another key")
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda data: data.replace(b"torch", b"Torch", 1),
    ],
    ids=["cut off", "empty", "a changed bit", "another key"],
)
def test_a_damaged_entry_is_replaced(cache: Path, damage: Callable[[bytes], bytes]) -> None:
    built = START.program()
    (path,) = cache.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again = START.program()
    assert again.storage == f"the program was built anew: {path} is damaged"
    assert again.storage in again.notes
    assert text_of(again) == text_of(built)
    assert is_loaded()


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def opcodes(module: str, name: str, argument: str = "true") -> bytes:
    """A pickle that calls a name of a module."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


FORGED: dict[str, bytes] = {
    "a function": pickle.dumps(Call(os.system, "true")),
    "a builtin": pickle.dumps(Call(eval, "1")),
    "a class": pickle.dumps(Call(subprocess.Popen, ["true"])),
    "a function that an entry names": opcodes("meshweave.ir.local_ops", "zeros"),
    "a module's import": opcodes("meshweave.disk_cache", "sha256"),
    "a class that a module imports": opcodes("meshweave.disk_cache", "Path"),
    "a path through a module": opcodes("meshweave.disk_cache", "os.system"),
    "an attribute of a class": opcodes("meshweave.ir.graph", "Spec.__init__"),
    "a class that is not frozen": opcodes("meshweave.runtime.regions.compiler", "RegionCompiler"),
    "a class of torch": opcodes("torch", "Generator"),
    "a tensor": pickle.dumps(torch.ones(2)),
    "a known value that is unknown": opcodes(stored.__name__, "_part", "known"),
    "other fields": pickle.dumps(Call(stored._part, Spec, (2, 2))),
    "no constant": pickle.dumps(Call(stored._part, "torch", "hub")),
    "a layout on no axis": pickle.dumps(Call(stored._part, Layout, Call(stored._part, "mesh", "a=2"), 3)),
    "no program": pickle.dumps((1, ())),
    "a deep nest": b"(" * 100_000 + b"l" * 100_000 + b".",
    "half a pickle": pickle.dumps(tuple(range(100)))[:50],
}

TARGETS = (
    "os.system.default",
    "os.system",
    "builtins.eval",
    "inductor.accumulate_grad_.default",
    "aten.nothing.default",
    "aten.mm.__class__",
    "aten.add_.Tensor",
    "meshweave.ir.graph.re",
    "meshweave.ir.local_ops.torch",
    "meshweave.stored.load",
)

ROWS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "a name that is taken": lambda rows: [rows[0], (rows[1][0], rows[0][1], *rows[1][2:]), *rows[2:]],
    "a node that does not exist": lambda rows: [
        *rows[:-1],
        (*rows[-1][:3], (stored._NodeNumber(100_000),), *rows[-1][4:]),
    ],
    "a missing input": lambda rows: rows[1:],
    "no metadata": lambda rows: [(*row[:5], {}) for row in rows],
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[stored.Storage, Planned]:
    """A program, and where it is."""
    directory, found = tmp_path_factory.mktemp("entry"), list[stored.Storage]()

    def noted(inputs: PlanInputs) -> tuple[stored.Storage | None, str]:
        storage, trouble = stored.storage_of(inputs)
        assert storage is not None
        found.append(storage)
        return storage, trouble

    with patch.dict(os.environ, {"MESHWEAVE_CACHE": str(directory)}), patch.object(build, "storage_of", noted):
        START.program()
        planned, trouble = found[0].read()
    assert planned is not None, trouble
    return found[0], planned


def check_refused(storage: stored.Storage) -> None:
    planned, trouble = storage.read()
    assert planned is None
    assert trouble.startswith(f"{storage.entry.path} has no program of this step (")


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_entry_executes_nothing(
    program: tuple[stored.Storage, Planned], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, _ = program
    assert storage.entry.write(zlib.compress(FORGED[name])) == ""
    for module, function in ((os, "system"), (subprocess, "Popen"), (builtins, "eval")):
        monkeypatch.setattr(module, function, lambda *args: pytest.fail("it was executed"))
    check_refused(storage)


@pytest.mark.parametrize("target", TARGETS)
def test_a_forged_target_is_refused(program: tuple[stored.Storage, Planned], target: str) -> None:
    storage, planned = program
    with patch.object(stored, "_target_name", lambda value: target):
        assert storage.write(planned) == ""
    check_refused(storage)


@pytest.mark.parametrize("name", ROWS)
def test_forged_nodes_are_refused(program: tuple[stored.Storage, Planned], name: str) -> None:
    (storage, planned), rows_of = program, stored._ProgramPickler._rows
    with patch.object(stored._ProgramPickler, "_rows", lambda self, graph: ROWS[name](rows_of(self, graph))):
        assert storage.write(planned) == ""
    check_refused(storage)


def test_a_forged_entry_is_replaced(cache: Path) -> None:
    built = START.program()
    (path,) = cache.iterdir()
    key = json.loads(path.read_bytes().split(b"\n", 2)[1].removeprefix(b"# "))
    assert CacheEntry(cache, key, ".program").write(zlib.compress(FORGED["a function"])) == ""
    again = START.program()
    assert again.storage.startswith(f"the program was built anew: {path} has no program of this step (")
    assert text_of(again) == text_of(built)
    assert is_loaded()


@pytest.mark.parametrize("data", [b"", b"!", zlib.compress(b""), zlib.compress(b"N.")[:-3]])
def test_data_that_are_no_program(program: tuple[stored.Storage, Planned], data: bytes) -> None:
    storage, _ = program
    assert storage.entry.write(data) == ""
    planned, trouble = storage.read()
    assert planned is None
    assert (trouble != "") == (data != b"")


def test_an_entry_that_others_can_write_is_not_used(cache: Path) -> None:
    built = START.program()
    (path,) = cache.iterdir()
    assert cache.stat().st_mode & 0o077 == 0
    for changed in (path, cache):
        changed.chmod(0o777)
        again = START.program()
        assert "others can write to it" in again.storage
        assert text_of(again) == text_of(built)
        assert is_loaded()
    moved = path.rename(cache.parent / "moved")
    path.symlink_to(moved)
    assert "cannot be read" in START.program().storage


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
    monkeypatch.setattr(stored, "package_digest", lambda: "another version")
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
