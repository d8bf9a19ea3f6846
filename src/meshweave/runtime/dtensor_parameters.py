"""Parameters of a module as DTensors whose memory is this rank's pieces of the state. Imported on a cluster alone, for
DTensor takes long to import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.interop.dtensor import local_tensor, set_local_tensor
from meshweave.interop.hooks import has_forward_hook
from meshweave.interop.modules import own_parameters
from meshweave.ir.graph import Input
from meshweave.ir.layout import Layout
from meshweave.runtime.dtensor import dtensor_from_piece, dtensor_placements, unheld_dtensor


def dtensor_parameter(like: Tensor, piece: Tensor | None, item: Input, layout: Layout, device_type: str) -> Tensor:
    """A DTensor parameter with the memory of `piece` (None on a rank that has none); `like` itself where it is one with
    the same placements."""
    if isinstance(like, DTensor) and _is_placed(like, layout, item.spec.shape):
        own: Tensor = like
    else:
        own = nn.Parameter(dtensor_of(piece, item, layout, device_type), requires_grad=like.requires_grad)
    if piece is not None:
        set_piece(own, piece)
    return own


def dtensor_of(piece: Tensor | None, item: Input, layout: Layout, device_type: str) -> DTensor:
    """A DTensor with the memory of `piece`; None on a rank that has none."""
    if piece is None:
        return unheld_dtensor(layout, item.spec, device_type)
    return dtensor_from_piece(piece, layout, item.spec.shape)


def replace_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, replaced: Mapping[Tensor, Tensor]
) -> None:
    """Put new parameters in the place of old ones: in every module that has them, so that tied weights stay tied, in
    the groups of the optimizer and in its state. (No plain tensor becomes a DTensor in place, which has slots.)"""
    for module in model.modules():
        for name, old in list(own_parameters(module).items()):
            if old is not None and old in replaced:
                setattr(module, name, replaced[old])
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
    for p in [p for p in optimizer.state if p in replaced]:
        optimizer.state[replaced[p]] = optimizer.state.pop(p)


def gather_in_forward(model: nn.Module) -> None:
    """Let `model(x)` run on plain tensors: each module has its own sharded parameters whole while its forward runs, as
    after `fully_shard`. All ranks call it; gradients arrive at the DTensors."""
    for module in model.modules():
        has_shards = any(isinstance(p, DTensor) for p in own_parameters(module).values())
        if has_shards and not has_forward_hook(module, _gather):
            module.register_forward_pre_hook(_gather)
            module.register_forward_hook(_let_go, always_call=True)


_SHARDS = "_meshweave_shards"  # the DTensors of a module whose forward runs, and how often it is entered


def _gather(module: nn.Module, args: Any) -> None:
    entered = module.__dict__.get(_SHARDS)
    if entered is not None:
        entered[1] += 1
        return
    own: dict[str, Any] = own_parameters(module)
    shards = {name: p for name, p in own.items() if isinstance(p, DTensor)}
    if shards:  # not while a step is captured, which runs on other tensors
        module.__dict__[_SHARDS] = [shards, 1]
        own.update({name: p.full_tensor() for name, p in shards.items()})


def _let_go(module: nn.Module, args: Any, outputs: Any) -> None:
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
    """Let a DTensor parameter have another piece."""
    assert isinstance(tensor, DTensor), "bound as one"
    set_local_tensor(tensor, piece)


def _is_placed(tensor: DTensor, layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether a DTensor has the placements of a layout on the layout's mesh."""
    ranks = tuple(tensor.device_mesh.mesh.flatten().tolist())
    return ranks == tuple(layout.mesh.devices) and tuple(tensor.placements) == dtensor_placements(layout, shape)


def accept_full_tensors(model: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Let `model.load_state_dict` take full tensors for DTensor parameters: each rank cuts its piece, nothing is sent.

    `layouts` are by parameter name. A state dict of DTensors goes on as it is.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in model.named_parameters()}
    known = {name: layouts[first[id(p)]] for name, p in named.items() if first[id(p)] in layouts}

    def cut(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        own = dict(module.named_parameters(remove_duplicate=False))
        for name, layout in known.items():
            value, parameter = state_dict.get(prefix + name), own.get(name)
            is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if is_plain and isinstance(parameter, DTensor) and value.shape == parameter.shape:
                state_dict[prefix + name] = _cut(value, layout, parameter)

    model.register_load_state_dict_pre_hook(cut)


def _cut(value: Tensor, layout: Layout, like: DTensor) -> Tensor:
    """This rank's piece of a full tensor, as a DTensor like another one."""
    rank = torch.distributed.get_rank()
    if rank not in layout.mesh:
        return like.detach()
    piece = value.detach()[layout.box_of(value.shape, rank).slices()]
    return dtensor_from_piece(piece.to(local_tensor(like).device).contiguous(), layout, value.shape)
