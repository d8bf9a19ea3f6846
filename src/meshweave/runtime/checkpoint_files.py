"""The directory of a checkpoint: created beside its path, checked, and published by a rename."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from meshweave.errors import CheckpointError, MeshweaveError
from meshweave.runtime.checkpoint_tables import FORMAT_VERSION, METADATA, OUR_FILES, TABLE

Info = Mapping[str, int | str]
NOT_WRITTEN = "the checkpoint could not be written; the old contents of its path are untouched"


@contextmanager
def errors(what: str, path: Path) -> Iterator[None]:
    """Turn errors of the file system and of DCP into CheckpointError.

    DCP raises a BaseException with the failures of all processes. A MeshweaveError among them, and Ctrl-C, pass
    through.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(what, where=str(path), got=f"{type(error).__name__}: {error}") from error
    except CheckpointException as failed:
        causes = {rank: wrapped[0] for rank, wrapped in failed.failures.items()}
        for cause in causes.values():
            if isinstance(cause, MeshweaveError) or not isinstance(cause, Exception):
                raise cause from failed
        rank, cause = next(iter(causes.items()))
        raise CheckpointError(
            what, where=str(path), got=f"{type(cause).__name__} on process {rank}: {cause}"
        ) from failed


def leftovers(target: Path, kind: str) -> list[Path]:
    """Leftovers of unfinished saves beside `target`, newest first; `kind` is tmp or old."""
    pattern = re.compile(re.escape(target.name) + rf"\.{kind}-[0-9a-f]{{8}}")
    leftovers = [p for p in target.parent.glob("*") if pattern.fullmatch(p.name)] if target.parent.is_dir() else []
    return sorted(leftovers, key=lambda p: p.stat().st_mtime, reverse=True)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f"{target.name}.{kind}-{uuid.uuid4().hex[:8]}")


def prepare(target: Path) -> Path:
    """A new directory to write into. CheckpointError if `target` is anything but a checkpoint."""
    if target.exists():
        strange = [target] if not target.is_dir() else [p for p in target.iterdir() if not OUR_FILES.fullmatch(p.name)]
        if strange:
            raise CheckpointError(
                "the path contains something that is not a checkpoint, and it will not be replaced",
                where=str(target),
                got=", ".join(p.name for p in strange[:3]),
                hint="save to another path, or move these away",
            )
    staged = _beside(target, "tmp")
    with errors("the checkpoint's directory cannot be created", staged):
        staged.mkdir(parents=True)
    return staged


def finish(staged: Path, target: Path, files: frozenset[str], info: Info) -> None:
    """Publish the files in `staged` as `target`."""
    absent = sorted(name for name in files if not (staged / name).is_file())
    if absent:
        raise CheckpointError(
            "files of other processes are missing",
            where=str(staged),
            got=", ".join(absent[:3]),
            hint="save to a file system that all processes share",
        )
    table = {
        "format": "meshweave",
        "version": FORMAT_VERSION,
        "checksums": torch.serialization.get_crc32_options(),
        "files": {name: (staged / name).stat().st_size for name in sorted({*files, METADATA})},
        "info": dict(info),
    }
    with open(staged / TABLE, "w", encoding="utf-8") as stream:
        json.dump(table, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _sync(staged)
    _publish(staged, target)


def _publish(staged: Path, target: Path) -> None:
    replaced = _beside(target, "old")
    try:
        if target.exists():
            target.rename(replaced)
        staged.rename(target)
    except BaseException:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise
    _sync(target.parent)
    for junk in (*leftovers(target, "old"), *leftovers(target, "tmp")):
        shutil.rmtree(junk, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Make the directory entries in `directory` durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
