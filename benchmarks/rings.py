"""Matmuls beside collectives, taken apart and not, in real time: processes at 1 Gbit/s from each other, over Gloo.

    python benchmarks/rings.py [-o benchmarks/results/rings.md] [--quick] [--ranks 2] [--profile machine.toml]

An all-gather and the matmul of what it brings, a matmul and the reduce-scatter of its result, a matmul and the
all-reduce of its result, and the same with a second matmul of what the all-reduce brings. Every shape runs whole, in
every way in which `meshweave.decompose` can take it apart, and as its gate chooses with the profile of a calibration
under the same condition; and the matmuls alone run without any communication. In one job all of these take their turns,
so that what disturbs the machine disturbs all alike; a run ends when the slowest process has ended it; every figure is
a median. Results are compared with those of the whole.

Every process is in a network namespace of its own, with a link of 1 Gbit/s (veth and `tc tbf`; needs root): two joined
directly, four by a bridge. --quick: two processes, 8 shapes, and a calibration that is short and coarse.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from predict_gloo import RATE, ROOT, TIMEOUT_S, Link, _checked, _free_port, _ip, running, shaped

WHOLE, ALONE = "whole", "compute alone"
NEAR = 1.05  # a choice is right if nothing that was measured is faster by more
COVERED_EFFICIENCY = 0.85
WARM_UP = 2
LEAST_ROUNDS, MOST_ROUNDS, CASE_SECONDS = 9, 31, 4.0
FOLLOWED = "all_reduce, matmul"
KINDS = ("all_gather", "reduce_scatter", "all_reduce", FOLLOWED)


@dataclass(frozen=True)
class Case:
    """[rows, inner] @ [inner, columns] on every process. Of a gather, [rows / n, inner] is what each brings; of the
    reductions, [rows, columns] is what each hands in, and a matmul after one is of the same size."""

    kind: str
    rows: int
    inner: int
    columns: int

    @property
    def op(self) -> str:
        """As in meshweave.decompose."""
        return self.kind.partition(",")[0]

    def __str__(self) -> str:
        return f"{self.rows} x {self.inner} x {self.columns}"


# What the link takes is in proportion to rows * inner (of a gather) or rows * columns (of a reduction), compute to the
# product of all three: the third size sets the ratio of the two. From 16 KB to 8 MB a piece.
_GATHERS = (
    (64, 128, 256), (128, 256, 1024), (256, 512, 128), (256, 512, 2048), (512, 512, 512), (512, 1024, 1024),
    (512, 512, 4096), (1024, 512, 256), (1024, 768, 768), (1024, 768, 3072), (1536, 512, 1536), (2048, 256, 2048),
)  # fmt: skip


# The ones that --quick takes.
_QUICK = {"all_gather": (0, 5, 10), "reduce_scatter": (0, 4, 8), "all_reduce": (8,), FOLLOWED: (8,)}


def cases(kind: str, is_quick: bool) -> list[Case]:
    sizes = _GATHERS if kind == "all_gather" else tuple((m, n, k) for m, k, n in _GATHERS)
    return [Case(kind, *sizes[i]) for i in (_QUICK[kind] if is_quick else range(len(sizes)))]


# In each process of a job


def program(case: Case, num_ranks: int, has_collective: bool) -> tuple[Any, dict[str, Any]]:
    """A rank graph, and the shapes of this process's inputs."""
    import torch
    from torch import fx

    import meshweave as mw
    from meshweave.ir.graph import Input, Origin, Spec
    from meshweave.ir.layout import Layout
    from meshweave.ir.rank import WAIT, RankGraph, collectives
    from meshweave.ir.verify import verify_rank

    mesh, aten = mw.Mesh(d=num_ranks), torch.ops.aten
    is_gather = case.kind == "all_gather"
    rows = case.rows // num_ranks if is_gather and has_collective else case.rows
    shapes = {"x": (rows, case.inner), "w": (case.inner, case.columns)}
    if case.kind == FOLLOWED:
        shapes["v"] = (case.columns, case.inner)
    graph = fx.Graph()
    sources = [graph.placeholder(name) for name in shapes]

    def call(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    def moved(x: fx.Node) -> fx.Node:
        args = {"all_gather": (num_ranks,), "reduce_scatter": ("sum", num_ranks), "all_reduce": ("sum",)}[case.op]
        return call(WAIT, call(op, call(aten.contiguous.default, x), *args, "d")) if has_collective else x

    op = {
        "all_gather": collectives.all_gather_into_tensor.default,
        "reduce_scatter": collectives.reduce_scatter_tensor.default,
        "all_reduce": collectives.all_reduce.default,
    }[case.op]
    x, w = sources[:2]
    result = call(aten.mm.default, moved(x), w) if is_gather else moved(call(aten.mm.default, x, w))
    if case.kind == FOLLOWED:
        result = call(aten.mm.default, call(aten.relu.default, result), sources[2])
    graph.output([result])
    for node in graph.nodes:
        node.meta["origin"] = Origin("forward", source="benchmarks/rings.py")
    for node in sources:
        node.meta["spec"] = Spec(shapes[node.name], torch.float32)
    # Every device has operands of its own, as pieces of larger ones.
    layouts = (Layout.parse("[{d}, {}]", mesh),) * len(shapes)
    items = tuple(Input("batch", name, Spec((n * num_ranks, m), torch.float32)) for name, (n, m) in shapes.items())
    unknown = Layout.replicated(mesh, 0)
    return verify_rank(RankGraph(graph, mesh, items, layouts, (("loss", "0"),), (unknown,))), shapes


def variants(case: Case, num_ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The programs that are measured, by name, and the shapes of their inputs; of equal ones the first."""
    from meshweave.decompose import ALGORITHMS, DecomposeOptions, decompose

    whole, shapes = program(case, num_ranks, True)
    found = {WHOLE: whole}
    table = "all_gather" if case.op == "all_gather" else "reduce_scatter"
    ways = [(row.name, ()) for row in ALGORITHMS if row.collective == table]
    for name, chunks in (*ways, *(("pipelined", (count,)) for count in DecomposeOptions().num_chunks)):
        made, report = decompose(whole, None, replace(only(case, name, *chunks), when="always"))
        if report.num_taken and made.text() not in {role.text() for role in found.values()}:
            found[" ".join((name, *map(str, chunks)))] = made
    return found, shapes


def only(case: Case, way: str, *num_chunks: int) -> Any:
    """Options that have one way for the collective of a case."""
    from meshweave.decompose import DecomposeOptions

    ways: dict[str, Any] = {"all_gather": ("direct",) if case.kind == FOLLOWED else (), case.op: (way,)}
    return DecomposeOptions(num_chunks=num_chunks, **ways)


def gate(case: Case, profile: Any, found: dict[str, Any]) -> dict[str, Any]:
    """What the gate chooses, under the name that it has among what is measured (it joins it if it is new), and what it
    prices everything at; a matmul after an all-reduce is in no price."""
    from meshweave.decompose import decompose

    def priced(rows: Any) -> float:
        return float(rows[0].seconds_after - sum(r.seconds_before - r.seconds_after for r in rows[1:] if r.is_taken))

    whole, prices = found[WHOLE], {}
    for name in found:
        way, *chunks = name.split()
        if name != WHOLE:
            prices[name] = priced(decompose(whole, profile, only(case, way, *map(int, chunks)))[1].rows)
    made, report = decompose(whole, profile)
    first = report.rows[0]
    if not report.num_taken:
        choice = WHOLE
    else:
        choice = next((name for name, role in found.items() if role.text() == made.text()), "another")
        found[choice] = made
        prices[choice] = priced(report.rows)
    return {"choice": choice, "reason": str(report), "before": first.seconds_before, "prices": prices}


def runner(role: Any, shapes: dict[str, Any], world: Any) -> Callable[[], Any]:
    """A function that runs a program on this process once, and returns its result."""
    import torch

    from meshweave.runtime.executor import FORWARD, compile_tasks

    compiled = compile_tasks(role, world.device)
    executor = world.executor([role], [compiled], None)
    made = torch.Generator().manual_seed(world.rank)
    values = [torch.randn(shape, generator=made) for shape in shapes.values()]

    def run() -> Any:
        (env,) = executor.environment()
        for slot, value in zip(compiled.inputs, values, strict=True):
            env[slot] = value
        executor.begin([env])
        executor.run(FORWARD)
        result = env[compiled.outputs[0]]
        executor.end()
        return result

    return run


def measured(case: Case, profile: Any, world: Any) -> dict[str, Any]:
    """Medians of every variant's seconds, and what the gate says of them."""
    import torch
    import torch.distributed as dist

    size = world.mesh.num_devices
    found, shapes = variants(case, size)
    chosen = gate(case, profile, found)
    runs = {name: runner(role, shapes, world) for name, role in found.items()}
    expected = runs[WHOLE]()
    for name, run in runs.items():
        torch.testing.assert_close(run(), expected, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    runs[ALONE] = runner(*program(case, size, False), world)
    names, seconds = list(runs), {name: list[float]() for name in runs}

    def turn(i: int) -> list[float]:
        taken = dict[str, float]()
        for name in names[i % len(names) :] + names[: i % len(names)]:
            dist.barrier()
            began = time.perf_counter()
            runs[name]()
            taken[name] = time.perf_counter() - began
        return [taken[name] for name in names]

    for i in range(WARM_UP):
        one = _slowest(torch.tensor([turn(i)]))[0]
    rounds = int(min(MOST_ROUNDS, max(LEAST_ROUNDS, CASE_SECONDS / sum(one))))
    for row in _slowest(torch.tensor([turn(i) for i in range(rounds)], dtype=torch.float64)):
        for name, taken in zip(names, row, strict=True):
            seconds[name].append(taken)
    steps = {name: _num_matmuls(role) for name, role in found.items()}
    medians = {name: statistics.median(those) for name, those in seconds.items()}
    found_here = {"case": str(case), "kind": case.kind, "samples": seconds, "seconds": medians, "steps": steps}
    return {**found_here, **chosen}


def _slowest(seconds: Any) -> list[list[float]]:
    """What the slowest process took. The same on all."""
    import torch.distributed as dist

    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return list(seconds.tolist())


def _num_matmuls(role: Any) -> int:
    import torch

    return sum(node.target is torch.ops.aten.mm.default for node in role.graph.nodes)


def worker(kind: str, is_quick: bool, profile: str) -> None:
    """Measure every case of a kind; rank 0 prints what it found, a line of JSON each."""
    import meshweave as mw
    from meshweave.runtime.cluster import ClusterWorld, init_from_env, shutdown

    rank, num_ranks = init_from_env()
    world = ClusterWorld(mw.Mesh(d=num_ranks))
    for case in cases(kind, is_quick):
        found = measured(case, mw.load_profile(profile), world)
        if rank == 0:
            print(json.dumps(found), flush=True)
    shutdown(world)


def coarse(output: Path) -> None:
    """A calibration of a few sizes, for --quick: matmuls, copies and links."""
    import torch

    from meshweave.calibrate import QUICK, calibrate
    from meshweave.calibrate.ops import Effort
    from meshweave.runtime.cluster import init_from_env, shutdown

    rank, _ = init_from_env()
    kib = 1 << 10
    plan = replace(
        QUICK,
        ops=Effort(7, 0.2),
        links=Effort(9, 0.4),
        matmul_sizes=(64, 256, 1024),
        other_sizes=(64,),
        held_out_shapes=((512, 512, 512), (256, 512, 1024), (128, 128, 512)),
        attention=((1, 4, 64, 64),),
        memory=(kib, 64 * kib, 1024 * kib, 16384 * kib),
        held_out_memory=(256 * kib,),
        received=(kib, 64 * kib, 1024 * kib, 4096 * kib),
        held_out_received=(256 * kib,),
    )
    found = calibrate(plan, "coarse", "benchmarks/rings.py --quick", torch.device("cpu"))
    if rank == 0:
        output.write_text(found.text)
    shutdown()


# The driver


class Star(Link):
    """Any number of processes, each with a link of its own."""

    def run(self, *command: str) -> str:
        """stdout of rank 0, when all have ended. Raises RuntimeError when one fails or they take too long."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            port, jobs = _free_port(), []
            for rank, prefix in enumerate(self.prefixes):
                environment = {**self._environment(rank, port), "WORLD_SIZE": str(len(self.prefixes))}
                stdout = out if rank == 0 else subprocess.DEVNULL
                line = [*prefix, sys.executable, *command]
                jobs.append(subprocess.Popen(line, stdout=stdout, stderr=errors, env=environment, cwd=ROOT))
            end = time.monotonic() + TIMEOUT_S
            while any(job.poll() is None for job in jobs) and not any(job.poll() for job in jobs):
                if time.monotonic() > end:
                    break
                time.sleep(0.2)
            codes = [job.poll() for job in jobs]
            for job in jobs:
                job.kill()
                job.wait()
            out.seek(0)
            errors.seek(0)
            if any(code != 0 for code in codes):
                raise RuntimeError(f"{' '.join(command[:3])} on {self.name}: {codes}\n{errors.read()[-3000:]}")
            return out.read()


@contextmanager
def star(count: int) -> Iterator[Link]:
    """Network namespaces around one with a bridge, each at the end of a shaped link, gone afterwards."""
    hub, names = f"meshweave{os.getpid()}hub", [f"meshweave{os.getpid()}n{i}" for i in range(count)]
    outer, inner = ([f"mw{os.getpid()}{side}{i}" for i in range(count)] for side in "on")
    shape = ("root", "tbf", "rate", RATE, "burst", "256kb", "latency", "50ms")  # as in predict_gloo.shaped
    try:
        for name in (hub, *names):
            _ip("netns", "add", name)
        _ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge0", "up")
        for i, name in enumerate(names):
            _ip("link", "add", inner[i], "type", "veth", "peer", "name", outer[i])
            _ip("link", "set", inner[i], "netns", name)
            _ip("link", "set", outer[i], "netns", hub)
            _ip("-n", hub, "link", "set", outer[i], "master", "bridge0", "up")
            _ip("-n", name, "addr", "add", f"10.78.0.{i + 1}/24", "dev", inner[i])
            _ip("-n", name, "link", "set", inner[i], "up")
            _ip("-n", name, "link", "set", "lo", "up")
            for space, device in ((name, inner[i]), (hub, outer[i])):
                _checked("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, *shape)
        prefixes = tuple(("ip", "netns", "exec", name) for name in names)
        yield Star("1 Gbit/s", prefixes, "10.78.0.1", 1, tuple(inner))  # type: ignore[arg-type]
    finally:
        for name in (hub, *names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextmanager
def joined(count: int) -> Iterator[Link]:
    with shaped() if count == 2 else star(count) as link:
        yield link


def measure(link: Link, count: int, is_quick: bool, profile: str, folder: Path) -> list[dict[str, Any]]:
    """A row per case."""
    this = str(Path(__file__))
    if not profile:
        profile = str(folder / f"machine{count}.toml")
        calibrate = ("-m", "meshweave", "calibrate", "--quick", "-o", profile)
        print(link.run(*((this, "--coarse", profile) if is_quick else calibrate)), flush=True)
    rows = []
    quick = ["--quick"] if is_quick else []
    for kind in KINDS:
        load = running()
        out = link.run(this, "--worker", kind, "--profile", profile, *quick)
        rows += [{"count": count, "load": load, **json.loads(text)} for text in out.strip().splitlines()]
        for row in rows:
            if row["kind"] == kind:
                print(line(row), flush=True)
    return rows


# What was found


def efficiency(row: dict[str, Any], name: str) -> float:
    """The share of the communication that a way hides: 1 where it takes as long as compute alone."""
    alone, whole = row["seconds"][ALONE], row["seconds"][WHOLE]
    return 1 - (row["seconds"][name] - alone) / (whole - alone)


def is_covered(row: dict[str, Any], name: str) -> bool:
    """Whether compute of a chunk lasts at least as long as what is sent in one message, by what was measured: all
    compute alone, and what the collective adds to it."""
    alone, num_steps = row["seconds"][ALONE], row["steps"][name]
    num_messages = num_steps if name.startswith(("pipelined", "broadcast")) else num_steps - 1
    return alone / num_steps >= (row["seconds"][WHOLE] - alone) / num_messages


def best(row: dict[str, Any]) -> str:
    """The fastest way to take it apart."""
    return min((name for name in row["seconds"] if name not in (WHOLE, ALONE)), key=row["seconds"].__getitem__)


def is_right(row: dict[str, Any]) -> bool:
    """Whether nothing that was measured is faster than the choice by more than NEAR."""
    return row["seconds"][row["choice"]] <= NEAR * min(row["seconds"][WHOLE], row["seconds"][best(row)])


HEAD = (
    "| n | pair | rows x inner x columns | compute | whole | best way apart | ms | efficiency | choice | ms "
    "| efficiency | priced: whole | choice | right | load |\n|" + "---|" * 15
)


def line(row: dict[str, Any]) -> str:
    seconds, choice, way = row["seconds"], row["choice"], best(row)
    is_apart = choice != WHOLE
    cells = (
        row["count"],
        row["kind"].replace("_", "-"),
        row["case"],
        _ms(seconds[ALONE]),
        _ms(seconds[WHOLE]),
        way,
        _ms(seconds[way]),
        f"{efficiency(row, way):.0%}",
        choice,
        _ms(seconds[choice]),
        f"{efficiency(row, choice):.0%}{' covered' if is_covered(row, choice) else ''}" if is_apart else "",
        _ms(row["before"]),
        _ms(row["prices"][choice]) if is_apart else f"best {_ms(min(row['prices'].values()))}",
        "yes" if is_right(row) else "no",
        f"{row['load']:.1f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    right = sum(map(is_right, rows))
    taken = [row for row in rows if row["choice"] != WHOLE]
    said = [f"The choice is within {NEAR - 1:.0%} of the fastest that was measured in {right} of {len(rows)} shapes."]
    if taken:
        ratios = [row["seconds"][row["choice"]] / row["seconds"][WHOLE] for row in taken]
        said.append(
            f"Taken apart in {len(taken)}: time against the whole median {statistics.median(ratios):.3f}, "
            f"worst {max(ratios):.3f}."
        )
    for kind in KINDS:
        found = [efficiency(row, row["choice"]) for row in taken if row["kind"] == kind]
        covered = [
            efficiency(row, row["choice"]) for row in taken if row["kind"] == kind and is_covered(row, row["choice"])
        ]
        if found:
            least = (
                f", {len(covered)} covered: median {statistics.median(covered):.0%}, least {min(covered):.0%}"
                if covered
                else ""
            )
            said.append(f"Efficiency, {kind}: median {statistics.median(found):.0%} of {len(found)}{least}.")
    return said


def page(rows: Sequence[dict[str, Any]], is_quick: bool) -> str:
    parts = [
        "# Matmuls beside collectives, taken apart",
        "",
        f"`python benchmarks/rings.py{' --quick' if is_quick else ''}`: processes of one machine, {RATE[0]} Gbit/s "
        "between them, Gloo, float32. Milliseconds, medians of runs in turns. Efficiency is the share of the "
        "communication that is hidden, 1 - (apart - compute) / (whole - compute); it is covered where the compute of "
        "a chunk lasts as long as its message. The choice is the gate's, with a profile calibrated right before under "
        "the same condition. The load is that of other processes, in processors.",
        "",
        HEAD,
        *map(line, rows),
        "",
    ]
    for count in sorted({row["count"] for row in rows}):
        parts += [f"**{count} processes.** " + " ".join(summary([r for r in rows if r["count"] == count])), ""]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--quick", action="store_true", help="two processes, 8 shapes, a coarse calibration")
    parser.add_argument("--ranks", type=int, action="append", help="numbers of processes; 2 and 4")
    parser.add_argument("--profile", default="", help="a file of `meshweave calibrate`, in place of a calibration")
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--worker", choices=KINDS)
    parser.add_argument("--coarse", type=Path)
    options = parser.parse_args()
    if options.coarse:
        coarse(options.coarse)
        return 0
    if options.worker:
        worker(options.worker, options.quick, options.profile)
        return 0
    rows = []
    for count in options.ranks or ((2,) if options.quick else (2, 4)):
        with joined(count) as link, tempfile.TemporaryDirectory() as folder:
            rows += measure(link, count, options.quick, options.profile, Path(folder))
    text = page(rows, options.quick)
    print(text)
    if options.json:
        options.json.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if options.output:
        options.output.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
