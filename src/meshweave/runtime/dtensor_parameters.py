"""Parameters of a module as DTensors whose memory is this rank's pieces of the state. Imported only on a cluster,
because importing DTensor is slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from meshweave.interop.dtensor import local_tensor, set_local_tensor
from meshweave.interop.hooks import forward_pre_hooks
from meshweave.interop.modules import own_parameters
from meshweave.ir.graph import Input, Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.placements import layout_from_placements
from meshweave.runtime.dtensor import dtensor_from_piece, dtensor_placements, unheld_dtensor
from meshweave.runtime.optimizer_state import note_replaced, replace_in_optimizer
from meshweave.runtime.world import World


def dtensor_parameter(like: Tensor, piece: Tensor | None, item: Input, layout: Layout, device_type: str) -> Tensor:
    """A DTensor parameter with the memory of `piece` (None on a rank without a piece); `like` itself if it is a DTensor
    with the same placements."""
    if isinstance(like, DTensor) and is_placed(like, layout, item.spec.shape):
        own: Tensor = like
    else:
        own = nn.Parameter(dtensor_of(piece, item, layout, device_type), requires_grad=like.requires_grad)
    if piece is not None:
        set_piece(own, piece)
    return own


def dtensor_of(piece: Tensor | None, item: Input, layout: Layout, device_type: str) -> DTensor:
    """A DTensor with the memory of `piece`; None on a rank without a piece."""
    if piece is None:
        return unheld_dtensor(layout, item.spec, device_type)
    return dtensor_from_piece(piece, layout, item.spec.shape)


def replace_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, replaced: Mapping[Tensor, Tensor]
) -> None:
    """Replace old parameters by new parameters in every module that has them, so that tied weights stay tied, in the
    groups of the optimizer and in its state. (A plain tensor cannot become a DTensor in place, because DTensor has
    slots.)"""
    for module in model.modules():
        for name, old in list(own_parameters(module).items()):
            if old is not None and old in replaced:
                setattr(module, name, replaced[old])
    note_replaced(replaced)
    if optimizer is not None:
        replace_in_optimizer(optimizer, replaced)


class GatherHooks:
    """Hooks before and after the forward of each module of a model: its sharded parameters are whole meanwhile, as
    after `fully_shard`. A copy of the model has the same hooks."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __deepcopy__(self, memo: Any) -> GatherHooks:
        return self

    def enter(self, module: nn.Module, args: Any) -> None:
        for owner in _owners(module):
            _gather(owner, self.world)

    def leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        for owner in _owners(module):
            _let_go(owner)


def add_hooks(model: nn.Module, world: World) -> None:
    """Let `model(x)` run on plain tensors, with gradients that arrive at the DTensors, and `load_state_dict` take full
    tensors. All ranks run the forward together. A model that already has the hooks switches to the new world."""
    for module in model.modules():
        known = [getattr(hook, "__self__", None) for hook in forward_pre_hooks(module)]
        hooks = next((hook for hook in known if isinstance(hook, GatherHooks)), None)
        if hooks is not None:
            hooks.world = world
        elif any(isinstance(p, DTensor) for p in module.parameters()):
            hooks = GatherHooks(world)
            module.register_forward_pre_hook(hooks.enter)
            module.register_forward_hook(hooks.leave, always_call=True)
            module.register_load_state_dict_pre_hook(_cut_full_tensors)


# Modules of torch whose forward reads the parameters of their children (torch/nn/modules/activation.py, and the fast
# paths of transformer.py).
_READ_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def _owners(module: nn.Module) -> list[nn.Module]:
    """The modules whose parameters the forward of a module reads itself."""
    return list(module.modules()) if isinstance(module, _READ_CHILDREN) else [module]


_SHARDS = "_meshweave_shards"  # the DTensors of a module whose forward runs, and how often it is entered


class _Whole(torch.autograd.Function):
    """The values of a DTensor, gathered by the world's own collectives, which end on every rank when any rank fails.
    The gradient that arrives is this rank's piece of the DTensor's gradient."""

    @staticmethod
    def forward(ctx: Any, shards: DTensor, world: World) -> Tensor:
        ctx.layout = layout = layout_of(shards)
        pieces = [local_tensor(shards)] if torch.distributed.get_rank() in layout.mesh else []
        return world.assemble(Spec(tuple(shards.shape), shards.dtype), layout, pieces)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        layout, rank = ctx.layout, torch.distributed.get_rank()
        if rank not in layout.mesh:
            return unheld_dtensor(layout, Spec(tuple(grad.shape), grad.dtype), grad.device.type), None
        piece = grad[layout.box_of(grad.shape, rank).slices()].contiguous()
        return dtensor_from_piece(piece, layout, grad.shape), None


class WholeSums(TorchFunctionMode):
    """While active, functions return DTensors with their sums over ranks done. Of a DTensor that is parts of a sum,
    `.item()` is this rank's part, and ops in place are errors (torch 2.13)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, DTensor) or not any(at.is_partial() for at in result.placements):
            return result
        return result.redistribute(placements=[Replicate() if at.is_partial() else at for at in result.placements])


def layout_of(tensor: DTensor) -> Layout:
    """The layout of a DTensor's pieces, on a mesh with the axis names of its DeviceMesh."""
    at = tensor.device_mesh
    names = at.mesh_dim_names or tuple(f"dim{i}" for i in range(at.ndim))
    mesh = Mesh(dict(zip(names, at.shape, strict=True)), devices=at.mesh.flatten().tolist())
    return layout_from_placements(tensor.placements, mesh, tensor.dim())


def _gather(module: nn.Module, world: World) -> None:
    entered = module.__dict__.get(_SHARDS)
    if entered is not None:
        entered[1] += 1
        return
    own: dict[str, Any] = own_parameters(module)
    shards = {name: p for name, p in own.items() if isinstance(p, DTensor)}
    if shards:
        module.__dict__[_SHARDS] = [shards, 1]
        own.update({name: _Whole.apply(p, world) for name, p in shards.items()})


def _let_go(module: nn.Module) -> None:
    entered = module.__dict__.get(_SHARDS)
    if entered is None:
        return
    entered[1] -= 1
    if not entered[1]:
        own_parameters(module).update(entered[0])
        del module.__dict__[_SHARDS]


def piece_of(tensor: Tensor) -> Tensor:
    """The memory of a DTensor parameter on this rank."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def set_piece(tensor: Tensor, piece: Tensor) -> None:
    """Give a DTensor parameter another piece."""
    assert isinstance(tensor, DTensor), "bound as one"
    set_local_tensor(tensor, piece)


def is_placed(tensor: DTensor, layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether a DTensor has a layout's placements on the layout's mesh."""
    ranks = tuple(tensor.device_mesh.mesh.flatten().tolist())
    return ranks == tuple(layout.mesh.devices) and tuple(tensor.placements) == dtensor_placements(layout, shape)


def _cut_full_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cut this rank's pieces of full tensors for the DTensors that a module itself has; nothing is sent. DTensors are
    passed on unchanged."""
    for name, own in own_parameters(module).items():
        value = state_dict.get(prefix + name)
        is_full = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if is_full and isinstance(own, DTensor) and value.shape == own.shape:
            state_dict[prefix + name] = _cut(value, own)


def _cut(value: Tensor, like: DTensor) -> Tensor:
    """This rank's piece of a full tensor, as a DTensor like another DTensor."""
    rank, layout = torch.distributed.get_rank(), layout_of(like)
    if rank not in layout.mesh:
        return like.detach()
    piece = value.detach()[layout.box_of(value.shape, rank).slices()]
    return dtensor_from_piece(piece.to(local_tensor(like).device).contiguous(), layout, value.shape)
