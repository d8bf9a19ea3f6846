"""What new nodes of anyone's graph make: meta["val"], as its neighbours have it, without running anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from meshweave.interop.fake import fake_like, meta_like, without_modes
from meshweave.ir.collectives import COLLECTIVES, TABLE, WAIT

_META = torch.device("meta")


def made_by(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: Any) -> Any:
    """What an op makes of what its operands' meta["val"] say; `like` is what a neighbour makes.

    Run on tensors of the meta device, which are then written as fake ones of the mode and device of `like`: views share
    the storage of their base. Raises RuntimeError, as the op does, where it cannot take its operands.
    """
    if target is WAIT:
        return args[0].meta["val"]
    with without_modes(), torch.no_grad():
        held, named = fx.map_arg((args, kwargs), lambda n: _bare(n.meta["val"]))
        if "device" in named:
            named = {**named, "device": _META}
        try:
            made = _collective(target, held) if target in COLLECTIVES else target(*held, **named)
        except ValueError as error:  # of ops that torch runs by their decomposition: view, where sizes may be symbolic
            raise RuntimeError(str(error)) from error
        return _dressed(made, like)


def _collective(target: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """What a collective makes; it is contiguous."""
    return args[0].new_empty(TABLE[target].shape(tuple(args[0].shape), args[1:]))


def _bare(x: Any) -> Any:
    """Every tensor of an argument as one of the meta device."""
    if isinstance(x, (list, tuple)):
        return type(x)(_bare(one) for one in x)
    return meta_like(x) if isinstance(x, torch.Tensor) else x


def _dressed(made: Any, like: Any) -> Any:
    if isinstance(made, (list, tuple)):
        likes = like if isinstance(like, (list, tuple)) else [like] * len(made)
        return type(made)(_dressed(one, other) for one, other in zip(made, likes, strict=True))
    if isinstance(like, (list, tuple)):
        like = next(one for one in like if isinstance(one, torch.Tensor))
    return fake_like(made, like) if isinstance(made, torch.Tensor) else made


def symbolic(x: torch.Tensor) -> bool:
    """Whether a shape or stride is not a number."""
    return any(type(size) is not int for size in (*x.shape, *(x.stride() if x.layout is torch.strided else ())))
