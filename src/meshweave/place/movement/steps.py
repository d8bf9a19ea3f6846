"""Step: a collective or local op of a move, and its effect on a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from meshweave.errors import VerifyError
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh

Kind = Literal[
    "slice",
    "reduce_scatter",
    "all_reduce",
    "scale",
    "all_to_all",
    "permute",
    "all_gather",
    "to_partial",
    "transfer",
    "sparse_gather",
    "sparse_scatter",
]
REDUCTIONS: tuple[Kind, ...] = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class Step:
    """An op in every group of the flattened `axes` of the mesh; `target` has the pieces of `apply(source, step)`.

    slice           keep this device's part of `dim`, cut in blocks of `unit`; `axes` become the innermost of `dim`
    reduce_scatter  reduce the partial `axes` with `op`, keep this device's part of `dim` as slice does
    all_reduce      reduce the partial `axes` with `op`
    all_to_all gather `dim` over its innermost `axes` while cutting `to_dim` over them, in blocks of `unit`, in the
        order `to_axes`
    permute every device gets its piece of `target` from devices of its group, as in `ir.routes`: a message each if
        pieces are even. `axes` are all those whose place in the layout changes.
    all_gather      gather `dim` over its innermost `axes`
    to_partial index 0 of the group keeps the value, the others get the identity of `op`. With a `dim`, whose innermost
        are `axes`: they stop cutting it, and elements outside a device's piece are the identity.
    scale           multiply by `factor`: turns the sum over `axes` into the average. From the first reduction of an
                    avg axis to this step the value is 1 / `factor` times the global value.
    transfer every device of the target's mesh gets its piece from devices of the source's, as in `ir.routes`; no axes,
        and nothing is partial. The only step between two meshes.
    sparse_gather all_gather of the rows that each device reads (see `movement.dispatch`); not in plans
    sparse_scatter  reduce_scatter of the rows that each device has, likewise

    `dim` is -1, `to_dim` None, `to_axes` and `op` empty if the kind has none. `op` is sum, max or min, never avg.
    `seconds` and `bytes_received` (per device) are those of the largest piece under the plan's profile; for a transfer
    those of the busiest device.
    """

    kind: Kind
    axes: tuple[str, ...]
    source: Layout
    target: Layout
    dim: int = -1
    to_dim: int | None = None
    to_axes: tuple[str, ...] = ()
    unit: int = 1
    op: str = ""
    factor: float = 1.0
    seconds: float = 0.0
    bytes_received: float = 0.0

    def __str__(self) -> str:
        axes = ",".join(self.axes)
        blocks = f" in blocks of {self.unit}" if self.unit != 1 else ""
        return {
            "slice": f"slice dim {self.dim} over {axes}{blocks}",
            "reduce_scatter": f"reduce_scatter({self.op}) over {axes} onto dim {self.dim}{blocks}",
            "all_reduce": f"all_reduce({self.op}) over {axes}",
            "all_to_all": f"all_to_all over {axes} from dim {self.dim} onto dim {self.to_dim}{self._turn}{blocks}",
            "permute": f"permute over {axes}",
            "all_gather": f"all_gather dim {self.dim} over {axes}",
            "to_partial": f"to_partial({self.op}) over {axes}" + (f" from dim {self.dim}" if self.dim >= 0 else ""),
            "scale": f"scale by {self.factor:g} over {axes}",
            "transfer": f"transfer to {_place(self.target.mesh)}",
            "sparse_gather": f"sparse_gather dim {self.dim} over {axes}",
            "sparse_scatter": f"sparse_scatter({self.op}) over {axes} onto dim {self.dim}",
        }[self.kind]

    @property
    def _turn(self) -> str:
        return f" as {','.join(self.to_axes)}" if self.to_axes != self.axes else ""


def _place(mesh: Mesh) -> str:
    return mesh.text if mesh.axis_names else f"device {mesh.devices[0]}"


def apply(layout: Layout, step: Step) -> Layout:
    """The layout after `step` (its kind, axes, dims, unit and op; its own layouts are not read, except the target of a
    transfer or a permute: a transfer leads there from anywhere, a permute from layouts that differ only in its axes).
    An appended axis sets the unit of the whole dim, which for a non-empty dim must not change the earlier pieces. The
    result is not normalised. Raises VerifyError if the step does not fit the layout.
    """
    return _APPLY[step.kind](layout, step)


def _append(layout: Layout, step: Step, dim: int, axes: tuple[str, ...]) -> Layout:
    _need(all(axis in layout.replicated_axes for axis in axes), layout, step, "axes that are replicated")
    _need(0 <= dim < len(layout.dims), layout, step, f"a dim of 0 to {len(layout.dims) - 1}")
    return layout.with_dim(dim, DimSharding((*layout.dims[dim].axes, *axes), step.unit))


def _pop(layout: Layout, step: Step) -> Layout:
    _need(0 <= step.dim < len(layout.dims), layout, step, f"a dim of 0 to {len(layout.dims) - 1}")
    dim, count = layout.dims[step.dim], len(step.axes)
    _need(count > 0 and dim.axes[-count:] == step.axes, layout, step, "the innermost axes of the dim")
    return layout.with_dim(step.dim, DimSharding(dim.axes[:-count], dim.unit))


def _all_to_all(layout: Layout, step: Step) -> Layout:
    to_dim = -1 if step.to_dim is None or step.to_dim == step.dim else step.to_dim
    _need(sorted(step.to_axes) == sorted(step.axes), layout, step, "the same axes on both dims")
    return _append(_pop(layout, step), step, to_dim, step.to_axes)


def _permute(layout: Layout, step: Step) -> Layout:
    target = step.target
    _need(
        (target.mesh, target.partial) == (layout.mesh, layout.partial), layout, step, "the same mesh and partial axes"
    )
    _need(len(layout.dims) == len(target.dims), layout, step, f"{len(target.dims)} dims")
    places = [{axis: side.dim_of(axis) for axis in side.mesh.axis_names} for side in (layout, target)]
    still = (axis for axis in layout.mesh.axis_names if axis not in step.axes)
    _need(all(places[0][axis] == places[1][axis] for axis in still), layout, step, "other axes unchanged")
    return target


def _reduce(layout: Layout, step: Step) -> Layout:
    _need(all(axis in layout.partial_axes for axis in step.axes), layout, step, "axes that are partial")
    ops = {"sum" if op == "avg" else op for axis, op in layout.partial if axis in step.axes}
    _need(ops == {step.op}, layout, step, f"the reduce op of the layout ({', '.join(sorted(ops))})")
    return replace(layout, partial=tuple(p for p in layout.partial if p[0] not in step.axes))


def _to_partial(layout: Layout, step: Step) -> Layout:
    if step.dim >= 0:
        layout = _pop(layout, step)
    _need(all(axis in layout.replicated_axes for axis in step.axes), layout, step, "axes that are replicated")
    return replace(layout, partial=(*layout.partial, *((axis, step.op) for axis in step.axes)))


def _scale(layout: Layout, step: Step) -> Layout:
    ops = {op for axis, op in layout.partial if axis in step.axes}
    _need(ops <= {"avg"}, layout, step, "averaged axes")
    return replace(layout, partial=tuple((a, "sum" if a in step.axes else op) for a, op in layout.partial))


def _transfer(layout: Layout, step: Step) -> Layout:
    _need(not layout.partial and not step.target.partial, layout, step, "nothing partial, before and after")
    _need(len(layout.dims) == len(step.target.dims), layout, step, f"{len(step.target.dims)} dims")
    return step.target


_APPLY: dict[Kind, Callable[[Layout, Step], Layout]] = {
    "slice": lambda layout, step: _append(layout, step, step.dim, step.axes),
    "reduce_scatter": lambda layout, step: _append(_reduce(layout, step), step, step.dim, step.axes),
    "all_reduce": _reduce,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "all_gather": _pop,
    "to_partial": _to_partial,
    "scale": _scale,
    "transfer": _transfer,
}


def _need(holds: bool, layout: Layout, step: Step, expected: str) -> None:
    if not holds:
        raise VerifyError("the step does not fit the layout", where=str(step), got=str(layout), expected=expected)
