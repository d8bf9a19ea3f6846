"""The activations that a schedule holds on each rank, as a bound that does not depend on times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshweave.engine.actions import Schedule
from meshweave.errors import PlanError

PerStage = float | Sequence[float]  # a number for all stages, or one for each


def per_stage(what: str, values: PerStage, stages: int) -> tuple[float, ...]:
    """A value for each of `stages`. Raises PlanError for another number of values, and for negative or no numbers."""
    row = tuple(float(v) for v in values) if isinstance(values, Sequence) else (float(values),) * stages
    if len(row) != stages:
        raise PlanError(
            f"{what} needs a value for each stage",
            got=f"{len(row)} values",
            expected=f"{stages} values, or a single number",
        )
    if not all(0 <= value < float("inf") for value in row):
        raise PlanError(f"{what} has to be finite and at least 0", got=str(values))
    return row


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """What a stage holds for a microbatch, in bytes or any other unit, per stage or as a number for all.

    `activation`: from the begin of F. `after_input`: what of it is left once I has run, until W ends; None: all of it,
    as where I frees nothing. B frees all at its end."""

    activation: PerStage = 1.0
    after_input: PerStage | None = None

    @classmethod
    def of_transformer(cls, heads: int, tokens: int, width: int) -> ActivationMemory:
        """Of transformer layers that keep their attention scores, in activations of a microbatch on a stage: a layer
        stores 34 + 5 heads tokens / width bytes per token and unit of width (Korthikanti et al., MLSys 2023), of which
        W needs 32 (Qi et al., Zero Bubble Pipeline Parallelism, section 2.3)."""
        return cls(1.0, 32 / (34 + 5 * heads * tokens / width))

    def of_stages(self, stages: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Per stage what is held after F, and what after I. Raises PlanError if I leaves more than F stored."""
        stored = per_stage("activation", self.activation, stages)
        left = stored if self.after_input is None else per_stage("after_input", self.after_input, stages)
        for stage, (before, after) in enumerate(zip(stored, left, strict=True)):
            if after > before:
                raise PlanError(
                    "the input part of backward frees activations, it stores none",
                    where=f"stage {stage}",
                    got=f"{after:g} after I, {before:g} before",
                )
        return stored, left


def peak_activations(schedule: Schedule, memory: ActivationMemory | None = None) -> tuple[float, ...]:
    """The most that each rank holds at a time, in the unit of `memory` (default: in microbatches of a stage, which W
    frees). A rank runs its actions in order, so that no runtime holds more."""
    stored, left = (memory or ActivationMemory()).of_stages(schedule.num_stages)
    change = {
        "forward": stored,
        "input": tuple(after - before for before, after in zip(stored, left, strict=True)),
        "weight": tuple(-after for after in left),
        "backward": tuple(-before for before in stored),
    }
    peaks = []
    for actions in schedule.of_role:
        now = peak = 0.0
        for action in actions:
            for kind in action.kinds:
                now += change[kind][action.stage] if kind in change else 0.0
                peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)
