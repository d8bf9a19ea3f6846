"""What each process of benchmarks/rings.py runs: a pair of a collective and a matmul, whole, in every way in which it
can be taken apart, as the gate chooses, and without communication, all in turns.

Matmuls run on the processor, or on a stand-in for an accelerator: the process sleeps for as long as they take there.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

WHOLE, ALONE = "whole", "compute alone"
WARM_UP = 2
LEAST_ROUNDS, MOST_ROUNDS, CASE_SECONDS = 9, 25, 4.0
FOLLOWED = "all_reduce, matmul"
KINDS = ("all_gather", "reduce_scatter", "all_reduce", FOLLOWED)
PROCESSOR, STAND_IN = "processor", "stand-in"
COMPUTE = (PROCESSOR, STAND_IN)
_AWAKE = 5e-4
RATE, MEMORY = 40e9, 1e12  # of the stand-in: floating point operations (as a core of a processor), bytes per second


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
        """As in meshweave.optimize.decompose."""
        return self.kind.partition(",")[0]

    def __str__(self) -> str:
        return f"{self.rows} x {self.inner} x {self.columns}"


# What the link takes is in proportion to rows * inner (of a gather) or rows * columns (of a reduction), compute to the
# product of all three: the third size sets the ratio of the two. A processor core does 30 to 60 GFLOP/s in float32,
# 1 Gbit/s brings 30 million elements in a second: at 640 and more a chunk's compute covers its message on the stand-in,
# at about 800 on a core, at half of that where four processes share two cores (compute takes twice as long there).
_SHORT = ((64, 128, 256), (256, 512, 128))
_SIZES = {
    2: (*_SHORT, (512, 512, 512), (512, 1024, 1024), (1024, 512, 2048), (2048, 384, 1536)),
    4: (_SHORT[1], (512, 512, 512), (2048, 512, 1024), (2048, 512, 2048)),
}
_QUICK = (0, 3)  # the ones that --quick takes


def cases(kind: str, num_ranks: int, is_quick: bool) -> list[Case]:
    """Of a reduction the second and third size change places. Other numbers of processes take the sizes of 4."""
    sizes = _SIZES.get(num_ranks, _SIZES[4])
    chosen = [sizes[i] for i in _QUICK] if is_quick else sizes
    return [Case(kind, m, *((k, n) if kind == "all_gather" else (n, k))) for m, k, n in chosen]


def program(case: Case, num_ranks: int, has_collective: bool) -> tuple[Any, dict[str, Any]]:
    """A rank graph, and the shapes of this process's inputs."""
    import torch
    from torch import fx

    import meshweave as mw
    from meshweave.ir.collectives import WAIT, functional
    from meshweave.ir.graph import Input, Origin, Spec
    from meshweave.ir.layout import Layout
    from meshweave.ir.rank import RankGraph
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
        "all_gather": functional.all_gather_into_tensor.default,
        "reduce_scatter": functional.reduce_scatter_tensor.default,
        "all_reduce": functional.all_reduce.default,
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
    from meshweave.optimize.decompose import ALGORITHMS, DecomposeOptions, decompose

    whole, shapes = program(case, num_ranks, True)
    found = {WHOLE: whole}
    table = "all_gather" if case.op == "all_gather" else "reduce_scatter"
    ways = [(row.name, ()) for row in ALGORITHMS if row.collective == table]
    for name, chunks in (*ways, *(("pipelined", (count,)) for count in DecomposeOptions().num_chunks)):
        made, report = decompose(whole, None, replace(only(case, name, *chunks), when="always"))
        if report.num_taken and made.text() not in {role.text() for role in found.values()}:
            found[" ".join((name, *map(str, chunks)))] = made
    return found, shapes


def only(case: Case, scheme: str, *num_chunks: int) -> Any:
    """Options that have one way for the collective of a case."""
    from meshweave.optimize.decompose import DecomposeOptions

    ways: dict[str, Any] = {"all_gather": ("direct",) if case.kind == FOLLOWED else (), case.op: (scheme,)}
    return DecomposeOptions(num_chunks=num_chunks, **ways)


def gate(case: Case, profile: Any, found: dict[str, Any]) -> dict[str, Any]:
    """What the gate chooses, under the name that it has among what is measured (it joins it if it is new), and what it
    prices everything at; a matmul after an all-reduce is in no price."""
    from meshweave.optimize.decompose import decompose

    def priced(rows: Any) -> float:
        return float(rows[0].seconds_after - sum(r.seconds_before - r.seconds_after for r in rows[1:] if r.is_taken))

    whole, prices = found[WHOLE], {}
    for name in found:
        scheme, *chunks = name.split()
        if name != WHOLE:
            prices[name] = priced(decompose(whole, profile, only(case, scheme, *map(int, chunks)))[1].rows)
    made, report = decompose(whole, profile)
    first = report.rows[0]
    if not report.num_taken:
        choice = WHOLE
    else:
        own = ", then ".join(row.scheme for row in report.rows if row.is_taken)
        choice = next((name for name, role in found.items() if role.text() == made.text()), own)
        found[choice] = made
        prices[choice] = priced(report.rows)
    return {"choice": choice, "reason": str(report), "before": first.seconds_before, "prices": prices}


class StandIn:
    """A kernel on a stand-in for an accelerator: matmuls take their time while no processor is busy, what is bound by
    memory takes none. Results are those of the first call, in memory that is there."""

    def __init__(self, task: Any) -> None:
        import torch

        self.function, self.is_matmul = task.function, task.node.target is torch.ops.aten.mm.default
        self.made: Any = None
        self.is_view = False

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.made is None or self.is_view:
            self.made = self.function(*args, **named)
            held = {x.untyped_storage().data_ptr() for x in args if hasattr(x, "untyped_storage")}
            self.is_view = not hasattr(self.made, "untyped_storage") or self.made.untyped_storage().data_ptr() in held
        if self.is_matmul:
            x, w = args
            _pass(seconds_on_stand_in(*x.shape, w.shape[1]))
        return self.made


def _pass(seconds: float) -> None:
    """Sleep, and stay awake for the end, for a sleeper is woken late."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - _AWAKE))
    while time.perf_counter() < end:
        time.sleep(0)


def seconds_on_stand_in(m: int, k: int, n: int) -> float:
    return 2.0 * m * k * n / RATE


def profile_of(path: str, compute: str) -> Any:
    """What the gate is told: the calibrated machine, with the stand-in's matmuls where that computes."""
    import meshweave as mw
    from meshweave.cost.hardware.schema import KINDS as MEMORY_KINDS
    from meshweave.cost.hardware.schema import MatmulModel, MatmulPoints

    found = mw.load_profile(path)
    if compute == PROCESSOR:
        return found
    cubes = [2**i for i in range(13)]
    points = tuple((n, n, n, 1, seconds_on_stand_in(n, n, n)) for n in cubes)
    links = replace(found.links, net=replace(found.links.net, compute_slowdown=1.0))
    memory = replace(
        found.memory, bandwidth=MEMORY, efficiency=tuple((kind, 1.0) for kind in MEMORY_KINDS), measured=()
    )
    return replace(found, matmul=MatmulModel(measured=(MatmulPoints("float32", points),)), memory=memory, links=links)


def runner(role: Any, shapes: dict[str, Any], world: Any, compute: str = PROCESSOR) -> Callable[[], Any]:
    """A function that runs a program on this process once, and returns its result."""
    import torch

    from meshweave.runtime.executor import FORWARD, compile_tasks

    compiled = compile_tasks(role, world.device)
    if compute == STAND_IN:
        compiled.tasks = tuple(
            tuple(t if t.is_start or t.is_wait else replace(t, function=StandIn(t)) for t in part)
            for part in compiled.tasks
        )
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


def measured(case: Case, profile: Any, world: Any, compute: str) -> dict[str, Any]:
    """Medians of every variant's seconds, and what the gate says of them. Values are those of real matmuls."""
    import torch
    import torch.distributed as dist

    size = world.mesh.num_devices
    found, shapes = variants(case, size)
    chosen = gate(case, profile, found)
    runs = {name: runner(role, shapes, world) for name, role in found.items()}
    expected = runs[WHOLE]()
    for name, run in runs.items():
        torch.testing.assert_close(run(), expected, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    if compute != PROCESSOR:
        runs = {name: runner(role, shapes, world, compute) for name, role in found.items()}
    runs[ALONE] = runner(*program(case, size, False), world, compute)
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
    kinds = {"case": str(case), "kind": case.kind, "compute": compute}
    found_here = {**kinds, "samples": seconds, "seconds": medians, "steps": steps}
    return {**found_here, **chosen}


def _slowest(seconds: Any) -> list[list[float]]:
    """What the slowest process took. The same on all."""
    import torch.distributed as dist

    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return list(seconds.tolist())


def _num_matmuls(role: Any) -> int:
    import torch

    return sum(node.target is torch.ops.aten.mm.default for node in role.graph.nodes)


def worker(kind: str, compute: str, is_quick: bool, profile: str, rows: Path) -> None:
    """Measure every case of a kind; rank 0 adds what it found to a file, a line of JSON each."""
    import torch

    import meshweave as mw
    from meshweave.runtime.cluster import ClusterWorld, init_from_env, shutdown

    torch.set_num_threads(1)
    rank, num_ranks = init_from_env()
    world = ClusterWorld(mw.Mesh(d=num_ranks))
    machine = profile_of(profile, compute)
    for case in cases(kind, num_ranks, is_quick):
        found = measured(case, machine, world, compute)
        if rank == 0:
            with rows.open("a") as file:
                file.write(json.dumps(found) + "\n")
    shutdown(world)


def coarse(output: Path) -> None:
    """A calibration of a few sizes, for --quick: matmuls, copies and links."""
    import torch

    from meshweave.calibrate import BRIEF, calibrate
    from meshweave.calibrate.ops import Effort
    from meshweave.runtime.cluster import init_from_env, shutdown

    rank, _ = init_from_env()
    kib = 1 << 10
    plan = replace(
        BRIEF,
        ops=Effort(7, 0.2),
        links=Effort(9, 0.4),
        matmul_sizes=(64, 256, 1024),
        other_sizes=(64,),
        attention=((1, 4, 64, 64),),
        memory=(kib, 64 * kib, 1024 * kib, 16384 * kib),
        received=(kib, 64 * kib, 1024 * kib, 4096 * kib),
    )
    text = calibrate(plan, "coarse", "benchmarks/rings.py --quick", torch.device("cpu"))
    if rank == 0:
        output.write_text(text)
    shutdown()
