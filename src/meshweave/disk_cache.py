"""Data cached on disk that meshweave can recreate: measurements and programs, as text under a key."""

from __future__ import annotations

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
    """A text stored under `key` (what it depends on, as text), in a file of its own.

    The file contains a digest of the rest, the key and the text. It is data only: nothing in it is executed.
    """

    directory: Path
    key: str
    suffix: str = ".toml"

    @property
    def path(self) -> Path:
        return self.directory / f"{sha256(self.key.encode()).hexdigest()[:24]}{self.suffix}"

    def read(self) -> tuple[str, str]:
        """The text, and what is wrong with the entry; both empty if there is no entry."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return "", ""
        except (OSError, UnicodeDecodeError) as error:
            return "", f"{self.path} cannot be read ({error})"
        head, _, rest = text.partition("\n")
        key, _, kept = rest.partition("\n")
        if head != f"# {_digest(rest)}" or key != f"# {json.dumps(self.key)}":
            return "", f"{self.path} is damaged"
        return kept, ""

    def write(self, text: str) -> str:
        """Store a text atomically. Returns why it could not be stored, else an empty text."""
        rest = f"# {json.dumps(self.key)}\n{text}"
        temporary = ""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            number, temporary = tempfile.mkstemp(prefix=self.path.stem, suffix=".part", dir=self.directory)
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(f"# {_digest(rest)}\n{rest}")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            if temporary:
                with suppress(OSError):
                    os.unlink(temporary)
            return f"it could not be stored ({error})"
        return ""

    def prune(self, most: int) -> None:
        """Remove all but the `most` entries of the directory written last. Other processes may do the same."""
        try:
            entries = sorted(self.directory.glob(f"*{self.suffix}"), key=lambda path: path.stat().st_mtime)
            for path in entries[:-most]:
                path.unlink(missing_ok=True)
        except OSError:
            return

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the entry for this process, so that two jobs do not measure at the same time. If it cannot be locked (no
        directory, no lock support, another holder that takes too long) the entry is used without a lock: writes are
        atomic in any case."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
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


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
