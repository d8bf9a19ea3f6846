"""What the optimizer's own code computes and keeps: the numbers of each step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.optimizer_graph import Number
from meshweave.capture.optimizer_record import Prepared
from meshweave.capture.optimizer_stand_ins import Kept, StandIns
from meshweave.capture.optimizers import OptimizerSpec, UpdateKind, kept_of, names_by_id, scalars_of, signature_of
from meshweave.errors import OutdatedUpdate, StepError


class StepNumbers:
    """The numbers of each step, and what the optimizer's own code keeps between steps.

    `next()` runs `step()` on stand-ins with the options as they are now; `commit()` says that the step was taken.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        optimizer: torch.optim.Optimizer,
        names: nn.Module | Mapping[int, str],
        updated: Collection[str] | None = None,
    ) -> None:
        named = names_by_id(names)
        self.spec, self._stand_ins = spec, StandIns(optimizer, named)
        self._named = {named[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        members = {k: spec.members(k) for k in spec.leaders}
        self._members = {k: [n for n in each if updated is None or n in updated] or each for k, each in members.items()}
        self._kept: dict[int, Kept] = {}
        self.read()

    def read(self) -> None:
        """Continue from the state that the optimizer has now. StepError where parameters of one kind differ in it."""
        state = self._stand_ins.source.state
        known: dict[str, dict[str, Any]] = {name: dict(state.get(p, {})) for name, p in self._named.items()}
        self._check_alike({name: scalars_of(kept) for name, kept in known.items()})
        kinds = [(k, self.spec.kinds[k], names[0]) for k, names in self._members.items()]
        self._after = self._kept = {k: kept_of(known[n], Kept(kind.slots, kind.kept)) for k, kind, n in kinds}

    def are_alike(self, values: Mapping[str, Mapping[str, float]]) -> bool:
        """Whether parameters of one kind have the same numbers."""
        return all(len(self._distinct(k, values)) < 2 for k in self._members)

    def _distinct(self, k: int, values: Mapping[str, Mapping[str, Any]]) -> list[str]:
        given = [values.get(name, {}) for name in self._members[k]]
        return sorted({str({slot: kept.get(slot) for slot in self.spec.kinds[k].kept}) for kept in given})

    def _check_alike(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        for k in self._members:
            shown = self._distinct(k, values)
            if len(shown) > 1:
                raise StepError(
                    "the parameters have taken different numbers of steps",
                    where=f"state of the optimizer {self.spec.name}",
                    got=", ".join(shown),
                    expected="parameters of one group and shape with one number of steps",
                    hint="load it into the optimizer before mw.compile: optimizer.load_state_dict",
                )

    def next(self) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
        """The numbers of the next step by name; and by slot and parameter what state begins with in it.

        Raises StepError where the optimizer would do something else than was captured.
        """
        numbers: dict[str, float] = {}
        fills: dict[tuple[str, str], float] = {}
        self._after = {}
        self._stand_ins.take_options()
        for k, names in self._members.items():
            kind = self.spec.kinds[k]
            paths, self._after[k] = self._stand_ins.step(names[0], self._kept[k])
            signature = signature_of(paths)
            if signature not in kind.variants or (not kind.reads_shape and any(p.record.reads_shape for p in paths)):
                raise self._changed(kind, names[0])
            variant = kind.variants.index(signature)
            for i, number in enumerate(kind.numbers):
                numbers[f"update{k}.{i}"] = _value(number, variant, paths)
            fills |= {(key[2], name): v for key, v in paths[0].fills.items() for name in self.spec.members(k)}
        return numbers, fills

    def commit(self) -> None:
        """The step of the last `next()` was taken."""
        self._kept = self._after

    def kept(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What the optimizer's code keeps of some parameters beside their tensors, as it keeps it."""
        known = {n: self._kept[self.spec.leaders[k]].numbers for n, k in self.spec.kind_of.items()}
        return {n: dict(known[n]) for n in names if n in known}

    def values(self) -> dict[str, dict[str, float]]:
        """What the optimizer's code keeps of each parameter: counts of steps and the like, by parameter and slot."""
        shown = {k: scalars_of(kept.numbers) for k, kept in self._kept.items()}
        leaders = {name: self.spec.leaders[k] for name, k in self.spec.kind_of.items()}
        return {name: dict(shown[k]) for name, k in leaders.items() if shown[k]}

    def load(self, values: Mapping[str, Mapping[str, float]], num_steps: int) -> None:
        """Continue from what `values()` gave after so many steps. StepError where parameters of one kind differ."""
        self._check_alike(values)
        for k, names in self._members.items():
            kind = self.spec.kinds[k]
            given = values.get(names[0], {slot: num_steps for slot in kind.kept if slot == "step"})
            numbers = {slot: number_like(value, kind.kept.get(slot)) for slot, value in given.items()}
            self._kept[k] = Kept(kind.slots, numbers) if num_steps else Kept()
        self._after = self._kept

    def _changed(self, kind: UpdateKind, name: str) -> StepError:
        return OutdatedUpdate(
            "the optimizer's options call for another update than was compiled",
            where=f"{self.spec.name}, param_groups[{kind.group}], parameter {name}",
            got="other operations in step(): an option was switched on or off (0 and not 0 are two ways)",
            expected="the operations of the step that was compiled; numbers may change",
            hint="step.save(path), compile again with it, step.load(path)",
        )


def number_like(value: float, like: Any) -> Any:
    """A number as an optimizer keeps it: as a tensor, an integer or a float."""
    if isinstance(like, Tensor):
        return torch.tensor(value, dtype=like.dtype).reshape(like.shape)
    return type(like)(value) if isinstance(like, (int, float)) else value


def _value(number: Number, variant: int, paths: list[Prepared]) -> float:
    """What a number is in a step of a variant; 1 for those of other variants, which are not used then."""
    for source in number:
        if source.index < 0:
            return float(source.variant == variant)
        if source.variant == variant:
            path = next(p for p in paths if p.record.outcomes[: len(source.path)] == source.path)
            return path.record.numbers[source.index]
    return 1.0
