"""Ranks over NCCL that share a GPU: right against eager PyTorch, then steps beside DDP, FSDP2 and tensor parallelism.

    python benchmarks/nccl.py [--ranks 2|4] [--quick] [--json] [--write] [--only cp] [--device cpu] [--check]

NCCL takes ranks with different NCCL_HOSTID for hosts of their own, and talks over sockets: a slow network with 4.6 ms
for a collective of any size up to 4 MiB (H200), right for correctness, for the number of collectives and for peers
under the same handicap. With --device cpu the same runs over Gloo, with a smaller model.

Every case is a job of its own, which trains a small model on a mesh and the same model eagerly on the same device: in
float32, in bfloat16 autocast, with passes that rewrite, with accumulation, from a checkpoint of another mesh, and with
a rank that is killed. Cases run at the same time, as many as there are cores for. A region that Inductor refuses is a
failure. On GPUs, without --quick, the same steps run twice again, with CUDA graphs between the communications and
without: shown is how their losses differ from the first ones. --check: cases only. Then every way to train is a job;
all start at once and take their steps in turns (step_time.py), ours without profile, pass or flag, once its regions are
compiled.

--json: one object with `failures`, `worst_ratio` and the rows. --quick: fewer cases, and peers eager. --write:
results/nccl.md. The exit status is 1 if a case fails.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from links import Link, loopback, one_gpu
from step_time import Row, compare, page
from step_time_worker import BACKEND_OF, Config, make_model
from torch import Tensor, nn

import meshweave as mw
from meshweave.cost.hardware import profile_of_device
from meshweave.errors import MeshweaveError
from meshweave.passes import Decompose, Overlap, Split
from meshweave.runtime import session
from meshweave.runtime.cluster import init_from_env, shutdown

SCRIPT = str(Path(__file__).resolve())
TABLE = Path(__file__).parent / "results" / "nccl.md"
STEPS = {"cpu": 3, "cuda": 6}  # there the third is recorded, and later ones are replayed
SAME, SAME_NARROW = 1e-6, 2e-2  # relative errors of losses: float32, bfloat16
NOTICED_S = 30.0  # in which the death of a rank is an error on the others
# Passes that run whether or not a step gains by them; by default those that gain.
REWRITES: dict[str, Any] = {
    "none": "none",
    "decomposed": [Decompose(when="always"), Overlap()],
    "split": [Split((2,), when="always"), Overlap()],
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps on a mesh, by passes of `REWRITES` if any. `then`: the last of them on another mesh, from a checkpoint.
    `kills`: the last rank ends after the first."""

    mesh: str
    family: str = "llama"
    plan: str = ""
    passes: str = ""
    accumulate: int = 1
    is_narrow: bool = False
    then: str = ""
    kills: bool = False
    is_quick: bool = False
    records: bool = False  # compares CUDA graphs with single launches
    device: str = "cpu"

    def __str__(self) -> str:
        named = {"plan": self.plan, "passes": self.passes, "then": self.then}
        marks = [f"{name}={value}" for name, value in named.items() if value]
        marks += [f"accumulate={self.accumulate}"] if self.accumulate > 1 else []
        marks += ["bfloat16"] if self.is_narrow else []
        marks += ["a rank is killed"] if self.kills else []
        return ", ".join([self.mesh.replace(",", " "), *([self.family] if self.family != "llama" else []), *marks])


CASES = {
    2: (
        Case(mesh="dp=2", is_quick=True),
        Case(mesh="fsdp=2", is_quick=True),
        Case(mesh="tp=2", is_quick=True),
        Case(mesh="cp=2", is_quick=True),
        Case(mesh="pp=2", is_quick=True),
        Case(mesh="ep=2", family="mixtral", is_quick=True),
        Case(mesh="fsdp=2", accumulate=2, is_quick=True),
        Case(mesh="fsdp=2", is_narrow=True, is_quick=True),
        Case(mesh="dp=2", then="fsdp=2", is_quick=True),
        Case(mesh="dp=2", kills=True, is_quick=True),
        Case(mesh="dp=2", is_narrow=True),
        Case(mesh="tp=2", is_narrow=True),
        Case(mesh="dp=2", accumulate=2),
        Case(mesh="tp=2", passes="decomposed"),
        Case(mesh="fsdp=2", passes="decomposed"),
        Case(mesh="dp=2", passes="split"),
        Case(mesh="cp=2", plan="cp:cp:ring"),
        Case(mesh="cp=2", plan="cp:cp:heads"),
        Case(mesh="fsdp=2", then="tp=2"),
    ),
    4: (
        Case(mesh="dp=2,tp=2", is_quick=True),
        Case(mesh="fsdp=2,tp=2", is_quick=True),
        Case(mesh="pp=2,dp=2", is_quick=True),
        Case(mesh="dp=2,cp=2"),
        Case(mesh="fsdp=2,cp=2"),
        Case(mesh="tp=2,cp=2"),
        Case(mesh="pp=2,tp=2"),
        Case(mesh="dp=2,ep=2", family="mixtral"),
        Case(mesh="fsdp=2,tp=2", then="dp=4"),
        Case(mesh="fsdp=4", is_narrow=True),
    ),
}


# A rank of a case


def check(case: Case, folder: str) -> dict[str, Any]:
    """Losses of a case, and those of eager PyTorch on the same device."""
    device = torch.device(case.device)
    config = config_of(case)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    draw = torch.Generator().manual_seed(1)
    num_steps = STEPS[device.type]
    batches = [torch.randint(config.vocabulary, (8, config.sequence), generator=draw) for _ in range(num_steps)]
    batches = [batch.to(device) for batch in batches]
    model = make_model(config).to(device)
    expected = eager_losses(copy.deepcopy(model), batches, case)
    began = time.perf_counter()
    step = compiled(model, case, case.mesh, batches[0])
    losses = [float(step(inputs(batches[0])))]
    row: dict[str, Any] = {"first_loss_s": time.perf_counter() - began}
    if case.kills:
        return row | killed(step, batches[1])
    losses += [float(step(inputs(batch))) for batch in batches[1 : num_steps - bool(case.then)]]
    notes = list(step.session.compiler.notes)
    if case.then:
        step.save(str(Path(folder) / "step"))
        step = compiled(make_model(config).to(device), case, case.then, batches[0])
        step.load(str(Path(folder) / "step"))
        losses.append(float(step(inputs(batches[-1]))))
        notes += step.session.compiler.notes
    error = max(abs(own / reference - 1) for own, reference in zip(losses, expected, strict=True))
    row |= {"error": error, "notes": notes, "failure": failure_of(case, error, notes)}
    return row | ({"recorded": recorded(case, batches, losses)} if case.records else {})


def recorded(case: Case, batches: Sequence[Tensor], losses: Sequence[float]) -> str:
    """How losses of the same steps differ if CUDA graphs are recorded between communications, and if they are not."""
    session.IN_JOBS = True
    shown = []
    for cuda_graphs in (True, False):
        config = config_of(case)
        step = compiled(make_model(config).to(case.device), case, case.mesh, batches[0], cuda_graphs=cuda_graphs)
        found = [float(step(inputs(batch))) for batch in batches]
        shown.append(f"{max(abs(own / before - 1) for own, before in zip(found, losses, strict=True)):.0e}")
    return " / ".join(shown)


def config_of(case: Case) -> Config:
    return Config("", 4, case.family, layers=2, hidden=128, vocabulary=256, sequence=32)


def failure_of(case: Case, error: float, notes: Sequence[str]) -> str:
    most = SAME_NARROW if case.is_narrow else SAME
    if not error <= most:
        return f"losses differ by {error:.1e}, at most {most:.0e} is rounding"
    return notes[0] if notes else ""


def inputs(batch: Tensor) -> dict[str, Tensor]:
    return {"input_ids": batch, "labels": batch}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def compiled(model: nn.Module, case: Case, mesh: str, batch: Tensor, *, cuda_graphs: bool = True) -> mw.TrainStep:
    optional: dict[str, Any] = {"plan": case.plan, "passes": REWRITES.get(case.passes)}
    return mw.compile(
        model,
        loss=lambda out, _: out.loss,
        example=inputs(batch),
        optimizer=optimizer_of(model),
        mesh=mesh,
        forward=lambda m, b: m(**b, use_cache=False),
        profile=profile_of_device(torch.cuda.get_device_name()) or "h100" if case.device == "cuda" else "cpu-gloo",
        accumulate=case.accumulate,
        precision=torch.bfloat16 if case.is_narrow else None,
        device=case.device,
        run=mw.RunOptions(backend="inductor" if case.device == "cuda" else "eager", cuda_graphs=cuda_graphs),
        **{name: value for name, value in optional.items() if value},
    )


def eager_losses(model: nn.Module, batches: Sequence[Tensor], case: Case) -> list[float]:
    optimizer, losses = optimizer_of(model), []
    for batch in batches:
        total = 0.0
        for micro in batch.chunk(case.accumulate):
            with torch.autocast(case.device, torch.bfloat16) if case.is_narrow else nullcontext():
                loss = model(**inputs(micro), use_cache=False).loss / case.accumulate
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def killed(step: mw.TrainStep, batch: Tensor) -> dict[str, Any]:
    """How the first rank learns that the last one has ended."""
    if torch.distributed.get_rank():
        os._exit(0)
    began = time.perf_counter()
    try:
        for _ in range(1000):
            step(inputs(batch))
    except MeshweaveError as error:
        seconds = time.perf_counter() - began
        late = f"after {seconds:.0f} s" if seconds > NOTICED_S else ""
        return {"error": 0.0, "notes": [str(error)], "failure": late}
    return {"error": 0.0, "notes": [], "failure": "steps go on without a rank"}


def worker(case: Case, folder: str) -> None:
    rank, _ = init_from_env(BACKEND_OF[case.device])
    try:
        row = check(case, folder)
    except Exception as error:
        row = {"failure": f"{type(error).__name__}: {error}"}
    if rank == 0:
        print(json.dumps(row), flush=True)
    if not case.kills:
        shutdown()


# All cases and ways


def run_case(link: Link, case: Case) -> dict[str, Any]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = (SCRIPT, "--case", json.dumps(asdict(case)), "--cache", folder)
        try:
            with link.talk(*command) as job:
                row = job.ask("")
        except RuntimeError as error:
            row = {"failure": str(error)[-500:]}
    row = {"case": str(case), "seconds": time.perf_counter() - began, **row}
    print(_case_line(row), file=sys.stderr, flush=True)
    return row


def _case_line(row: dict[str, Any]) -> str:
    outcome = f"FAILED: {row['failure']}" if row["failure"] else f"error {row['error']:.1e}"
    return f"{row['case']}: {outcome} ({row['seconds']:.0f} s)"


def rows_of(num_ranks: int, device: str, is_quick: bool) -> tuple[Row, ...]:
    """Ways of the model of the facts, or of a small one on processors."""
    schemes = ("ddp", "fsdp", "tp") if num_ranks == 2 else ("fsdp+tp",) if is_quick else ("ddp", "fsdp", "fsdp+tp")
    on_gpu = device == "cuda"
    sizes = {"hidden": 768, "vocabulary": 32000, "sequence": 512} if on_gpu else {"layers": 2, "steps": 2}
    return tuple(
        Row(Config(scheme, 4 if on_gpu else 1, device=device, compiles=not is_quick, **sizes), num_ranks, gbit=0)  # type: ignore[arg-type]
        for scheme in schemes
    )


def text_of(checked: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], device: str) -> str:
    """The page of results/nccl.md."""
    lines = [
        "# Ranks that share a GPU, over NCCL",
        "",
        f"`python benchmarks/nccl.py`, {device}, torch {torch.__version__}.",
        "",
        "| case | largest relative error of losses | first loss s | with CUDA graphs / the same again | fails |",
        "|---|---|---|---|---|",
    ]
    for row in checked:
        numbers = (f"{row['error']:.1e}", f"{row['first_loss_s']:.0f}") if "first_loss_s" in row else ("", "")
        numbers = (*numbers, row.get("recorded", ""))
        lines.append(
            f"| {' | '.join((row['case'], *numbers, row['failure'].splitlines()[0] if row['failure'] else ''))} |"
        )
    return "\n".join(lines) + "\n\n" + (page(rows).replace("# Steps", "## Steps", 1) if rows else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=sorted(CASES), default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true", help="cases only")
    parser.add_argument("--only", default="", help="cases and ways that have this in their text")
    parser.add_argument("--device", choices=sorted(BACKEND_OF), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        worker(Case(**json.loads(options.case)), options.cache)
        return 0
    cases = [
        replace(c, device=options.device, records=options.device == "cuda" and not (options.quick or c.then or c.kills))
        for c in CASES[options.ranks]
        if options.only in str(c) and (c.is_quick or not options.quick)
    ]
    rows = [row for row in rows_of(options.ranks, options.device, options.quick) if options.only in str(row.config)]
    at_once = max(1, (os.cpu_count() or 1) // options.ranks)
    open_link = one_gpu if options.device == "cuda" else loopback
    with ExitStack() as stack:
        link = stack.enter_context(open_link(options.ranks))
        pool, folder = (
            stack.enter_context(ThreadPoolExecutor(at_once)),
            stack.enter_context(tempfile.TemporaryDirectory()),
        )
        checked = list(pool.map(lambda case: run_case(link, case), cases))
        together = [rows] if options.device == "cuda" else [[row] for row in rows]  # processors start them one by one
        found = [] if options.check else [one for its in together for one in compare(link, its, folder, at_once)]
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, Gloo, {os.cpu_count()} cores"
    failures = [_case_line(row) for row in checked if row["failure"]]
    text = text_of(checked, found, device)
    if options.write:
        TABLE.write_text(text)
    if options.json:
        worst = max((row["ratio"] for row in found), default=None)
        print(
            json.dumps({"device": device, "failures": failures, "worst_ratio": worst, "cases": checked, "rows": found})
        )
    else:
        print(text)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
