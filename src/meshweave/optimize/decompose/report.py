"""The outcome of every collective, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from meshweave.optimize.decompose.price import Estimate
from meshweave.optimize.decompose.rewrite import RingScheme


@dataclass(frozen=True, slots=True)
class RingRow:
    """A collective, and its outcome. Seconds are 0 without costs; `matmuls` are those of `way`, the best algorithm (""
    if there was none)."""

    name: str
    op: str
    group: str
    place: str
    matmuls: tuple[str, ...] = ()
    scheme: str = ""
    num_steps: int = 0
    seconds_before: float = 0.0
    seconds_after: float = 0.0
    is_taken: bool = False
    reason: str = ""
    numerics: str = ""

    def __str__(self) -> str:
        verdict = "taken apart" if self.is_taken else "left"
        return f"{self.name} ({self.op} over {self.group}) {verdict}: {self.reason}; {self.place}"


@dataclass(frozen=True, slots=True)
class DecomposeReport:
    """Every all-gather, reduce-scatter and all-reduce of a role, in order.

    The gather of a decomposed all-reduce follows it.
    """

    rows: tuple[RingRow, ...]

    @property
    def num_taken(self) -> int:
        return sum(row.is_taken for row in self.rows)

    @property
    def note(self) -> str:
        """Why nothing was decomposed, with the reason of a collective of each kind; "" if something was."""
        if self.num_taken or not self.rows:
            return ""
        reasons = {(row.op, row.group): row.reason for row in reversed(self.rows)}
        texts = [f"{op} over {group}: {reason}" for (op, group), reason in reversed(reasons.items())]
        return f"none of {len(self.rows)} collectives is decomposed: {'; '.join(texts)}"

    def left(self, reason: str) -> DecomposeReport:
        """A report of a graph that stays as it is, with the reason."""
        rows = (replace(r, is_taken=False, reason=f"{reason}; {r.reason}") if r.is_taken else r for r in self.rows)
        return replace(self, rows=tuple(rows))

    def __str__(self) -> str:
        head = f"{self.num_taken} of {len(self.rows)} collectives decomposed"
        if self.rows:
            schemes = Counter(row.scheme for row in self.rows if row.is_taken)
            head += f": {', '.join(f'{n} {scheme}' for scheme, n in schemes.items()) or self.rows[0].reason}"
        return "\n".join([head, *(f"  {row}" for row in self.rows)])


def joined_reasons(reasons: list[str]) -> str:
    return "; ".join(dict.fromkeys(reasons)) or "no matmul is beside it"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def gain_text(scheme: RingScheme, estimate: Estimate | None, more: float) -> str:
    """`more` is the possible gain of the second half of an all-reduce."""
    if estimate is None:
        return f"{scheme}, as requested by the options"
    before, after = _microseconds(estimate.before), _microseconds(estimate.after)
    second = f", and its gather can gain {_microseconds(more)} beside what comes after" if more else ""
    return f"{scheme}: {after} instead of {before}{second}"


def no_gain_text(scheme: RingScheme, estimate: Estimate) -> str:
    """Which part of the best decomposition makes it too slow."""
    before, after = _microseconds(estimate.before), _microseconds(estimate.after)
    if estimate.hidden >= estimate.collective:
        return f"other work hides it: {_microseconds(estimate.hidden)} of {_microseconds(estimate.collective)}"
    parts = {
        "the matmuls are slower in chunks": estimate.num_steps * estimate.chunk - estimate.compute,
        "messages take longer than the collective": estimate.num_messages * estimate.message - estimate.collective,
        "not every message is hidden": estimate.played - estimate.num_steps * estimate.chunk,
        "results have to be put together": estimate.losses,
    }
    worst = max(parts, key=parts.__getitem__)
    return f"no gain: {scheme} takes {after} instead of {before}, {worst} ({_microseconds(parts[worst])})"
