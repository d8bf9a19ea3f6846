"""The inputs of a pass over a step, on each local device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshweave.capture.step_inputs import LOSS_SCALE
from meshweave.errors import LayoutError
from meshweave.ir.graph import Input
from meshweave.ir.pieces import Box
from meshweave.runtime.executor import Compiled, Env
from meshweave.runtime.interfaces import World
from meshweave.runtime.state import LASTING, Key, State

_STRIDE = 2  # numbers lie 16 bytes apart: compiled regions copy operands at other addresses


@dataclass(slots=True)
class _DeviceInputs:
    """Where the inputs of a device go. `lasting`: slot, key, and index among the pieces of the state."""

    lasting: list[tuple[int, Key, int]] = field(default_factory=list)
    batch: list[tuple[int, Input, Box]] = field(default_factory=list)
    sums: dict[int, tuple[Input, Box]] = field(default_factory=dict)  # of gradients, over microbatches
    constants: list[tuple[int, str]] = field(default_factory=list)
    numbers: list[tuple[int, str]] = field(default_factory=list)  # of the pass, by name


class Inputs:
    """Fills the environments of the local devices."""

    def __init__(self, world: World, ranks: Sequence[Compiled], accumulate: int) -> None:
        """`accumulate`: the microbatches of a step."""
        self.world, self._ranks, self.accumulate = world, ranks, accumulate
        self._constants = {n: x.to(world.device) for r in ranks for n, x in r.graph.constants.items()}
        self._devices = [self._device(rank, device) for rank, device in zip(ranks, world.devices, strict=True)]

    def _device(self, rank: Compiled, device: int) -> _DeviceInputs:
        its = _DeviceInputs()
        for item, layout, slot in zip(rank.graph.inputs, rank.graph.layouts, rank.inputs, strict=True):
            if item.kind in LASTING:
                holders = [d for d in self.world.devices if d in layout.mesh]
                its.lasting.append((slot, (item.kind, item.name), holders.index(device)))
            elif item.kind in ("batch", "ahead", "acc"):
                box = layout.box_of(item.spec.shape, device)
                if item.kind == "acc":
                    its.sums[slot] = item, box
                else:
                    its.batch.append((slot, item, box))
            elif item.kind == "constant":
                its.constants.append((slot, item.name))
            elif item.name in ("draw", LOSS_SCALE):
                its.numbers.append((slot, item.name))
        return its

    def fill(self, envs: Sequence[Env], state: State, batch: Mapping[str, Tensor] | None, draw: int) -> None:
        """Fill fresh environments. `draw` is the number of the pass, for random ops. Without a batch they are those of
        an update. Sums of gradients, and what earlier microbatches hand over, are not among these inputs."""
        numbers = numbers_on(self.world.device, {"draw": draw}, torch.int64)
        if any(name == LOSS_SCALE for its in self._devices for _, name in its.numbers):
            numbers |= numbers_on(self.world.device, {LOSS_SCALE: state.scaler.scale}, torch.float32)
        pieces = state.pieces
        for its, env in zip(self._devices, envs, strict=True):
            for slot, key, index in its.lasting:
                env[slot] = pieces[key][index]
            for slot, item, box in its.batch if batch is not None else ():
                env[slot] = batch_piece(self.world, item, box, batch[item.name], self.accumulate)  # type: ignore[index]
            for slot, name in its.constants:
                env[slot] = self._constants[name]
            for slot, name in its.numbers:
                env[slot] = numbers[name]

    def zeros(self, index: int, slot: int) -> Tensor | None:
        """What a sum of gradients begins with on local device `index`; None if a slot is no such sum."""
        if slot not in self._devices[index].sums:
            return None
        item, box = self._devices[index].sums[slot]
        return torch.zeros(box.size, dtype=item.spec.dtype, device=self.world.device)


def batch_piece(world: World, item: Input, box: Box, value: Tensor, accumulate: int) -> Tensor:
    """The device's piece of a global tensor; or the tensor itself if a process with a single device was passed its
    piece.
    Raises LayoutError for a tensor of another shape or dtype. `accumulate`: the microbatches of a step."""
    if value.dtype == item.spec.dtype:
        if tuple(value.shape) == item.spec.shape:
            return upload(value[box.slices()], world.device)
        if world.is_distributed and tuple(value.shape) == box.size:
            return upload(value, world.device)
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


def upload(x: Tensor, device: torch.device) -> Tensor:
    """x on a device; x itself if it is there. The host does not wait for a copy to a GPU, but continues to launch
    kernels. The copy is of x's present values, whatever the caller writes later."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    staged = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)
    return staged.to(device, non_blocking=True)


def numbers_on(device: torch.device, numbers: Mapping[str, float], dtype: torch.dtype) -> dict[str, Tensor]:
    """Numbers by name as 0-dim tensors on a device: a single copy for all of them."""
    if device.type != "cuda":
        return {name: torch.tensor(value, dtype=dtype, device=device) for name, value in numbers.items()}
    values = [[value] * _STRIDE for value in numbers.values()]
    packed = upload(torch.tensor(values, dtype=dtype).view(-1, _STRIDE), device)
    return dict(zip(numbers, packed[:, 0].unbind(), strict=True))
