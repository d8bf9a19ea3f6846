"""Parallel operators inside a model: replicate, repartition, combine, reduction, move and on.

Each is the identity on the global value and pins the layout of its result; the gradient moves back to the operand's
layout. In eager PyTorch, and on a mesh of one device, they do nothing. A value that an operator made partial is an
error in a non-linear op until `reduction` makes it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from meshweave.capture.trace import user_line
from meshweave.errors import LayoutError, MeshError
from meshweave.interop import pytree
from meshweave.ir import ops
from meshweave.ir.graph import Origin
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh

Axes = str | Sequence[str]
T = TypeVar("T")


def replicate(x: Tensor, axis: Axes) -> Tensor:
    """x, whole on every device along `axis`. Backward: the sum of the replicas' gradients.

    A value that is sharded over `axis` is gathered. LayoutError if it is partial over `axis`: use `reduction`.
    """
    return _pinned(x, "replicate", _names(axis))


def repartition(x: Tensor, *, dim: int, axis: Axes) -> Tensor:
    """x, its `dim` cut into a piece per device along `axis`, inside its present cuts. Backward: the gather.

    Pieces may be uneven. An axis that cuts another dim is moved here (an all-to-all). LayoutError for an axis over
    which x is partial, and for a dim that x lacks."""
    return _pinned(x, "repartition", str(_dim(x, dim)), _names(axis))


def combine(x: Tensor, *, dim: int, axis: Axes) -> Tensor:
    """x, the pieces of `dim` along `axis` joined. Backward: each device keeps its slice of the gradient.

    Other axes that cut `dim` still cut it. LayoutError where `axis` does not cut `dim`.
    """
    return _pinned(x, "combine", str(_dim(x, dim)), _names(axis))


def reduction(x: Tensor, axis: Axes) -> Tensor:
    """x, its partial values along `axis` added up on every device. Backward: every device gets the gradient.

    LayoutError where x is not partial over `axis`.
    """
    return _pinned(x, "reduction", _names(axis))


def move(x: Tensor, layout: Layout) -> Tensor:
    """x in `layout`, on the mesh of the layout. Backward: the gradient moves back."""
    try:
        layout.check_rank(x.shape)
    except LayoutError as error:
        raise LayoutError(error.what, where=user_line(), got=error.got, expected=error.expected) from error
    return _pinned(x, "move", layout.mesh.text, str(layout))


def on(x: T, mesh: Mesh) -> T:
    """x on the devices of `mesh`; the ops that follow run there. Axes that both meshes have keep their cuts. `x` may be
    a tensor or a nest of tensors. Backward: the gradient moves back."""
    return pytree.tree_map_only(Tensor, lambda t: _pinned(t, "on", mesh.text), x)


def _pinned(x: Tensor, *words: str) -> Tensor:
    return ops.pin(x, _SEPARATOR.join(words), False)


_SEPARATOR = " | "


def _names(axis: Axes) -> str:
    names = [axis] if isinstance(axis, str) else list(axis)
    if not names:
        raise MeshError("an operator needs an axis", where=user_line(), expected="the name of a mesh axis")
    return ",".join(names)


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise LayoutError(
            f"the tensor has no dim {dim}",
            where=user_line(),
            got=f"dim {dim} of a tensor of shape {list(x.shape)}",
            expected=f"{-x.dim()} to {x.dim() - 1}" if x.dim() else "a tensor with dims",
        )
    return dim % x.dim()


# Reading pins: what placement does with a pin's text.


@dataclass(frozen=True, slots=True)
class Pin:
    """A parsed pin. `axes` are those that an operator names; a plan's constraint names none here. `mesh` is the device
    set that `on` and `move` ask for."""

    kind: str
    axes: tuple[str, ...] = ()
    dim: int = -1
    mesh: Mesh | None = None
    text: str = ""

    @staticmethod
    def parse(text: str) -> Pin:
        kind, *rest = text.split(_SEPARATOR)
        if not rest:
            return Pin("constraint", text=text)
        if kind in ("on", "move"):
            return Pin(kind, mesh=Mesh.parse(rest[0]), text=rest[-1])
        return Pin(kind, tuple(rest[-1].split(",")), int(rest[0]) if len(rest) > 1 else -1)

    @property
    def is_operator(self) -> bool:
        """Whether the model contains it (as opposed to a plan's constraint)."""
        return self.kind != "constraint"

    def layout(self, layout: Layout, is_grad: bool = False) -> Layout:
        """The layout after the pin of a value in layout `held` (of its gradient, for a plan's constraint). On a mesh of
        one device that is `held`. Raises LayoutError or MeshError, without a location."""
        if self.kind == "constraint":
            return apply_constraint(self.text, layout, is_grad)
        if self.mesh is not None:
            return translate(layout, self.mesh) if self.kind == "on" else Layout.parse(self.text, self.mesh)
        for axis in self.axes:
            if layout.mesh.size(axis) > 1:
                layout = _OPERATORS[self.kind](layout, axis, self.dim)
        return layout

    def layout_for(self, layout: Layout, shape: Sequence[int], where: str) -> Layout:
        """The layout of a value of `shape` after an operator. Errors name the operator's source line."""
        try:
            target = self.layout(layout)
            target.check_rank(shape)
        except (LayoutError, MeshError) as error:
            parts = {"got": error.got, "expected": error.expected, "hint": error.hint}
            raise type(error)(error.what, where=where, **parts) from error
        return target

    def acting(self, target: Layout, before: frozenset[str]) -> frozenset[str]:
        """The axes whose effect on the operator's result comes from operators: those of this operator and of earlier
        ones."""
        used = {*target.sharded_axes, *target.partial_axes}
        return frozenset(used & {*(used if self.kind == "move" else self.axes), *before})


def partial_operand(op: str, axis: str, layout: Layout, at: Origin, producer: Origin) -> LayoutError:
    """The error for a non-linear op on a value that an operator has made partial."""
    return LayoutError(
        f"{op} is not linear and takes a value that is partial over '{axis}'",
        where=str(at),
        got=f"{layout} from {producer.source}",
        expected=f"a value that is not partial over {axis}",
        hint=f'add it up first: mw.reduction(x, "{axis}")',
    )


def translate(layout: Layout, mesh: Mesh) -> Layout:
    """The dims of `layout` on another mesh, as far as it has axes of the same names and sizes; nothing is partial.

    On its own mesh a layout is itself.
    """
    if layout.mesh == mesh:
        return layout

    def kept(axis: str) -> bool:
        return axis in mesh.axis_names and mesh.size(axis) == layout.mesh.size(axis)

    dims = tuple(DimSharding(tuple(a for a in dim.axes if kept(a)), dim.unit) for dim in layout.dims)
    return Layout(mesh, dims)


def layout_back(pin: Pin, grad: Layout, operand: Layout) -> Layout:
    """The layout of an operator's gradient: that of its operand, along the axes that the operator names.

    Over other axes the gradient keeps its layout. If the operand was partial, every device gets the gradient.
    """
    if pin.mesh is not None:
        return replace(operand, partial=())
    for axis in pin.axes:
        grad = _without(grad, axis)
    back = replace(grad, partial=tuple(p for p in grad.partial if p[0] not in pin.axes))
    for d, dim in enumerate(operand.dims):
        named = tuple(a for a in dim.axes if a in pin.axes)
        if named:
            entry = back.dims[d]
            whole = dim if {*entry.axes, *named} == {*dim.axes} else DimSharding((*entry.axes, *named), dim.unit)
            back = back.with_dim(d, whole)
    return back


def _without(layout: Layout, axis: str) -> Layout:
    dims = tuple(DimSharding(tuple(a for a in dim.axes if a != axis), dim.unit) for dim in layout.dims)
    return replace(layout, dims=dims)


def _replicate(layout: Layout, axis: str, dim: int) -> Layout:
    if axis in layout.partial_axes:
        raise _misuse("replicate", axis, layout, f"a value that is not partial over {axis}", "call reduction")
    return _without(layout, axis)


def _repartition(layout: Layout, axis: str, dim: int) -> Layout:
    if axis in layout.partial_axes:
        raise _misuse("repartition", axis, layout, f"a value that is not partial over {axis}", "call reduction first")
    if layout.dim_of(axis) == dim:
        return layout
    bare = _without(layout, axis)
    sharding = bare.dims[dim]
    return bare.with_dim(dim, DimSharding((*sharding.axes, axis), sharding.unit))


def _combine(layout: Layout, axis: str, dim: int) -> Layout:
    if layout.dim_of(axis) != dim:
        hint = "call reduction" if axis in layout.partial_axes else "combine undoes a repartition"
        raise _misuse("combine", axis, layout, f"dim {dim} cut over {axis}", hint)
    return _without(layout, axis)


def _reduction(layout: Layout, axis: str, dim: int) -> Layout:
    if axis not in layout.partial_axes:
        hint = "call combine" if axis in layout.sharded_axes else "the value is not partial over it"
        raise _misuse("reduction", axis, layout, f"a value that is partial over {axis}", hint)
    return replace(layout, partial=tuple(p for p in layout.partial if p[0] != axis))


_OPERATORS: dict[str, Callable[[Layout, str, int], Layout]] = {
    "replicate": _replicate,
    "repartition": _repartition,
    "combine": _combine,
    "reduction": _reduction,
}


def _misuse(operator: str, axis: str, layout: Layout, expected: str, hint: str) -> LayoutError:
    return LayoutError(
        f"{operator} over '{axis}' does not fit the value", got=str(layout), expected=expected, hint=hint
    )


def apply_constraint(constraint: str, layout: Layout, is_grad: bool) -> Layout:
    """The layout after a plan's pin: `tp=1` shards dim 1 over tp, `tp=r` replicates over it; other axes stay.

    For a gradient an axis that is to be replicated may stay partial: the sum is needed where the gradient is used. An
    axis that the value's mesh lacks has no effect.
    """
    for part in filter(None, constraint.split(";")):
        axis, _, where = part.partition("=")
        if axis not in layout.mesh.axis_names or (is_grad and where == "r" and axis in layout.partial_axes):
            continue
        layout = replace(_without(layout, axis), partial=tuple(p for p in layout.partial if p[0] != axis))
        if where != "r":
            d = int(where) % len(layout.dims)
            cut = layout.dims[d]
            layout = layout.with_dim(d, DimSharding((*cut.axes, axis), cut.unit if cut.axes else 1))
    return layout
