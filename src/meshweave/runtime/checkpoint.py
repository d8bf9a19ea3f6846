"""Checkpoints in the format of torch.distributed.checkpoint (DCP): tables of pieces, loadable on any other mesh.

A checkpoint is a directory with DCP's `.metadata` (which piece of which tensor lies where), one data file per process
that wrote, and `meshweave.json` (format version, and the caller's own facts). It is written to a temporary directory
beside its path and renamed when complete. Loading never executes code from a file.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult

from meshweave.errors import CheckpointError, MeshweaveError
from meshweave.interop.checkpoints import PICKLED, CheckedReader
from meshweave.interop.process_groups import is_in_job
from meshweave.ir.graph import Spec

FORMAT_VERSION = 2  # version 1 also lists the sizes of the files
TABLE = "meshweave.json"
METADATA = ".metadata"
OUR_FILES = re.compile(r"\.metadata|meshweave\.json|__\d+_\d+\.distcp")
NOT_WRITTEN = "the checkpoint could not be written; the old contents of its path are untouched"

Info = Mapping[str, int | str]
T = TypeVar("T")
_LOG = logging.getLogger("meshweave")


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    info: Info,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint of `tensors` at `path`; every process of the group calls this.

    `tensors` are those of each process: what several have is written once. `info` (of the first process) is small facts
    such as step and seed. The files are written into `<path>.tmp-<id>`, which is renamed when all of them are
    complete: until then, and after an error or Ctrl-C, the old contents of `path` stay. All processes must share a file
    system. Without torch.distributed this process writes alone.

    Raises CheckpointError, on every process, when writing failed on any process, when the pieces overlap or leave gaps,
    and when `path` contains anything but a checkpoint.
    """
    writer = _begin(path, info, process_group)
    _write(tensors, writer, process_group, not is_in_job())


def async_save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    info: Info,
    process_group: dist.ProcessGroup | None = None,
) -> Future[None]:
    """`save` on a thread that writes and publishes the files. Returns once the tensors are copied to CPU memory.

    The thread communicates over `process_group`, a Gloo group that nothing else uses until the future is done. The
    future's error is a CheckpointError, logged when it occurs; the end of the program waits for the thread. Raises
    CheckpointError, on every process, for a path that contains anything but a checkpoint, and if the copies failed on
    any process.
    """
    copies: dict[str, Tensor] = {}
    writer = _begin(
        path, info, process_group, lambda: copies.update({n: x.to("cpu", copy=True) for n, x in tensors.items()})
    )
    executor = ThreadPoolExecutor(1, thread_name_prefix="meshweave-checkpoint")
    done = executor.submit(_write_beside_steps, copies, writer, process_group, not is_in_job())
    executor.shutdown(wait=False)
    return done


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint at a path. A save that was killed between its two renames leaves the checkpoint that it
    replaced at `<path>.old-<id>`, which is then read."""

    path: Path
    metadata: Metadata
    has_checksums: bool
    info: Mapping[str, Any]

    @staticmethod
    def at(path: str | os.PathLike[str]) -> Checkpoint:
        """Read its tables. Raises CheckpointError when there is no checkpoint, when it is damaged or of an unknown
        version."""
        folder = _find(Path(os.path.realpath(path)))
        with _errors("the checkpoint cannot be read", folder):
            table = _read_table(folder)
            return Checkpoint(folder, _read_metadata(folder), table["checksums"], table["info"])

    @property
    def specs(self) -> dict[str, Spec]:
        """Shapes and dtypes of the tensors, by name."""
        tables = self.metadata.state_dict_metadata
        return {
            name: Spec(tuple(table.size), table.properties.dtype)
            for name, table in tables.items()
            if isinstance(table, TensorStorageMetadata)
        }

    def read(self, wanted: Mapping[str, Tensor]) -> None:
        """Fill tensors and DTensors in place, by name, whatever their layout when saved. The checksums of what is
        read are checked. CheckpointError for a damaged file."""
        with _errors("the checkpoint cannot be read", self.path):
            check = partial(_check_piece, self.path) if self.has_checksums else None
            reader = CheckedReader(self.path, self.metadata, check)
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp_load(dict(wanted), storage_reader=reader, planner=planner, no_dist=True)

    def check_model(self, wanted: Mapping[str, Spec]) -> None:
        """CheckpointError unless these are the tensors of the checkpoint."""
        saved = self.specs
        differing = [n for n, spec in wanted.items() if saved.get(n, spec) != spec]
        lists = {
            "missing": [name for name in wanted if name not in saved],
            "unexpected": [name for name in saved if name not in wanted],
            "different": [f"{name} is {saved[name]}, not {wanted[name]}" for name in differing],
        }
        if any(lists.values()):
            raise CheckpointError(
                "the checkpoint is of another model",
                where=str(self.path),
                got="; ".join(f"{len(names)} {kind}: {', '.join(names[:3])}" for kind, names in lists.items() if names),
                expected="the same names, shapes and dtypes as the model's and the optimizer's",
            )


# Several processes.


def on_all(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Do `work` on every process and return all results. A failure on any process is a failure on all."""
    # DCP warns of `no_dist` in every call; a thread must not change the filters for a while.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    if not is_in_job():
        return [work()]
    error: BaseException | None = None
    outcome: tuple[T | None, str] = (None, "")
    try:
        outcome = (work(), "")
    except BaseException as caught:
        error, outcome = caught, (None, str(caught) or type(caught).__name__)
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(outcomes):
        if message:
            raise CheckpointError(f"process {rank} failed: {message}")
    return [result for result, _ in outcomes]


@contextmanager
def _errors(what: str, path: Path) -> Iterator[None]:
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


# Writing.


class _PieceWriter(FileSystemWriter):
    """Writes into `staged`, which the first process renames to `target` when all processes have finished."""

    def __init__(self, staged: Path, target: Path, info: Info, is_first: bool) -> None:
        super().__init__(staged)
        self.staged, self.target, self.info, self.is_first = staged, target, info, is_first

    def storage_meta(self) -> StorageMeta | None:
        # DCP would record the path, as a pickled object, and the path is not the final path.
        return None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on the first process, with the results of all processes."""
        super().finish(metadata, results)
        written = {each.index: each.storage_data for own in results for each in own}
        if defect := _defect(self.staged, replace(metadata, storage_data=written)):  # torch 2.11 sets it on a copy
            raise CheckpointError(
                "the checkpoint is not complete",
                where=str(self.staged),
                got=defect,
                hint="all processes must share a file system, and some process must have each box of a tensor's layout",
            )
        table = {
            "version": FORMAT_VERSION,
            "checksums": torch.serialization.get_crc32_options(),
            "info": dict(self.info),
        }
        with open(self.staged / TABLE, "w", encoding="utf-8") as stream:
            json.dump(table, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        _sync(self.staged)
        _publish(self.staged, self.target)


def _begin(
    path: str | os.PathLike[str], info: Info, group: dist.ProcessGroup | None, work: Callable[[], None] | None = None
) -> _PieceWriter:
    """Create the directory to write into, and do `work`, on every process or on none."""
    target = Path(os.path.realpath(path))
    is_first = not is_in_job() or dist.get_rank(group) == 0

    def begin() -> Path | None:
        if work is not None:
            work()
        return _prepare(target) if is_first else None

    staged = on_all(begin, group)[0]
    assert staged is not None
    return _PieceWriter(staged, target, info, is_first)


def _write(
    tensors: Mapping[str, Tensor], writer: _PieceWriter, group: dist.ProcessGroup | None, is_alone: bool
) -> None:
    """Write and publish. On failure `staged` is removed, and the error is a CheckpointError, or Ctrl-C."""
    try:
        with _errors(NOT_WRITTEN, writer.target):
            planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp_save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=is_alone)
    except BaseException:
        if writer.is_first:
            shutil.rmtree(writer.staged, ignore_errors=True)
        raise


def _write_beside_steps(
    tensors: Mapping[str, Tensor], writer: _PieceWriter, group: dist.ProcessGroup | None, is_alone: bool
) -> None:
    """`_write` on a thread."""
    try:
        _write(tensors, writer, group, is_alone)
    except BaseException as error:
        shown, is_left = error, group is not None and not dist.is_initialized()
        if is_left or not isinstance(error, MeshweaveError):
            hint = "destroy_process_group() ran during the save: wait for the future that async_save returns first"
            got = f"{type(error).__name__}: {error}"
            shown = CheckpointError(NOT_WRITTEN, where=str(writer.target), got=got, hint=hint if is_left else "")
        _LOG.error("%s: an asynchronous save failed: %s", writer.target, shown)
        raise shown from (None if shown is error else error)


def _prepare(target: Path) -> Path:
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
    with _errors("the checkpoint's directory cannot be created", staged):
        staged.mkdir(parents=True)
    return staged


def _publish(staged: Path, target: Path) -> None:
    """Rename the finished directory; what was at `target` is removed afterwards."""
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
    for junk in (*_leftovers(target, "old"), *_leftovers(target, "tmp")):
        shutil.rmtree(junk, ignore_errors=True)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f"{target.name}.{kind}-{uuid.uuid4().hex[:8]}")


def _leftovers(target: Path, kind: str) -> list[Path]:
    """Leftovers of unfinished saves beside `target`, newest first; `kind` is tmp or old."""
    pattern = re.compile(re.escape(target.name) + rf"\.{kind}-[0-9a-f]{{8}}")
    leftovers = [p for p in target.parent.glob("*") if pattern.fullmatch(p.name)] if target.parent.is_dir() else []
    return sorted(leftovers, key=lambda p: p.stat().st_mtime, reverse=True)


def _sync(directory: Path) -> None:
    """Make the directory entries in `directory` durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Reading.


def _find(target: Path) -> Path:
    path = target if target.exists() else next(iter(_leftovers(target, "old")), None)
    if path is None:
        raise CheckpointError(
            "there is no checkpoint at this path",
            where=str(target),
            hint="a save to this path is not finished, or was killed" if _leftovers(target, "tmp") else "",
        )
    return path


def _check_piece(path: Path, name: str, content: bytes) -> None:
    """A piece is a zip archive written by torch.save. torch.load does not compare its checksums; zipfile does."""
    with zipfile.ZipFile(BytesIO(content)) as archive:
        if archive.testzip() is not None:
            raise _damage(path, f"wrong checksum in {name}")


def _damage(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        "not a checkpoint of meshweave, or damaged", where=str(path), got=got, hint="use an earlier checkpoint"
    )


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads((path / TABLE).read_text(encoding="utf-8"))
        version, (_, _) = table["version"], (dict(table["info"]), table["checksums"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damage(path, f"{TABLE}: {type(error).__name__}: {error}") from error
    if version not in range(1, FORMAT_VERSION + 1):
        raise CheckpointError(
            "unknown format version of the checkpoint",
            where=str(path),
            got=f"version {version}",
            expected=f"version {FORMAT_VERSION}",
            hint="load it with the version of meshweave that wrote it, or a newer version",
        )
    return dict(table)


# The only classes that a table of pieces needs. Loading any other name would let the file choose what runs.
_ALLOWED: Mapping[tuple[str, str], Any] = {
    **{
        (kind.__module__, kind.__qualname__): kind
        for kind in (
            Metadata,
            MetadataIndex,
            ChunkStorageMetadata,
            TensorStorageMetadata,
            TensorProperties,
            *PICKLED,
        )
    },
    ("torch", "Size"): torch.Size,
    **{("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
}


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise CheckpointError(
                "the checkpoint's metadata contains more than tables of pieces, and was not loaded",
                got=f"{module}.{name}",
                expected="the metadata classes of torch.distributed.checkpoint",
                hint="do not use this file: it may be an attempt to run code on your machine",
            )
        return _ALLOWED[module, name]


def _read_metadata(path: Path) -> Metadata:
    """The tables of pieces, after a check that they contain nothing else, and that the files contain the pieces."""
    try:
        with open(path / METADATA, "rb") as stream:
            metadata = _TableUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise ValueError("no tables of pieces")
        for name, table in metadata.state_dict_metadata.items():
            if not isinstance(table, TensorStorageMetadata):
                raise ValueError(f"'{name}' is not a tensor")
        for stored in metadata.storage_data.values():
            if not OUR_FILES.fullmatch(stored.relative_path) or stored.transform_descriptors:
                raise ValueError(f"a piece in the file {stored.relative_path!r}")
    except MeshweaveError:
        raise
    except Exception as error:
        raise _damage(path, f"{METADATA}: {type(error).__name__}: {error}") from error
    if defect := _defect(path, metadata):
        raise _damage(path, defect)
    return metadata


def _defect(path: Path, metadata: Metadata) -> str:
    """Says which tensor has gaps, or which data file is missing or too short for its pieces; empty if none is."""
    for name, table in metadata.state_dict_metadata.items():
        assert isinstance(table, TensorStorageMetadata), "of tables of pieces"
        covered, total = sum(prod(chunk.sizes) for chunk in table.chunks), prod(table.size)
        if covered != total:
            return f"pieces of '{name}' with {covered} of {total} elements"
    ends: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    for name, end in sorted(ends.items()):
        if not (path / name).is_file():
            return f"{name} is missing"
        if (path / name).stat().st_size < end:
            return f"{name} has {(path / name).stat().st_size} of {end} bytes"
    return ""
