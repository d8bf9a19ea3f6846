"""The contents of a checkpoint: views of tensors as tables of pieces, and how to read untrusted tables."""

from __future__ import annotations

import difflib
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from meshweave.errors import CheckpointError, MeshweaveError
from meshweave.interop.checkpoints import PICKLED
from meshweave.ir.pieces import Box

FORMAT_VERSION = 1
TABLE = "meshweave.json"
METADATA = ".metadata"
OUR_FILES = re.compile(r"\.metadata|meshweave\.json|__\d+_\d+\.distcp")


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTensorView:
    """A global tensor as the pieces that this process has (to save) or wants (to load, filled in place).

    Implements DCP's `_Checkpointable` (torch/distributed/_checkpointable.py). A box may occur several times if a
    process represents many devices: it is written once, and read once for all. Empty pieces are normal.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Box, Tensor], ...]

    def __post_init__(self) -> None:
        for box, tensor in self.pieces:
            assert tuple(tensor.shape) == box.size, f"a tensor of shape {tuple(tensor.shape)} for {box}"
            assert tensor.dtype == self.dtype, f"a tensor of {tensor.dtype} in a view of {self.dtype}"
            ends = (o + s for o, s in zip(box.offset, box.size, strict=True))
            assert all(end <= size for end, size in zip(ends, self.shape, strict=True)), f"{box} leaves {self.shape}"

    def distinct(self) -> list[tuple[Box, Tensor]]:
        """The pieces without duplicates and empty pieces; a tensor without elements is a single piece."""
        if prod(self.shape) == 0:
            whole = Box((0,) * len(self.shape), self.shape)
            return [(whole, tensor.new_empty(self.shape)) for _, tensor in self.pieces[:1]]
        first: dict[Box, Tensor] = {}
        for box, tensor in self.pieces:
            first.setdefault(box, tensor)
        return [(box, tensor) for box, tensor in first.items() if box.num_elements]

    def repeat(self) -> None:
        """Copy what was read once into every other tensor with the same box."""
        first = dict(self.distinct())
        for box, tensor in self.pieces:
            if box.num_elements and first[box] is not tensor:
                tensor.detach().copy_(first[box])

    def copy(self) -> ShardedTensorView:
        """Its distinct pieces, copied to CPU memory."""
        copies = ((box, tensor.detach().to("cpu", copy=True)) for box, tensor in self.distinct())
        return replace(self, pieces=tuple(copies))

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box), properties=TensorProperties(dtype=self.dtype), size=torch.Size(self.shape)
                ),
            )
            for box, _ in self.distinct()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box, _ in self.distinct()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The piece at `index`. Its hint chooses among wanted boxes that begin at the same offset."""
        pieces = self.distinct()
        hinted = pieces[index.index : index.index + 1] if index.index is not None else []
        return next(tensor for box, tensor in [*hinted, *pieces] if box.offset == tuple(index.offset or ()))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.size))


def check_cover(name: str, shape: Iterable[int], sizes: Iterable[Iterable[int]]) -> None:
    covered, total = sum(map(prod, sizes)), prod(shape)
    if covered != total:
        raise CheckpointError(
            f"the pieces of '{name}' do not make up the whole tensor",
            got=f"{covered} elements",
            expected=f"{total} elements",
            hint="some process must have each box of the tensor's layout",
        )


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


def _not_ours(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        "this is not a meshweave checkpoint",
        where=str(path),
        got=got,
        expected=f"a directory with {TABLE} and {METADATA}",
    )


def damaged(path: Path, got: str) -> CheckpointError:
    return CheckpointError("the checkpoint is damaged", where=str(path), got=got, hint="use an earlier checkpoint")


def read_table(path: Path) -> dict[str, Any]:
    if not (path / TABLE).is_file():
        raise _not_ours(path, "a file" if path.is_file() else f"no {TABLE}")
    try:
        table = json.loads((path / TABLE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise damaged(path, f"{TABLE}: {error}") from error
    if not isinstance(table, dict) or table.get("format") != "meshweave":
        raise _not_ours(path, f"another {TABLE}")
    if table.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            "unknown format version of the checkpoint",
            where=str(path),
            got=f"version {table.get('version')}",
            expected=f"version {FORMAT_VERSION}",
            hint="load it with the version of meshweave that wrote it, or a newer version",
        )
    fields = {"checksums": bool, "files": dict, "info": dict}
    wrong = [name for name, kind in fields.items() if not isinstance(table.get(name), kind)]
    if wrong:
        raise damaged(path, f"{TABLE} has no valid '{wrong[0]}'")
    return table


def read_metadata(path: Path, files: Mapping[str, int]) -> Metadata:
    """The tables of pieces, after a check that all files exist in full length."""
    for name, size in files.items():
        if not OUR_FILES.fullmatch(name):
            raise damaged(path, f"{TABLE} names the file {name!r}")
        num_bytes = (path / name).stat().st_size if (path / name).is_file() else None
        if num_bytes != size:
            got = f"{name} is missing" if num_bytes is None else f"{name} has {num_bytes} of {size} bytes"
            raise damaged(path, got)
    try:
        with open(path / METADATA, "rb") as stream:
            metadata = _TableUnpickler(stream).load()
        _check_metadata(metadata, files)
    except MeshweaveError:
        raise
    except Exception as error:
        raise damaged(path, f"{METADATA}: {type(error).__name__}: {error}") from error
    return metadata


def _check_metadata(metadata: Any, files: Mapping[str, int]) -> None:
    if not isinstance(metadata, Metadata):
        raise ValueError("no tables of pieces")
    for name, table in metadata.state_dict_metadata.items():
        if not isinstance(table, TensorStorageMetadata):
            raise ValueError(f"'{name}' is not a tensor")
    for stored in metadata.storage_data.values():
        if stored.relative_path not in files or stored.transform_descriptors:
            raise ValueError(f"a piece in the file {stored.relative_path!r}")


def check_model(path: Path, metadata: Metadata, wanted: Mapping[str, ShardedTensorView]) -> None:
    saved = {n: t for n, t in metadata.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}
    missing = [name for name in wanted if name not in saved]
    unexpected = [name for name in saved if name not in wanted]
    differing = [
        f"{name} is {_kind(saved[name].properties.dtype, saved[name].size)}, not {_kind(view.dtype, view.shape)}"
        for name, view in wanted.items()
        if name in saved and (tuple(saved[name].size), saved[name].properties.dtype) != (view.shape, view.dtype)
    ]
    if not missing and not unexpected and not differing:
        return
    parts = [("missing", missing), ("unexpected", unexpected), ("different", differing)]
    near = [(name, match) for name in missing[:3] for match in difflib.get_close_matches(name, unexpected, 1)]
    raise CheckpointError(
        "the checkpoint is of another model",
        where=str(path),
        got="; ".join(f"{len(names)} {label}: {_first(names)}" for label, names in parts if names),
        expected="the same names, shapes and dtypes as the model's",
        hint="; ".join(f"'{name}' may be the checkpoint's '{match}'" for name, match in near),
    )


def _first(names: Iterable[str], num: int = 3) -> str:
    rest = iter(names)
    return ", ".join([*islice(rest, num), *(["..."] if next(rest, None) else [])])


def _kind(dtype: torch.dtype, shape: Iterable[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
