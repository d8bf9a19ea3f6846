"""A simulated (or measured) step: spans on streams, memory over time, and totals. Plain values: equal inputs give equal
bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["compute", "collective", "transfer"]

# Of a simulated peak, to either side: published peaks are within it, all but one (benchmarks/results/predictions.md).
MEMORY_ERROR = 0.04


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a communication is exposed for `seconds`.

    `kind` is `dependency` (a task waits for it and nothing else is left to compute), `late` (it could have started
    earlier), `link` (the link was busy with `blocker`), `channel` (its channel was busy with `blocker`), `order`
    (compute that does not need it comes after its wait: the order of `blocker` is fixed) or `peer` (another role was
    late with `blocker`). `text` is a sentence with names and source lines; `blocker` is the index of a span, -1 if
    there is none.
    """

    kind: str
    seconds: float
    text: str
    blocker: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A task that ran: a kernel (an op or a fused chain) of a role's compute stream, or a communication of a channel.

    Times are in seconds from the start of the step. `exposed_seconds` is the part of a communication during which its
    role computes nothing; if several run, it is attributed to the communication that the role waits for, else divided;
    of a message between two roles it is that of both. `needs` are the spans that it had to wait for, `index` is its own
    index in `Simulation.spans`. `bytes` are received over links by a communication, moved in device memory by a kernel.
    `names` are its graph nodes.
    `action` is what its role runs it for (`engine.actions`: "forward", "backward", "input", "weight", ...), on `stage`.
    `repeats`: for how many equal ones it stands, itself among them, where few of many equal layers were simulated.
    """

    index: int
    name: str
    op: str
    kind: Kind
    stream: str
    role: int
    start: float
    seconds: float
    phase: str
    module: str = ""
    line: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    layout: str = ""  # for a communication: "[{fsdp}, {}] -> [{}, {}]", with the value's global dtype and shape
    group: str = ""  # for a communication: the axes, such as "dp,tp"
    microbatch: int = 0
    action: str = ""
    stage: int = 0
    exposed_seconds: float = 0.0
    reasons: tuple[Reason, ...] = ()
    needs: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    repeats: int = 1

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """Tensors in memory at the peak: a tensor and its twins in repeated layers. `name` is of the largest, `bytes` of
    all `count` of them, `module` has `*` for numbers that differ."""

    name: str
    bytes: int
    kind: str  # param, state, grad, batch, activation, gathered, temporary
    module: str = ""
    line: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleResult:
    """A role: its devices, memory and time. `memory` is (seconds, bytes) at every change, in order of time."""

    index: int
    devices: tuple[int, ...]
    compute_seconds: float
    communication_seconds: float  # time in which at least one communication of the role runs
    exposed_seconds: float  # the part of that in which it computes nothing
    idle_seconds: float  # neither compute nor communication
    peak_bytes: int
    peak_at: float
    reserved_bytes: int  # what PyTorch's caching allocator has reserved by then, fragments included
    persistent_bytes: int  # parameters, optimizer state, buffers
    # all of them, those with the most bytes first
    at_peak: tuple[LiveTensor, ...] = field(default=(), repr=False)
    memory: tuple[tuple[float, int], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A step on a machine. `source` is "modelled" or "measured"; `profile` and `profile_version` name its costs.
    `flops` are those of the model's mathematics per step of the whole program (recomputation not counted), `mfu` is
    flops / (seconds * devices * peak rate of `mfu_dtype`); None if the profile has no peak or the step does not
    fit. `tokens` per step. `schedule` is the name of a pipeline's; "" for stages that run one after the other."""

    seconds: float
    spans: tuple[Span, ...] = field(repr=False)
    roles: tuple[RoleResult, ...]
    streams: tuple[str, ...]
    mesh: str
    num_devices: int
    profile: str
    profile_version: str
    source: Literal["modelled", "measured"] = "modelled"
    title: str = ""
    schedule: str = ""
    tokens: int = 0
    flops: float = 0.0
    mfu: float | None = None
    mfu_dtype: str = ""
    memory_bytes: int | None = None  # of a device; None if unknown
    verdict: str = ""  # "" if it fits, else what does not
    advice: tuple[str, ...] = ()  # what would make it fit
    notes: tuple[str, ...] = ()
    # (span, span that depends on it), for the graph view
    edges: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    @property
    def exposed_seconds(self) -> float:
        """Exposed communication of the role that has the most."""
        return max((role.exposed_seconds for role in self.roles), default=0.0)

    @property
    def fit(self) -> Literal["yes", "may", "no"]:
        """Whether the step fits in memory. "may": its peak differs from the memory of a device by less than the model's
        error (MEMORY_ERROR)."""
        if self.verdict:
            return "no"
        room = self.memory_bytes
        is_near = room is not None and self.peak_bytes > room * (1 - MEMORY_ERROR)
        return "may" if is_near and self.source == "modelled" else "yes"

    @property
    def verdict_text(self) -> str:
        """What does not fit, and what would make it fit; "" if it fits."""
        advice = f"; what would make it fit: {'; '.join(self.advice)}" if self.advice else ""
        return f"{self.verdict}{advice}"

    @property
    def peak_bytes(self) -> int:
        return max((role.peak_bytes for role in self.roles), default=0)

    @property
    def reserved_bytes(self) -> int:
        return max((role.reserved_bytes for role in self.roles), default=0)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.seconds / self.num_devices if self.seconds else 0.0

    def __str__(self) -> str:
        """The totals and notes, a few lines."""
        room = f" of {self.memory_bytes / 1e9:.3g}" if self.memory_bytes else ""
        fit = {"yes": "fits", "may": "may fit", "no": self.verdict_text}[self.fit]
        share = f", MFU {self.mfu:.1%}" if self.mfu is not None else ""
        throughput = f", {self.tokens_per_s_per_gpu:,.0f} tokens/s per device{share}" if self.tokens else share
        lines = [
            f"step {self.seconds:.4g} s, {self.exposed_seconds:.3g} s of communication exposed{throughput}",
            f"peak {self.peak_bytes / 1e9:.3g}{room} GB: {fit}",
            f"{self.source} on {self.profile}, {self.num_devices} devices, mesh {self.mesh}",
            *self.notes,
        ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The totals, as `--json` prints them."""
        return {
            "seconds": self.seconds,
            "exposed_seconds": self.exposed_seconds,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "profile": self.profile,
            "profile_version": self.profile_version,
            "source": self.source,
            "fits": not self.verdict,
            "fit": self.fit,
            "verdict": self.verdict,
            "advice": list(self.advice),
        }
