"""The two passes that benchmarks/overlap.py compares, each told the same costs, judged by the same judge."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from overlap_graphs import Groups
from overlap_judge import INTER_NODE, NVLINK, Costs, Verdict, judge
from torch import fx

from meshweave.optimize.overlap import OverlapReport, overlap

ROOM = {  # memory no object
    "max_memory_increase_gb": None,
    "max_memory_increase_ratio": 1.0,
    "max_in_flight_gb": 40.0,
    "max_compute_pre_fetch": 1000,
    "max_coll_distance": 1000,
}
NO_PRE = {"pre_bucketing_fsdp_collectives": False}
SETTINGS: dict[str, dict[str, Any]] = {  # Inductor's
    "default": {},
    "no buckets": NO_PRE,
    "buckets": {"collective_bucketing": True, **NO_PRE},
    "both buckets": {"collective_bucketing": True},
    "no buckets, room": {**NO_PRE, **ROOM},
    "both buckets, room": {"collective_bucketing": True, **ROOM},
    "no priority for buckets": {
        "collective_bucketing": True,
        "prioritize_bucketing_during_scheduling": False,
        "max_off_bucket_gb": None,
        **NO_PRE,
    },
    "pre-buckets of 25 MB": {"collective_bucketing": True, "pre_bucketing_fsdp_collectives_bucket_cap_mb": 25.0},
    "pre-buckets of 150 MB": {"collective_bucketing": True, "pre_bucketing_fsdp_collectives_bucket_cap_mb": 150.0},
    "pre-buckets of 500 MB": {"collective_bucketing": True, "pre_bucketing_fsdp_collectives_bucket_cap_mb": 500.0},
    "double compute": {"compute_overlap_multipler": 2.0, **NO_PRE},
    "both buckets, double compute": {"collective_bucketing": True, "compute_overlap_multipler": 2.0},
    "half compute": {"compute_overlap_multipler": 0.5, **NO_PRE},
}
FEW = ("default", "no buckets", "both buckets")  # where the seconds of the passes are in question
# Of large graphs: one of these was the best or within 0.3% of it in every smaller case.
MANY = (*FEW, "buckets", "half compute", "pre-buckets of 150 MB")
MIB = 2**20
OWN_INCREASE = (0.05, 512 * MIB)  # what our pass allows itself above the input's peak where no cap is given


@dataclass(frozen=True)
class Taken:
    """Seconds of a pass, of this process's processor time and of the clock. Passes are single-threaded; the two differ
    where others use the machine."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Result:
    """A graph that some pass made, and what the judge says under the costs that the pass was told."""

    name: str
    graph: fx.Graph
    verdict: Verdict
    taken: Taken


def original_of(module: fx.GraphModule, costs: Costs) -> Result:
    return Result("as traced", module.graph, judge(module.graph, costs), Taken(0.0, 0.0))


def prepare_inductor() -> None:
    """Inductor's pass asks triton for the bandwidth of a GPU, even where a custom estimate stands in for all that it
    makes of it. Where there is no GPU, one call with a stand-in answers: torch keeps the answer, the stand-in goes."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    from torch._inductor.fx_passes import bucketing, fsdp
    from torch._inductor.utils import get_gpu_dram_gbps

    for module in (bucketing, fsdp):
        module.logger.setLevel(logging.ERROR)
    if torch.cuda.is_available():
        return
    triton, testing = types.ModuleType("triton"), types.ModuleType("triton.testing")
    testing.get_dram_gbps = lambda: 3350  # type: ignore[attr-defined]
    triton.testing = testing  # type: ignore[attr-defined]
    with patch.dict(sys.modules, {"triton": triton, "triton.testing": testing}):
        get_gpu_dram_gbps()


def costs_of(groups: Groups) -> Costs:
    """NVLink for the ranks of one node, the network for all others."""
    links = {name: NVLINK if max(ranks) < 8 else INTER_NODE for name, ranks in groups.ranks.items()}
    return Costs(links, {name: len(ranks) for name, ranks in groups.ranks.items()})


def remembered(graph: fx.Graph, costs: Costs) -> Callable[[fx.Node, int | None], float]:
    """The costs, already known of the nodes of a graph: so that no pass is timed with what the judge's formulas take.
    Nodes go by their names, which copies keep."""
    known = {node.name: costs(node) for node in graph.nodes if node.op == "call_function"}

    def look(node: fx.Node, num_bytes: int | None = None) -> float:
        return known[node.name] if num_bytes is None and node.name in known else costs(node, num_bytes)

    return look


def memory_cap(original: Result, inductor: Result) -> int:
    ratio, least = OWN_INCREASE
    peak = original.verdict.peak_bytes
    return min(inductor.verdict.peak_bytes, peak + max(int(peak * ratio), least))


def run_inductor(module: fx.GraphModule, costs: Costs, setting: str, repeat: int) -> Result:
    """Its pass with our costs as estimates, in milliseconds; settings that this version does not have are left out."""
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

    look = remembered(module.graph, costs)

    def estimate(node: fx.Node, override_size: int | None = None) -> float | None:
        return look(node, override_size) * 1e3 if node.op == "call_function" else None

    known = inspect.signature(schedule_overlap_bucketing).parameters
    wanted = {"compute_estimator": "analytical", "collective_estimator": "analytical", **SETTINGS[setting]}
    arguments = {key: value for key, value in wanted.items() if key in known}
    made, taken = timed(
        lambda: copy.deepcopy(module),
        lambda one: schedule_overlap_bucketing(one, custom_runtime_estimation=estimate, **arguments),
        repeat,
    )
    return Result(setting, made.graph, judge(made.graph, costs), taken)


def best_of(results: Sequence[Result]) -> Result:
    """The fastest by the judge; the first of equals."""
    return min(results, key=lambda one: one.verdict.seconds)


def donated_of(graph: fx.Graph) -> list[str]:
    """The inputs that a backward graph frees: all but parameters, as these graphs name them."""
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    is_backward = any(name.startswith("tangents") for name in names)
    return [name for name in names if is_backward and not name.startswith("primals")]


def run_ours(
    module: fx.GraphModule, costs: Costs, groups: Mapping[str, Sequence[int]], cap: int | None, repeat: int
) -> tuple[Result, float]:
    """Our pass, in place as Inductor's, and the bound that it reports. Every run has an empty cache: it searches."""
    look = remembered(module.graph, costs)

    def run(one: fx.GraphModule) -> tuple[fx.GraphModule, OverlapReport]:
        return overlap(one, cost=look, memory_cap_bytes=cap, groups=groups, donated=donated_of(one.graph))

    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ):

        def prepare() -> fx.GraphModule:
            os.environ["MESHWEAVE_CACHE"] = tempfile.mkdtemp(dir=folder)
            return copy.deepcopy(module)

        (made, report), taken = timed(prepare, run, repeat)
    return Result("meshweave", made.graph, judge(made.graph, costs), taken), report.bound_seconds


def timed(prepare: Callable[[], Any], run: Callable[[Any], Any], repeat: int) -> tuple[Any, Taken]:
    """The last result, and the medians of what the runs took."""
    cpu, wall = list[float](), list[float]()
    for _ in range(repeat):
        prepared = prepare()
        begun = time.process_time(), time.perf_counter()
        made = run(prepared)
        cpu.append(time.process_time() - begun[0])
        wall.append(time.perf_counter() - begun[1])
    return made, Taken(median(cpu), median(wall))
