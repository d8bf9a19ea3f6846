"""FSDP with its collectives in the compiled graph, where a pass can move them.

The hooks of `fully_shard` are closed to Dynamo (torch 2.13, _fully_shard/_fsdp_state.py: `_dynamo_disable`): its
gathers and reductions run between the compiled pieces, on its own schedule, and no compiler sees them. Here a parameter
is a sharded DTensor that is gathered when it is read: torch.compile traces the gather, autograd the reduction, like any
other op (SimpleFSDP, arXiv 2411.00284).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshweave.errors import MeshweaveError
from meshweave.interop.dtensor import StridedShard, joined_device_mesh
from meshweave.interop.modules import own_parameters
from meshweave.ir.collectives import ALL_GATHER, WAIT
from meshweave.ir.traits import CASTS


@dataclass(frozen=True, slots=True)
class _StoredForm:
    """How a parameter is transformed to its module's form: `shape` on this rank, `before` the mesh and placements that
    it had as a DTensor."""

    mesh: DeviceMesh
    shape: torch.Size
    stride: tuple[int, ...]
    before: tuple[DeviceMesh, tuple[Placement, ...]] | None
    is_gathered_again: bool
    dtype: torch.dtype | None

    def used(self, stored: DTensor) -> Tensor:
        """The parameter in its module's original form, gathered along `mesh`; its gradient is averaged and cut
        again."""
        if self.is_gathered_again:
            return checkpoint(self.gathered, stored, use_reentrant=False, context_fn=_gathers_again)
        return self.gathered(stored)

    def gathered(self, stored: DTensor) -> Tensor:
        local = _AverageGradient.apply(stored.to_local(), self.mesh.size())
        if self.dtype is not None:
            local = local.to(self.dtype)
        sharded = DTensor.from_local(
            local, self.mesh, [Shard(0)], run_check=False, shape=self.shape, stride=self.stride
        )
        whole = sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return whole if self.before is None else DTensor.from_local(whole, *self.before, run_check=False)


class _AverageGradient(torch.autograd.Function):
    """The identity, whose gradient, a sum over ranks, is divided by their number (Gloo has no averaging reduction)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient / ctx.size, None


_AGAIN = CASTS | {ALL_GATHER.op, WAIT}


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE if op in _AGAIN else CheckpointPolicy.PREFER_RECOMPUTE


def _gathers_again() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def shard_in_graph(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard the parameters of `module` along the only dim of `mesh`, like `fully_shard`, with gathers in the graph.

    Parameters become DTensors sharded on dim 0; those that are DTensors already (`parallelize_module` with a mesh of
    the same root) also keep their placements. Reading a parameter (`module.weight`) gathers it; in the backward pass it
    is gathered again unless `reshard_after_forward` is False; gradients are averaged along `mesh` and stay sharded.
    With `param_dtype` gathers and gradient reductions use that dtype. Changes `module` in place and returns it: compile
    it as a whole. Raises MeshweaveError for a mesh of several dims.
    """
    if mesh.ndim != 1:
        raise MeshweaveError(
            "parameters are sharded along a single dim of the mesh",
            where="shard_in_graph",
            got=f"a mesh of {mesh.ndim} dims, {mesh.mesh_dim_names or tuple(mesh.shape)}",
            expected="a single dim of it, as mesh['dp']",
        )
    sharded: dict[nn.Parameter, tuple[nn.Parameter, _StoredForm]] = {}
    for part in list(module.modules()):
        own = {name: p for name, p in part.named_parameters(recurse=False) if name not in _ways(part)}
        for p in own.values():
            if p not in sharded:
                sharded[p] = _stored(p, mesh, reshard_after_forward, param_dtype)
        if not own:
            continue
        ways = {**_ways(part), **{name: sharded[p][1] for name, p in own.items()}}
        for name, p in own.items():
            own_parameters(part)[name] = sharded[p][0]
        readers = {name: property(partial(_read, name=name, stored_form=stored)) for name, stored in ways.items()}
        part.__class__ = type(part.__class__.__name__, (part.__class__,), {**readers, "meshweave_in_graph": ways})
    return module


def _ways(part: nn.Module) -> Mapping[str, _StoredForm]:
    return getattr(type(part), "meshweave_in_graph", {})


def _read(part: nn.Module, name: str, stored_form: _StoredForm) -> Tensor | None:
    stored = own_parameters(part)[name]
    return None if stored is None else stored_form.used(stored)  # type: ignore[arg-type]


def _stored(
    p: nn.Parameter, mesh: DeviceMesh, reshard: bool, dtype: torch.dtype | None
) -> tuple[nn.Parameter, _StoredForm]:
    """The sharded parameter and the way back to `p`."""
    local: Any = p.detach()
    local = (local.to_local() if isinstance(p, DTensor) else local).contiguous()
    sharded: Any = distribute_tensor(local, mesh, [Shard(0)], src_data_rank=None)
    before = None
    if isinstance(p, DTensor):
        times = math.prod(p.device_mesh.size(i) for i, placed in enumerate(p.placements) if placed.is_shard(0))
        # A dim that the other mesh cut first is cut again within each of its pieces, the order of fully_shard.
        cut = Shard(0) if times == 1 else StridedShard(0, split_factor=times)
        both = joined_device_mesh([mesh, p.device_mesh])
        placements = (cut, *p.placements)
        sharded = DTensor.from_local(
            sharded.to_local(), both, placements, run_check=False, shape=p.shape, stride=p.stride()
        )
        before = (p.device_mesh, tuple(p.placements))
    return nn.Parameter(sharded, p.requires_grad), _StoredForm(
        mesh, local.shape, local.stride(), before, reshard, dtype
    )
