"""Moves run for real: plan, expand, run on virtual devices, compare every device's piece with the global value.

A value is made of one part per combination of the partial axes, different on each device; the parts of a partial
target are added up (or their greatest taken) again before the comparison. All values are integers, so bits agree.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, fx

from meshweave.ir import ops
from meshweave.ir.graph import Input, Origin, Spec, StepGraph
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_placed, verify_rank
from meshweave.place.expand.expand import expand
from meshweave.place.movement.plan import plan_move
from meshweave.runtime.executor import compile_tasks
from meshweave.runtime.world import LocalWorld

MESHES = {"2x2": Mesh("a=2,b=2"), "2x3": Mesh("a=2,b=3"), "2x2x2": Mesh("a=2,b=2,c=2")}
# A dim of 5 or 7 has uneven pieces, one of 2 or 1 empty ones on 4 or more devices.
SHAPES = [(8, 12), (5, 7), (2, 6), (1, 3), (12, 2), (7, 1)]
COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def layouts(mesh: Mesh, num_dims: int = 2, units: Sequence[int] = (1,), op: str = "sum") -> Iterator[Layout]:
    """Every layout of the mesh: each axis is left out, shards a dim (in every order) or is partial."""
    seen = set()
    for order in itertools.permutations(mesh.axis_names):
        for places in itertools.product(range(-2, num_dims), repeat=len(order)):
            dims = [tuple(a for a, p in zip(order, places, strict=True) if p == d) for d in range(num_dims)]
            partial = tuple((a, op) for a, p in zip(order, places, strict=True) if p == -1)
            for unit in units:
                layout = Layout(mesh, tuple(DimSharding(axes, unit) for axes in dims), partial)
                if layout not in seen:
                    seen.add(layout)
                    yield layout


def one_move(source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> RankGraph:
    """The rank graph of a step that is one move, expanded and verified."""
    source, target = source.normalized(shape), target.normalized(shape)
    spec = Spec(shape, dtype)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(spec=spec, origin=Origin("forward"), layout=source)
    y = x
    if source != target:
        y = graph.call_function(ops.move, (x, str(target)))
        y.meta.update(spec=spec, origin=Origin("forward"), layout=target)
    graph.output([y])
    step = verify_placed(StepGraph(graph, (Input("batch", "x", spec),), (("loss", ""),)))
    (rank,) = expand(step, source.mesh, lambda a, b, s, d: plan_move(a, b, s, d))
    return verify_rank(rank)


def run_rank(rank: RankGraph, held: Sequence[Tensor]) -> list[Tensor]:
    """What the devices hold afterwards of what they held before, in row-major order."""
    world = LocalWorld(rank.mesh)
    compiled = compile_tasks(rank, world.device)
    executor = world.executor([rank], [compiled] * rank.mesh.num_devices, None)
    envs = executor.environment()
    for env, piece in zip(envs, held, strict=True):
        env[compiled.inputs[0]] = piece
    executor.begin(envs)
    executor.run("forward")
    return [env[compiled.outputs[0]] for env in envs]


def full_value(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=made) < 0.5
    # Within bfloat16's 8 bits even after 8 parts are added up.
    return torch.randint(-8, 9, shape, generator=made).to(dtype)


def parts_of(full: Tensor, layout: Layout, seed: int) -> dict[tuple[int, ...], Tensor]:
    """Coordinates along the partial axes -> a part of the value; the parts combine to `full`."""
    axes = layout.partial
    made = torch.Generator().manual_seed(seed)
    keys = list(itertools.product(*(range(layout.mesh.size(a)) for a, _ in axes)))
    if not axes:
        return {(): full}
    op = axes[0][1]
    if op in ("sum", "avg"):
        total = full * len(keys) if op == "avg" else full
        parts = {k: torch.randint(-3, 4, full.shape, generator=made).to(full.dtype) for k in keys[1:]}
        parts[keys[0]] = total - sum(parts.values(), torch.zeros_like(full))
        return parts
    owner = torch.randint(len(keys), full.shape, generator=made)
    away = torch.full_like(full, op == "min") if full.dtype == torch.bool else full + (-5 if op == "max" else 5)
    return {k: torch.where(owner == i, full, away) for i, k in enumerate(keys)}


def pieces_of(full: Tensor, layout: Layout, seed: int) -> list[Tensor]:
    """What each device of the mesh holds of `full`, in row-major order."""
    parts = parts_of(full, layout, seed)
    held = []
    for position in range(layout.mesh.num_devices):
        coords = layout.mesh.coordinates(position)
        part = parts[tuple(coords[a] for a in layout.partial_axes)]
        held.append(part[layout.box(full.shape, coords).slices()].clone())
    return held


def check_pieces(found: Sequence[Tensor], full: Tensor, layout: Layout) -> None:
    """Every device holds its piece; pieces along partial axes combine to it."""
    mesh = layout.mesh
    groups: dict[tuple[int, ...], list[int]] = {}
    for position in range(mesh.num_devices):
        coords = mesh.coordinates(position)
        key = tuple(coords[a] for a in mesh.axis_names if a not in layout.partial_axes)
        groups.setdefault(key, []).append(position)
    for positions in groups.values():
        total = found[positions[0]]
        for position in positions[1:]:
            total = COMBINE[layout.partial[0][1]](total, found[position])
        expected = full[layout.box(full.shape, mesh.coordinates(positions[0])).slices()]
        assert total.dtype == expected.dtype
        assert total.shape == expected.shape
        assert torch.equal(total, expected), f"devices {positions}: {total} instead of {expected}"


def run_move(source: Layout, target: Layout, full: Tensor, seed: int = 0) -> list[str]:
    """Run the move, check every device; the kinds of the steps that it took."""
    shape = tuple(full.shape)
    source, target = source.normalized(shape), target.normalized(shape)
    rank = one_move(source, target, shape, full.dtype)
    held = pieces_of(full, source, seed)
    before = [h.clone() for h in held]
    check_pieces(run_rank(rank, held), full, target)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True)), "a move wrote to its operand"
    return [step.kind for step in plan_move(source, target, shape, full.dtype).steps]


def sample(seed: int, count: int) -> list[tuple[Layout, Layout, tuple[int, ...], int]]:
    """Pairs of layouts that can be moved between, on all meshes and shapes."""
    chance = random.Random(seed)
    known = {name: list(layouts(mesh, units=(1, 2))) for name, mesh in MESHES.items()}
    found = []
    while len(found) < count:
        held = known[chance.choice(list(known))]
        source, target = chance.choice(held), chance.choice(held)
        found.append((source, target, chance.choice(SHAPES), chance.randrange(1000)))
    return found


SAMPLE = sample(7, 400)


@pytest.mark.slow_rows("4", "5", "6", "7")
@pytest.mark.parametrize("part", range(8))
def test_a_sample_of_moves_gives_every_device_its_piece(part: int) -> None:
    for source, target, shape, seed in SAMPLE[part::8]:
        full = full_value(shape, torch.float32, seed)
        try:
            run_move(source, target, full, seed)
        except AssertionError as error:
            raise AssertionError(f"{source} -> {target} of {shape} on {source.mesh}: {error}") from error


def test_the_sample_takes_every_kind_of_step() -> None:
    kinds = Counter(
        step.kind
        for source, target, shape, _ in SAMPLE
        for step in plan_move(source.normalized(shape), target.normalized(shape), shape, torch.float32).steps
    )
    assert set(kinds) == {"slice", "reduce_scatter", "all_reduce", "all_to_all", "all_gather", "to_partial", "permute"}
    assert min(kinds.values()) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 12), (5, 7), (1, 3)])
def test_every_move_on_two_by_two(shape: tuple[int, ...]) -> None:
    full = full_value(shape, torch.float32, 3)
    for source, target in itertools.product(layouts(MESHES["2x2"], units=(1, 2)), repeat=2):
        run_move(source, target, full, 3)


KINDS: list[tuple[str, str, str, tuple[int, ...], list[str]]] = [
    ("2x2", "[{}, {}]", "[{a}, {}]", (5, 7), ["slice"]),
    ("2x2", "[{}, {}]", "[{}, {b}x2]", (5, 7), ["slice"]),
    ("2x2", "[{a}, {}]", "[{a,b}, {}]", (5, 7), ["slice"]),
    ("2x3", "[{}, {b}]", "[{}, {}]", (5, 7), ["all_gather"]),
    ("2x3", "[{b}, {}]", "[{}, {}]", (2, 7), ["all_gather"]),
    ("2x2", "[{a,b}, {}]", "[{a}, {}]", (5, 7), ["all_gather"]),
    ("2x2", "[{}, {a,b}x2]", "[{}, {a}x2]", (5, 6), ["all_gather"]),
    ("2x3", "[{}, {}] partial(sum: b)", "[{b}, {}]", (4, 7), ["reduce_scatter"]),
    ("2x3", "[{}, {}] partial(sum: b)", "[{}, {b}]", (4, 7), ["reduce_scatter"]),
    ("2x3", "[{a}, {}] partial(sum: b)", "[{a,b}, {}]", (5, 7), ["reduce_scatter"]),
    ("2x3", "[{}, {}] partial(max: b)", "[{b}, {}]", (1, 7), ["all_reduce", "slice"]),
    ("2x2", "[{}, {}] partial(sum: a,b)", "[{}, {}]", (5, 7), ["all_reduce"]),
    ("2x2", "[{}, {}] partial(max: a,b)", "[{}, {}]", (5, 7), ["all_reduce"]),
    ("2x2", "[{}, {}] partial(min: a)", "[{}, {}]", (5, 7), ["all_reduce"]),
    ("2x3", "[{b}, {}]", "[{}, {b}]", (4, 7), ["all_to_all"]),
    ("2x3", "[{}, {b}x2]", "[{b}, {}]", (2, 7), ["all_to_all"]),
    ("2x3", "[{a,b}, {}]", "[{a}, {b}]", (7, 5), ["all_to_all"]),
    ("2x2", "[{}, {}]", "[{}, {}] partial(sum: a)", (5, 7), ["to_partial"]),
    ("2x2", "[{}, {}]", "[{}, {}] partial(max: a,b)", (5, 7), ["to_partial"]),
    ("2x2", "[{}, {}]", "[{}, {}] partial(min: b)", (5, 7), ["to_partial"]),
]


@pytest.mark.parametrize(("mesh", "source", "target", "shape", "kinds"), KINDS)
def test_each_kind_of_step_alone(mesh: str, source: str, target: str, shape: tuple[int, ...], kinds: list[str]) -> None:
    a, b = (Layout.parse(text, MESHES[mesh]) for text in (source, target))
    assert run_move(a, b, full_value(shape, torch.float32, 1), 1) == kinds


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bfloat16, torch.float16, torch.float64])
def test_moves_of_other_dtypes(dtype: torch.dtype) -> None:
    chance = random.Random(11)
    held = list(layouts(MESHES["2x3"], units=(1, 2)))
    for i in range(25):
        full = full_value(chance.choice(SHAPES), dtype, i)
        run_move(chance.choice(held), chance.choice(held), full, i)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_maxima_and_minima(op: str, dtype: torch.dtype) -> None:
    chance = random.Random(13)
    held = list(layouts(MESHES["2x2"], op=op))
    for i in range(25):
        run_move(chance.choice(held), chance.choice(held), full_value(chance.choice(SHAPES), dtype, i), i)


def test_booleans_are_cut_gathered_and_exchanged() -> None:
    chance = random.Random(17)
    held = [layout for layout in layouts(MESHES["2x3"], units=(1, 2)) if not layout.partial]
    for i in range(40):
        run_move(chance.choice(held), chance.choice(held), full_value(chance.choice(SHAPES), torch.bool, i), i)


def test_booleans_as_maxima() -> None:
    """Any is a maximum, all a minimum."""
    full = full_value((5, 7), torch.bool, 1)
    for op in ("max", "min"):
        whole, partial = (Layout.parse(t, MESHES["2x2"]) for t in ("[{}, {}]", f"[{{}}, {{}}] partial({op}: a)"))
        run_move(whole, partial, full)


@pytest.mark.parametrize("shape", [(), (3,), (4, 3, 5), (2, 1, 3, 2)])
def test_values_of_other_ranks(shape: tuple[int, ...]) -> None:
    chance = random.Random(19)
    held = list(layouts(MESHES["2x2"], len(shape)))
    for i in range(20):
        run_move(chance.choice(held), chance.choice(held), full_value(shape, torch.float32, i), i)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_values_without_elements(shape: tuple[int, ...]) -> None:
    chance = random.Random(23)
    held = list(layouts(MESHES["2x2"]))
    for i in range(20):
        run_move(chance.choice(held), chance.choice(held), full_value(shape, torch.float32, i), i)


def test_an_average_is_the_sum_divided() -> None:
    mesh = MESHES["2x2"]
    source, target = (Layout.parse(t, mesh) for t in ("[{}, {}] partial(avg: a,b)", "[{a}, {}]"))
    full = full_value((5, 7), torch.float32, 2)
    rank = one_move(source, target, (5, 7), torch.float32)
    check_pieces(run_rank(rank, [full * 4 * w for w in (0.25, 0.5, 0.0, 0.25)]), full, target)


def test_devices_in_any_order_of_ids() -> None:
    mesh = Mesh("a=2,b=3", devices=(4, 0, 5, 1, 3, 2))
    for source, target in itertools.islice(itertools.product(layouts(mesh), repeat=2), 0, None, 37):
        run_move(source, target, full_value((5, 7), torch.float32, 5), 5)
