"""The proof of a sharding rule: an op run on pieces gives what it gives unsharded, for every legal assignment.

A sample is an op with arguments. For each assignment its one-op placed graph is expanded and run on virtual devices;
every device's result is checked against its piece of the whole result, partial results after they are reduced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.errors import LayoutError
from meshweave.ir.graph import Input, Origin, Spec, StepGraph, op_name, tensor_inputs
from meshweave.ir.grouped import all_rows, own_rows
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ops.factors import Rule
from meshweave.ops.registry import result_specs, row_for
from meshweave.place.assign import Assignment, PassedPartial, Role, Shard, realize
from meshweave.place.expand.expand import expand
from meshweave.runtime.executor import compile_tasks, environment, evaluate


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor argument: shape, dtype, and the values it may take."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: int = -4
    high: int = 5
    real: bool = False
    is_zeros: bool = False

    def make(self, generator: torch.Generator) -> Tensor:
        if self.real:
            span = float(self.high - self.low)
            return (torch.rand(self.shape, generator=generator, dtype=torch.float64) * span + self.low).to(self.dtype)
        return torch.randint(self.low, self.high, self.shape, generator=generator).to(self.dtype)


def F(*shape: int, dtype: torch.dtype = torch.float32) -> Value:
    """Floats with integer values, so that sums agree to the bit in any order."""
    return Value(shape, dtype)


def R(*shape: int, low: int = -2, high: int = 2) -> Value:
    """Real numbers."""
    return Value(shape, torch.float32, low, high, real=True)


def P(*shape: int) -> Value:
    """Real numbers between 0 and 1."""
    return R(*shape, low=0, high=1)


def I(*shape: int, high: int = 5, low: int = 0, dtype: torch.dtype = torch.int64) -> Value:  # noqa: E743
    return Value(shape, dtype, low, high)


def B(*shape: int) -> Value:
    return Value(shape, torch.bool, 0, 2)


def Z(*shape: int) -> Value:
    """Zeros that a node of the graph makes, which rules may ask for."""
    return Value(shape, torch.float32, 0, 1, is_zeros=True)


Made = Callable[[torch.Generator], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """An op with its arguments, in the form that capture gives them. `exact`: results agree to the bit."""

    target: Any
    args: tuple[Any, ...] | Made
    kwargs: dict[str, Any]
    exact: bool

    def __str__(self) -> str:
        if callable(self.args):
            return op_name(self.target)
        texts = [str(list(a.shape)) if isinstance(a, Value) else _short(a) for a in self.args]
        return f"{op_name(self.target)}({','.join(texts)})"


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_short(v) for v in value) + "]"
    return "x".join(map(str, value.shape)) if isinstance(value, Value) else str(value)


def sample(target: Any, *args: Any, exact: bool = True, **kwargs: Any) -> Sample:
    return Sample(target, args, kwargs, exact)


def made(target: Any, build: Made, *, exact: bool = False, **kwargs: Any) -> Sample:
    """A sample whose arguments depend on each other."""
    return Sample(target, build, kwargs, exact)


@dataclass(slots=True)
class Case:
    """A sample as a one-op graph, with the values of its operands and the result on one device."""

    step: StepGraph
    node: fx.Node
    items: list[fx.Node | None]
    operands: list[Tensor]
    expected: list[Tensor]
    exact: bool

    @property
    def rule(self) -> Rule:
        return row_for(self.node).rule(self.node)


def build_case(item: Sample, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    graph, operands, inputs = fx.Graph(), [], []

    def enter(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(enter(v) for v in value)
        is_zeros = isinstance(value, Value) and value.is_zeros
        if isinstance(value, Value):
            value = value.make(generator)
        if not isinstance(value, Tensor):
            return value
        full = torch.ops.aten.full.default, (list(value.shape), 0), {"dtype": value.dtype}
        node = graph.call_function(*full) if is_zeros else graph.placeholder(f"x{len(operands)}")
        node.meta.update(spec=Spec(tuple(value.shape), value.dtype), origin=Origin("forward"))
        if not is_zeros:
            inputs.append(Input("batch", node.name, node.meta["spec"]))
        operands.append(value)
        return node

    raw = item.args(generator) if callable(item.args) else item.args
    args, kwargs = enter(tuple(raw)), {k: enter(v) for k, v in item.kwargs.items()}
    node = graph.call_function(item.target, args, kwargs)
    values = iter(operands)
    real_args, real_kwargs = fx.map_arg((args, kwargs), lambda _: next(values).clone())
    whole = item.target(*real_args, **real_kwargs)
    parts = list(whole) if isinstance(whole, (tuple, list)) else [whole]
    specs = tuple(None if v is None else Spec(tuple(v.shape), v.dtype) for v in parts)
    node.meta["spec"] = specs[0] if isinstance(whole, Tensor) else specs
    node.meta["origin"] = Origin("forward", source="model.py:7")
    items: list[fx.Node | None] = [node]
    if not isinstance(whole, Tensor):
        items = [None if s is None else graph.call_function(operator.getitem, (node, i)) for i, s in enumerate(specs)]
        for i, found in enumerate(items):
            if found is not None:
                found.meta.update(spec=specs[i], origin=node.meta["origin"])
    kept = [n for n in items if n is not None]
    graph.output(kept)
    step = StepGraph(graph, tuple(inputs), tuple(("value", n.name) for n in kept))
    return Case(step, node, items, operands, [v for v in parts if v is not None], item.exact)


def roles_of(case: Case) -> list[Role]:
    """Everything that one axis may do in this op."""
    rule = case.rule
    found: list[Role] = [None]
    for factor, size in enumerate(rule.sizes):
        if rule.is_shardable(factor):
            found += [Shard(factor), Shard(factor, 2)] if size > 2 else [Shard(factor)]
    for mode, way in enumerate(rule.linear):
        found += [PassedPartial(mode, op) for op in sorted(way.ops) if _is_partial(case, way.operands, op)]
    return found


def _is_partial(case: Case, operands: frozenset[int], op: str) -> bool:
    """Whether values of these dtypes are ever partial in this way: no sums of booleans, no averages of integers. Zeros
    that the graph makes would be moved first."""
    if any(tensor_inputs(case.node)[i].op != "placeholder" for i in operands):
        return False
    dtypes = [case.operands[i].dtype for i in operands]
    if op == "avg":
        return all(d.is_floating_point for d in dtypes)
    return op != "sum" or torch.bool not in dtypes


def one_axis(case: Case, size: int) -> Iterator[Assignment]:
    mesh = Mesh(a=size)
    for role in roles_of(case):
        yield _realize(case, mesh, [("a", role)])


def two_axes(case: Case) -> Iterator[Assignment]:
    """Both axes of a 2x2 mesh do something; where they cut one factor, in both orders."""
    mesh = Mesh(a=2, b=2)
    roles = [role for role in roles_of(case) if role is not None]
    for first, second in product(roles, repeat=2):
        if not _fit(first, second):
            continue
        yield _realize(case, mesh, [("a", first), ("b", second)])
        if isinstance(first, Shard) and first == second:
            yield _realize(case, mesh, [("b", first), ("a", second)])


def _fit(first: Role, second: Role) -> bool:
    """Axes of one factor cut in one unit; different reductions at once have no order."""
    if isinstance(first, Shard) and isinstance(second, Shard) and first.factor == second.factor:
        return first.unit == second.unit
    return not (isinstance(first, PassedPartial) and isinstance(second, PassedPartial)) or first.op == second.op


def _realize(case: Case, mesh: Mesh, roles: Sequence[tuple[str, Role]]) -> Assignment:
    operands = [n.meta["spec"] for n in tensor_inputs(case.node)]
    return realize(case.rule, mesh, roles, operands, result_specs(case.node))


def run_sharded(case: Case, option: Assignment, seed: int = 1) -> list[list[Tensor]]:
    """Per result the tensors that the devices make, given the operands in the layouts of `option`."""
    _place(case, option)
    mesh = option.results[0].mesh
    (rank,) = expand(case.step, mesh, _no_move)
    compiled = compile_tasks(rank, torch.device("cpu"))
    envs = [environment(compiled, device) for device in mesh.devices]
    generator = torch.Generator().manual_seed(seed)
    given = zip(tensor_inputs(case.node), case.operands, option.operands, strict=True)
    inputs = [(value, layout) for node, value, layout in given if node.op == "placeholder"]
    for slot, (value, layout) in zip(compiled.inputs, inputs, strict=True):
        pieces = zip(mesh.devices, pieces_of(value, layout, generator), strict=True)
        for env, (device, piece) in zip(envs, pieces, strict=True):
            ends = ends_on(case, option, device)
            env[slot] = own_rows(piece, ends, *owner(case, value, layout, device), 0) if layout.owned else piece
    with torch.no_grad():
        for device, env in zip(mesh.devices, envs, strict=True):
            for task in (t for part in compiled.tasks.values() for t in part):
                env[task.out] = evaluate(task, env, device)
    return [[env[slot] for env in envs] for slot in compiled.outputs]


def ends_on(case: Case, option: Assignment, device: int) -> Tensor:
    """The ends that a device has: of all rows, or of its blocks of them."""
    ends = case.operands[-1]
    return ends[option.operands[-1].box_of(ends.shape, device).slices()]


def owner(case: Case, value: Tensor, layout: Layout, device: int) -> tuple[int, int, int, int]:
    """(dim, first row of the piece, first expert, number of experts) of the rows that a device owns."""
    cut = Layout(layout.mesh, (DimSharding(layout.owned_axes),))
    experts, (dim, *_) = cut.box_of(case.operands[-1].shape[-1:], device), (dim for _, dim, _ in layout.owned)
    return dim, layout.box_of(value.shape, device).offset[dim], experts.offset[0], experts.size[0]


def _no_move(*_: Any) -> Any:
    raise AssertionError("a one-op graph holds no move")


def _place(case: Case, option: Assignment) -> None:
    for node, layout in zip(tensor_inputs(case.node), option.operands, strict=True):
        node.meta["layout"] = layout
    rest = iter(option.results)
    layouts = [None if n is None else next(rest) for n in case.items]
    for node, layout in zip(case.items, layouts, strict=True):
        if node is not None:
            node.meta["layout"] = layout
    if isinstance(case.node.meta["spec"], tuple):
        case.node.meta["layout"] = tuple(layouts)
    case.node.meta["assignment"] = option


def pieces_of(value: Tensor, layout: Layout, generator: torch.Generator) -> list[Tensor]:
    """One tensor per device; along partial axes random parts that reduce to the value."""
    mesh = layout.mesh
    sizes = [mesh.size(axis) for axis in layout.partial_axes]
    ops = {op for _, op in layout.partial}
    assert len(ops) <= 1, "different reductions at once"
    parts = _parts(value, prod(sizes), ops.pop(), generator) if ops else [value]
    found = []
    for position in range(mesh.num_devices):
        coords = mesh.coordinates(position)
        index = 0
        for axis, size in zip(layout.partial_axes, sizes, strict=True):
            index = index * size + coords[axis]
        found.append(parts[index][layout.box(value.shape, coords).slices()].contiguous())
    return found


def _parts(value: Tensor, count: int, op: str, generator: torch.Generator) -> list[Tensor]:
    """`count` tensors that reduce to `value`, all of them different."""
    if op in ("max", "min"):
        owner = torch.randint(0, count, value.shape, generator=generator)
        other = (torch.minimum if op == "max" else torch.maximum)(value, value.flatten().roll(1).view(value.shape))
        return [torch.where(owner == i, value, other) for i in range(count)]
    whole = value * count if op == "avg" else value
    parts = [torch.randint(-3, 4, value.shape, generator=generator).to(value.dtype) for _ in range(count - 1)]
    return [*parts, whole - sum(parts)]


_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "avg": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
}


def check(case: Case, option: Assignment) -> None:
    """Run and compare: shape, dtype and values of every piece; replicas equal to the bit; every element covered."""
    results = run_sharded(case, option)
    for whole, pieces, placed in zip(case.expected, results, option.results, strict=True):
        layout = placed.owned_as_parts()
        if placed.owned:  # as a part of a sum, with zeros for rows of others
            for device, piece in zip(placed.mesh.devices, list(pieces), strict=True):
                dim, *numbers = owner(case, whole, placed, device)
                size = placed.box_of(whole.shape, device).size[dim]
                pieces[device] = all_rows(piece, ends_on(case, option, device), dim, *numbers, size)
        seen = torch.zeros(whole.shape, dtype=torch.bool)
        for box, members in _by_piece(layout, whole.shape, pieces):
            own = whole[box.slices()]
            for member in members:
                assert tuple(member.shape) == box.size, (option, tuple(member.shape), box)
                assert member.dtype == whole.dtype, (option, member.dtype, whole.dtype)
            got = reduce_parts(members, [op for _, op in layout.partial])
            assert_same(got, own, case.exact, str(option))
            seen[box.slices()] = True
        assert bool(seen.all()), option


def _by_piece(layout: Layout, shape: Sequence[int], pieces: Sequence[Tensor]) -> Iterator[tuple[Any, list[Tensor]]]:
    """(box, one tensor per index of the partial axes) of every piece; replicas must agree."""
    mesh = layout.mesh
    groups: dict[tuple[int, ...], dict[tuple[int, ...], Tensor]] = {}
    for position, piece in enumerate(pieces):
        coords = mesh.coordinates(position)
        at = tuple(coords[a] for a in layout.sharded_axes)
        member = tuple(coords[a] for a in layout.partial_axes)
        held = groups.setdefault(at, {}).setdefault(member, piece)
        assert torch.equal(torch.nan_to_num(held), torch.nan_to_num(piece)), "replicas differ"
    for at, members in groups.items():
        yield layout.box(shape, dict(zip(layout.sharded_axes, at, strict=True))), list(members.values())


def reduce_parts(parts: Sequence[Tensor], ops: Sequence[str]) -> Tensor:
    if not ops:
        return parts[0]
    if len(set(ops)) > 1:
        raise LayoutError("different reductions at once", got=str(ops))
    stacked = torch.stack(list(parts))
    if stacked.dtype == torch.bool:
        return stacked.all(0) if ops[0] == "min" else stacked.any(0)
    return _REDUCE[ops[0]](stacked)


def assert_same(got: Tensor, expected: Tensor, exact: bool, where: str) -> None:
    if exact:
        assert torch.equal(got, expected), f"{where}\n got {got}\n expected {expected}"
        return
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda m: f"{where}\n{m}")
