"""Non-public classes that `torch.distributed.checkpoint` writes, and where it reads a piece.

Holds for torch 2.11 to 2.13 (torch/distributed/checkpoint/filesystem.py, metadata.py, torch/serialization.py).
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

# Names in a pickled table of pieces, besides the classes of `torch.distributed.checkpoint.metadata`.
PICKLED: tuple[Any, ...] = (dcp_metadata._MEM_FORMAT_ENCODING, _StorageInfo, torch.serialization._get_layout)


class CheckedReader(FileSystemReader):
    """A reader with metadata that has been read already, which passes the file and the bytes of each piece to `check`
    before it loads them."""

    def __init__(self, path: Path, metadata: dcp_metadata.Metadata, check: Callable[[str, bytes], None] | None) -> None:
        super().__init__(path)
        self._metadata, self._check = metadata, check

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        return self._metadata

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        content = super()._slice_file(file, sinfo).read()
        if self._check is not None:
            self._check(sinfo.relative_path, content)
        return BytesIO(content)
