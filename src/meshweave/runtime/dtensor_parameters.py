"""Parameters of a module as DTensors whose memory is this rank's pieces of the state. Imported only on a cluster,
because importing DTensor is slow."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.errors import MeshweaveError
from meshweave.interop.dtensor import local_tensor, set_local_tensor
from meshweave.interop.hooks import forward_pre_hooks
from meshweave.interop.modules import own_parameters
from meshweave.ir.graph import Input, Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.placements import layout_from_placements
from meshweave.runtime.dtensor import dtensor_from_piece, dtensor_placements, unheld_dtensor
from meshweave.runtime.replaced import note_replaced, replace_in_optimizer
from meshweave.runtime.world import World


def dtensor_parameter(like: Tensor, piece: Tensor | None, item: Input, layout: Layout, device_type: str) -> Tensor:
    """A DTensor parameter with the memory of `piece` (None on a rank without a piece); `like` itself if it is a DTensor
    with the same placements."""
    if isinstance(like, DTensor) and _is_placed(like, layout, item.spec.shape):
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


def gather_in_forward(model: nn.Module, world: World) -> None:
    """Let `model(x)` run on plain tensors: each module's sharded parameters are whole while its forward runs, as after
    `fully_shard`. Gradients arrive at the DTensors.

    The outermost forward is a call of `world`, which all ranks make: on a single rank it is an error on every rank. A
    model that already has the hooks switches to the new world.
    """
    modules = [m for m in model.modules() if any(isinstance(p, DTensor) for p in m.parameters())]
    known = next((hooks for module in modules for hooks in _hooks_of(module)), None)
    hooks = known or ForwardHooks(world)
    hooks.world = world
    for module in modules:
        if not _hooks_of(module):
            module.register_forward_pre_hook(hooks.enter)
            module.register_forward_hook(hooks.leave, always_call=True)


@dataclass(slots=True)
class _Forward:
    """The running outermost forward, how often its module is entered, and the exception being handled when it began."""

    module: nn.Module
    call: AbstractContextManager[None]
    handled: BaseException | None
    num_entered: int = 1


class ForwardHooks:
    """Hooks before and after the forward of each module of a model. A copy of the model has the same hooks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._forward: _Forward | None = None

    def __deepcopy__(self, memo: Any) -> ForwardHooks:
        return self

    def enter(self, module: nn.Module, args: Any) -> None:
        forward = self._forward
        if forward is not None:
            forward.num_entered += module is forward.module
        elif any(_is_sharded(p) for p in module.parameters()):  # not during capture, which runs on other tensors
            call = self.world.call(f"forward of {type(module).__name__}")
            call.__enter__()
            self._forward = _Forward(module, call, sys.exception())
        try:
            for owner in _owners(module):
                _gather(owner, self.world)
        except BaseException as error:  # raised here it reaches the user; in `leave` it is only a note
            forward, self._forward = self._forward, None
            if forward is not None:
                forward.call.__exit__(type(error), error, error.__traceback__)
            raise

    def leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """torch calls it after a failure, too, and then raises that failure whatever is raised here."""
        for owner in _owners(module):
            _let_go(owner)
        forward = self._forward
        if forward is None or module is not forward.module:
            return
        forward.num_entered -= 1
        if forward.num_entered:
            return
        self._forward = None
        error = sys.exception()
        if error is None or error is forward.handled:
            forward.call.__exit__(None, None, None)
            return
        try:
            forward.call.__exit__(type(error), error, error.__traceback__)
        except MeshweaveError as first:
            if first is not error:
                error.add_note(str(first))
        except Exception as raised:
            if raised is not error:
                raise


def _hooks_of(module: nn.Module) -> list[ForwardHooks]:
    owners = [getattr(hook, "__self__", None) for hook in forward_pre_hooks(module)]
    return [owner for owner in owners if isinstance(owner, ForwardHooks)]


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and not all(at.is_replicate() for at in tensor.placements)


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


def _is_placed(tensor: DTensor, layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether a DTensor has a layout's placements on the layout's mesh."""
    ranks = tuple(tensor.device_mesh.mesh.flatten().tolist())
    return ranks == tuple(layout.mesh.devices) and tuple(tensor.placements) == dtensor_placements(layout, shape)


def accept_full_tensors(model: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Let `load_state_dict` of the model and of its modules take full tensors for DTensor parameters: each rank cuts
    its piece, nothing is sent. `layouts` are by parameter name. A state dict of DTensors is passed on unchanged."""
    named = dict(model.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in model.named_parameters()}
    known = {name: layouts[first[id(p)]] for name, p in named.items() if first[id(p)] in layouts}

    def cut(its: Mapping[str, Layout], module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        own = dict(module.named_parameters(remove_duplicate=False))
        for name, layout in its.items():
            value, parameter = state_dict.get(prefix + name), own.get(name)
            is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if is_plain and isinstance(parameter, DTensor) and value.shape == parameter.shape:
                state_dict[prefix + name] = _cut(value, layout, parameter)

    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        its = {name.removeprefix(start): layout for name, layout in known.items() if name.startswith(start)}
        if its:
            module.register_load_state_dict_pre_hook(partial(cut, its))


def _cut(value: Tensor, layout: Layout, like: DTensor) -> Tensor:
    """This rank's piece of a full tensor, as a DTensor like another DTensor."""
    rank = torch.distributed.get_rank()
    if rank not in layout.mesh:
        return like.detach()
    piece = value.detach()[layout.box_of(value.shape, rank).slices()]
    return dtensor_from_piece(piece.to(local_tensor(like).device).contiguous(), layout, value.shape)
