"""Layout: where every element of a value lives on a mesh."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

from meshweave.errors import LayoutError
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import Box, largest_chunk, nested_chunk, unit_matters

REDUCE_OPS = ("sum", "avg", "max", "min")


@dataclass(frozen=True, slots=True)
class DimSharding:
    """How a tensor dim is cut: by `axes` in turn, outermost first, in blocks of `unit` elements.

    The unit is 1 for ordinary dims. A dim that a view merged from (heads, head_dim) and that is sharded by heads has
    unit head_dim, so that 3 heads on 2 devices give pieces of 2 and 1 whole heads. A dim that no axis cuts has unit 1.
    `stretches`: the dim is so many equal stretches, and a piece has its part of each (rows in a dim that a view merged
    from (tokens, rows)); only a batch cut over time has such pieces, devices have not.
    Raises LayoutError for a unit below 1.
    """

    axes: tuple[str, ...] = ()
    unit: int = 1
    stretches: int = 1

    def __post_init__(self) -> None:
        if self.unit < 1:
            raise LayoutError(
                "a dim is cut in blocks of at least 1 element",
                where="{" + ",".join(self.axes) + "}",
                got=f"unit {self.unit}",
                expected="1 or more",
            )
        if not self.axes and self.unit != 1:
            object.__setattr__(self, "unit", 1)

    def __str__(self) -> str:
        text = "{" + ",".join(self.axes) + "}" + (f"x{self.unit}" if self.axes and self.unit != 1 else "")
        return text if self.stretches == 1 else f"{self.stretches}*{text}"


WHOLE = DimSharding()


@dataclass(frozen=True, slots=True)
class Layout:
    """Per tensor dim the ordered axes that shard it, and per partial axis its reduce op; replicated elsewhere.

    `owned` are (axis, dim, key): along the axis every device has its own rows of the dim. Which and how many is known
    only at run time: the value named `key` says which expert a row belongs to (the ends of `ir.grouped`), and the
    experts are cut over these axes in turn as chunks.

    Invariants, checked when built: every axis is in the mesh and is used once; `partial` is in mesh order. Written
    `[{dp}, {tp}]`, `[{}, {tp}x16]` (blocks of 16), `[{}, {}] partial(sum: tp)` and `[{}, {}] owned(ep: 0 by ends)`.
    """

    mesh: Mesh
    dims: tuple[DimSharding, ...]
    partial: tuple[tuple[str, str], ...] = ()
    owned: tuple[tuple[str, int, str], ...] = ()
    _hash: int = field(default=0, init=False, repr=False, compare=False)  # 0: not computed yet

    def __hash__(self) -> int:
        if not self._hash:
            object.__setattr__(self, "_hash", hash((self.mesh, self.dims, self.partial, self.owned)))
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, (self.mesh, self.dims, self.partial, self.owned)  # hashes differ between processes

    def __post_init__(self) -> None:
        used = [*self.sharded_axes, *self.partial_axes, *self.owned_axes]
        for axis in used:
            self.mesh.axis_index(axis)
            if used.count(axis) > 1:
                raise LayoutError(
                    f"axis '{axis}' is used twice in a layout",
                    where=f"mesh {self.mesh}",
                    got=str(self),
                    expected="every axis at most once",
                    hint="an axis shards a single dim, or makes the value partial, once",
                )
        for axis, op in self.partial:
            if op not in REDUCE_OPS:
                raise LayoutError(
                    f"'{op}' is not a reduce op",
                    where=f"axis '{axis}' of mesh {self.mesh}",
                    got=f"{op}: {axis}",
                    expected=f"one of {', '.join(REDUCE_OPS)}",
                )
        ordered = tuple(sorted(self.partial, key=lambda p: self.mesh.axis_index(p[0])))
        if ordered != self.partial:
            object.__setattr__(self, "partial", ordered)

    @staticmethod
    def replicated(mesh: Mesh, num_dims: int) -> Layout:
        """The layout with every element on every device."""
        return Layout(mesh, (WHOLE,) * num_dims)

    @staticmethod
    def of(
        mesh: Mesh, num_dims: int, shards: Mapping[int, Sequence[str]], partial: Mapping[str, str] | None = None
    ) -> Layout:
        """The layout that shards dim d over `shards[d]` and is partial over the axes of `partial`.

        Raises LayoutError for a dim outside 0 .. num_dims-1.
        """
        for d in shards:
            if not 0 <= d < num_dims:
                raise LayoutError(
                    f"there is no dim {d} to shard",
                    where=f"a layout on mesh {mesh}",
                    got=f"dim {d}",
                    expected=f"0 to {num_dims - 1}" if num_dims else "no sharded dim, because the value has no dims",
                )
        dims = tuple(DimSharding(tuple(shards.get(d, ()))) for d in range(num_dims))
        return Layout(mesh, dims, tuple((partial or {}).items()))

    @staticmethod
    def parse(text: str, mesh: Mesh) -> Layout:
        """Read the text form. Raises LayoutError for text that is not a layout, MeshError for an unknown axis."""
        return _parse(text, mesh)

    def __str__(self) -> str:
        text = "[" + ", ".join(map(str, self.dims)) + "]"
        if self.owned:
            plain, owned = (
                replace(self, owned=()),
                "; ".join(f"{axis}: {dim} by {key}" for axis, dim, key in self.owned),
            )
            return f"{plain} owned({owned})"
        if not self.partial:
            return text
        by_op: dict[str, list[str]] = {}
        for axis, op in self.partial:
            by_op.setdefault(op, []).append(axis)
        return f"{text} partial(" + "; ".join(f"{op}: {','.join(axes)}" for op, axes in by_op.items()) + ")"

    def __repr__(self) -> str:
        return f"Layout({self!s} on {self.mesh!s})"

    @property
    def partial_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.partial)

    @property
    def owned_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _, _ in self.owned)

    @property
    def owned_dims(self) -> tuple[int, ...]:
        """The dims whose rows devices own, each once."""
        return tuple(dict.fromkeys(dim for _, dim, _ in self.owned))

    def without_owned(self) -> Layout:
        """The layout with every row on every device instead of only its own."""
        return replace(self, owned=()) if self.owned else self

    def owned_as_parts(self) -> Layout:
        """The layout after rows of other devices are set to zero: a partial sum."""
        parts = tuple((axis, "sum") for axis in self.owned_axes)
        return Layout(self.mesh, self.dims, (*self.partial, *parts)) if self.owned else self

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """The axes along which all devices have the same values, in mesh order."""
        used = (*self.sharded_axes, *self.partial_axes, *self.owned_axes)
        return tuple(axis for axis in self.mesh.axis_names if axis not in used)

    def dim_of(self, axis: str) -> int | None:
        """The dim that `axis` shards, or None."""
        return next((d for d, dim in enumerate(self.dims) if axis in dim.axes), None)

    def parts(self, dim: int) -> tuple[int, ...]:
        """Sizes of the axes that shard `dim`, outermost first."""
        return tuple(self.mesh.size(axis) for axis in self.dims[dim].axes)

    def normalized(self, shape: Sequence[int]) -> Layout:
        """The same pieces in normal form: axes of size 1 dropped, units dropped where they change no piece. Two layouts
        of a shape whose texts differ only in these have the same normal form.
        Raises LayoutError when the number of dims differs from the shape's.
        """
        self.check_rank(shape)
        if 1 not in self.mesh.shape and all(dim.unit == 1 for dim in self.dims):
            return self
        dims = []
        for size, dim in zip(shape, self.dims, strict=True):
            axes = tuple(axis for axis in dim.axes if self.mesh.size(axis) > 1)
            parts = [self.mesh.size(axis) for axis in axes]
            unit = dim.unit if unit_matters(size // dim.stretches, parts, dim.unit) else 1
            dims.append(DimSharding(axes, unit, dim.stretches))
        partial = tuple(p for p in self.partial if self.mesh.size(p[0]) > 1)
        owned = tuple(entry for entry in self.owned if self.mesh.size(entry[0]) > 1)
        if (tuple(dims), partial, owned) == (self.dims, self.partial, self.owned):
            return self
        return Layout(self.mesh, tuple(dims), partial, owned)

    def check_rank(self, shape: Sequence[int]) -> None:
        if len(shape) != len(self.dims):
            raise LayoutError(
                "the layout and the tensor differ in their number of dims",
                where=f"a tensor of shape {tuple(shape)}",
                got=f"{self} with {len(self.dims)} dims",
                expected=f"{len(shape)} dims",
            )

    def with_dim(self, dim: int, sharding: DimSharding) -> Layout:
        return replace(self, dims=(*self.dims[:dim], sharding, *self.dims[dim + 1 :]))

    def box(self, shape: Sequence[int], coords: Mapping[str, int]) -> Box:
        """The piece of a tensor of `shape` on the device at `coords`."""
        spans = [
            nested_chunk(size, [(self.mesh.size(a), coords[a]) for a in dim.axes], dim.unit)
            for size, dim in zip(shape, self.dims, strict=True)
        ]
        return Box(tuple(o for o, _ in spans), tuple(s for _, s in spans))

    def box_of(self, shape: Sequence[int], device: int) -> Box:
        """The piece on a device of the mesh, by its id."""
        return self.box(shape, self.mesh.coordinates(self.mesh.index(device)))

    def pieces(self, shape: Sequence[int]) -> dict[int, Box]:
        """Device id -> its box. Along replicated and partial axes devices have the same box."""
        self.check_rank(shape)
        mesh, boxes = self.mesh, dict[tuple[int, ...], Box]()
        spans = [self.spans(d, size) for d, size in enumerate(shape)]
        numbers = [0] * mesh.num_devices, *(self._numbers(d) for d in range(len(shape)))
        pieces = {}
        for device, (_, *key) in zip(mesh.devices, zip(*numbers, strict=True), strict=True):
            at = tuple(key)
            if at not in boxes:
                cut = [spans[d][i] for d, i in enumerate(at)]
                boxes[at] = Box(tuple(o for o, _ in cut), tuple(s for _, s in cut))
            pieces[device] = boxes[at]
        return pieces

    def spans(self, d: int, size: int) -> list[tuple[int, int]]:
        """Offset and size of the pieces of dim d, the outermost axis slowest."""
        parts, unit = self.parts(d), self.dims[d].unit
        return [nested_chunk(size, list(zip(parts, index, strict=True)), unit) for index in product(*map(range, parts))]

    def _numbers(self, d: int) -> list[int]:
        """For every device, in mesh order, the index of its piece of dim d."""
        strides, stride = {}, 1
        for axis in reversed(self.dims[d].axes):
            strides[axis] = stride
            stride *= self.mesh.size(axis)
        numbers = [0]
        for axis, size in zip(self.mesh.axis_names, self.mesh.shape, strict=True):
            step = strides.get(axis, 0)
            numbers = [at + i * step for at in numbers for i in range(size)]
        return numbers

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the largest piece, that of the device at coordinate 0 of every axis. Of owned rows it is an equal
        share: the load is assumed to be balanced."""
        pieces = [
            largest_chunk(size // dim.stretches, self.parts(d), dim.unit) * dim.stretches if dim.axes else size
            for d, (size, dim) in enumerate(zip(shape, self.dims, strict=True))
        ]
        for dim in self.owned_dims if self.owned else ():
            shares = prod(self.mesh.size(axis) for axis, d, _ in self.owned if d == dim)
            pieces[dim] = -(-pieces[dim] // shares)
        return tuple(pieces)


_LAYOUT = re.compile(
    r"\s*\[(?P<dims>[^\]]*)\]\s*(?:partial\((?P<partial>[^)]*)\))?\s*(?:owned\((?P<owned>[^)]*)\))?\s*"
)
_OWNED = re.compile(r"\s*(?P<axis>\w+):\s*(?P<dim>\d+) by (?P<key>\w+)\s*")
_DIM = re.compile(r"\s*\{(?P<axes>[^}]*)\}(?:x(?P<unit>[1-9]\d*))?\s*(?:,|$)")


def _parse(text: str, mesh: Mesh) -> Layout:
    match = _LAYOUT.fullmatch(text)
    if match is None:
        raise _not_a_layout(text)
    dims, rest = [], match["dims"].strip()
    while rest:
        dim = _DIM.match(rest)
        if dim is None:
            raise _not_a_layout(text)
        dims.append(DimSharding(_names(dim["axes"]), int(dim["unit"] or 1)))
        rest = rest[dim.end() :]
    partial = []
    for part in filter(None, (match["partial"] or "").split(";")):
        op, colon, axes = part.partition(":")
        if not colon:
            raise _not_a_layout(text)
        partial += [(axis, op.strip()) for axis in _names(axes)]
    entries = [_OWNED.fullmatch(part) for part in filter(None, (match["owned"] or "").split(";"))]
    if None in entries:
        raise _not_a_layout(text)
    owned = tuple((entry["axis"], int(entry["dim"]), entry["key"]) for entry in entries if entry is not None)
    return Layout(mesh, tuple(dims), tuple(partial), owned)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _not_a_layout(text: str) -> LayoutError:
    return LayoutError(
        "this is not a layout",
        where="the text of a layout",
        got=repr(text),
        expected="something like [{dp}, {tp}] or [{}, {}] partial(sum: tp)",
        hint="a pair of braces per tensor dim, with the axes that shard it",
    )
