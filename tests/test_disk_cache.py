"""What is kept on disk: whole or not at all, and never used where it is not what was written."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from meshweave.disk_cache import CacheEntry, cache_directory

TEXT = "[link]\nlaunch_s = 1\nname = 'ümlaut'\n"


def test_what_was_kept_is_read_back_to_the_letter(tmp_path: Path) -> None:
    entry = CacheEntry(tmp_path / "a" / "b", "here\nand now")
    assert entry.read() == ("", "")
    assert entry.write(TEXT) == ""
    assert entry.read() == (TEXT, "")
    assert [path.name for path in entry.directory.iterdir()] == [entry.path.name]
    other = CacheEntry(entry.directory, "elsewhere")
    assert other.read() == ("", "")
    other.path.write_bytes(entry.path.read_bytes())
    assert "damaged" in other.read()[1]  # the file of another key


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda text: text[: len(text) // 2], "damaged"),
        (lambda text: "", "damaged"),
        (lambda text: re.sub("launch_s = .", "launch_s = 7", text), "damaged"),
        (lambda text: b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_damaged_entry_is_not_used(tmp_path: Path, damage: Callable[[str], str | bytes], expected: str) -> None:
    entry = CacheEntry(tmp_path, "key")
    assert entry.write(TEXT) == ""
    left = damage(entry.path.read_text())
    entry.path.write_bytes(left if isinstance(left, bytes) else left.encode())
    text, trouble = entry.read()
    assert text == ""
    assert expected in trouble
    assert str(entry.path) in trouble
    assert entry.write(TEXT) == ""
    assert entry.read() == (TEXT, "")


def test_a_directory_that_takes_nothing_costs_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    entry = CacheEntry(tmp_path / "file", "key")
    with entry.lock():
        assert entry.read()[0] == ""
        assert "it could not be stored" in entry.write(TEXT)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    entry = CacheEntry(tmp_path / "full", "key")
    assert "No space left on device" in entry.write(TEXT)
    assert list(entry.directory.iterdir()) == []


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
        entry.write(TEXT)
    assert ours.recv() == TEXT
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
