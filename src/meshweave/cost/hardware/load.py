"""Loads profiles from TOML files and checks every figure: errors have file and field."""

from __future__ import annotations

import difflib
import math
import tomllib
import types
from dataclasses import MISSING, Field, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from meshweave.cost.hardware.profile import MachineProfile
from meshweave.errors import MeshweaveError

T = TypeVar("T")
_DATA = resources.files("meshweave.cost.hardware") / "data"
Path_ = tuple[str | int, ...]  # keys and list indices from the root of a file to a value


@cache
def profile_names() -> tuple[str, ...]:
    """Names of the profiles that are part of meshweave."""
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in _DATA.iterdir() if entry.name.endswith(".toml")))


def profile_of_device(device_name: str) -> str | None:
    """The name of the built-in profile of a device named as by torch.cuda; None if there is none."""
    patterns = ((name, _load_by_name(name).device) for name in profile_names())
    return next((name for name, pattern in patterns if pattern and fnmatchcase(device_name, pattern)), None)


def load_profile(name_or_path: str | Path) -> MachineProfile:
    """The profile of a name (see `profile_names`) or of a TOML file.

    Text that ends in .toml or contains a directory is a file. Raises MeshweaveError for an unknown name, an unreadable
    file, and a file with missing, unknown or invalid fields.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".toml") or "/" in text:
        return _from_file(Path(text))
    if text not in profile_names():
        near = difflib.get_close_matches(text, profile_names(), n=3, cutoff=0.4)
        raise MeshweaveError(
            f"unknown machine profile '{text}'",
            where="load_profile",
            got=text,
            expected=f"one of {', '.join(profile_names())}, or the path of a TOML file",
            hint=f"did you mean {' or '.join(near)}?"
            if near
            else "`meshweave calibrate -o machine.toml` measures this machine",
        )
    return _load_by_name(text)


@lru_cache(maxsize=64)
def _load_by_name(name: str) -> MachineProfile:
    return parse_profile((_DATA / f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml")


def _from_file(path: Path) -> MachineProfile:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MeshweaveError(
            "the machine profile cannot be read", where=str(path), got=str(error), expected="a TOML file"
        ) from error
    return parse_profile(text, str(path))


def parse_profile(text: str, file: str) -> MachineProfile:
    """The profile in the TOML `text`; `file` is its name in errors. Raises MeshweaveError as `load_profile` does."""
    return _ProfileReader(file).check(parse_table(MachineProfile, text, file))


def parse_table(kind: type[T], text: str, file: str) -> T:
    """A class of the schema from TOML. Raises MeshweaveError as `load_profile` does."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MeshweaveError("the machine profile is not TOML", where=file, got=str(error), expected="TOML") from error
    read: T = _ProfileReader(file).table(kind, table, ())
    return read


class _ProfileReader:
    """Reads the tables of a file into the dataclasses of `schema`."""

    def __init__(self, file: str) -> None:
        self.file = file

    def table(self, kind: type[Any], value: object, path: Path_) -> Any:
        if not isinstance(value, dict):
            raise self.wrong("is not a table", path, repr(value), f"a table [{_dotted_path(path)}]")
        known = {f.name: f for f in fields(kind)}
        for key in value:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean '{near[0]}'?" if near else "remove it"
                raise self.wrong("is unknown", (*path, key), key, f"one of {', '.join(known)}", hint)
        hints = get_type_hints(kind)
        entries = {
            name: self.value(hints[name], f, value[name], (*path, name)) for name, f in known.items() if name in value
        }
        for name, f in known.items():
            if name not in value and f.default is MISSING:
                raise self.wrong(
                    "is missing", (*path, name), "nothing", str(f.metadata.get("expected", f"a table [{name}]"))
                )
        return kind(**entries)

    def value(self, hint: Any, f: Field[Any], value: object, path: Path_) -> Any:
        kind = _inner(hint)
        if is_dataclass(kind) and isinstance(kind, type):
            if get_origin(hint) is not tuple:
                return self.table(kind, value, path)
            rows = self.rows(value, path, f"tables [[{_dotted_path(path)}]]")
            return tuple(self.table(kind, row, (*path, i)) for i, row in enumerate(rows))
        meta = f.metadata
        if "keys" in meta:
            return self.pairs(meta, value, path)
        if "columns" in meta:
            return self.points(meta, value, path, nested=get_args(hint)[0] is not float)
        if kind is str:
            return self.text(meta, value, path)
        number = self.number(meta, value, path)
        if kind is not int:
            return number
        if number != int(number):
            raise self.wrong("is out of range", path, repr(value), meta["expected"])
        return int(number)

    def text(self, meta: Any, value: object, path: Path_) -> str:
        if not isinstance(value, str) or ("names" in meta and value not in meta["names"]) or not value.strip():
            raise self.wrong("is not an allowed value", path, repr(value), meta["expected"])
        return value

    def number(self, meta: Any, value: object, path: Path_) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong("is not a number", path, repr(value), meta["expected"])
        low_enough = meta["low"] < value if meta["above"] else meta["low"] <= value
        if not (low_enough and value <= meta["high"] and math.isfinite(value)):
            raise self.wrong("is out of range", path, repr(value), meta["expected"])
        return float(value)

    def rows(self, value: object, path: Path_, expected: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.wrong("is not a list", path, repr(value), expected)
        return value

    def pairs(self, meta: Any, value: object, path: Path_) -> tuple[tuple[str, float], ...]:
        if not isinstance(value, dict):
            raise self.wrong("is not a table", path, repr(value), meta["expected"])
        for key in value:
            if key not in meta["keys"]:
                raise self.wrong("is unknown", (*path, key), key, f"one of {', '.join(meta['keys'])}")
        return tuple((key, self.number(meta["value"], value[key], (*path, key))) for key in sorted(value))

    def points(self, meta: Any, value: object, path: Path_, nested: bool) -> Any:
        rows = self.rows(value, path, meta["expected"])
        if not nested:
            return self.point(meta, rows, path)
        if not rows:
            raise self.wrong("has no rows", path, "[]", meta["expected"])
        points = [self.point(meta, self.rows(r, (*path, i), "a row"), (*path, i)) for i, r in enumerate(rows)]
        for i, (point, other) in enumerate(pairwise(points), 1):
            if meta["rising"] and not (point[0] < other[0] and point[-1] <= other[-1]):
                expected = "a larger {} than in the previous row, and no smaller {}".format(
                    meta["columns"][0], meta["columns"][-1]
                )
                raise self.wrong("does not rise", (*path, i), str(list(other)), expected)
        return tuple(points)

    def point(self, meta: Any, row: list[Any], path: Path_) -> tuple[float, ...]:
        *names, last = meta["columns"]
        if len(row) != len(names) + 1:
            raise self.wrong("has a row of another length", path, repr(row), meta["expected"])
        low = meta["low"]
        metas = [
            {"expected": f"{name}, {low:g} or more", "low": low, "high": math.inf, "above": False} for name in names
        ]
        metas.append({"expected": f"{last}, above 0", "low": 0, "high": math.inf, "above": True})
        return tuple(self.number(metas[i], value, (*path, i)) for i, value in enumerate(row))

    def check(self, profile: MachineProfile) -> MachineProfile:
        """The profile, after a check that its figures are consistent."""
        power, memory, net = profile.power, profile.memory, profile.links.net
        if power is not None and power.static_watts >= min(power.watts, power.reference_watts):
            path: Path_ = ("power", "static_watts")
            raise self.wrong("is out of range", path, f"{power.static_watts:g}", "less than watts and reference_watts")
        if memory.reserved_bytes >= memory.bytes:
            path = ("memory", "reserved_bytes")
            raise self.wrong("is out of range", path, f"{memory.reserved_bytes:g}", f"less than {memory.bytes:g} bytes")
        if net is not None and net.ports > profile.devices_per_node:
            path = ("links", "net", "ports")
            raise self.wrong(
                "is out of range", path, str(net.ports), f"{profile.devices_per_node} at most, one per device"
            )
        for i, table in enumerate(profile.attention.measured):
            for j, point in enumerate(table.points):
                if min(point[:4]) < 1 or point[4] not in (0, 1):
                    path = ("attention", "measured", i, "points", j)
                    raise self.wrong("is out of range", path, str(list(point)), "sizes of 1 or more; causal 0 or 1")
        return profile

    def wrong(self, what: str, path: Path_, got: str, expected: str, hint: str = "") -> MeshweaveError:
        return MeshweaveError(f"'{_dotted_path(path)}' {what}", where=self.file, got=got, expected=expected, hint=hint)


def _inner(hint: Any) -> Any:
    """The type itself of `T | None`, the type of the elements of `tuple[T, ...]`, else the hint."""
    if get_origin(hint) is types.UnionType:
        return get_args(hint)[0]
    return get_args(hint)[0] if get_origin(hint) is tuple else hint


def _dotted_path(path: Path_) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
