"""Data cached on disk that meshweave can recreate: measurements and programs, under a key."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

_LOCK_S = 60.0  # longer than a calibration takes; a job that has waited this long measures for itself
_POLL_S = 0.1
_MOST_BYTES = 1 << 30  # of the entries of a directory: 450 programs of a 32-layer 8B step


def cache_directory() -> Path:
    """The directory of cached data that meshweave can recreate: $MESHWEAVE_CACHE, else `meshweave` in the user's
    caches, else, for a user without a home directory, in the directory of temporary files."""
    if own := os.environ.get("MESHWEAVE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "meshweave"
    try:
        return Path.home() / ".cache" / "meshweave"
    except RuntimeError:  # neither $HOME nor an entry in the user database
        return Path(tempfile.gettempdir()) / f"meshweave-{os.getuid()}"


def machine_of(device: torch.device) -> dict[str, Any]:
    """What measured figures depend on: the host, its machine, the device, threads of a CPU."""
    cuda = device.type == "cuda"
    return {
        "host": platform.node(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "threads": 0 if cuda else torch.get_num_threads(),
    }


@cache
def package_digest() -> str:
    """A digest of all code of meshweave."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Data under `key` (all that they depend on, as text), in a file of its own: a digest of the rest, the key, and the
    data.

    Directory and file are the user's own, and nobody else can write to them: else the entry is not used.
    """

    directory: Path
    key: str
    suffix: str = ".toml"

    @property
    def path(self) -> Path:
        return self.directory / f"{sha256(self.key.encode()).hexdigest()[:24]}{self.suffix}"

    def read(self) -> tuple[bytes, str]:
        """The data, and what is wrong with the entry; both empty if there is no entry."""
        try:
            with open(self.path, "rb", opener=_open_own) as file:
                _check_own(self.directory, os.lstat(self.directory))
                content = file.read()
        except FileNotFoundError:
            return b"", ""
        except OSError as error:
            return b"", f"{self.path} cannot be read ({error})"
        head, _, rest = content.partition(b"\n")
        key, _, data = rest.partition(b"\n")
        if head != _head(rest) or key != self._key_line():
            return b"", f"{self.path} is damaged"
        return data, ""

    def write(self, data: bytes) -> str:
        """Store data atomically, and remove the oldest entries beyond `_MOST_BYTES`. Returns why the data could not be
        stored, else an empty text."""
        rest = self._key_line() + b"\n" + data
        temporary = ""
        try:
            self._make_directory()
            number, temporary = tempfile.mkstemp(prefix=self.path.stem, suffix=".part", dir=self.directory)
            with os.fdopen(number, "wb") as file:
                file.write(_head(rest) + b"\n" + rest)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            if temporary:
                with suppress(OSError):
                    os.unlink(temporary)
            return f"it could not be stored ({error})"
        self._prune()
        return ""

    def _key_line(self) -> bytes:
        return f"# {json.dumps(self.key)}".encode()

    def _make_directory(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(PermissionError):  # of another user
            self.directory.chmod(0o700)
        _check_own(self.directory, os.lstat(self.directory))

    def _prune(self) -> None:
        """Remove the oldest entries. Other processes may do the same."""
        with suppress(OSError):
            stats = [(path, path.stat()) for path in self.directory.glob(f"*{self.suffix}")]
            total = 0
            for path, stat in sorted(stats, key=lambda pair: -pair[1].st_mtime):
                total += stat.st_size
                if total > _MOST_BYTES and path != self.path:
                    path.unlink(missing_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the entry for this process, so that two jobs do not measure at the same time. If it cannot be locked (no
        directory, no lock support, another holder that takes too long) the entry is used without a lock: writes are
        atomic in any case."""
        try:
            self._make_directory()
            number = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:
            yield
            return
        try:
            end = time.monotonic() + _LOCK_S
            while not _locked(number) and time.monotonic() < end:
                time.sleep(_POLL_S)
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(number, fcntl.LOCK_UN)  # closing does not release it if a process was forked meanwhile
            os.close(number)


def _locked(number: int) -> bool:
    """Whether this process has the lock now, or the file system supports none."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _head(rest: bytes) -> bytes:
    return f"# {sha256(rest).hexdigest()}".encode()


def _open_own(path: str, flags: int) -> int:
    """Open a file that is the user's own. Raises PermissionError for any other, and for a link."""
    number = os.open(path, flags | os.O_NOFOLLOW)
    try:
        _check_own(Path(path), os.fstat(number))
    except OSError:
        os.close(number)
        raise
    return number


def _check_own(path: Path, stat: os.stat_result) -> None:
    """Raises PermissionError if a file or directory belongs to another user, or others can write to it."""
    if stat.st_uid != os.geteuid() or stat.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "it belongs to another user, or others can write to it", str(path))
