"""Parameters of a module as DTensors whose memory is this rank's pieces of the state. Imported only on a cluster,
because importing DTensor is slow."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

from meshweave.interop.dtensor import local_tensor, set_local_tensor
from meshweave.interop.modules import own_parameters
from meshweave.ir.graph import Input
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.placements import layout_from_placements
from meshweave.runtime.dtensor import dtensor_from_piece, is_placed, unheld_dtensor
from meshweave.runtime.optimizer_state import note_replaced, replace_in_optimizer
from meshweave.runtime.state import full_values
from meshweave.runtime.watch import watch_of_job

_NOTES = logging.getLogger("meshweave")


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
    slots.) `load_state_dict` of these modules still takes full tensors, and they may be called: their parameters are
    whole meanwhile, without gradients, as after `fully_shard` under `torch.no_grad`. All ranks call them together."""
    for module in model.modules():
        own = {name: old for name, old in own_parameters(module).items() if old is not None and old in replaced}
        for name, old in own.items():
            setattr(module, name, replaced[old])
        if own:
            module.register_load_state_dict_pre_hook(_cut_full_tensors)
        if own or (replaced and isinstance(module, _READ_CHILDREN)):
            module.register_forward_pre_hook(_gather_parameters)
            module.register_forward_hook(_restore_parameters, always_call=True)
    note_replaced(replaced)
    if replaced:
        _warn_of_averages(model)
    if optimizer is not None:
        replace_in_optimizer(optimizer, replaced)


def _warn_of_averages(model: nn.Module) -> None:
    """A warning about averages of this model that are older than its DTensors: torch cannot update them."""
    forms = {name: p.shape for name, p in model.named_parameters()}
    for each in gc.get_objects():
        if issubclass(type(each), AveragedModel) and {n: p.shape for n, p in each.module.named_parameters()} == forms:
            _NOTES.warning(
                "an AveragedModel was made before mw.compile, which has sharded the model's parameters: its "
                "update_parameters cannot mix whole and sharded tensors. Make it after mw.compile, from the same model"
            )
            return


# Modules of torch whose forward reads the parameters of their children (torch/nn/modules/activation.py, and the fast
# paths of transformer.py).
_READ_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_SHARDS = "_meshweave_shards"  # the DTensors of a module whose forward runs, for each time that it was entered


def _gather_parameters(module: nn.Module, args: Any) -> None:
    readers = module.modules() if isinstance(module, _READ_CHILDREN) else (module,)
    shards = [(own, {n: p for n, p in own.items() if isinstance(p, DTensor)}) for own in map(own_parameters, readers)]
    module.__dict__.setdefault(_SHARDS, []).append(shards)
    if not any(of_module for _, of_module in shards):
        return
    with watch_of_job().call("model(x), which gathers sharded parameters", meets=True):
        for own, of_module in shards:
            own.update({name: nn.Parameter(full_values(p), requires_grad=False) for name, p in of_module.items()})


def _restore_parameters(module: nn.Module, args: Any, outputs: Any) -> None:
    """After forward, and after a gather that failed."""
    entered = module.__dict__[_SHARDS]
    for own, shards in entered.pop():
        own.update(shards)
    if not entered:
        del module.__dict__[_SHARDS]


def dtensor_like(value: Tensor, param: Any) -> Tensor:
    """A full tensor of an optimizer's state as a DTensor: cut like its parameter if it has its shape, else the same on
    every rank."""
    if value.shape == param.shape:
        return _cut(value, param)
    placements = [Replicate() for _ in range(param.device_mesh.ndim)]
    return DTensor.from_local(value.contiguous(), param.device_mesh, placements, run_check=False)


def distribute_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer's state that is older than the DTensors in place of its parameters become DTensors, too."""
    for param, kept in optimizer.state.items():
        for slot, value in kept.items() if isinstance(param, DTensor) else ():
            is_full = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if is_full and slot != "step" and (value.shape == param.shape or value.numel() != 1):
                kept[slot] = dtensor_like(value.detach(), param)


_DRAWS = {
    torch.rand_like, torch.randn_like, torch.randint_like, Tensor.normal_, Tensor.uniform_, Tensor.exponential_,
    Tensor.bernoulli_, Tensor.random_,
}  # fmt: skip


class WholeSums(TorchFunctionMode):
    """While active, functions return DTensors with their sums over ranks done, and random numbers for a DTensor are
    pieces of those for the whole tensor. Of a DTensor that is parts of a sum, `.item()` is this rank's part, and ops in
    place are errors (torch 2.13)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DRAWS and isinstance(args[0], DTensor):  # on a CPU torch draws the same for every piece
            own = args[0]
            whole = func(torch.empty(own.shape, dtype=own.dtype, device=own.device), *args[1:], **(kwargs or {}))
            return own.copy_(_cut(whole, own)) if func.__name__.endswith("_") else _cut(whole, own)
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


def piece_of(tensor: Tensor) -> Tensor:
    """The memory of a DTensor parameter on this rank."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def set_piece(tensor: Tensor, piece: Tensor) -> None:
    """Give a DTensor parameter another piece."""
    assert isinstance(tensor, DTensor), "bound as one"
    set_local_tensor(tensor, piece)


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
