"""What lasts from step to step: the pieces of parameters, buffers and optimizer state that this process holds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from meshweave.errors import CheckpointError, StepError
from meshweave.ir.graph import Input
from meshweave.ir.layout import Layout
from meshweave.ir.pieces import Box
from meshweave.ir.rank import RankGraph
from meshweave.runtime.initialize import full_values
from meshweave.runtime.world import boxes_of

if TYPE_CHECKING:
    from meshweave.runtime.checkpoint_tables import ShardedTensorView

Key = tuple[str, str]
LASTING = ("param", "buffer", "state")


@dataclass(slots=True)
class State:
    """Pieces by (kind, name), one per held device that is of the value's mesh, and the number of completed steps.
    `numbers` are the optimizer's own of each parameter (counts of steps and the like), by parameter and slot.

    While an update runs, old pieces are given up one by one as new ones appear; `torn` is set meanwhile. A state
    that an interrupted update left torn refuses to be used.
    """

    roles: Sequence[RankGraph]
    devices: Sequence[int]
    device: torch.device
    pieces: dict[Key, list[Tensor]] = field(default_factory=dict)
    num_steps: int = 0
    torn: bool = False
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def items(self) -> Iterable[tuple[Input, Layout]]:
        """Every lasting value of the program, whether or not a piece of it is held here."""
        return lasting(self.roles)

    def holders(self, layout: Layout) -> list[int]:
        """The held devices that are of a layout's mesh, in the order in which pieces are kept."""
        return [device for device in self.devices if device in layout.mesh]

    def boxes(self, item: Input, layout: Layout) -> list[Box]:
        """The box of each holder."""
        return boxes_of(layout, item.spec.shape, self.holders(layout))

    def fill(
        self, values: Iterable[tuple[str, Tensor]], state: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> None:
        """Cut pieces of full tensors by name (parameters and buffers); optimizer state from `state` or zeros.

        One full tensor is looked at at a time, so that a generator need never hold two.
        """
        known = {item.name: (item, layout) for item, layout in self.items if item.kind != "state"}
        for name, value in values:
            item, layout = known[name]
            self.put(item, layout, value)
        for item, layout in self.items:
            if item.kind == "state":
                slot, _, param = item.name.partition("/")
                held = (state or {}).get(param, {}).get(slot)
                self.put(
                    item,
                    layout,
                    self.zeros(item) if held is None else full_values(held),
                )

    def extend(self, roles: Sequence[RankGraph]) -> None:
        """Take in what another program of the same model keeps beside: optimizer state of parameters that were frozen
        before, which begins as zeros."""
        new = [entry for entry in lasting(roles) if (entry[0].kind, entry[0].name) not in self.pieces]
        if new:
            self.roles = (*self.roles, *roles)
        for item, layout in new:
            self.put(item, layout, self.zeros(item))

    @staticmethod
    def zeros(item: Input) -> Tensor:
        """A full tensor of zeros that takes no memory."""
        return torch.zeros((), dtype=item.spec.dtype).expand(item.spec.shape)

    def put(self, item: Input, layout: Layout, value: Tensor) -> None:
        """Hold the pieces of one full tensor."""
        self.pieces[item.kind, item.name] = [
            value[box.slices()].detach().to(self.device, copy=True).contiguous() for box in self.boxes(item, layout)
        ]

    def refill(self, values: Mapping[tuple[str, str], float]) -> None:
        """State that holds one number everywhere, by slot and parameter."""
        for (slot, param), value in values.items():
            for piece in self.pieces.get(("state", f"{slot}/{param}"), []):
                piece.fill_(value)

    def matches(self, kind: str, name: str, value: Tensor) -> bool:
        """Whether the pieces held here are those of a full tensor."""
        item, layout = next((i, at) for i, at in self.items if (i.kind, i.name) == (kind, name))
        if (tuple(value.shape), value.dtype) != (item.spec.shape, item.spec.dtype):
            return False
        boxes = boxes_of(layout, value.shape, self.holders(layout))
        pieces = zip(boxes, self.pieces[kind, name], strict=True)
        return all(torch.equal(value[box.slices()].to(self.device), piece) for box, piece in pieces)

    def blank(self) -> State:
        """A state of the same pieces without values, for a load to fill."""
        pieces = {
            (item.kind, item.name): [
                torch.empty(box.size, dtype=item.spec.dtype, device=self.device) for box in self.boxes(item, layout)
            ]
            for item, layout in self.items
        }
        return State(self.roles, self.devices, self.device, pieces)

    def check_usable(self) -> None:
        if self.torn:
            raise StepError(
                "the last update was interrupted half-way",
                got=f"step {self.num_steps + 1} changed some parameters and not others",
                hint="load the last checkpoint",
            )

    def views(self) -> dict[str, ShardedTensorView]:
        """Checkpoint names (`param/...`, `buffer/...`, `state/...`) to the pieces held here, which a load fills."""
        from meshweave.runtime.checkpoint_tables import ShardedTensorView

        return {
            f"{item.kind}/{item.name}": ShardedTensorView(
                item.spec.shape,
                item.spec.dtype,
                tuple(zip(self.boxes(item, layout), self.pieces[item.kind, item.name], strict=True)),
            )
            for item, layout in self.items
        }

    def save(self, path: str | os.PathLike[str], seed: int) -> None:
        """Write a checkpoint that any other mesh may load; all processes call it."""
        from meshweave.runtime.checkpoint import save  # takes long to import, and few programs do

        self.check_usable()
        save(path, self.views(), self._info(seed))

    def async_save(
        self, path: str | os.PathLike[str], seed: int, process_group: dist.ProcessGroup | None
    ) -> Future[None]:
        """`save` by a thread, of the state as it is now, over a Gloo group that nothing else uses meanwhile."""
        from meshweave.runtime.checkpoint import async_save

        self.check_usable()
        return async_save(path, self.views(), self._info(seed), process_group)

    def _info(self, seed: int) -> dict[str, int | str]:
        return {"num_steps": self.num_steps, "seed": seed, "optimizer": json.dumps(self.numbers)}

    def load(self, path: str | os.PathLike[str], seed: int) -> None:
        """Fill the pieces from a checkpoint; all processes call it. CheckpointError also for one of another seed."""
        from meshweave.runtime.checkpoint import load

        info = load(path, self.views())
        if int(info["seed"]) != seed:
            raise CheckpointError(
                "the checkpoint was trained with another seed",
                where=str(path),
                got=str(info["seed"]),
                expected=str(seed),
                hint="compile with that seed, so that dropout goes on as it would have",
            )
        self.num_steps = int(info["num_steps"])
        self.numbers = json.loads(str(info.get("optimizer", "{}")))  # before 2026-11 there was none

    @property
    def num_bytes(self) -> list[int]:
        """Bytes held by each device."""
        total = dict.fromkeys(self.devices, 0)
        for item, layout in self.items:
            for device, piece in zip(self.holders(layout), self.pieces[item.kind, item.name], strict=True):
                total[device] += piece.nbytes
        return list(total.values())


def lasting(roles: Sequence[RankGraph]) -> list[tuple[Input, Layout]]:
    """The parameters, buffers and optimizer state of a program, each once."""
    found: dict[Key, tuple[Input, Layout]] = {}
    for rank in roles:
        for item, layout in zip(rank.inputs, rank.layouts, strict=True):
            if item.kind in LASTING:
                found.setdefault((item.kind, item.name), (item, layout))
    return list(found.values())
