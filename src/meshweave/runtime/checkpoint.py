"""Checkpoints in the format of torch.distributed.checkpoint (DCP): tables of pieces, loadable on any other mesh.

A checkpoint is a directory with DCP's `.metadata` (which piece of which tensor lies where), one data file per process
that wrote, and `meshweave.json` (format version, sizes of the files, and the caller's own facts). It is written to a
temporary directory beside its path and renamed when complete. Loading never executes code from a file.
"""

from __future__ import annotations

import difflib
import logging
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult

from meshweave.errors import CheckpointError, MeshweaveError
from meshweave.interop.checkpoints import PieceReader, StorageInfo
from meshweave.interop.process_groups import is_in_job
from meshweave.ir.graph import Spec
from meshweave.runtime.checkpoint_files import NOT_WRITTEN, Info, finish, leftovers, prepare
from meshweave.runtime.checkpoint_files import errors as file_errors
from meshweave.runtime.checkpoint_tables import (
    ShardedTensorView,
    check_cover,
    check_model,
    damaged,
    read_metadata,
    read_table,
)

__all__ = ["Info", "ShardedTensorView", "async_save", "load", "save", "saved_specs"]

_LOG = logging.getLogger("meshweave")

_ALONE = "torch.distributed is disabled, unavailable or uninitialized"  # DCP warns about this; here it is normal
T = TypeVar("T")


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, ShardedTensorView],
    info: Info,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint of `tensors` at `path`; every process of the group calls this.

    A box that several processes or devices have is written once. `info` (of the first process) is small facts such as
    step, seed and fingerprints. The files are written into `<path>.tmp-<id>`, which is renamed when all of them are
    complete: until then, and after an error or Ctrl-C, the old contents of `path` stay. All processes must share a file
    system. Without torch.distributed this process writes alone.

    Raises CheckpointError, on every process, when writing failed on any process, when the pieces overlap or leave gaps,
    and when `path` contains anything but a checkpoint.
    """
    writer = _begin(path, info, process_group)
    with writer.errors(), _alone_is_fine():
        dcp_save(
            dict(tensors),
            storage_writer=writer,
            planner=_SavePlanner(),
            process_group=process_group,
            no_dist=not is_in_job(),
        )


def async_save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, ShardedTensorView],
    info: Info,
    process_group: dist.ProcessGroup | None = None,
) -> Future[None]:
    """`save` on a thread that writes and publishes the files. Returns once the pieces are copied to CPU memory.

    The thread communicates over `process_group`, a Gloo group that nothing else uses until the future is done. The
    future's error is a CheckpointError, logged when it occurs. Raises CheckpointError, on every process, for a path
    that contains anything but a checkpoint, and if the copies failed on any process.
    """
    copies: dict[str, ShardedTensorView] = {}
    writer = _begin(
        path, info, process_group, lambda: copies.update({name: view.copy() for name, view in tensors.items()})
    )
    if not is_in_job():
        warnings.filterwarnings("ignore", message=_ALONE)  # the thread must not change the warning filters temporarily
    with writer.errors():
        upload = dcp_async_save(
            copies,
            storage_writer=writer,
            planner=_SavePlanner(),
            process_group=process_group,
            no_dist=not is_in_job(),
        )
    assert isinstance(upload, Future)
    done: Future[None] = Future()
    upload.add_done_callback(lambda upload: _settle(upload, writer, process_group is not None, done))
    return done


_LEFT = "destroy_process_group() ran during the save: wait for the future that async_save returns first"


def _settle(upload: Future[Any], writer: _PieceWriter, is_of_job: bool, done: Future[None]) -> None:
    """Complete `done` with the result of `upload`, or with a meshweave error."""
    try:
        with writer.errors():
            upload.result()
    except BaseException as error:
        got = f"{type(error).__name__}: {error}"
        ours = error if isinstance(error, MeshweaveError) else CheckpointError(NOT_WRITTEN, got=got)
        if is_of_job and not dist.is_initialized():
            ours = CheckpointError(NOT_WRITTEN, where=str(writer.target), got=ours.got or got, hint=_LEFT)
        _LOG.error("%s: an asynchronous save failed: %s", writer.target, ours)
        done.set_exception(ours)
    else:
        done.set_result(None)


def load(
    path: str | os.PathLike[str],
    wanted: Mapping[str, ShardedTensorView],
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, int | str]:
    """Fill `wanted` in place from the checkpoint at `path`, whatever its layout when saved, and return its info.

    `wanted` names every tensor of the model on every process; a process without a part of a tensor passes a view
    without pieces. Each process reads the pieces that it needs and checks their checksums. A save that was killed
    between its two renames leaves the checkpoint that it replaced at `<path>.old-<id>`, which is then read.

    Raises CheckpointError, on every process, when there is no checkpoint, when it is damaged, of another model or of an
    unknown version; then `wanted` is unchanged, unless a data file turned out to be damaged during the read.
    """
    rank = dist.get_rank(process_group) if is_in_job() else 0
    return _together(lambda: _load(Path(os.path.realpath(path)), wanted), process_group)[rank]


def saved_specs(path: str | os.PathLike[str]) -> dict[str, Spec]:
    """Shapes and dtypes of the tensors in a checkpoint, by name. CheckpointError if there is no checkpoint."""
    folder = _find(Path(os.path.realpath(path)))
    with file_errors("the checkpoint cannot be read", folder):
        metadata = read_metadata(folder, read_table(folder)["files"])
    tables = {n: t for n, t in metadata.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}
    return {name: Spec(tuple(table.size), table.properties.dtype) for name, table in tables.items()}


# Several processes.


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ALONE)
        yield


def _together(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Do `work` on every process and return all results. A failure on any process is a failure on all."""
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


# Writing.


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner, extended to drop boxes that another process writes; also checks that nothing is missing."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        view: ShardedTensorView = self.state_dict[index.fqn]
        return view.__get_tensor_shard__(index)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for name, table in metadata.state_dict_metadata.items():
            assert isinstance(table, TensorStorageMetadata)
            check_cover(name, table.size, (chunk.sizes for chunk in table.chunks))
        return plans, metadata


class _PieceWriter(FileSystemWriter):
    """Writes into `staged`, which the first process renames to `target` when all processes have finished."""

    def __init__(self, staged: Path, target: Path, info: Info, is_first: bool) -> None:
        super().__init__(staged)
        self.staged, self.target, self.info, self.is_first = staged, target, info, is_first

    @contextmanager
    def errors(self) -> Iterator[None]:
        """A context that turns errors into CheckpointError and removes `staged` on failure."""
        try:
            with file_errors(NOT_WRITTEN, self.target):
                yield
        except BaseException:
            if self.is_first:
                shutil.rmtree(self.staged, ignore_errors=True)
            raise

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Called by DCP's `async_save`. The pieces are copies already."""
        return state_dict

    def storage_meta(self) -> StorageMeta | None:
        # DCP would record the path, as a pickled object, and the path is not the final path.
        return None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on the first process, with the results of all processes."""
        super().finish(metadata, results)
        files = frozenset(entry.storage_data.relative_path for written in results for entry in written)
        finish(self.staged, self.target, files, self.info)


def _begin(
    path: str | os.PathLike[str], info: Info, group: dist.ProcessGroup | None, work: Callable[[], None] | None = None
) -> _PieceWriter:
    """Create the directory to write into, and do `work`, on every process or on none."""
    target = Path(os.path.realpath(path))
    is_first = not is_in_job() or dist.get_rank(group) == 0

    def begin() -> Path | None:
        if work is not None:
            work()
        return prepare(target) if is_first else None

    staged = _together(begin, group)[0]
    assert staged is not None
    return _PieceWriter(staged, target, info, is_first)


# Reading.


class _Reader(PieceReader):
    """Reads with metadata that has been checked already. Checks each piece's checksums, and caches the last piece,
    because several wanted boxes in a row may be cut from it."""

    def __init__(self, path: Path, metadata: Metadata, checksums: bool) -> None:
        super().__init__(path)
        self._metadata, self._checksums = metadata, checksums
        self._last: tuple[StorageInfo | None, bytes] = (None, b"")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def content(self, piece: StorageInfo, read: Callable[[], bytes]) -> bytes:
        if self._last[0] is not piece:
            content = read()
            if self._checksums:
                self._check(content, piece)
            self._last = (piece, content)
        return self._last[1]

    def _check(self, content: bytes, piece: StorageInfo) -> None:
        # A piece is a zip archive written by torch.save. torch.load does not compare its checksums; zipfile does.
        with zipfile.ZipFile(BytesIO(content)) as archive:
            if archive.testzip() is not None:
                raise damaged(Path(self.path), f"wrong checksum in {piece.relative_path}")


class _LoadPlanner(LoadPlanner):
    """DCP's resharding for views, without unpickling: DCP's default planner would unpickle bytes without
    restriction."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._views: Mapping[str, ShardedTensorView] = state_dict
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        plan = create_default_local_load_plan(dict(self._views), self._metadata)
        read: dict[str, int] = {}
        for item in plan.items:
            read[item.dest_index.fqn] = read.get(item.dest_index.fqn, 0) + prod(item.lengths)
        for name, view in self._views.items():
            needed = sum(box.num_elements for box, _ in view.distinct())
            check_cover(name, (needed,), ((read.get(name, 0),),))
        plan.items.sort(key=lambda item: (item.storage_index.fqn, tuple(item.storage_index.offset or ())))
        return plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise AssertionError("tables of pieces have no entries of bytes")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self._views[read_item.dest_index.fqn].__get_tensor_shard__(read_item.dest_index).detach()
        box = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return tensor[tuple(slice(offset, offset + length) for offset, length in box)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the piece was copied in place."""


def _load(target: Path, wanted: Mapping[str, ShardedTensorView]) -> dict[str, int | str]:
    path = _find(target)
    with file_errors("the checkpoint cannot be read", path):
        table = read_table(path)
        metadata = read_metadata(path, table["files"])
        check_model(path, metadata, wanted)
        reader = _Reader(path, metadata, table["checksums"])
        with _alone_is_fine():
            dcp_load(dict(wanted), storage_reader=reader, planner=_LoadPlanner(), no_dist=True)
    for view in wanted.values():
        view.repeat()
    return dict(table["info"])


def _find(target: Path) -> Path:
    path = target if target.exists() else next(iter(leftovers(target, "old")), None)
    if path is None:
        near = difflib.get_close_matches(target.name, [p.name for p in target.parent.glob("*")])
        raise CheckpointError(
            "there is no checkpoint at this path",
            where=str(target),
            expected=" or ".join(near),
            hint="a save to this path is not finished, or was killed" if leftovers(target, "tmp") else "",
        )
    return path
