"""The piece of a batch for a device."""

from __future__ import annotations

from torch import Tensor

from meshweave.errors import LayoutError
from meshweave.ir.graph import Input
from meshweave.ir.pieces import Box
from meshweave.runtime.uploads import uploaded
from meshweave.runtime.world import World


def batch_piece(world: World, item: Input, box: Box, value: Tensor, accumulate: int) -> Tensor:
    """The device's piece of a global tensor; or the tensor itself if a process with a single device was passed its
    piece.
    Raises LayoutError for a tensor of another shape or dtype. `accumulate`: the microbatches of a step."""
    if value.dtype == item.spec.dtype:
        if tuple(value.shape) == item.spec.shape:
            return uploaded(value[box.slices()], world.device)
        if world.is_distributed and tuple(value.shape) == box.size:
            return uploaded(value, world.device)
    parts = f" in each of {accumulate} microbatches" if accumulate > 1 else ""
    if world.is_distributed and box.size != item.spec.shape:
        parts = f" (or {list(box.size)}: this rank's own rows){parts}"
    raise LayoutError(
        f"batch entry '{item.name}' differs from the example",
        got=f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}",
        expected=f"{item.spec}{parts}",
        hint="a program takes batches of a single shape; a step of mw.compile compiles further programs for batches "
        "that differ from the example only in sizes",
    )
