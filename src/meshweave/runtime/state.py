"""What lasts from step to step: the pieces of parameters, buffers and optimizer state on this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshweave.errors import CheckpointError, MeshError, StepError
from meshweave.ir.graph import Input, Spec
from meshweave.ir.layout import Layout
from meshweave.ir.pieces import Box
from meshweave.ir.rank import RankGraph
from meshweave.runtime.initialize import full_values, has_layout
from meshweave.runtime.weight_files import WeightFiles
from meshweave.runtime.world import boxes_of

if TYPE_CHECKING:
    from meshweave.runtime.checkpoint import ShardedTensorView

Key = tuple[str, str]
LASTING = ("param", "buffer", "state")


@dataclass(slots=True)
class State:
    """Pieces by (kind, name), a piece per local device in the value's mesh, and the number of completed steps.

    `numbers` are the optimizer's scalars of each parameter (step counts and the like), by parameter and slot; `options`
    those of its groups; `resting` is optimizer state of frozen parameters, which is in checkpoints but in no program.
    During an update old pieces are released singly as new pieces appear; `torn` is set meanwhile. A state that an
    interrupted update left torn raises errors.
    """

    roles: Sequence[RankGraph]
    devices: Sequence[int]
    device: torch.device
    pieces: dict[Key, list[Tensor]] = field(default_factory=dict)
    num_steps: int = 0
    torn: bool = False
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    options: Sequence[Mapping[str, Any]] = ()
    resting: list[tuple[Input, Layout]] = field(default_factory=list)
    _lasting: list[tuple[Input, Layout]] = field(init=False)  # of the program

    def __post_init__(self) -> None:
        self._lasting = lasting(self.roles)
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

    @property
    def items(self) -> Iterable[tuple[Input, Layout]]:
        """Every lasting value of the program, with or without a local piece, and resting state."""
        return [*self._lasting, *self.resting]

    def holders(self, layout: Layout) -> list[int]:
        """The local devices in a layout's mesh, in the order of the pieces."""
        return [device for device in self.devices if device in layout.mesh]

    def boxes(self, item: Input, layout: Layout) -> list[Box]:
        """The box of each holder."""
        return boxes_of(layout, item.spec.shape, self.holders(layout))

    def fill(
        self, values: Iterable[tuple[str, Tensor]], state: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> None:
        """Cut pieces of full tensors by name (parameters and buffers); optimizer state from `state` or zeros.

        Full tensors are read one at a time, so that a generator never needs two in memory.
        """
        known = {item.name: (item, layout) for item, layout in self.items if item.kind != "state"}
        for name, value in values:
            item, layout = known[name]
            self.put(item, layout, value)
        for item, layout in self.items:
            if item.kind == "state":
                slot, _, param = item.name.partition("/")
                slot_value = (state or {}).get(param, {}).get(slot)
                self.put(
                    item,
                    layout,
                    self.zeros(item) if slot_value is None else full_values(slot_value),
                )

    def has(self, item: Input) -> bool:
        """Whether a value has pieces."""
        return (item.kind, item.name) in self.pieces

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
            self._lasting = lasting(self.roles)
        for item, layout in new:
            self.put(item, layout, self.zeros(item))

    def rest(self, param: str, specs: Mapping[str, Spec], slots: Mapping[str, Any]) -> None:
        """Keep optimizer state of a parameter that no compiled update trains: full tensors or DTensors by slot. Other
        ranks have the pieces of slots that are missing."""
        for slot, spec in specs.items():
            value = slots.get(slot)
            entry = self._resting(f"{slot}/{param}", spec)
            self.resting.append(entry)
            if value is None or has_layout(value, entry[1]):
                self.pieces["state", entry[0].name] = (
                    [value.to_local()] if value is not None and self.holders(entry[1]) else []
                )
            else:
                self.put(*entry, full_values(value))

    def _resting(self, name: str, spec: Spec) -> tuple[Input, Layout]:
        """A slot of a frozen parameter, laid out like the parameter if it has its shape."""
        param = name.partition("/")[2]
        item, layout = next((i, at) for i, at in self.items if (i.kind, i.name) == ("param", param))
        is_like = item.spec.shape == spec.shape
        return Input("state", name, spec), layout if is_like else Layout.replicated(layout.mesh, len(spec.shape))

    @staticmethod
    def zeros(item: Input) -> Tensor:
        """A full tensor of zeros that takes no memory."""
        return torch.zeros((), dtype=item.spec.dtype).expand(item.spec.shape)

    def put(self, item: Input, layout: Layout, value: Tensor) -> None:
        """Store the pieces of a full tensor."""
        self.pieces[item.kind, item.name] = [
            value[box.slices()].detach().to(self.device, copy=True).contiguous() for box in self.boxes(item, layout)
        ]

    def refill(self, values: Mapping[tuple[str, str], complex]) -> None:
        """Fill state that is a single number everywhere, by slot and parameter."""
        for (slot, param), value in values.items():
            for piece in self.pieces.get(("state", f"{slot}/{param}"), []):
                piece.fill_(value)

    def blank(self) -> State:
        """A state with the same pieces but without values, for a load to fill. Its resting state comes from the
        checkpoint."""
        empty = State(self.roles, self.devices, self.device)
        for item, layout in empty.items:
            empty._put_empty(item, layout)
        return empty

    def _put_empty(self, item: Input, layout: Layout) -> None:
        self.pieces[item.kind, item.name] = [
            torch.empty(box.size, dtype=item.spec.dtype, device=self.device) for box in self.boxes(item, layout)
        ]

    def check_usable(self) -> None:
        if self.torn:
            raise StepError(
                "the last update was interrupted half-way",
                got=f"step {self.num_steps + 1} changed only some of the parameters",
                hint="load the last checkpoint",
            )

    def views(self) -> dict[str, ShardedTensorView]:
        """Checkpoint names (`param/...`, `buffer/...`, `state/...`) to the local pieces, which a load fills."""
        from meshweave.runtime.checkpoint import ShardedTensorView

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
        from meshweave.runtime.checkpoint import save  # slow to import, and few programs need it

        self.check_usable()
        save(path, self.views(), self._info(seed))

    def async_save(
        self, path: str | os.PathLike[str], seed: int, process_group: dist.ProcessGroup | None
    ) -> Future[None]:
        """`save` on a thread, of the present state, over a Gloo group that nothing else uses meanwhile."""
        from meshweave.runtime.checkpoint import async_save

        self.check_usable()
        return async_save(path, self.views(), self._info(seed), process_group)

    def _info(self, seed: int) -> dict[str, int | str]:
        return {
            "num_steps": self.num_steps,
            "seed": seed,
            "optimizer": json.dumps(self.numbers),
            "groups": json.dumps(self.options),
        }

    def load(self, path: str | os.PathLike[str], seed: int) -> list[str]:
        """Fill the pieces from a checkpoint; all processes call it. CheckpointError also for another seed.

        Returns the parameters that were frozen when it was written, and have no optimizer state in it: zeros.
        """
        from meshweave.runtime.checkpoint import load, saved_specs

        saved = saved_specs(path)
        fresh = self._adapt(saved)
        views = self.views()
        missing = {f"state/{i.name}" for i, _ in self.items if i.kind == "state" and i.name.partition("/")[2] in fresh}
        info = load(path, {name: view for name, view in views.items() if name not in missing})
        for item, layout in self.items:
            if f"{item.kind}/{item.name}" in missing:
                self.put(item, layout, self.zeros(item))
        if int(info["seed"]) != seed:
            raise CheckpointError(
                "the checkpoint was trained with another seed",
                where=str(path),
                got=str(info["seed"]),
                expected=str(seed),
                hint="compile with that seed, so that dropout continues its sequence",
            )
        self.num_steps = int(info["num_steps"])
        self.numbers = json.loads(str(info.get("optimizer", "{}")))  # checkpoints before 2026-11 have none
        self.options = json.loads(str(info.get("groups", "[]")))
        return fresh

    def _adapt(self, saved: Mapping[str, Spec]) -> list[str]:
        """Make room for a checkpoint's state of parameters that are frozen now. Returns the parameters of which it has
        no optimizer state, although it has that of others: they were frozen then."""
        wanted = {item.name for item, _ in self.items if item.kind == "state"}
        trained = {name.partition("/")[2] for name in wanted}
        params = {item.name for item, _ in self.items if item.kind == "param"}
        own = {name.removeprefix("state/"): spec for name, spec in saved.items() if name.startswith("state/")}
        for name, spec in own.items():
            param = name.partition("/")[2]
            if param in params and param not in trained:
                self.resting.append(entry := self._resting(name, spec))
                self._put_empty(*entry)
        slots, known = ({name.partition("/")[part] for name in own} for part in (0, 2))
        of_others = {name.partition("/")[2] for name in wanted if name.partition("/")[0] not in slots}
        return sorted(trained - known - of_others) if known else []

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
