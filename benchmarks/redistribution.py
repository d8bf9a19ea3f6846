"""Redistribution: our plans against a brute-force optimum and DTensor's planners; planning time; moves between meshes.

    python benchmarks/redistribution.py                    # every part; writes results/redistribution.md
    python benchmarks/redistribution.py optimum peers      # some parts; the others keep their sections
    python benchmarks/redistribution.py optimum --sample 5000 --meshes 2x4,2x2x4

Tensors are square float32 matrices that all axes divide, of about the size named. Alpha is 10 us,
the outermost axis has 50 GB/s, the others 400 GB/s.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from math import exp, inf, log, prod
from pathlib import Path
from statistics import median

import numpy as np
import torch
from optimum import Optimum, State, check_by_hand
from peer_plans import VARIANTS, Question, peer_plans

import meshweave as mw
from meshweave.ir.routes import routes
from meshweave.place.movement import across, plan, search, space, within

TABLE = Path(__file__).parent / "results" / "redistribution.md"
NAMES = "abcd"
SLOW, FAST, ALPHA = 50e9, 400e9, 10e-6
SIDES = {"1 MiB": 512, "1 GiB": 16384}
MESHES = ("2x4", "3x4", "4x8", "2x2x3", "2x2x4", "2x2x2x2")
NO_BOUND, LITTLE_BYTES = 1 << 62, 64 << 20  # what plan_move allows whatever a value takes, without a device's memory
PEER_SAMPLE = 600  # pairs on a 4-D mesh: DTensor's graph planner takes about 50 ms for each
Pair = tuple[int, int]


class Setting:
    """A mesh such as 2x4 and a size: the layouts as meshweave writes them, numbered as the optimum numbers them."""

    def __init__(self, mesh: str, side: int, names: str = NAMES) -> None:
        self.sizes = tuple(map(int, mesh.split("x")))
        self.mesh = mw.Mesh(dict(zip(names, self.sizes, strict=False)))
        self.bandwidths = (SLOW,) + (FAST,) * (len(self.sizes) - 1)
        self.profile = mw.AlphaBeta(ALPHA, dict(zip(names, self.bandwidths, strict=False)))
        self.side = side // prod(self.sizes) * prod(self.sizes)
        self.shape = (self.side, self.side)
        self.optimum = optimum_of(self.sizes, self.side, True)
        self.layouts = [self._layout(state) for state in self.optimum.states]

    def _layout(self, state: State) -> mw.Layout:
        names = self.mesh.axis_names
        cuts = {d: [names[axis] for axis in cut] for d, cut in enumerate(state.cuts)}
        return mw.Layout.of(self.mesh, len(state.cuts), cuts, {names[axis]: "sum" for axis in state.partial})

    def plan(self, pair: Pair, cap: int | None = None) -> mw.MovePlan:
        ends = self.layouts[pair[0]], self.layouts[pair[1]]
        return mw.plan_move(*ends, self.shape, torch.float32, self.profile, memory_cap_bytes=cap)

    def all_pairs(self) -> list[Pair]:
        count = len(self.layouts)
        return [(s, t) for s, t in product(range(count), repeat=2) if s != t]

    def peer_pairs(self, in_mesh_order: bool = True) -> list[Pair]:
        """The pairs that DTensor takes: no axis becomes partial; unless told, every dim is cut in mesh order."""
        states = self.optimum.states
        kept = [
            i
            for i, state in enumerate(states)
            if not in_mesh_order or all(list(cut) == sorted(cut) for cut in state.cuts)
        ]
        return [(s, t) for s, t in product(kept, repeat=2) if s != t and states[t].partial <= states[s].partial]


@cache
def optimum_of(sizes: tuple[int, ...], side: int, with_permute: bool) -> Optimum:
    bandwidths = (SLOW,) + (FAST,) * (len(sizes) - 1)
    return Optimum(sizes, bandwidths, (side, side), alpha=ALPHA, with_permute=with_permute)


@cache
def table_of(sizes: tuple[int, ...], side: int, order: str, bounded: bool, with_permute: bool = True) -> np.ndarray:
    return optimum_of(sizes, side, with_permute).table(order, LITTLE_BYTES if bounded else None)


def drawn(pairs: list[Pair], count: int) -> list[Pair]:
    """All of the pairs, or that many of them by a fixed seed."""
    return pairs if len(pairs) <= count else random.Random(0).sample(pairs, count)


class Ratios:
    """How much more than the optimum some plans cost. Where the optimum is free and the plan is not there is no ratio:
    such pairs count as off, and not in the geometric mean."""

    def __init__(self, pairs: Iterable[tuple[float, float]]) -> None:
        self.values = [_ratio(got, best) for got, best in pairs]
        self.finite = [value for value in self.values if value < inf]

    def off(self, above: float) -> float:
        return sum(value > above for value in self.values) / len(self.values)

    @property
    def geomean(self) -> float:
        return exp(sum(map(log, self.finite)) / len(self.finite))

    @property
    def worst(self) -> float:
        return max(self.finite)

    def __str__(self) -> str:
        free = len(self.values) - len(self.finite)
        shown = f"{self.off(1.05):.1%} / {self.geomean:.3f} / {self.worst:.2f}"
        return shown + (f" ({free} where the optimum is free)" if free else "")


def _ratio(got: float, best: float) -> float:
    if best < 1e-12:
        return 1.0 if got < 1e-12 else inf
    return got / best


# parts


def optimum_part(meshes: Sequence[str], sample: int) -> list[str]:
    check_by_hand()
    rows = []
    for mesh, (name, side) in product(meshes, SIDES.items()):
        setting = Setting(mesh, side)
        bound, free, loose = (
            table_of(setting.sizes, setting.side, *how) for how in (("sound", True), ("sound", False), ("any", False))
        )
        every = setting.all_pairs()
        pairs = drawn(every, sample)
        count = f"{len(pairs):,}" + ("" if len(pairs) == len(every) else f" of {len(every):,}")
        shown = []
        for best, cap in ((free, NO_BOUND), (bound, None)):
            ours = Ratios((setting.plan(pair, cap).seconds, float(best[pair])) for pair in pairs)
            below = sum(value < 1 - 1e-9 for value in ours.values)
            shown += [f"{1 - ours.off(1 + 1e-9):.3%} / {below} / {ours.worst:.4f}"]
        for one, other in ((free, loose), (bound, free)):
            price = Ratios((float(one[pair]), float(other[pair])) for pair in every)
            shown += [f"{price.geomean:.4f} / {price.worst:.2f}"]
        rows.append([mesh, name, count, *shown])
        print(rows[-1], flush=True)
    head = ["mesh", "tensor", "ordered pairs", "without a bound", "default bound"]
    head += ["price of soundness", "price of the bound"]
    return [
        "`plan_move(...).seconds` against the sound optimum over ordered pairs of layouts: each axis cuts a dim, in "
        "any order, or is partial(sum), or replicated. The optimum takes every step from every layout; what is partial "
        "in the source may be reduced over any axis and become partial over it again. Cells: equal / below (would be a "
        "mistake of the brute force) / worst; without a memory bound, and with the default one (input and output of a "
        "step hold no more than 64 MiB, or twice the larger of source and target) against the optimum under it. Prices "
        "are geomean / worst over all pairs: of the sound optimum against that in any order of reductions, and of the "
        "bound against none.",
        "",
        *_table(head, rows),
    ]


def peers_part(meshes: Sequence[str], sample: int) -> list[str]:
    lines = [
        "Each cell: pairs more than 5% off / geometric mean / worst of the peer's seconds over the optimum's. "
        "`no permute` is the optimum in any order of reductions, without permutes or a memory bound. `any` has "
        "permutes too, `sound` besides is order-sound and within the default memory bound. All pairs of placements "
        f"that the public API takes (at most {PEER_SAMPLE} on 4-D meshes or in any order), every set of dims flattened "
        "before.",
    ]
    cases = [(True, "Placements in mesh order"), (False, "Any order of axes on a dim (_StridedShard)")]
    for ordered, title in cases:
        rows = [
            row for mesh, name in product(meshes, SIDES) for row in _peer_rows(mesh, name, ordered, min(sample, 4000))
        ]
        head = ["mesh", "tensor", "pairs", "planner", "no permute", "any", "sound", "not order-sound"]
        lines += ["", f"### {title}", "", *_table(head, rows)]
    return lines


def _peer_rows(mesh: str, name: str, ordered: bool, sample: int) -> list[list[str]]:
    setting = Setting(mesh, SIDES[name])
    pairs = drawn(setting.peer_pairs(ordered), PEER_SAMPLE if len(setting.sizes) > 3 or not ordered else sample)
    plans = [
        peer_plans(setting.layouts[s], setting.layouts[t], setting.shape, torch.float32, setting.profile)
        for s, t in pairs
    ]
    refusals = {variant.refusal for those in plans for variant in those if variant.refusal}
    assert not refusals, refusals
    facts, loose, sound = (
        table_of(setting.sizes, setting.side, *how) for how in (("any", False, False), ("any", False), ("sound", True))
    )
    rows = []
    for i, (variant, _, _) in enumerate(VARIANTS):
        seconds = [those[i].seconds for those in plans]
        shown = [
            str(Ratios((got, float(best[p])) for got, p in zip(seconds, pairs, strict=True)))
            for best in (facts, loose, sound)
        ]
        unsound = sum(not those[i].is_sound for those in plans) / len(plans)
        rows.append([mesh, name, f"{len(pairs):,}", variant, *shown, f"{unsound:.1%}"])
        print(rows[-1], flush=True)
    return rows


def time_part(meshes: Sequence[str], sample: int) -> list[str]:
    rows = []
    for mesh in meshes:
        setting = Setting(mesh, SIDES["1 GiB"])
        pairs = random.Random(1).sample(setting.peer_pairs(), 60 if len(setting.sizes) > 3 else 150)
        taken = [_times(setting, pair) for pair in pairs]
        cold, cached, graph, greedy = ([row[i] for row in taken] for i in range(4))
        first = [_first_times(mesh, pair, i) for i, pair in enumerate(pairs[:15])]
        ratios = [g / c for g, c in zip(graph, cold, strict=True)]
        columns = (cold, [row[0] for row in first], [row[1] for row in first], graph, greedy)
        shown = [f"{median(values) * 1e3:.3g}" for values in columns]
        shown += [f"{median(cached) * 1e6:.2g}", f"{median(ratios):.1f}x", f"{min(ratios):.2f}x"]
        rows.append([mesh, str(len(pairs)), *shown])
        print(rows[-1], flush=True)
    head = ["mesh", "pairs", "ours ms", "first on a mesh ms", "first ever ms", "DTensor graph ms", "DTensor greedy ms"]
    head += ["cached us", "graph / ours", "least"]
    return [
        "Medians over random distinct pairs of placements, 1 GiB, every pair planned by all in turn. Ours: no plan "
        "cached, the graph of layouts as it is after the pairs before; on a mesh with axis names never seen; and with "
        "every cache cleared, as the first plan of a process; cached: one of a hundred calls. DTensor: the planner and "
        "the merging alone, specs made.",
        "",
        *_table(head, rows),
    ]


def _times(setting: Setting, pair: Pair) -> tuple[float, float, float, float]:
    """Seconds of ours, ours again, DTensor's graph and greedy planner: beside each other, so that what disturbs one
    disturbs all."""
    _forget_plans()
    s, t = pair
    asked = Question.of(setting.layouts[s], setting.layouts[t], setting.shape, torch.float32, setting.profile)
    return (
        _timed(lambda: setting.plan(pair)),
        _timed(lambda: [setting.plan(pair) for _ in range(100)]) / 100,
        _timed(lambda: asked.transforms(graph=True, merged=True)),
        _timed(lambda: asked.transforms(graph=False, merged=True)),
    )


def _first_times(mesh: str, pair: Pair, number: int) -> tuple[float, float]:
    """Seconds of the first plan on a mesh of this shape whose axes have new names, and of the first ever."""
    _forget_plans()
    fresh = Setting(mesh, SIDES["1 GiB"], [f"{letter}{number}" for letter in NAMES])
    first = _timed(lambda: fresh.plan(pair))
    _forget_all()
    return first, _timed(lambda: fresh.plan(pair))


def _forget_plans() -> None:
    for module in (plan, within, across):
        _clear(module)


def _forget_all() -> None:
    _forget_plans()
    for module in (search, space):
        _clear(module)


def _clear(module: object) -> None:
    for value in vars(module).values():
        if hasattr(value, "cache_clear") and getattr(value, "__module__", "") == getattr(module, "__name__", None):
            value.cache_clear()


def _timed(body: Callable[[], object]) -> float:
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


Place = tuple[str, str, Sequence[int] | None]  # mesh, layout, devices
ACROSS: dict[str, tuple[Place, Place]] = {
    "1 -> 4": (("", "[{}, {}]", [0]), ("a=4", "[{a}, {}]", [4, 5, 6, 7])),
    "1 -> 4, replicated": (("", "[{}, {}]", [0]), ("a=4", "[{}, {}]", [4, 5, 6, 7])),
    "1 -> 8, one axis replicated": (("", "[{}, {}]", [0]), ("a=2,b=4", "[{b}, {}]", range(8, 16))),
    "4 -> 1": (("a=4", "[{a}, {}]", None), ("", "[{}, {}]", [9])),
    "4 -> 1, partial": (("a=4", "[{}, {}] partial(sum: a)", None), ("", "[{}, {}]", [9])),
    "4 -> 1, of them": (("a=4", "[{a}, {}]", None), ("", "[{}, {}]", [2])),
    "4 -> 4": (("a=4", "[{a}, {}]", None), ("a=4", "[{a}, {}]", [4, 5, 6, 7])),
    "4 -> 4, other dim": (("a=4", "[{a}, {}]", None), ("a=4", "[{}, {a}]", [4, 5, 6, 7])),
    "4 -> 4, replicated": (("a=4", "[{}, {}]", None), ("a=4", "[{}, {}]", [4, 5, 6, 7])),
    "4 -> 6": (("a=4", "[{a}, {}]", None), ("a=2,b=3", "[{b}, {a}]", range(4, 10))),
    "8 -> 4, partial, replicated": (
        ("a=2,b=4", "[{b}, {}] partial(sum: a)", None),
        ("c=4", "[{}, {}]", range(8, 12)),
    ),
    "overlap 0-3 -> 2-5": (("a=4", "[{a}, {}]", None), ("a=4", "[{a}, {}]", [2, 3, 4, 5])),
    "overlap 0-3 -> 2-5, replicated": (("a=4", "[{a}, {}]", None), ("a=4", "[{}, {}]", [2, 3, 4, 5])),
    "permuted devices": (("a=4", "[{a}, {}]", None), ("a=4", "[{a}, {}]", [1, 0, 3, 2])),
    "permuted devices, one pair": (("a=4", "[{a}, {}]", None), ("a=4", "[{a}, {}]", [0, 2, 1, 3])),
    "2x4 -> 4x2, same devices": (("a=2,b=4", "[{a}, {b}]", None), ("c=4,d=2", "[{c}, {d}]", None)),
    "2x4 -> 8, same devices": (("a=2,b=4", "[{a,b}, {}]", None), ("c=8", "[{c}, {}]", None)),
    "2x4 -> 8, other dim": (("a=2,b=4", "[{a,b}, {}]", None), ("c=8", "[{}, {c}]", range(8, 16))),
}


def across_part(meshes: Sequence[str], sample: int) -> list[str]:
    shape, rows = (4080, 4096), []
    profile = mw.AlphaBeta(ALPHA, {**dict.fromkeys(NAMES, FAST), "between": SLOW})
    for name, (start, end) in ACROSS.items():
        source, target = (_placed(*place) for place in (start, end))
        made = mw.plan_move(source, target, shape, torch.float32, profile)
        step = next(step for step in made.steps if step.kind == "transfer")
        messages = routes(step.source, step.target, shape).messages
        inside = set(target.mesh.devices)
        entering = 4 * sum(m.box.num_elements for m in messages if m.sender not in inside)
        messages = routes(step.source, step.target, shape).messages
        crossing = 4 * sum(m.box.num_elements for m in messages if m.sender != m.receiver)
        least, neediest = _must_cross(source, target, shape)
        after = [later for later in made.steps if later.target.mesh == target.mesh]
        received = sum(later.bytes_received for later in after)
        shown = [f"{value / 2**20:.2f}" for value in (crossing, entering, 4 * least, received, 4 * neediest)]
        rows.append([name, made.kind, *shown])
        print(rows[-1], flush=True)
    head = ["move", "steps", "crossing MiB", "entering MiB", "at least", "busiest receives MiB", "at least"]
    return [
        f"A float32 matrix of {shape[0]} x {shape[1]} ({4 * prod(shape) / 2**20:.2f} MiB); transfers 50 GB/s, inside a "
        "mesh 400 GB/s. Crossing: from one device to another in the transfer. Entering: from devices that are not of "
        "the target's mesh; at least what none of its devices holds, once. The busiest device receives in the transfer "
        "and after it; at least what it needs and does not hold. Bounds by marking elements; torch.chunk cuts pieces.",
        "",
        *_table(head, rows),
    ]


def _placed(mesh: str, layout: str, devices: Sequence[int] | None) -> mw.Layout:
    return mw.Layout.parse(layout, mw.Mesh(mesh, devices=devices))


def _must_cross(source: mw.Layout, target: mw.Layout, shape: tuple[int, ...]) -> tuple[int, int]:
    """(elements that no device of the target's mesh holds, most elements that one of them needs and does not hold), by
    marking elements; the pieces are cut by torch.chunk."""
    whole = not source.partial
    held = {
        d: _marked(source, shape, d) if d in source.mesh and whole else np.zeros(shape, bool)
        for d in target.mesh.devices
    }
    union = np.logical_or.reduce(list(held.values()))
    needs = [int((_marked(target, shape, d) & ~held[d]).sum()) for d in target.mesh.devices]
    return int((~union).sum()), max(needs)


def _marked(layout: mw.Layout, shape: tuple[int, ...], device: int) -> np.ndarray:
    mesh = layout.mesh
    at = mesh.coordinates(mesh.devices.index(device))
    spans = []
    for size, dim in zip(shape, layout.dims, strict=True):
        span = torch.arange(size)
        for axis in dim.axes:
            chunks = span.chunk(mesh.size(axis))
            span = chunks[at[axis]] if at[axis] < len(chunks) else span[:0]
        spans.append(span.numpy())
    marks = np.zeros(shape, bool)
    marks[np.ix_(*spans)] = True
    return marks


PARTS: dict[str, tuple[str, Callable[[Sequence[str], int], list[str]]]] = {
    "optimum": ("Against the optimum", optimum_part),
    "peers": ("DTensor's planners against the optimum", peers_part),
    "time": ("Planning time", time_part),
    "across": ("Between meshes", across_part),
}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows)]


def write(sections: dict[str, list[str]]) -> None:
    """Put the sections into the file in the order of PARTS; those that were not run stay as they are."""
    before = TABLE.read_text() if TABLE.exists() else ""
    held = {title: body.strip() for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", before, re.M | re.S)}
    held |= {title: "\n".join(lines) for title, lines in sections.items()}
    head = (
        f"# Redistribution\n\n`python benchmarks/redistribution.py`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} "
        f"cores, torch {torch.__version__}. Square float32 matrices; alpha 10 us, the outermost axis 50 GB/s, the\n"
        "others 400 GB/s, a flattened group has its slowest axis. The optimum is brute force (benchmarks/optimum.py), "
        "which shares no code with the planner.\n"
    )
    titles = [title for title, _ in PARTS.values() if title in held]
    TABLE.write_text("\n".join([head, *(f"## {title}\n\n{held[title]}\n" for title in titles)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all without one")
    parser.add_argument("--meshes", default=",".join(MESHES), help="such as 2x4,2x2x4")
    parser.add_argument("--sample", type=int, default=20_000, help="most pairs to compare for one mesh and size")
    given = parser.parse_args()
    for part in given.parts or PARTS:
        title, body = PARTS[part]
        write({title: body(given.meshes.split(","), given.sample)})


if __name__ == "__main__":
    main()
