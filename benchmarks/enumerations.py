"""Whole enumerations of plans, predicted: does the simulator rank plans as they ran, and know which run out of memory?

    python benchmarks/enumerations.py                  # all sheets; writes results/enumerations.md
    python benchmarks/enumerations.py 65B              # sheets whose names hold this; nothing is written

`plan_enumerations.jsonl` has every plan that Aleph Alpha ran of Llama 13B, 30B and 65B on 64 A100 of 80 GB ("Efficient
Parallelization Layouts for Large-Scale Distributed Model Training", arXiv 2311.05610): microbatch, tensor and pipeline
parallelism, attention kernel, recomputation; seconds of a step, or that it ran out of memory. Nothing is fitted.

The trainer is modelled after its source, github.com/Aleph-Alpha/scaling (see TRAINER). A stage is linear in its layers,
so a program of three short stages says what a microbatch takes and holds in the embedding, in a layer and in the head;
the clock of pipelines plays the actual stages. Programs are built once per width of tensor parallelism and microbatch.
"""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import mean, median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import MachineProfile, load_profile
from meshweave.cost.simulate.result import MEMORY_ERROR, Simulation
from meshweave.engine.schedules import make_schedule, pipeline_times
from meshweave.ir.layout import Layout
from meshweave.passes import pass_list_of
from meshweave.pipeline import PipelineChoice
from meshweave.program import Program
from meshweave.whatif import simulate

HERE = Path(__file__).parent
ROWS = HERE / "plan_enumerations.jsonl"
TABLE = HERE / "results" / "enumerations.md"
GIB = 2**30
VOCABULARY, GPUS_PER_NODE = 128000, 8
MODELS = {  # layers, width, width of the MLP, heads
    "llama-13B": (40, 5120, 13824, 40),
    "llama-30B": (60, 6656, 17920, 52),
    "llama-65B": (80, 8192, 22016, 64),
}
FLASH = "flash_attention2"
ATTENTION = {"flash_attentionv1.0.8": "flash1"}  # the others run FlashAttention-2, or no kernel of the profile
FIRST, MIDDLE, LAST = 4, 2, 2  # layers of the three stages that are built: the peak of the first is in its layers
MICROBATCHES = 6  # of the short pipeline; the fourth is neither filling nor draining it
SHOWN = 3
BUCKET = 500_000_000  # elements
TRAINER = [
    "optimizer/parameter_group.py, optimizer.py: parameters and their gradients whole, in 16 bits; float32 copies and "
    "Adam's state in shards over data parallelism; after the last microbatch gradients are all-reduced in float32, in "
    "buckets of 500 million (allreduce.py), and updated parameters gathered: neither overlaps with anything.",
    "nn/pipeline_schedule/train.py: 1F1B; communicator.py: a send or receive after another, which are waited for.",
    "nn/parallel_module/pipeline_partitioning.py: embedding, layers, norm and head are cut into equal numbers.",
    "nn/linear: the all-reduces of tensor parallelism do not overlap; nn/norm: a norm's output is gathered over the "
    "sequence, and kept; model/layers/lm_head.py, losses/cross_entropy.py: every device has the logits of the whole "
    "vocabulary, and the loss in float32; its accuracy reads them again.",
    "Dropout is off; parameters of the plans beside those in the rows are the defaults of the configuration.",
]
NOT_EXPLAINED = [
    "13B with FlashAttention-2 on two stages: a step grows with the microbatch by 4 s per sequence, six times the "
    "bubble; with FlashAttention-1 it grows as the bubble does (recomputed, microbatches of 8: 73 s and 45 s).",
    "13B with the fused softmax: runs out of memory as if it kept more than the probabilities. With eight sequences "
    "and recomputation neither it nor torch's softmax ran, where we see no such memory.",
    "65B, tp 8 with microbatches of 4: ran, and as fast as with sequence parallelism; by its memory, too, the sheet "
    "may have a wrong label there.",
    "13B: FlashAttention-1, the fused and torch's softmax are slower than FlashAttention-2 by the same 5 to 6 ms for "
    "each layer and sequence beyond what their kernels take: perhaps an older trainer.",
    "Matmuls of narrow pieces (tp 4 and 8): the profile's rates are those of tiles and waves at the rate of 8192^3.",
]


@dataclass(frozen=True)
class Row:
    """A plan, and what became of it: seconds of a step, or None where it ran out of memory."""

    model: str
    seq: int
    global_batch: int
    kernel: str
    checkpointing: str
    microbatch: int
    tp: int
    pp: int
    dp: int
    status: str
    step_s: float | None = None
    sequence_parallel: bool = False

    @property
    def sheet(self) -> str:
        parts = [self.model, f"{self.seq}", self.kernel]
        parts += ["recomputed"] if self.checkpointing == "every_layer" else []
        parts += ["sequence parallel"] if self.sequence_parallel else []
        return ", ".join(parts)

    @property
    def plan(self) -> str:
        return f"mb {self.microbatch}, tp {self.tp}, pp {self.pp}, dp {self.dp}"

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.microbatch * self.dp)

    @property
    def stages(self) -> list[int]:
        """The layers of each stage: embedding, layers, norm and head in equal numbers, the first stages one more."""
        size, more = divmod(MODELS[self.model][0] + 3, self.pp)
        parts = [size + (stage < more) for stage in range(self.pp)]
        return [n - (stage == 0) - 2 * (stage == self.pp - 1) for stage, n in enumerate(parts)]


# The model of Aleph-Alpha/scaling, op by op.


class Norm(nn.Module):
    """RMSNorm op by op, as Meta's llama has it (github.com/meta-llama/llama, model.py: in float32), or as a kernel,
    which reads, saves and writes as PyTorch's of layer_norm does."""

    def __init__(self, width: int, is_kernel: bool) -> None:
        super().__init__()
        self.weight, self.is_kernel = nn.Parameter(torch.ones(width)), is_kernel

    def forward(self, x: Tensor) -> Tensor:
        if self.is_kernel:
            return F.layer_norm(x, self.weight.shape, self.weight)
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Layer(nn.Module):
    """`kernel`: of attention, as in the rows. Without FlashAttention every layer has a mask of its own."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        _, width, inner, heads = MODELS[row.model]
        kernel, self.heads, self.row = row.kernel, heads, row
        self.scattered: Layout | None = None  # how a result lies with sequence parallelism
        self.norm_1, self.norm_2 = (Norm(width, "RMS" in kernel) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        if kernel == "torch":
            self.register_buffer("mask", torch.empty(row.seq, row.seq))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.entering(self.norm_1(x))).view(batch, length, self.heads, -1).chunk(3, dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (rotated(q, cos, sin), rotated(k, cos, sin), v))
        mixed = self.attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.leaving(self.out(mixed))
        h = self.entering(self.norm_2(x))
        return x + self.leaving(self.down(F.silu(self.gate(h)) * self.up(h)))

    def entering(self, x: Tensor) -> Tensor:
        """Whole on every device of tensor parallelism, and so kept; the gradient is added up."""
        return mw.replicate(x, "tp") if self.row.tp > 1 else x

    def leaving(self, x: Tensor) -> Tensor:
        """Added up over tensor parallelism, or with sequence parallelism scattered; its gradient is whole."""
        if self.scattered is not None:
            return mw.move(x, self.scattered)
        return mw.reduction(x, "tp") if self.row.tp > 1 else x

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`torch`: op by op, as Meta's llama has it, the softmax in float32; the matmul scales. `fused`: a kernel that
        scales, masks and takes the softmax, which reads and writes as the softmax alone."""
        if "flash" in self.row.kernel:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(-1, -2)
        if self.row.kernel == "torch":
            return (scores.float() + self.mask).softmax(-1).type_as(q) @ v
        return scores.softmax(-1) @ v


class Llama(nn.Module):
    def __init__(self, layers: int, row: Row) -> None:
        super().__init__()
        _, width, _, heads = MODELS[row.model]
        self.tp = row.tp
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(row) for _ in range(layers))
        self.norm, self.head = Norm(width, "RMS" in row.kernel), nn.Linear(width, VOCABULARY, bias=False)
        table = torch.empty(row.seq, 1, width // heads)
        self.register_buffer("cos", table)
        self.register_buffer("sin", table.clone())

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return mw.replicate(logits, "tp") if self.tp > 1 else logits


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), batch["labels"].view(-1))


# A short pipeline, and what it says of a stage.


def short_program(row: Row, profile: MachineProfile) -> Program:
    """Three stages on a node each. Memory does not bound the plan: what does not fit is what is asked."""
    with torch.device("meta"):
        model = Llama(FIRST + MIDDLE + LAST, row).to(torch.bfloat16)
    dp = GPUS_PER_NODE // row.tp
    mesh = mw.Mesh(f"pp=3,dp={dp}" + f",tp={row.tp}" * (row.tp > 1))
    plan = mw.Plan.dp("dp") + mw.Plan.stages("pp", layout=f"Et*{FIRST}|t*{MIDDLE}|t*{LAST}L")
    if row.tp > 1:
        columns = dict.fromkeys(("layers.*.qkv", "layers.*.gate", "layers.*.up", "head"), "colwise")
        plan += mw.Plan.tp("tp", {**columns, **dict.fromkeys(("layers.*.out", "layers.*.down", "embed"), "rowwise")})
    if row.sequence_parallel:
        plan += mw.Plan.sequence_parallel("tp")
        for number, layer in enumerate(model.layers):
            stage = (number >= FIRST) + (number >= FIRST + MIDDLE)
            layer.scattered = Layout.parse("[{dp}, {tp}, {}]", mesh.at(pp=stage))
    ids = torch.empty(row.microbatch * dp * MICROBATCHES, row.seq, dtype=torch.long, device="meta")
    optimizer = read_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    options = CaptureOptions(
        accumulate=MICROBATCHES,
        precision=mw.Precision(accumulate_in="whole"),
        pipeline=PipelineChoice.of("1f1b"),
    )
    recompute = "full" if row.checkpointing == "every_layer" else "none"
    return build_program(
        StepSource(model, loss),
        {"input_ids": ids, "labels": ids.clone()},
        optimizer,
        Target(mesh, plan, profile.scaled(memory_bytes=1e15)),
        options,
        pass_list=pass_list_of(f"recompute={recompute}"),
    )


@dataclass(frozen=True)
class Part:
    """What a part of the model takes and holds on a device: seconds of a microbatch forward and backward; bytes of its
    activations from forward to backward, and of parameters."""

    forward: float
    backward: float
    activation: float
    parameters: float

    def plus(self, other: Part, times: float = 1.0) -> Part:
        mine, its = vars(self), vars(other)
        return Part(**{name: mine[name] + times * its[name] for name in mine})


@dataclass(frozen=True)
class Parts:
    """The embedding, a layer, and the head with the loss. `beside`: bytes that a stage with only layers, that with the
    embedding, and that with the head need at most beside what they hold."""

    embedding: Part
    layer: Part
    head: Part
    beside: tuple[float, float, float]


@lru_cache(maxsize=8)
def machine(kernel: str) -> MachineProfile:
    return load_profile("a100").with_attention(ATTENTION.get(kernel, "flash2")).with_update("foreach")


def seconds_of(simulation: Simulation, role: int, action: str) -> float:
    """Seconds of an action of a role on the fourth microbatch: its kernels, and collectives that it waits for."""
    spans = [s for s in simulation.spans if s.role == role and s.microbatch == SHOWN and s.action == action]
    kernels = sum(s.seconds for s in spans if s.kind == "compute")
    return kernels + sum(s.exposed_seconds for s in spans if s.kind == "collective")


def held_by_microbatch(simulation: Simulation, role: int) -> float:
    """Bytes that a role holds of a microbatch from forward to backward: between the begins of two actions, of which the
    first is forward, before anything is freed."""
    actions = [("forward", 1), ("forward", 2)], [("forward", 0), ("forward", 1)], [("forward", 0), ("backward", 0)]
    curve = simulation.roles[role].memory
    levels = []
    for action, microbatch in actions[role]:
        spans = (s for s in simulation.spans if s.role == role and (s.action, s.microbatch) == (action, microbatch))
        begin = min(s.start for s in spans if s.kind == "compute")
        levels.append(curve[bisect_left(curve, (begin, 0)) - 1][1])
    return float(levels[1] - levels[0])


@lru_cache(maxsize=4)
def program_of(key: Row) -> Program:
    return short_program(key, load_profile("a100"))


@lru_cache(maxsize=256)
def parts_of(key: Row) -> Parts:
    """`key`: a row without what the parts do not depend on."""
    program = program_of(replace(key, kernel=FLASH) if key.kernel in ATTENTION else key)
    simulation = simulate(program, machine(key.kernel), fusion="eager")
    stages = [
        Part(
            seconds_of(simulation, stage, "forward"),
            seconds_of(simulation, stage, "backward"),
            held_by_microbatch(simulation, stage),
            float(simulation.roles[stage].persistent_bytes),
        )
        for stage in range(3)
    ]
    layer = Part(0, 0, 0, 0).plus(stages[1], 1 / MIDDLE)
    beside = [
        simulation.roles[stage].peak_bytes - 2 * part.parameters - (3 - stage) * part.activation
        for stage, part in enumerate(stages)
    ]
    return Parts(stages[0].plus(layer, -FIRST), layer, stages[2].plus(layer, -LAST), (beside[1], beside[0], beside[2]))


def key_of(row: Row) -> Row:
    return replace(row, global_batch=0, pp=3, dp=GPUS_PER_NODE // row.tp, status="", step_s=None)


# A plan: its stages on the clock of pipelines, and what the trainer does at the end of a step.


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step, those after the last microbatch, bytes at most on a device."""

    seconds: float
    tail: float
    peak_bytes: float
    room: float

    @property
    def fit(self) -> str:
        if self.peak_bytes > self.room * (1 + MEMORY_ERROR):
            return "no"
        return "yes" if self.peak_bytes < self.room * (1 - MEMORY_ERROR) else "may"


def predicted(row: Row) -> Predicted:
    parts, profile = parts_of(key_of(row)), machine(row.kernel)
    nothing, last = Part(0, 0, 0, 0), row.pp - 1
    stages = [nothing.plus(parts.layer, n) for n in row.stages]
    stages[0] = stages[0].plus(parts.embedding)
    stages[last] = stages[last].plus(parts.head)
    tails, peaks = [], []
    for number, stage in enumerate(stages):
        beside = max(parts.beside[0], parts.beside[1] * (number == 0), parts.beside[2] * (number == last))
        tail, held, at_end = end_of_step(row, profile, stage.parameters)
        in_flight = min(row.pp - number, row.microbatches)
        peaks.append(2 * stage.parameters + held + max(in_flight * stage.activation + beside, at_end))
        tails.append(tail)
    if row.pp == 1:
        seconds = row.microbatches * (stages[0].forward + stages[0].backward)
    else:
        seconds = pipeline_times(
            make_schedule("1f1b", row.pp, row.microbatches),
            F=[stage.forward for stage in stages],
            B=[stage.backward for stage in stages],
            W=0.0,
            comm=messages(row, profile),
            blocking_messages=True,
        ).step_s
    return Predicted(seconds + max(tails), max(tails), max(peaks), profile.usable_bytes)


def messages(row: Row, profile: MachineProfile) -> list[float]:
    """Seconds of the activations of a microbatch from each stage to the next."""
    sequence = row.seq // row.tp if row.sequence_parallel else row.seq
    size, apart = 2.0 * row.microbatch * sequence * MODELS[row.model][1], row.dp * row.tp
    return [profile.transfer_seconds(apart * stage, apart * (stage + 1), size) for stage in range(row.pp - 1)]


def end_of_step(row: Row, profile: MachineProfile, parameters: float) -> tuple[float, float, float]:
    """After the last microbatch: seconds; bytes of state; bytes of buffers. `parameters`: bytes of a device's, in 16
    bits."""
    elements = parameters / 2
    state = 12 * elements / row.dp  # a float32 copy, and two moments
    bucket = min(elements, BUCKET)
    buffers = bucket * (2 + 4)  # as in 16 bits, and as in float32
    mesh = mw.Mesh(f"pp={row.pp},dp={row.dp},tp={row.tp}")
    bandwidth = profile.memory.bandwidth * dict(profile.memory.efficiency)["pointwise"]
    moved = elements * (4 + 2 + 2 + 6 + 6 + 4) / bandwidth  # flattened, divided, cast, copied twice; read for the norm
    moved += state * 4 / bandwidth  # foreach: about ten passes over a float32 shard each of weight, moments, gradient
    if row.dp == 1:
        return moved, state, 0.0
    reduced = profile.seconds("all_reduce", mesh, ("dp",), 4 * elements)
    gathered = profile.seconds("all_gather", mesh, ("dp",), 2 * elements / row.dp)
    return moved + reduced + gathered, state, buffers


# The judgement of a sheet.


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(x < v for x in values) + 0.5 * (sum(x == v for x in values) - 1) for v in values]

    if len(a) < 3:
        return float("nan")
    return float(torch.corrcoef(torch.tensor([ranks(a), ranks(b)]))[0, 1])


@dataclass(frozen=True)
class Sheet:
    name: str
    rows: list[tuple[Row, Predicted]]

    @property
    def ran(self) -> list[tuple[Row, Predicted, float]]:
        return [(row, its, row.step_s) for row, its in self.rows if row.step_s is not None]

    @property
    def rank_correlation(self) -> float:
        return spearman([its.seconds for _, its, _ in self.ran], [seconds for _, _, seconds in self.ran])

    @property
    def chosen(self) -> tuple[Row, Predicted]:
        """The fastest plan in prediction, of those that do not need more than a device has."""
        fitting = [pair for pair in self.rows if pair[1].peak_bytes <= pair[1].room] or self.rows
        return min(fitting, key=lambda pair: pair[1].seconds)

    @property
    def regret(self) -> float:
        """By how much the chosen plan was slower than the best; infinite where it ran out of memory."""
        row, _ = self.chosen
        best = min(seconds for _, _, seconds in self.ran)
        return float("inf") if row.step_s is None else row.step_s / best - 1

    @property
    def errors(self) -> list[float]:
        """Of speed: + is too fast."""
        return [seconds / its.seconds - 1 for _, its, seconds in self.ran]

    @property
    def fits(self) -> Counter[tuple[str, str]]:
        """(what became of it, what was said) of every plan."""
        return Counter(("ran" if row.step_s is not None else "out of memory", its.fit) for row, its in self.rows)

    @property
    def cells(self) -> list[str]:
        """The figures of the sheet, as in the table."""
        rank, regret = self.rank_correlation, self.regret
        return [
            "" if rank != rank else f"{rank:.2f}",
            self.chosen[0].plan,
            "out of memory" if regret == float("inf") else f"{regret:.1%}",
            f"{median(self.errors):+.1%}",
            f"{self.right} of {len(self.rows)}",
            " / ".join(str(self.fits["ran", said]) for said in ("yes", "may", "no")),
            " / ".join(str(self.fits["out of memory", said]) for said in ("no", "may", "yes")),
        ]

    @property
    def in_order(self) -> list[tuple[Row, Predicted]]:
        """The rows that ran by their seconds, then the others by those predicted."""
        return sorted(self.rows, key=lambda pair: (pair[0].step_s is None, pair[0].step_s or pair[1].seconds))

    @property
    def right(self) -> int:
        """Plans of which it is right on which side of the memory they are."""
        return sum((its.peak_bytes <= its.room) == (row.step_s is not None) for row, its in self.rows)


def sheets(wanted: str, path: Path = ROWS) -> list[Sheet]:
    found: dict[str, dict[Row, Predicted]] = {}
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    for row in sorted(
        rows, key=lambda row: str(key_of(replace(row, kernel=FLASH) if row.kernel in ATTENTION else row))
    ):
        if wanted in row.sheet:
            found.setdefault(row.sheet, {})[row] = predicted(row)  # 226 rows, of which a few are there twice
    return [Sheet(name, list(its.items())) for name, its in sorted(found.items())]


def by_model(found: Sequence[Sheet]) -> list[Sheet]:
    """The sheets of a model as one: with all kernels, recomputation and sequence parallelism."""
    rows: dict[str, list[tuple[Row, Predicted]]] = {}
    for sheet in found:
        rows.setdefault(f"**{sheet.rows[0][0].model}**", []).extend(sheet.rows)
    return [Sheet(name, pairs) for name, pairs in rows.items()]


def show(sheet: Sheet) -> None:
    print(f"\n{sheet.name}: {len(sheet.rows)} plans, {len(sheet.ran)} ran")
    print(f"  {' | '.join(sheet.cells)}")
    for row, its in sheet.in_order:
        ran = "out of memory" if row.step_s is None else f"{row.step_s:.1f} s ({row.step_s / its.seconds - 1:+.1%})"
        print(
            f"    {row.plan}: {its.seconds:.1f} of {ran}, end {its.tail:.2f} s, {its.peak_bytes / GIB:.1f} of "
            f"{its.room / GIB:.1f} GiB: {its.fit}"
        )


def wrong_memory(found: Sequence[Sheet]) -> list[str]:
    """The plans of which the memory is on the wrong side, those that are furthest off first."""
    pairs = [(sheet, row, its) for sheet in found for row, its in sheet.rows]
    wrong = [each for each in pairs if (each[2].peak_bytes <= each[2].room) != (each[1].step_s is not None)]
    wrong.sort(key=lambda each: -abs(each[2].peak_bytes - each[2].room))
    return [
        f"| {sheet.name} | {row.plan} | {'ran' if row.step_s is not None else 'out of memory'} "
        f"| {its.peak_bytes / GIB:.1f} ({its.peak_bytes / its.room - 1:+.1%}) | {its.fit} |"
        for sheet, row, its in wrong
    ]


def slowest_and_fastest(sheet: Sheet) -> list[str]:
    """The two plans whose seconds are furthest off."""
    worst = sorted(sheet.ran, key=lambda each: -abs(each[2] / each[1].seconds - 1))[:2]
    return [
        f"| {sheet.name} | {row.plan} | {seconds:.1f} | {its.seconds:.1f} | {seconds / its.seconds - 1:+.1%} |"
        for row, its, seconds in worst
    ]


def write(found: Sequence[Sheet], took: float) -> None:
    rows, right = sum(len(sheet.rows) for sheet in found), sum(sheet.right for sheet in found)
    errors = [error for sheet in found for error in sheet.errors]
    lines = [
        "# Whole enumerations of plans, predicted",
        "",
        f"`python benchmarks/enumerations.py`, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {took:.0f} s of "
        f"processor time. {rows} plans (four are there twice), {len(errors)} of which ran. Nothing is fitted to a row.",
        "",
        f"Seconds of those that ran: median error {median(map(abs, errors)):.1%}, bias {mean(errors):+.1%} (+: "
        f"too fast). Memory on the right side of what a device has: {right} of {rows}.",
        "",
        "Rank correlation (Spearman) is over the plans that ran. Regret: by how much the plan that is predicted to be "
        "the fastest of those that fit was slower than the best. Memory: what became of a plan / what was "
        f"said; *may* is within {MEMORY_ERROR:.0%} of what a device has, and counts by its side.",
        "",
        "| sheet | plans | ran | rank correlation | chosen | regret | median error | memory right "
        "| ran: yes / may / no | out of memory: no / may / yes |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {sheet.name} | {len(sheet.rows)} | {len(sheet.ran)} | {' | '.join(sheet.cells)} |"
            for sheet in (*by_model(found), *found)
        ),
        "",
        "## Memory on the wrong side",
        "",
        "| sheet | plan | | predicted GiB | said |",
        "|---|---|---|---|---|",
        *wrong_memory(found),
        "",
        "## Furthest off in each sheet",
        "",
        "| sheet | plan | seconds | predicted | error |",
        "|---|---|---|---|---|",
        *(line for sheet in found for line in slowest_and_fastest(sheet)),
        "",
        "## What is not explained",
        "",
        *(f"- {text}" for text in NOT_EXPLAINED),
        "",
        "## The trainer",
        "",
        "After github.com/Aleph-Alpha/scaling, src/scaling/core (the rows are of 2023, this source of 2024):",
        "",
        *(f"- {text}" for text in TRAINER),
    ]
    TABLE.write_text("\n".join(lines) + "\n")


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    began = time.process_time()
    found = sheets(wanted)
    took = time.process_time() - began
    for sheet in found:
        show(sheet)
    for sheet in by_model(found):
        print(f"{sheet.name}: {' | '.join(sheet.cells)}")
    print(f"\n{sum(len(sheet.rows) for sheet in found)} plans in {took:.0f} s of processor time")
    if not wanted:
        write(found, took)


if __name__ == "__main__":
    main()
