"""What was measured once, on disk: profiles of machines and links, and which regions are worth compiling."""

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
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

_LOCK_S = 60.0  # longer than a calibration takes: a job that waited so long measures for itself
_POLL_S = 0.1


def cache_directory() -> Path:
    """Where meshweave keeps what it can make again: $MESHWEAVE_CACHE, else `meshweave` in the user's caches."""
    if own := os.environ.get("MESHWEAVE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshweave"


def machine_of(device: torch.device) -> dict[str, Any]:
    """What figures that are measured on a device hang on: the host, its machine, the device, threads of a CPU."""
    cuda = device.type == "cuda"
    return {
        "host": platform.node(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "threads": 0 if cuda else torch.get_num_threads(),
    }


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """The text that is kept for `key` (what it depends on, as text), in a file of its own.

    The file holds a digest of the rest, the key, and the text: data alone, nothing in it is executed.
    """

    directory: Path
    key: str
    suffix: str = ".toml"

    @property
    def path(self) -> Path:
        return self.directory / f"{sha256(self.key.encode()).hexdigest()[:24]}{self.suffix}"

    def read(self) -> tuple[str, str]:
        """The text, and what is wrong with the entry; both empty where there is none."""
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
        """Keep a text, whole or not at all. Returns why it could not be kept, else nothing."""
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
            return f"it could not be kept ({error})"
        return ""

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time has the entry, so that two jobs do not measure beside each other.

        Where that is not to be had (no directory, no locks on it, a holder that takes too long) the entry is used
        without: writes are whole in any case.
        """
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
                fcntl.flock(number, fcntl.LOCK_UN)  # closing does not, where a process was forked meanwhile
            os.close(number)


def _locked(number: int) -> bool:
    """Whether the lock is ours now, or cannot be had on this file system at all."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
