"""plan_move: the cheapest sound sequence of steps from one layout to another, with its certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from meshweave.cost.hardware import Costs
from meshweave.cost.hardware.alpha_beta import AlphaBeta
from meshweave.errors import LayoutError
from meshweave.ir.layout import Layout
from meshweave.place.movement.across import steps_across
from meshweave.place.movement.bounds import lower_bound_seconds
from meshweave.place.movement.steps import Kind, Step
from meshweave.place.movement.within import Request, steps_within

_WORDS: dict[Kind, str] = {
    "slice": "slice",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "reduce",
    "scale": "scale",
    "all_to_all": "all-to-all",
    "permute": "permute",
    "all_gather": "gather",
    "to_partial": "replicate",
    "transfer": "transfer",
    "sparse_gather": "sparse gather",
    "sparse_scatter": "sparse reduce-scatter",
}


@dataclass(frozen=True, slots=True)
class MovePlan:
    """The steps of a move and its certificate: its costs for the largest piece under a profile, and a lower bound of
    all plans.

    `source` and `target` are as the caller wrote them; the steps lead from the normal form of the former to that of the
    latter. `peak_bytes` is the most that the input and output of a step take on a device (without steps: the value
    itself). `numerics` is "exact" when every element keeps its bits, whatever the groups, and "reassociates" when
    floating sums or an average depend on their order.
    """

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    seconds: float
    bytes_received: float
    peak_bytes: int
    numerics: Literal["exact", "reassociates"]
    request: Request

    @property
    def kind(self) -> str:
        """The distinct kinds of its steps in order, joined by "+"; "none" without steps."""
        return "+".join(dict.fromkeys(_WORDS[step.kind] for step in self.steps)) or "none"

    @property
    def lower_bound_seconds(self) -> float:
        """Seconds that every plan takes at least under the profile: see `movement.bounds`."""
        return _bound(self.request)

    def __str__(self) -> str:
        head = f"{self.source} -> {self.target}: "
        if not self.steps:
            return head + "nothing to do"
        count = f"{len(self.steps)} step" + "s" * (len(self.steps) > 1)
        costs = f"{_microseconds(self.seconds)}, at best {_microseconds(self.lower_bound_seconds)}"
        moved = f"{_bytes(self.bytes_received)} received, peak {_bytes(self.peak_bytes)}, {self.numerics}"
        return f"{head}{count}\n  {costs}; {moved}\n{steps_text(self.steps)}"


def steps_text(steps: Sequence[Step]) -> str:
    """A line for each step: its number, kind, resulting layout and cost."""
    texts, layouts = [str(step) for step in steps], [str(step.target) for step in steps]
    wide, wider = max(map(len, texts), default=0), max(map(len, layouts), default=0)
    return "\n".join(
        f"  {i}. {text:<{wide}}  -> {layout:<{wider}}  "
        f"{_microseconds(step.seconds)}, {_bytes(step.bytes_received)} received"
        for i, (text, layout, step) in enumerate(zip(texts, layouts, steps, strict=True), 1)
    )


def _bytes(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.4g} {unit}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us"


_DEFAULT_PROFILE = AlphaBeta()

# Without a cap a step may always use this share of a device's memory, or so many bytes if that memory is unknown: a
# hundredth of what the smallest GPUs in use have (8 GB).
_SHARE_OF_MEMORY, _LITTLE_BYTES = 1 / 100, 64 << 20


def plan_move(
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    dtype: torch.dtype,
    profile: Costs = _DEFAULT_PROFILE,
    *,
    memory_cap_bytes: int | None = None,
    device_bytes: int | None = None,
) -> MovePlan:
    """The cheapest plan under `profile` among all sequences of steps, each over any set of axes, in any order.

    (If more than four axes take part in the move: in the order of the target.)

    `memory_cap_bytes` is a hard bound on the input and output of every step on a device. Without it the bound is the
    larger of a hundredth of the device's memory (`device_bytes`, else the profile's; 64 MiB if neither is known) and
    twice the larger of the source's and the target's pieces (or, if uneven pieces allow no such plan, the least
    possible peak).

    A value that is partial at both ends may be reduced on the way and become partial again, as the same sum in other
    parts; and if `source` is partial, other axes may become partial, to be reduced with it. A value that is not partial
    is never summed: such a move is exact.

    A reduction runs only while every replicated axis was replicated in `source`, so that replicas are equal to the bit
    if groups that are replicas of each other add in the same order. Common outermost axes of a dim are not touched.
    Plans are deterministic and cached.

    Between two meshes (other devices, or the same in another order or with other axes) the plan has exactly one
    transfer, with steps on the source's mesh before it and on the target's after it; see `movement.across`.

    Raises LayoutError for a wrong number of dims, a negative size, reduce ops that do not commute (sum and max of the
    same value that must be reduced), an average of integers, a target that is partial(avg) if the source is not or is
    on another mesh, and a cap below the least possible peak (which the error names).
    """
    return _plan(source, target, tuple(map(int, shape)), dtype, profile, memory_cap_bytes, device_bytes)


@lru_cache(maxsize=16384)
def _plan(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    profile: Costs,
    memory_cap_bytes: int | None,
    device_bytes: int | None,
) -> MovePlan:
    if any(size < 0 for size in shape):
        raise LayoutError("a size is below 0", where="plan_move", got=str(shape), expected="sizes of 0 or more")
    memory = profile.usable_bytes if device_bytes is None else device_bytes
    room = _LITTLE_BYTES if memory is None else int(memory * _SHARE_OF_MEMORY)
    start, goal = source.normalized(shape), target.normalized(shape)
    request = Request(start, goal, shape, dtype, profile, memory_cap_bytes, room)
    steps = steps_within(request) if start.mesh == goal.mesh else steps_across(request)
    inexact = dtype.is_floating_point or dtype.is_complex
    rounds = inexact and any(step.kind == "scale" or step.op == "sum" for step in steps if step.kind != "to_partial")
    return MovePlan(
        source=source,
        target=target,
        steps=steps,
        seconds=sum((step.seconds for step in steps), 0.0),
        bytes_received=sum((step.bytes_received for step in steps), 0.0),
        peak_bytes=request.peak(steps),
        numerics="reassociates" if rounds else "exact",
        request=request,
    )


@lru_cache(maxsize=4096)
def _bound(request: Request) -> float:
    return lower_bound_seconds(request)
