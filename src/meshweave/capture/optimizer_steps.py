"""The numbers of each step, which the optimizer's own code computes and keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.optimizer_graph import Number
from meshweave.capture.optimizer_record import Prepared
from meshweave.capture.optimizer_shared import Place, merged
from meshweave.capture.optimizer_stand_ins import Kept, StandIns
from meshweave.capture.optimizers import OptimizerSpec, UpdateKind, kept_of, names_by_id, scalars_of, signature_of
from meshweave.errors import OutdatedUpdate, StepError


class StepNumbers:
    """The numbers of each step, and what the optimizer's own code keeps between steps, for every parameter.

    `next()` runs `step()` on stand-ins with the present options, once for all parameters that have the same numbers;
    `commit()` records that the step was taken. Parameters that a step does not update (the loss of its program does not
    use them) keep their values. `stepped` are those that have taken a step which left state.
    """

    def __init__(
        self, spec: OptimizerSpec, optimizer: torch.optim.Optimizer, names: nn.Module | Mapping[int, str]
    ) -> None:
        named = names_by_id(names)
        self.spec, self._stand_ins = spec, StandIns(optimizer, named)
        self._named = {named[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        self._members = {k: spec.members(k) for k in spec.leaders}
        self._kept: dict[str, Kept] = {}
        self.stepped: set[str] = set()
        self.read()

    def read(self) -> None:
        """Continue from the optimizer's present state."""
        state = self._stand_ins.source.state
        self._begin_with({n: kept_of(state.get(p, {}), self._leaves(n)) for n, p in self._named.items()})

    def _leaves(self, name: str) -> Kept:
        """The state that a first step of a parameter leaves."""
        kind = self.spec.kinds[self.spec.kind_of[name]] if name in self.spec.kind_of else None
        return Kept(kind.slots, kind.kept) if kind is not None else Kept()

    def _begin_with(self, kept: Mapping[str, Kept]) -> None:
        """Parameters of the same kind with the same numbers share them from now on."""
        shared: dict[Any, Kept] = {}
        self._kept = {n: shared.setdefault((k, _shown(kept[n])), kept[n]) for n, k in self._leaders()}
        self._after: dict[str, Kept] = {}
        self._shared: dict[Place, Any] = {}
        self.stepped = {name for name, own in self._kept.items() if own.tensors or own.numbers}

    def _leaders(self) -> Iterable[tuple[str, int]]:
        return ((name, k) for k, names in self._members.items() for name in names)

    def next(self, updated: Collection[str] | None = None) -> tuple[dict[str, float], dict[tuple[str, str], complex]]:
        """The numbers of the next step, which updates the parameters `updated` (None: all), by name; and by slot and
        parameter the initial values of state in it.

        Raises OutdatedUpdate if the optimizer would do something else than what was captured: because of other options,
        or because parameters have since taken different numbers of steps where a single number was captured for them.
        """
        numbers: dict[str, float] = {}
        fills: dict[tuple[str, str], complex] = {}
        self._after, shared = {}, list[Mapping[Place, Any]]()
        self._stand_ins.take_options()
        if self._stand_ins.is_unverified and not self._stand_ins.are_alike(self._members.values()):
            raise OutdatedUpdate(
                "the optimizer updates parameters in different ways that it updated alike when the step was compiled",
                where=self.spec.name,
                got="other operations or numbers for some parameters of a group, because of an attribute or option",
                expected="the same for all of them",
                hint="step.save(path), compile again with it, step.load(path)",
            )
        for k, members in self._members.items():
            kind = self.spec.kinds[k]
            if self._stand_ins.have_other_notes(members):
                raise OutdatedUpdate(
                    "attributes of parameters require another update than the compiled one",
                    where=f"{self.spec.name}, param_groups[{kind.group}]",
                    got=f"other attributes on some of {', '.join(members[:3])}",
                    expected="the values when the step was compiled, or the same on all of them",
                    hint="step.save(path), compile again with it, step.load(path)",
                )
            names = members if updated is None else [name for name in members if name in updated]
            kept = self._kept_by_all(names or members[:1])
            first = (names or members)[0]
            slots = self.spec.slots(first)
            own = Kept({slot: slots.get(slot, spec) for slot, spec in kept.tensors.items()}, kept.numbers)
            paths, after = self._stand_ins.step(first, own)
            self._after |= dict.fromkeys(names, after)
            shared.append(after.shared)
            signature = signature_of(paths)
            if signature not in kind.variants or (not kind.reads_shape and any(p.record.reads_shape for p in paths)):
                raise self._changed(kind, first)
            variant = kind.variants.index(signature)
            for i, number in enumerate(kind.numbers):
                numbers[f"update{k}.{i}"] = _value(number, variant, paths)
            fills |= {(key[2], name): v for key, v in paths[0].fills.items() for name in names}
        if any(shared):
            shared.append(self._stand_ins.changed_by_idle())
        self._shared = merged(shared, self.spec.name)
        return numbers, fills

    def _kept_by_all(self, names: Collection[str]) -> Kept:
        """What each of some parameters of the same kind keeps. OutdatedUpdate if they differ."""
        distinct = {id(self._kept[name]): name for name in names}
        shown = sorted({_shown(self._kept[name]) for name in distinct.values()}) if len(distinct) > 1 else []
        if len(shown) > 1:
            raise OutdatedUpdate(
                "parameters have taken different numbers of steps since the step was compiled",
                where=f"state of the optimizer {self.spec.name}: {', '.join(sorted(distinct.values()))}",
                got=" and ".join(shown),
                expected="the same number of steps for all parameters of a group and shape",
                hint="step.save(path), compile again with it, step.load(path)",
            )
        return self._kept[next(iter(names))]

    def commit(self) -> None:
        """Record that the step of the last `next()` was taken."""
        self._kept |= self._after
        self.stepped.update(name for name, after in self._after.items() if after.tensors or after.numbers)
        self._stand_ins.shared.commit(self._shared)
        self._after, self._shared = {}, {}

    def kept(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What the optimizer's code keeps for some parameters beside their tensors, in its own form."""
        wanted = {*names}
        return {name: dict(kept.numbers) for name, kept in self._kept.items() if name in wanted}

    def values(self) -> dict[str, dict[str, float]]:
        """What the optimizer's code keeps for each parameter: step counts and the like, by parameter and slot.
        Parameters that have taken no step have nothing, if others of the kind have something."""
        shown = {name: scalars_of(kept.numbers) for name, kept in self._kept.items()}
        return {name: values for name, values in shown.items() if values or self._is_fresh(name)}

    def _is_fresh(self, name: str) -> bool:
        leaves = self._leaves(name)
        return name not in self.stepped and bool(leaves.tensors or leaves.numbers)

    def load(self, values: Mapping[str, Mapping[str, float]], num_steps: int) -> None:
        """Continue from the result of `values()` after so many steps."""

        def loaded(name: str) -> Kept:
            leaves = self._leaves(name)
            if not num_steps or (name in values and not values[name]):
                return Kept()
            numbers = values.get(name, {slot: num_steps for slot in leaves.numbers if slot == "step"})
            return Kept(leaves.tensors, {slot: number_like(v, leaves.numbers.get(slot)) for slot, v in numbers.items()})

        self._begin_with({name: loaded(name) for name, _ in self._leaders()})

    def _changed(self, kind: UpdateKind, name: str) -> StepError:
        return OutdatedUpdate(
            "the optimizer's options require another update than the compiled one",
            where=f"{self.spec.name}, param_groups[{kind.group}], parameter {name}",
            got="other operations in step(): an option was switched on or off (0 and nonzero differ)",
            expected="the operations of the step that was compiled; numbers may change",
            hint="step.save(path), compile again with it, step.load(path)",
        )


def _shown(kept: Kept) -> str:
    """What distinguishes the state of two parameters of the same kind, whose shapes may differ."""
    return str((sorted(kept.tensors), sorted(scalars_of(kept.numbers).items())))


def number_like(value: float, like: Any) -> Any:
    """A number in the form in which an optimizer keeps it: a tensor, an integer or a float."""
    if isinstance(like, Tensor):
        return torch.tensor(value, dtype=like.dtype).reshape(like.shape)
    return type(like)(value) if isinstance(like, (int, float)) else value


def _value(number: Number, variant: int, paths: list[Prepared]) -> float:
    """A number's value in a step of a variant; 1 for numbers of other variants, which are not used then."""
    for source in number:
        if source.index < 0:
            return float(source.variant == variant)
        if source.variant == variant:
            path = next(p for p in paths if p.record.outcomes[: len(source.path)] == source.path)
            return path.record.numbers[source.index]
    return 1.0
