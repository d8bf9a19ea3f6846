"""A step's state in checkpoints: the tensors of the model and of `optimizer.state` as the user sees them, and the
options and numbers of the optimizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshweave.capture.optimizer_groups import options_of, put_options
from meshweave.capture.optimizers import number_like, state_tensors
from meshweave.errors import CheckpointError
from meshweave.ir.graph import Spec
from meshweave.runtime.bindings import Bindings
from meshweave.runtime.checkpoint import Checkpoint, async_save, on_all, save
from meshweave.runtime.state import State


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """Checkpoints of a model whose tensors are bound to a state, and of its optimizer.

    Tensors are named `param/NAME`, `buffer/NAME` and `state/SLOT/NAME`. A parameter that has taken no step has no
    optimizer state. `slots` are the tensors of parameters that a compiled update trains; of others those with an
    element for each of the parameter, or with several elements.
    """

    bindings: Bindings
    model: nn.Module
    optimizer: Optimizer | None
    slots: Mapping[str, Mapping[str, Spec]]

    def save(self, path: str | os.PathLike[str], state: State, seed: int) -> None:
        """Write a checkpoint that any other mesh may load. All processes call it."""
        save(path, *self._tensors_and_info(state, seed))

    def async_save(
        self, path: str | os.PathLike[str], state: State, seed: int, group: dist.ProcessGroup | None
    ) -> Future[None]:
        """`save` on a thread, of the present state, over a Gloo group that nothing else uses meanwhile."""
        return async_save(path, *self._tensors_and_info(state, seed), group)

    def _tensors_and_info(self, state: State, seed: int) -> tuple[dict[str, Tensor], dict[str, int | str]]:
        """The tensors of a checkpoint, those of the user and not copies, and the facts beside them."""
        tensors = self._model_tensors()
        of_ranks = on_all(lambda: self._add_optimizer_state(tensors))  # a rank may have that of its stage alone
        numbers = {name: entry for its in of_ranks for name, entry in its.items()}
        options = options_of(self.optimizer) if self.optimizer is not None else []
        return tensors, {
            "num_steps": state.num_steps,
            "seed": seed,
            "loss_scale": json.dumps(state.scaler.numbers()),
            "optimizer": json.dumps(numbers),
            "groups": json.dumps(options),
        }

    def _add_optimizer_state(self, tensors: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Add the tensors of the optimizer's state. Returns its numbers, by parameter and slot."""
        numbers: dict[str, dict[str, Any]] = {}
        own = {} if self.optimizer is None else state_tensors(self.optimizer, self.model)
        for name, of_elements in own.items():
            entries = self._entries(name)
            slots = {s: entries[s] for s in self.slots.get(name, of_elements) if isinstance(entries.get(s), Tensor)}
            tensors |= {f"state/{slot}/{name}": x.detach() for slot, x in slots.items()}
            others = {s: x for s, x in entries.items() if s not in slots}
            singles = {s: x for s, x in others.items() if not isinstance(x, Tensor) or x.numel() == 1}
            if singles:
                numbers[name] = {slot: _saved(name, slot, x) for slot, x in singles.items()}
        return numbers

    def _model_tensors(self) -> dict[str, Tensor]:
        return {f"{kind}/{n}": b.tensor.detach() for (kind, n), b in self.bindings.bound.items() if kind != "state"}

    def load(self, path: str | os.PathLike[str], state: State, seed: int, likes: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: fill the tensors of the model and of `optimizer.state`; the state takes them over
        as it takes over what a user loads. All processes call it.

        `likes` are numbers by slot in the form that the optimizer keeps. CheckpointError for a checkpoint of another
        model or seed: then nothing has changed. After an error while the tensors are read the state is torn.
        """
        opened: list[Checkpoint] = []
        on_all(lambda: opened.append(self._open(path, seed)))
        (checkpoint,) = opened
        numbers = json.loads(checkpoint.info["optimizer"])
        targets = self._targets(checkpoint, {name for name, own in numbers.items() if not own})
        wanted = self._model_tensors()
        wanted |= {f"state/{slot}/{name}": x.detach() for name, own in targets.items() for slot, x in own.items()}
        state.torn = True
        on_all(lambda: checkpoint.read(wanted))
        for name, p in self._params().items():
            before, own = self._entries(name), targets.get(name, {})
            own |= {s: number_like(v, before.get(s, likes.get(s))) for s, v in numbers.get(name, {}).items()}
            if own:
                assert self.optimizer is not None, "of parameters in its groups"
                self.optimizer.state[p] = own
            elif self.optimizer is not None:
                self.optimizer.state.pop(p, None)
        if self.optimizer is not None:
            put_options(self.optimizer, json.loads(checkpoint.info["groups"]))
        self._take_over(state)
        state.num_steps = int(checkpoint.info["num_steps"])
        if "loss_scale" in checkpoint.info:  # not in those of 0.2.0 and before
            state.scaler.load(json.loads(checkpoint.info["loss_scale"]))

    def _open(self, path: str | os.PathLike[str], seed: int) -> Checkpoint:
        checkpoint = Checkpoint.at(path)
        if missing := {"num_steps", "seed", "optimizer", "groups"} - checkpoint.info.keys():
            raise CheckpointError(
                "not the checkpoint of a step", where=str(path), got=f"no {', '.join(sorted(missing))}"
            )
        if int(checkpoint.info["seed"]) != seed:
            raise CheckpointError(
                "the checkpoint was trained with another seed",
                where=str(path),
                got=str(checkpoint.info["seed"]),
                expected=str(seed),
                hint="compile with that seed, so that dropout continues its sequence",
            )
        bound = self.bindings.bound.items()
        expected = {f"{kind}/{name}": b.item.spec for (kind, name), b in bound if kind != "state"}
        for slot, name, spec in _slots_in(checkpoint):
            if name in self.slots:
                expected |= {f"state/{own}/{name}": of_slot for own, of_slot in self.slots[name].items()}
            elif ("param", name) in self.bindings.bound:
                expected[f"state/{slot}/{name}"] = spec
        checkpoint.check_model(expected)
        return checkpoint

    def _targets(self, checkpoint: Checkpoint, unstepped: set[str]) -> dict[str, dict[str, Any]]:
        """Tensors for the optimizer state in a checkpoint, by parameter and slot: the present ones where they fit."""
        params = self._params()
        targets: dict[str, dict[str, Any]] = {}
        for slot, name, spec in _slots_in(checkpoint):
            if name in params and name not in unstepped:
                now = self._entries(name).get(slot)
                fits = isinstance(now, Tensor) and Spec(tuple(now.shape), now.dtype) == spec
                targets.setdefault(name, {})[slot] = now if fits else _zeros(spec, params[name])
        return targets

    def _take_over(self, state: State) -> None:
        """Let the state have what was loaded into the tensors."""
        params = self._params()
        for bound in self.bindings.bound.values():
            bound.fingerprint = None  # a torn state may have no pieces, even if a copy has the values already
        for item, layout in state.items:
            slot, _, name = item.name.partition("/")
            if item.kind == "state" and (name not in params or slot not in self._entries(name)):
                self.bindings.bound.pop(("state", item.name), None)
                state.put(item, layout, state.zeros(item))
        state.torn = False
        self.bindings.take_over(state)

    def _params(self) -> dict[str, Tensor]:
        """The parameters in the optimizer's groups, by name."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        own = {id(p) for group in groups for p in group["params"]}
        return {name: p for name, p in self.model.named_parameters() if id(p) in own}

    def _entries(self, name: str) -> dict[str, Any]:
        """The optimizer's state of a parameter."""
        return dict(self.optimizer.state.get(self.model.get_parameter(name), {})) if self.optimizer is not None else {}


def _slots_in(checkpoint: Checkpoint) -> Iterator[tuple[str, str, Spec]]:
    """Slot, parameter and spec of the optimizer state in a checkpoint."""
    for key, spec in checkpoint.specs.items():
        kind, _, rest = key.partition("/")
        slot, _, name = rest.partition("/")
        if kind == "state":
            yield slot, name, spec


def _zeros(spec: Spec, param: Tensor) -> Tensor:
    """A tensor of optimizer state: a DTensor if the parameter is one."""
    zeros = torch.zeros((), dtype=spec.dtype, device=param.device).expand(spec.shape)
    if not hasattr(param, "placements"):
        return zeros.clone()
    from meshweave.runtime.dtensor_parameters import dtensor_like  # importing DTensor is slow

    return dtensor_like(zeros, param)


def _saved(name: str, slot: str, value: Any) -> Any:
    """A number of the optimizer's state in a checkpoint; of a tensor with its dtype."""
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch."), value.item()]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        "the optimizer's state cannot be written to a checkpoint",
        where=f"optimizer.state of {name}",
        got=f"'{slot}' is a {type(value).__name__}",
        expected="tensors and numbers",
    )
