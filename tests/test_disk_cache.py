"""What is kept on disk: whole or not at all, and never used where it is not what was written."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from meshweave import disk_cache
from meshweave.disk_cache import CacheEntry, cache_directory

DATA = "[link]\nlaunch_s = 1\nname = 'ümlaut'\n".encode()


def test_what_was_kept_is_read_back_to_the_letter(tmp_path: Path) -> None:
    entry = CacheEntry(tmp_path / "a" / "b", "here\nand now")
    assert entry.read() == (b"", "")
    assert entry.write(DATA) == ""
    assert entry.read() == (DATA, "")
    assert [path.name for path in entry.directory.iterdir()] == [entry.path.name]
    other = CacheEntry(entry.directory, "elsewhere")
    assert other.read() == (b"", "")
    other.path.write_bytes(entry.path.read_bytes())
    assert "damaged" in other.read()[1]  # the file of another key


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda data: data[: len(data) // 2], "damaged"),
        (lambda data: b"", "damaged"),
        (lambda data: data.replace(b"launch_s = 1", b"launch_s = 7"), "damaged"),
        (lambda data: b"\xff\xfe", "damaged"),
    ],
)
def test_a_damaged_entry_is_not_used(tmp_path: Path, damage: Callable[[bytes], bytes], expected: str) -> None:
    entry = CacheEntry(tmp_path, "key")
    assert entry.write(DATA) == ""
    entry.path.write_bytes(damage(entry.path.read_bytes()))
    data, trouble = entry.read()
    assert data == b""
    assert expected in trouble
    assert str(entry.path) in trouble
    assert entry.write(DATA) == ""
    assert entry.read() == (DATA, "")


def test_a_directory_that_takes_nothing_costs_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    entry = CacheEntry(tmp_path / "file", "key")
    with entry.lock():
        assert entry.read()[0] == b""
        assert "it could not be stored" in entry.write(DATA)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    entry = CacheEntry(tmp_path / "full", "key")
    assert "No space left on device" in entry.write(DATA)
    assert list(entry.directory.iterdir()) == []


@pytest.mark.parametrize("mode", [0o722, 0o770])
def test_what_others_can_write_is_not_used(tmp_path: Path, mode: int) -> None:
    entry = CacheEntry(tmp_path / "cache", "key")
    assert entry.write(DATA) == ""
    for path in (entry.path, entry.directory):
        path.chmod(mode)
        assert "others can write to it" in entry.read()[1]
        assert entry.write(DATA) == ""  # makes the directory the user's own again
        assert entry.read() == (DATA, "")
        assert stat.S_IMODE(entry.directory.stat().st_mode) == 0o700


def test_what_belongs_to_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = CacheEntry(tmp_path / "cache", "key")
    assert entry.write(DATA) == ""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "belongs to another user" in entry.read()[1]
    assert "belongs to another user" in entry.write(DATA)


def test_the_oldest_entries_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [CacheEntry(tmp_path / "cache", str(number)) for number in range(4)]
    for number, entry in enumerate(entries[:3]):
        assert entry.write(DATA) == ""
        os.utime(entry.path, (number, number))
    monkeypatch.setattr(disk_cache, "_MOST_BYTES", 2 * entries[0].path.stat().st_size)
    assert entries[3].write(DATA) == ""
    assert [entry.read()[0] for entry in entries] == [b"", b"", DATA, DATA]


def hold(directory: Path, pipe: Connection) -> None:
    """Say what is kept once the lock is there."""
    entry = CacheEntry(directory, "key")
    pipe.send("waiting")
    with entry.lock():
        pipe.send(entry.read()[0])


def test_a_second_job_waits_for_what_the_first_measures(tmp_path: Path) -> None:
    entry, context = CacheEntry(tmp_path, "key"), multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with entry.lock():
        other = context.Process(target=hold, args=(tmp_path, theirs))
        other.start()
        assert ours.recv() == "waiting"
        assert not ours.poll(0.3)
        entry.write(DATA)
    assert ours.recv() == DATA
    other.join()


def test_where_things_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHWEAVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_directory() == Path("/caches/meshweave")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "meshweave"
    monkeypatch.setenv("MESHWEAVE_CACHE", "/own")
    assert cache_directory() == Path("/own")


def test_a_user_without_a_home_caches_in_the_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MESHWEAVE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # in no user database
    assert cache_directory() == Path(tempfile.gettempdir()) / f"meshweave-{2**31 - 7}"
