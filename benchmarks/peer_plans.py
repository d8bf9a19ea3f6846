"""The plans of the installed torch's DTensor for a redistribution, priced like meshweave's.

DTensor has two planners: greedy (the default if every dim is cut in mesh order), and a shortest path over steps along a
single mesh dim each, by its own cost model, which distinguishes links within a host and between hosts. Both plans can
be merged: successive steps of the same kind become a step over a flattened mesh dim, if that exists. Here all exist,
and the innermost axes that are faster than the slowest form a host, so this is the peer's best case.

Source: torch/distributed/tensor/_redistribute.py (torch 2.13; merging: pytorch/pytorch PRs 171913 and 172121). Only the
planners run, on a DeviceMesh without process groups: nothing is sent, and an existing process group is neither used nor
changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import prod
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _collective_utils, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from meshweave.errors import LayoutError
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.placements import placements_from_layout

# (name, whether it searches a graph, whether steps are merged)
VARIANTS = (
    ("DTensor greedy", False, False),
    ("DTensor greedy, merged", False, True),
    ("DTensor graph", True, False),
    ("DTensor graph, merged", True, True),
)
# DTensor's conversions between two placements of a mesh dim (redistribute_local_tensor): meshweave's name of the step.
_KINDS = {
    ("partial", "replicate"): "all_reduce",
    ("partial", "shard"): "reduce_scatter",
    ("shard", "replicate"): "all_gather",
    ("shard", "shard"): "all_to_all",
    ("replicate", "shard"): "slice",
    ("replicate", "partial"): "to_partial",
}
_REDUCTIONS = ("all_reduce", "reduce_scatter")
# GB/s and us of a mesh dim within a host and between hosts, in the peer's own cost model (MeshTopoInfo.build_from_mesh,
# torch/distributed/tensor/_collective_utils.py, torch 2.13). What matters is that it considers the latter much slower.
_WITHIN_HOST, _BETWEEN_HOSTS = (87.7, 0.6), (87.7 * 0.22, 2.7)


class Profile(Protocol):
    """The interface of cost models here: `meshweave.AlphaBeta` implements it."""

    def bytes_received(self, op: str, group_size: int, local_bytes: float) -> float: ...

    def seconds(self, op: str, mesh: Mesh, axes: Sequence[str], local_bytes: float) -> float: ...

    def bandwidth_of(self, mesh: Mesh, axis: str) -> float: ...


@dataclass(frozen=True, slots=True)
class PeerStep:
    """A step of a peer's plan; bytes (received per device) and seconds are those of the largest piece."""

    kind: str
    axes: tuple[str, ...]
    target: Layout
    text: str
    bytes_received: float
    seconds: float

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """The plan of a variant of the peer; if there is none, `refusal` says why. `peak_bytes` is the most that the input
    and output of a step take on a device. `is_sound`: no reduction runs while an axis is replicated that was not
    replicated in the source, so that replicas are equal to the bit.
    """

    variant: str
    steps: tuple[PeerStep, ...] = ()
    seconds: float = 0.0
    bytes_received: float = 0.0
    peak_bytes: int = 0
    is_sound: bool = True
    refusal: str = ""


class _Refused(Exception):
    """Why a peer has no plan."""


def peer_plans(
    source: Layout, target: Layout, shape: Sequence[int], dtype: torch.dtype, profile: Profile
) -> tuple[PeerPlan, ...]:
    """The plan of every variant, in the order of VARIANTS, under the cost model of `profile`."""
    plans = []
    for name, graph, merged in VARIANTS:
        try:
            question = Question.of(source, target, tuple(shape), dtype, profile)
            plans.append(_priced(name, question, question.transforms(graph=graph, merged=merged), profile))
        except _Refused as refused:
            plans.append(PeerPlan(name, refusal=str(refused)))
    return tuple(plans)


@dataclass(frozen=True, slots=True)
class Question:
    """A redistribution in the form of DTensor's planners."""

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    mesh: DeviceMesh
    before: DTensorSpec
    after: DTensorSpec
    devices_per_host: int

    @staticmethod
    def of(source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype, profile: Profile) -> Question:
        """Raises _Refused if DTensor's public API would raise."""
        if source.mesh != target.mesh:
            raise _Refused("DTensor does not redistribute between meshes")
        if not source.mesh.axis_names:
            raise _Refused("a DeviceMesh has at least one axis")
        added = [p for p in target.partial if p not in source.partial]
        if added:
            raise _Refused(f"DTensor cannot make a value partial ({', '.join(f'{op}: {axis}' for axis, op in added)})")
        ops = {"sum" if op == "avg" else op for _, op in source.partial}
        if len(ops) > 1:
            raise _Refused(f"DTensor has no value that is partial with several reduce ops ({', '.join(sorted(ops))})")
        placements = [_placements(layout, shape) for layout in (source, target)]
        mesh = _bare_device_mesh(source.mesh)
        strides = tuple(prod(max(1, size) for size in shape[d + 1 :]) for d in range(len(shape)))
        meta = TensorMeta(torch.Size(shape), strides, dtype)
        before, after = (DTensorSpec(mesh, members, tensor_meta=meta) for members in placements)
        return Question(source, target, shape, dtype, mesh, before, after, _devices_per_host(source.mesh, profile))

    def transforms(self, *, graph: bool, merged: bool) -> list[Any]:
        """The steps as DTensor lists them (_TransformInfo). Greedy falls back to the graph, like DTensor, if an order
        of axes differs from the mesh's."""
        chosen = planner(self.mesh, self.before.tensor_meta)
        if chosen is None:
            raise _Refused(f"torch {torch.__version__} has no DTensorRedistributePlanner")
        self._tell_hosts(chosen)
        ordered = all(_in_mesh_order(layout) for layout in (self.source, self.target))
        if graph or not ordered:
            infos = chosen.generate_graph_based_transform_infos(self.before, self.after, self.shape)
        else:
            infos = chosen.generate_greedy_transform_infos(self.before, self.after)
        if not merged:
            return list(infos)
        fewer = merged_transforms(infos, self.mesh, self.before.placements, self.after.placements)
        if fewer is None:
            raise _Refused(f"torch {torch.__version__} does not merge steps over flattened mesh dims")
        return fewer

    def _tell_hosts(self, chosen: Any) -> None:
        """Let the planner price steps for hosts of so many devices; by default it uses the number of devices visible to
        this process, which is 1 on a machine without accelerators. No effect if this torch prices differently."""
        sizes = self.source.mesh.shape
        inside = [prod(sizes[dim:]) <= self.devices_per_host for dim in range(len(sizes))]
        links = [_WITHIN_HOST if is_inside else _BETWEEN_HOSTS for is_inside in inside]
        price = link_priced_cost(self.mesh, [gb for gb, _ in links], [us for _, us in links])
        if price is None:
            return
        total = self.dtype.itemsize * prod(self.shape) / 2**30

        def cost(before: Any, after: Any) -> float:
            pairs = list(zip(before.placements, after.placements, strict=True))
            dim = next(dim for dim, (old, new) in enumerate(pairs) if old != new)
            piece = total / prod(size for size, (old, _) in zip(sizes, pairs, strict=True) if old.is_shard())
            return price(*pairs[dim], dim, piece)

        chosen.cost_function = cost


def _devices_per_host(mesh: Mesh, profile: Profile) -> int:
    """The size of the innermost axes that are faster than the slowest; all devices if none is."""
    speeds = [profile.bandwidth_of(mesh, axis) for axis in mesh.axis_names]
    slow = [dim for dim, speed in enumerate(speeds) if speed == min(speeds)]
    return prod(mesh.shape[slow[-1] + 1 :]) if len(slow) < len(speeds) else mesh.num_devices


def _placements(layout: Layout, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    try:
        return placements_from_layout(layout, shape)
    except LayoutError as error:
        raise _Refused(error.what) from None


def _in_mesh_order(layout: Layout) -> bool:
    """Whether each dim is cut in mesh order, as DTensor sees it: by all axes, also those of size 1."""
    return all(list(dim.axes) == sorted(dim.axes, key=layout.mesh.axis_index) for dim in layout.dims)


@lru_cache(maxsize=64)
def _bare_device_mesh(mesh: Mesh) -> DeviceMesh:
    """A DeviceMesh as on its first device, without process groups, with every set of axes flattened."""
    ranks = torch.tensor(mesh.devices, dtype=torch.int, device="cpu").reshape(mesh.shape)
    bare = bare_device_mesh(ranks, mesh.axis_names)
    if bare is None:
        raise _Refused(f"torch {torch.__version__} makes no DeviceMesh without process groups")
    for count in range(2, len(mesh.axis_names) + 1):
        for axes in combinations(mesh.axis_names, count):
            flatten_without_groups(bare, axes)
    return bare


def _priced(name: str, question: Question, infos: Sequence[Any], profile: Profile) -> PeerPlan:
    layout, start, mesh = question.source, question.source, question.source.mesh
    steps, peak, sound = [], _bytes(question, layout), True
    for info in infos:
        dims = getattr(info, "original_mesh_dims", (info.mesh_dim,))
        axes = tuple(mesh.axis_names[dim] for dim in dims)
        before, after = info.src_dst_placements
        kind = _KINDS.get((_word(before), _word(after)))
        if kind is None:
            raise _Refused(f"DTensor does not go from {before} to {after} over {','.join(axes)}")
        if kind in _REDUCTIONS and _newly_replicated(layout, start):
            sound = False
        num_bytes = _bytes(question, layout)
        layout = _applied(layout, axes, after)
        peak = max(peak, num_bytes + _bytes(question, layout))
        received = profile.bytes_received(kind, mesh.flat_size(axes), num_bytes)
        text = _text(kind, axes, before, after)
        steps.append(PeerStep(kind, axes, layout, text, received, profile.seconds(kind, mesh, axes, num_bytes)))
    assert layout.normalized(question.shape) == question.target.normalized(question.shape), "a step was misread"
    seconds, total = sum(step.seconds for step in steps), sum(step.bytes_received for step in steps)
    return PeerPlan(name, tuple(steps), seconds, total, peak, sound)


def _bytes(question: Question, layout: Layout) -> int:
    """Bytes of the largest piece."""
    return question.dtype.itemsize * prod(layout.local_shape(question.shape))


def _newly_replicated(layout: Layout, start: Layout) -> bool:
    fresh = set(layout.replicated_axes) - set(start.replicated_axes)
    return any(layout.mesh.size(axis) > 1 for axis in fresh)


def _word(placement: Any) -> str:
    if placement.is_partial():
        return "partial"
    return "replicate" if placement.is_replicate() else "shard" if placement.is_shard() else type(placement).__name__


def _applied(layout: Layout, axes: tuple[str, ...], after: Any) -> Layout:
    """The layout when `axes` have the placement `after`: axes that begin to cut a dim become its innermost."""
    dims = tuple(DimSharding(tuple(axis for axis in dim.axes if axis not in axes), dim.unit) for dim in layout.dims)
    partial = tuple(p for p in layout.partial if p[0] not in axes)
    if after.is_partial():
        partial = (*partial, *((axis, after.reduce_op) for axis in axes))
    rest = Layout(layout.mesh, dims, partial)
    if not after.is_shard():
        return rest
    dim = rest.dims[after.dim]
    return rest.with_dim(after.dim, replace(dim, axes=(*dim.axes, *axes)))


def _text(kind: str, axes: tuple[str, ...], before: Any, after: Any) -> str:
    over = ",".join(axes)
    return {
        "all_reduce": lambda: f"all_reduce({before.reduce_op}) over {over}",
        "reduce_scatter": lambda: f"reduce_scatter({before.reduce_op}) over {over} onto dim {after.dim}",
        "all_gather": lambda: f"all_gather dim {before.dim} over {over}",
        "all_to_all": lambda: f"all_to_all over {over} from dim {before.dim} onto dim {after.dim}",
        "slice": lambda: f"slice dim {after.dim} over {over}",
        "to_partial": lambda: f"to_partial({after.reduce_op}) over {over}",
    }[kind]()


# DTensor's private parts


def bare_device_mesh(ranks: torch.Tensor, names: Sequence[str]) -> DeviceMesh | None:
    """A DeviceMesh as on its first rank, without process groups; None if this torch cannot create one."""
    options: dict[str, Any] = {"_init_backend": False, "_rank": int(ranks.flatten()[0])}
    try:
        return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(names), **options)
    except TypeError:
        return None


def flatten_without_groups(mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Make `merged_transforms` find these dims flattened: it looks up only the layout of the flattened mesh
    (`_get_flattened_mesh_by_layout_impl`). No effect if this torch looks elsewhere: then nothing is merged."""
    try:
        layout: Any = mesh._get_slice_mesh_layout(names)
        flattened: Any = SimpleNamespace(_layout=type(layout)([layout.collapse()]))
        mesh._flatten_mapping["_".join(names)] = flattened
    except (AttributeError, TypeError):
        return


def planner(mesh: DeviceMesh, meta: TensorMeta | None) -> Any:
    """DTensor's planner of redistributions; None if this torch has none."""
    planner_type = getattr(_redistribute, "DTensorRedistributePlanner", None)
    return None if planner_type is None else planner_type(mesh, meta)


def merged_transforms(
    transforms: Sequence[Any], mesh: DeviceMesh, before: Sequence[Placement], after: Sequence[Placement]
) -> list[Any] | None:
    """The steps of a planner, with successive steps of the same kind merged into a step over a flattened mesh dim; None
    if this torch does not merge. Torch's warning about steps that could not be merged is suppressed."""
    merge = getattr(_redistribute, "_optimize_transform_infos", None)
    if merge is None:
        return None
    with _quiet(_redistribute.logger):
        return list(merge(transforms, mesh, before, after))


def link_priced_cost(
    mesh: DeviceMesh, bandwidths: Sequence[float], latencies: Sequence[float]
) -> Callable[[Placement, Placement, int, float], float] | None:
    """DTensor's own cost of going from one placement to another over a mesh dim, of a piece of so many GiB, if the
    links of the dims have these GB/s and us; None if this torch prices differently."""
    price = getattr(_collective_utils, "_compute_placement_transition_cost", None)
    if price is None:
        return None
    topology = _collective_utils.MeshTopoInfo(mesh, [*mesh.shape], [*bandwidths], [*latencies])
    return lambda old, new, dim, gib: float(price(old, new, topology, dim, gib)[0])


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
