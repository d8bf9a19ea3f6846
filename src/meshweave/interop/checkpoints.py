"""Non-public classes that `torch.distributed.checkpoint` writes, and where it reads a piece.

Holds for torch 2.11 to 2.13 (torch/distributed/checkpoint/filesystem.py, metadata.py, torch/serialization.py).
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

StorageInfo = _StorageInfo

# Names in a pickled table of pieces, besides the classes of `torch.distributed.checkpoint.metadata`.
PICKLED: tuple[Any, ...] = (dcp_metadata._MEM_FORMAT_ENCODING, StorageInfo, torch.serialization._get_layout)


class PieceReader(FileSystemReader):
    """A reader that returns each piece through `content`, which may cache and check it."""

    def content(self, piece: StorageInfo, read: Callable[[], bytes]) -> bytes:
        """The bytes of a piece, which `read` reads from its file."""
        return read()

    def _slice_file(self, file: IO[bytes], sinfo: StorageInfo) -> IO[bytes]:
        whole = super()._slice_file
        return BytesIO(self.content(sinfo, lambda: whole(file, sinfo).read()))
