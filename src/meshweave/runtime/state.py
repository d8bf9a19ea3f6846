"""What lasts from step to step: the pieces of parameters, buffers and optimizer state on this process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshweave.capture.step import LossScale
from meshweave.errors import MeshError, StepError
from meshweave.interop import pytree
from meshweave.ir.graph import Input
from meshweave.ir.layout import Layout
from meshweave.ir.pieces import Box
from meshweave.ir.rank import RankGraph
from meshweave.runtime.local import boxes_of
from meshweave.runtime.weight_files import WeightFiles

Key = tuple[str, str]
LASTING = ("param", "buffer", "state")


# The smallest number of float16: below it the gradient of the loss by itself underflows. A scale of 2**16 is there
# after 40 skipped steps in a row.
_LEAST_SCALE = 2.0**-24


@dataclass(slots=True)
class LossScaler:
    """The present scale of the loss and the steps that decide it, as in `torch.amp.GradScaler`: `good_steps` in a row
    since the last change, and `skipped_steps` in all. Every process computes the same numbers."""

    options: LossScale = field(default_factory=LossScale)
    scale: float = 0.0
    good_steps: int = 0
    skipped_steps: int = 0

    def __post_init__(self) -> None:
        self.scale = self.options.init_scale

    def check(self, step: int) -> None:
        """StepError if a step cannot be skipped because a smaller scale is of no use."""
        if self.scale < _LEAST_SCALE:
            raise StepError(
                f"the gradients of step {step} are not finite in float16, whatever the scale of the loss",
                got=f"a loss scale of {self.scale:g} after {self.skipped_steps} skipped steps",
                hint="check loss and batch; or precision=torch.bfloat16, which has the range of float32",
            )

    def adjust(self, is_skipped: bool) -> None:
        """The scale of the next step. Rounded to float32, like that of `GradScaler`."""
        options = self.options
        self.skipped_steps += is_skipped
        self.good_steps = 0 if is_skipped else self.good_steps + 1
        factor = options.backoff_factor if is_skipped else 1.0
        if self.good_steps == options.growth_interval:
            factor, self.good_steps = options.growth_factor, 0
        scale = torch.tensor(self.scale * factor, dtype=torch.float32).item()
        self.scale = scale if math.isfinite(scale) else self.scale

    def numbers(self) -> dict[str, float]:
        """What checkpoints contain."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}

    def load(self, numbers: Mapping[str, float]) -> None:
        self.scale = float(numbers["scale"])
        self.good_steps, self.skipped_steps = int(numbers["good_steps"]), int(numbers["skipped_steps"])


@dataclass(slots=True, kw_only=True)
class State:
    """Pieces by (kind, name), a piece per local device in the value's mesh, the number of steps, and the loss scale.

    During an update old pieces are released singly as new pieces appear; `torn` is set meanwhile. A state that an
    interrupted update left torn raises errors.
    """

    roles: Sequence[RankGraph]
    devices: Sequence[int]
    device: torch.device
    pieces: dict[Key, list[Tensor]] = field(default_factory=dict)
    num_steps: int = 0
    torn: bool = False
    scaler: LossScaler = field(default_factory=LossScaler)
    items: list[tuple[Input, Layout]] = field(init=False)  # every value, with or without a local piece

    def __post_init__(self) -> None:
        self.items = lasting(self.roles)
        if len(self.devices) > 1 and self.device.type == "cpu":
            self._check_memory()

    def _check_memory(self) -> None:
        """Raises MeshError if this machine's memory is smaller than the pieces of all its virtual devices."""
        needed = 0
        for item, layout in self.items:
            if holders := self.holders(layout):
                (largest,) = boxes_of(layout, item.spec.shape, holders[:1])
                needed += len(holders) * largest.num_elements * item.spec.dtype.itemsize
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
            raise MeshError(
                "the virtual devices need more memory than this machine has",
                where=f"parameters, buffers and optimizer state on {len(self.devices)} devices",
                got=f"{needed / 2**30:,.0f} GiB",
                expected=f"at most {memory / 2**30:,.0f} GiB",
                hint="run fewer devices or a smaller model, shard the state (fsdp), or start one process per device on "
                "several machines with torchrun; meshweave plan and meshweave simulate need no memory for values",
            )

    def holders(self, layout: Layout) -> list[int]:
        """The local devices in a layout's mesh, in the order of the pieces."""
        return [device for device in self.devices if device in layout.mesh]

    def boxes(self, item: Input, layout: Layout) -> list[Box]:
        """The box of each holder."""
        return boxes_of(layout, item.spec.shape, self.holders(layout))

    def fill(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Cut pieces of full tensors by name (parameters and buffers); optimizer state is zeros.

        Full tensors are read one at a time, so that a generator never needs two in memory.
        """
        known = {item.name: (item, layout) for item, layout in self.items if item.kind != "state"}
        for name, value in values:
            self.put(*known[name], value)
        for item, layout in self.items:
            if item.kind == "state":
                self.put(item, layout, self.zeros(item))

    def read(self, files: WeightFiles) -> None:
        """Read the pieces of the parameters and buffers in files: each process reads only its own bytes."""
        for item, layout in self.items:
            if item.kind != "state" and item.name in files.tensors:
                pieces = files.pieces(item.name, self.boxes(item, layout), item.spec.dtype)
                self.pieces[item.kind, item.name] = [piece.to(self.device).contiguous() for piece in pieces]

    def extend(self, roles: Sequence[RankGraph]) -> None:
        """Add the further values of another program of the same model: optimizer state of parameters that were frozen
        before, which begins as zeros."""
        new = [entry for entry in lasting(roles) if (entry[0].kind, entry[0].name) not in self.pieces]
        if new:
            self.roles = (*self.roles, *roles)
            self.items = lasting(self.roles)
        for item, layout in new:
            self.put(item, layout, self.zeros(item))

    @staticmethod
    def zeros(item: Input) -> Tensor:
        """A full tensor of zeros that takes no memory."""
        return torch.zeros((), dtype=item.spec.dtype).expand(item.spec.shape)

    def put(self, item: Input, layout: Layout, value: Tensor) -> None:
        """Store the pieces of a tensor, or of a DTensor: of another layout it is gathered by the ranks that have it."""
        if has_layout(value, layout):
            local: Tensor = value.detach().to_local()  # type: ignore[attr-defined]
            self.pieces[item.kind, item.name] = [local.to(item.spec.dtype, copy=True)] if self.holders(layout) else []
            return
        full = full_values(value).to(item.spec.dtype).expand(item.spec.shape)
        self.pieces[item.kind, item.name] = [
            full[box.slices()].to(self.device, copy=True).contiguous() for box in self.boxes(item, layout)
        ]

    def refill(self, values: Mapping[tuple[str, str], complex]) -> None:
        """Fill state that is a single number everywhere, by slot and parameter."""
        for (slot, param), value in values.items():
            for piece in self.pieces.get(("state", f"{slot}/{param}"), []):
                piece.fill_(value)

    def check_usable(self) -> None:
        if self.torn:
            raise StepError(
                "the last update was interrupted half-way",
                got=f"step {self.num_steps + 1}, or a load, changed only some of the values",
                hint="load the last checkpoint",
            )

    @property
    def num_bytes(self) -> list[int]:
        """Bytes on each device."""
        total = dict.fromkeys(self.devices, 0)
        for item, layout in self.items:
            for device, piece in zip(self.holders(layout), self.pieces[item.kind, item.name], strict=True):
                total[device] += piece.nbytes
        return list(total.values())


def lasting(roles: Sequence[RankGraph]) -> list[tuple[Input, Layout]]:
    """The parameters, buffers and optimizer state of a program, each once."""
    lasting_items: dict[Key, tuple[Input, Layout]] = {}
    for rank in roles:
        for item, layout in zip(rank.inputs, rank.layouts, strict=True):
            if item.kind in LASTING:
                lasting_items.setdefault((item.kind, item.name), (item, layout))
    return list(lasting_items.values())


def full_values(tensor: Any) -> Tensor:
    """A tensor's values; for a DTensor, those of the full tensor, which all ranks request together."""
    values: Tensor = full_tensors(tensor.detach())
    return values


def full_tensors(state: Any) -> Any:
    """A nest of containers with every DTensor in it gathered. All processes call it, with the same nest."""
    return pytree.tree_map(lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x, state)


def is_here(tensor: Any) -> bool:
    """Whether this process has a part of a tensor: it is not a DTensor of other ranks."""
    return not hasattr(tensor, "placements") or tensor.device_mesh.get_coordinate() is not None


def has_layout(tensor: Any, layout: Layout) -> bool:
    """Whether a tensor is a DTensor of this layout, on the layout's mesh."""
    if not hasattr(tensor, "placements"):
        return False
    from meshweave.runtime.dtensor import is_placed  # slow to import

    return is_placed(tensor, layout, tuple(tensor.shape))
