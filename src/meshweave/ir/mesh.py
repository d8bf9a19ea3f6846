"""Mesh: named axes over an array of device ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from meshweave.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MOST_DEVICES = 1 << 20  # whose ids are listed, in 0.2 s
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Mesh:
    """Named axes over device ids, stored in row-major order of the axes.

    `Mesh("dp=2,tp=2")`, `Mesh(dp=2, tp=2)` and `Mesh("pp=2", devices=[3, 1])` are the ways to write a mesh. Without
    `devices` the ids are 0 .. n-1. Immutable and hashable; its hash is computed once, so that comparing layouts over
    16,384 devices costs no more than over 4.

    Raises MeshError for an axis named twice, a size below 1, a repeated device or a wrong number of them.
    """

    __slots__ = ("_hash", "_parent", "_sizes", "_where", "axis_names", "devices", "shape")

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    devices: tuple[int, ...]
    _hash: int
    _parent: Mesh | None
    _sizes: dict[str, int]
    _where: dict[int, int]

    def __init__(
        self, spec: str | Mapping[str, int] = "", *, devices: Sequence[int] | None = None, **axes: int
    ) -> None:
        pairs = [*_parse_axes(spec), *axes.items()]
        names = tuple(name for name, _ in pairs)
        _check_axes(pairs)
        shape = tuple(size for _, size in pairs)
        if prod(shape) > _MOST_DEVICES:
            raise MeshError(
                "the mesh has too many devices",
                where=f"axes {', '.join(f'{name}={size}' for name, size in pairs)}",
                got=f"{prod(shape):,} devices",
                expected=f"at most {_MOST_DEVICES:,}",
            )
        ids = tuple(range(prod(shape))) if devices is None else tuple(int(d) for d in devices)
        _check_devices(names, shape, ids)
        self._fill(names, shape, ids, None)

    def _fill(self, names: tuple[str, ...], shape: tuple[int, ...], ids: tuple[int, ...], parent: Mesh | None) -> None:
        where, sizes = {device: i for i, device in enumerate(ids)}, dict(zip(names, shape, strict=True))
        parts = {
            "axis_names": names,
            "shape": shape,
            "devices": ids,
            "_parent": parent,
            "_sizes": sizes,
            "_where": where,
        }
        for slot, value in parts.items():
            object.__setattr__(self, slot, value)
        object.__setattr__(self, "_hash", hash((names, shape, ids)))

    @classmethod
    def _make(
        cls, names: tuple[str, ...], shape: tuple[int, ...], ids: tuple[int, ...], parent: Mesh | None = None
    ) -> Mesh:
        mesh = object.__new__(cls)
        mesh._fill(names, shape, ids, parent)
        return mesh

    @staticmethod
    def of(mesh: Mesh | str | Mapping[str, int]) -> Mesh:
        """The mesh itself, or from its text `dp=2,tp=2` or the sizes of its axes by name. MeshError for anything
        else."""
        if isinstance(mesh, Mesh):
            return mesh
        if not isinstance(mesh, str | Mapping):
            hint = "mw.Mesh.from_device_mesh(...)" if type(mesh).__name__ == "DeviceMesh" else ""
            expected = '"dp=2,tp=2", {"dp": 2, "tp": 2} or a meshweave.Mesh'
            raise MeshError("not a mesh", where="mesh=", got=repr(mesh), expected=expected, hint=hint)
        return Mesh(mesh)

    @staticmethod
    def parse(text: str) -> Mesh:
        """Read the text form: `dp=2,tp=2`, or with its devices `dp=2 on [4, 5]`."""
        match = re.fullmatch(r"(?P<axes>.*?)\s*\bon\s*\[(?P<ids>[\d\s,]*)\]\s*", text)
        if match is None:
            return Mesh(text)
        return Mesh(match["axes"], devices=[int(n) for n in match["ids"].split(",") if n.strip()])

    @staticmethod
    def from_device_mesh(device_mesh: DeviceMesh) -> Mesh:
        """The Mesh with the axis names and ranks of a `torch.distributed` DeviceMesh (unnamed dims: d0, d1, ...).

        Raises MeshError for dim names that cannot name an axis.
        """
        ranks = device_mesh.mesh
        names = device_mesh.mesh_dim_names or tuple(f"d{i}" for i in range(ranks.ndim))
        return Mesh(dict(zip(names, ranks.shape, strict=True)), devices=ranks.flatten().tolist())

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Mesh is immutable")

    def __reduce__(self) -> tuple[object, ...]:
        return Mesh._make, (self.axis_names, self.shape, self.devices, self._parent)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh) or self._hash != other._hash:
            return False
        return (self.axis_names, self.shape, self.devices) == (other.axis_names, other.shape, other.devices)

    @property
    def text(self) -> str:
        """The axes and always the devices: `dp=2 on [0, 1]`. `Mesh.parse` reads it."""
        axes = ",".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True))
        return f"{axes} on {list(self.devices)}".strip()

    def __str__(self) -> str:
        axes = ",".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True))
        return axes if self.devices == tuple(range(len(self.devices))) else self.text

    def __repr__(self) -> str:
        return f"Mesh({self!s})"

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def __contains__(self, device: object) -> bool:
        return device in self._where

    def index(self, device: int) -> int:
        """Row-major position of the device with this id. Raises MeshError for a device that the mesh lacks."""
        if device not in self._where:
            raise MeshError(f"the mesh has no device {device}", where=f"mesh {self}", expected=str(list(self.devices)))
        return self._where[device]

    def covers(self, devices: Iterable[int]) -> bool:
        """Whether all of the device ids are in this mesh."""
        return all(device in self._where for device in devices)

    def size(self, axis: str) -> int:
        """Number of devices along `axis`. Raises MeshError for an axis that the mesh lacks."""
        return self._sizes[axis] if axis in self._sizes else self.shape[self.axis_index(axis)]

    def axis_index(self, axis: str) -> int:
        """Position of `axis` among the axes. Raises MeshError for an axis that the mesh lacks."""
        if axis not in self.axis_names:
            raise MeshError(
                f"the mesh has no axis '{axis}'",
                where=f"mesh {self}",
                got=axis,
                expected=f"one of {', '.join(self.axis_names) or '(no axes)'}",
                hint="use an axis of the mesh, or add it to the mesh",
            )
        return self.axis_names.index(axis)

    def flat_size(self, axes: Iterable[str]) -> int:
        """Number of devices in a group of the flattened `axes`."""
        return prod(self.size(axis) for axis in axes)

    def coordinates(self, position: int) -> dict[str, int]:
        """Coordinate along every axis of the device at `position` (its row-major index, not its id)."""
        coords = {}
        for name, size in zip(reversed(self.axis_names), reversed(self.shape), strict=True):
            position, coords[name] = divmod(position, size)
        return {name: coords[name] for name in self.axis_names}

    def position(self, coords: Mapping[str, int]) -> int:
        """Row-major index of the device at `coords`; omitted axes count as 0."""
        index = 0
        for name, size in zip(self.axis_names, self.shape, strict=True):
            index = index * size + coords.get(name, 0)
        return index

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Device ids of every group of the flattened `axes`, in the order given (first axis slowest).

        The axes need not be adjacent. Groups are in row-major order of the other axes. Raises MeshError for an axis
        that the mesh lacks or that is named twice.
        """
        _check_axes([(axis, self.size(axis)) for axis in axes])
        rest = [name for name in self.axis_names if name not in axes]
        inside = self._positions(axes)
        return tuple(tuple([self.devices[start + step] for step in inside]) for start in self._positions(rest))

    def _positions(self, axes: Sequence[str]) -> list[int]:
        """Row-major positions at every coordinate along `axes` (first axis slowest) and 0 along the others."""
        positions = [0]
        for axis in axes:
            index = self.axis_index(axis)
            stride = prod(self.shape[index + 1 :])
            positions = [at + i * stride for at in positions for i in range(self.shape[index])]
        return positions

    def flatten(self, axes: Sequence[str], name: str) -> Mesh:
        """The mesh with `axes` (any set, adjacent or not) replaced by a single axis `name`, in the place of the first.

        Raises MeshError for no axes, an axis that the mesh lacks or names twice, and a `name` that is taken.
        """
        if not axes:
            raise MeshError(
                "no axis to flatten",
                where=f"mesh {self}",
                got="no axes",
                expected="at least one axis of the mesh",
            )
        _check_axes([(axis, self.size(axis)) for axis in axes])
        rest = [a for a in self.axis_names if a not in axes]
        at = sum(1 for a in rest if self.axis_index(a) < self.axis_index(axes[0]))
        order = [*rest[:at], *axes, *rest[at:]]
        names = (*rest[:at], name, *rest[at:])
        shape = (*(self.size(a) for a in rest[:at]), self.flat_size(axes), *(self.size(a) for a in rest[at:]))
        _check_axes(list(zip(names, shape, strict=True)))
        return Mesh._make(names, shape, tuple(self.devices[at] for at in self._positions(order)))

    def at(self, **coords: int) -> Mesh:
        """The sub-mesh of the devices at these coordinates, over the remaining axes."""
        for axis, index in coords.items():
            if not 0 <= index < self.size(axis):
                raise MeshError(
                    f"no index {index} on axis '{axis}'",
                    where=f"mesh {self}",
                    got=str(index),
                    expected=f"0 to {self.size(axis) - 1}",
                )
        rest = tuple(name for name in self.axis_names if name not in coords)
        start = self.position(coords)
        ids = tuple(self.devices[start + step] for step in self._positions(rest))
        return Mesh._make(rest, tuple(self.size(a) for a in rest), ids)

    def __getitem__(self, key: str | tuple[str, ...] | int) -> Mesh:
        """`mesh["dp"]`: the sub-mesh of the named axes through index 0 of the others; `mesh["pp"][1]`: the
        sub-mesh at index 1 of axis pp, over all the other axes of `mesh`."""
        if isinstance(key, int):
            whole = self._parent or self
            if not self.axis_names:
                raise MeshError(
                    "a mesh without axes cannot be indexed",
                    where=f"devices {list(self.devices)}",
                    got="no axes",
                    expected="a mesh with an axis, such as mesh['pp']",
                )
            return whole.at(**{self.axis_names[0]: key})
        names = (key,) if isinstance(key, str) else tuple(key)
        return Mesh._make(names, tuple(map(self.size, names)), self.groups(names)[0], self._parent or self)


def _parse_axes(spec: str | Mapping[str, int]) -> list[tuple[str, int]]:
    if not isinstance(spec, str):
        return list(spec.items())
    pairs = []
    for part in filter(None, (p.strip() for p in spec.split(","))):
        name, _, size = part.partition("=")
        if not size.strip().isdecimal():
            raise MeshError(
                "a mesh axis is written name=size",
                where=f"mesh '{spec}'",
                got=part,
                expected="something like dp=2,tp=4",
                hint="separate the axes by commas",
            )
        pairs.append((name.strip(), int(size)))
    return pairs


def _check_axes(pairs: Sequence[tuple[str, int]]) -> None:
    names = [name for name, _ in pairs]
    where = "axes " + ",".join(f"{name}={size}" for name, size in pairs)
    for name, size in pairs:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise MeshError(
                f"'{name}' cannot name an axis",
                where=where,
                got=repr(name),
                expected="letters, digits and _, no digit first",
            )
        if names.count(name) > 1:
            raise MeshError(
                f"axis '{name}' is named twice", where=where, got=", ".join(names), expected="every axis at most once"
            )
        if isinstance(size, bool) or not isinstance(size, int):
            raise MeshError(
                f"the size of axis '{name}' is not a number", where=where, got=repr(size), expected="an int"
            )
        if size < 1:
            raise MeshError(
                f"axis '{name}' has no devices", where=where, got=f"{name}={size}", expected="a size of 1 or more"
            )


def _check_devices(names: tuple[str, ...], shape: tuple[int, ...], ids: tuple[int, ...]) -> None:
    where = "mesh " + ",".join(f"{n}={s}" for n, s in zip(names, shape, strict=True))
    if len(ids) != prod(shape):
        raise MeshError(
            "the devices do not fill the mesh",
            where=where,
            got=f"{len(ids)} devices",
            expected=f"{prod(shape)} devices",
        )
    if len(set(ids)) != len(ids):
        twice = sorted({d for d in ids if ids.count(d) > 1})
        raise MeshError(
            "a device is twice in the mesh", where=where, got=f"repeated: {twice}", expected="each device once"
        )
    if min(ids, default=0) < 0:
        raise MeshError("a device id is below 0", where=where, got=str(min(ids)), expected="0 or more")
