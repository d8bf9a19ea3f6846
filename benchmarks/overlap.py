"""The overlap pass against Inductor's, on graphs of Llama-3-8B, under the same costs and one independent judge.

    python benchmarks/overlap.py                      # every case; prints tables and what must hold
    python benchmarks/overlap.py --write              # and writes results/overlap.md, anew after each case
    python benchmarks/overlap.py backward-8x4         # cases whose name begins so (layers x batch)

Inductor's pass (torch._inductor.fx_passes.overlap_scheduling, as installed) runs over a grid of its settings, each on a
fresh copy of the graph with our costs as its estimates; the fastest by the judge counts. Ours runs with the lesser of
Inductor's peak and the cap that it would choose itself. Nothing is measured on a device: see overlap_judge.py. The exit
status is 1 where a demand is not met.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from overlap_graphs import Direction, Groups, Shape, trace, world
from overlap_judge import Costs, judge, lower_bound
from overlap_list import pool
from overlap_passes import (
    FEW,
    MANY,
    SETTINGS,
    Result,
    best_of,
    costs_of,
    memory_cap,
    original_of,
    prepare_inductor,
    run_inductor,
    run_ours,
)
from overlap_split import BOTH, SplitOutcome, run_split, split_table
from overlap_table import DUMPED, PASS_SECONDS, Outcome, case_lines, musts, report
from torch import fx

TABLE = Path(__file__).parent / "results" / "overlap.md"
# Of the size of DeepSeek-V3 (arXiv:2412.19437, section 4.2) but for its attention, which is that of Llama.
MIXTURE = Shape(8, 2, hidden=7168, heads=56, vocab=129280, experts=256, seq=4096)
# Data parallel alone, over 64 ranks of 8 nodes: every collective is a gather or a reduction of parameters.
SHARDED = Shape(32, 4, fsdp=64, tp=1)
# Llama 3 70B (arXiv:2407.21783, table 3) on the 8 devices of a node, tensor and sequence parallelism alone.
SEVENTY = Shape(8, 2, fsdp=1, hidden=8192, heads=64, ffn=28672)
Case = tuple[str, Direction, Shape]
CASES: tuple[Case, ...] = (
    ("backward-8x4", "backward", Shape(8, 4)),
    ("forward-8x4", "forward", Shape(8, 4)),
    ("backward-16x4", "backward", Shape(16, 4)),
    ("backward-32x4", "backward", Shape(32, 4)),
    ("forward-32x4", "forward", Shape(32, 4)),
    ("backward-32x1", "backward", Shape(32, 1)),
    ("forward-32x1", "forward", Shape(32, 1)),
    ("backward-70b-8x2", "backward", SEVENTY),
    ("forward-70b-8x2", "forward", SEVENTY),
    ("backward-fsdp64", "backward", SHARDED),
    ("nodes-6k", "backward", Shape(24, 4)),
    ("nodes-12k", "backward", Shape(48, 4)),
    ("backward-256-16x1", "backward", Shape(16, 1, dp=4)),
    ("backward-experts", "backward", MIXTURE),
    ("forward-experts", "forward", MIXTURE),
)
SPLIT = {Shape(8, 4): "split-8x4", Shape(32, 4): "split-32x4", SEVENTY: "split-70b-8x2"}
LARGE = 2500  # nodes; above, Inductor has fewer settings, and scenarios are played, not told to the passes again
NOISE_SEEDS = 3
CAPS = (1.02, 1.1, 1.5)  # of the memory that ours may hold: more, which must not make it slower
REPEAT = 3  # runs of ours, for the seconds of the pass


@dataclass(frozen=True)
class Scenario:
    """What may be otherwise than the pass was told."""

    name: str
    costs: Costs
    is_shared: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", default=[""], help="cases whose name begins so; split-8x4 needs both of 8x4"
    )
    parser.add_argument("--write", action="store_true", help="write results/overlap.md")
    parser.add_argument("--no-scenarios", action="store_true", help="only the costs that the passes are told")
    options = parser.parse_args()
    cases = [case for case in CASES if case[0].startswith(tuple(options.cases))]
    shapes = list(dict.fromkeys(shape for *_, shape in cases))
    prepare_inductor()
    outcomes: list[Outcome] = []
    splits: list[SplitOutcome] = []
    for shape in shapes:
        for one in run_shape(shape, [case for case in cases if case[2] == shape], not options.no_scenarios):
            (splits if isinstance(one, SplitOutcome) else outcomes).append(one)  # type: ignore[arg-type]
            if options.write:
                _, title, dumped = TABLE.read_text().partition(DUMPED)
                TABLE.write_text(
                    "\n".join([report(outcomes, splits, len(cases)), *([title + dumped] if title else [])])
                )
    print(report(outcomes, splits, len(cases)))
    if any(not holds for *_, holds in musts(outcomes, splits)):
        sys.exit(1)


def show(text: str) -> None:
    print(text, flush=True)


def run_shape(shape: Shape, cases: list[Case], with_scenarios: bool) -> Iterator[Outcome | SplitOutcome]:
    """The cases of a shape, which are traced once; then the batch split, where there is one and both graphs ran."""
    begun = time.perf_counter()
    with world(shape) as groups:
        modules = trace(shape, groups)
        costs = costs_of(groups)
        known: dict[Direction, tuple[Result, Result]] = {}
        show(f"{shape}: traced, {time.perf_counter() - begun:.0f} s")
        for name, direction, _ in cases:
            begun = time.perf_counter()
            one = run_case(name, modules[direction], costs, groups, with_scenarios)
            known[direction] = one.best, one.ours
            show("\n".join(case_lines(one)))
            show(f"  the case took {time.perf_counter() - begun:.0f} s")
            yield one
        if shape in SPLIT and set(known) == set(BOTH):
            begun = time.perf_counter()
            show(f"{SPLIT[shape]}:")
            split = run_split(SPLIT[shape], shape, groups, costs, modules, known, show)
            show(split_table([split]))
            show(f"  the case took {time.perf_counter() - begun:.0f} s")
            yield split


def run_case(name: str, module: fx.GraphModule, costs: Costs, groups: Groups, with_scenarios: bool) -> Outcome:
    original = original_of(module, costs)
    is_large = len(module.graph.nodes) > LARGE
    settings = FEW if name in PASS_SECONDS else MANY if is_large else tuple(SETTINGS)
    inductor = [run_inductor(module, costs, setting, 1) for setting in settings]
    best = best_of(inductor)
    cap = memory_cap(original, best)
    ours, reported = run_ours(module, costs, groups.ranks, cap, REPEAT)
    caps = [(part, run_ours(module, costs, groups.ranks, int(cap * part), 1)[0].verdict.seconds) for part in CAPS]
    plain = plain_pool(module, costs, cap)
    found = []
    for scenario in scenarios(costs) if with_scenarios and name not in PASS_SECONDS else ():
        told = [] if is_large else [run_inductor(module, scenario.costs, best.name, 1)]
        mine = [ours, run_ours(module, scenario.costs, groups.ranks, cap, 1)[0]]
        seconds = [play_in(scenario, one) for one in (*mine, original, *told, *inductor)]
        found.append((scenario.name, seconds[0], play_in(scenario, best), min(seconds[2:]), min(seconds)))
    bound = lower_bound(module.graph, costs)
    num_nodes = len(module.graph.nodes)
    rows = ((1.0, ours.verdict.seconds), *caps)
    return Outcome(name, num_nodes, bound, reported, original, tuple(inductor), ours, tuple(found), rows, plain)


def plain_pool(module: fx.GraphModule, costs: Costs, cap: int) -> tuple[tuple[str, float], ...]:
    """The plain list scheduler's orders that fit, by name with their seconds."""
    return tuple((name, verdict.seconds) for name, verdict in pool(module, costs) if verdict.peak_bytes <= cap)


def scenarios(costs: Costs) -> Iterator[Scenario]:
    yield Scenario("communication x2", replace(costs, scale=2.0))
    yield Scenario("communication x3", replace(costs, scale=3.0))
    for seed in range(NOISE_SEEDS):
        yield Scenario(f"40% noise, seed {seed}", replace(costs, noise=0.4, seed=seed))
    yield Scenario("shared link", costs, is_shared=True)


def play_in(scenario: Scenario, result: Result) -> float:
    return judge(result.graph, scenario.costs, is_shared=scenario.is_shared).seconds


if __name__ == "__main__":
    main()
