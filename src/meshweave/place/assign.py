"""Assignments: what each mesh axis does in an op, enumerated and priced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from meshweave.errors import PlanError, RuleError
from meshweave.ir.graph import Spec
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ops.factors import Dims, Rule
from meshweave.place.rates import Rates, default_rates

Price = Callable[[Layout, Layout, Spec], float]


@dataclass(frozen=True, slots=True)
class Shard:
    """An axis cuts a factor, in blocks of `unit`; of each of its equal `stretches` a part."""

    factor: int
    unit: int = 1
    stretches: int = 1


@dataclass(frozen=True, slots=True)
class PassedPartial:
    """An axis over which the operands of the rule's mode `mode` are partial with reduce op `op`, and so is every
    result."""

    mode: int
    op: str


@dataclass(frozen=True, slots=True)
class Own:
    """An axis whose devices each work on their own rows of a factor, which the key names (`Layout.owned`)."""

    factor: int
    key: str


_TICKS = 10**15  # costs are compared in femtoseconds, so that sums added in another order still tie

Role = Shard | PassedPartial | Own | None  # None: the axis repeats the work


@dataclass(frozen=True, slots=True)
class Assignment:
    """What every axis does in an op, with the layouts that this requires of operands and gives to results."""

    roles: tuple[tuple[str, Role], ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]

    def role(self, axis: str) -> Role:
        return dict(self.roles).get(axis)


_Cut = tuple[list[str], int, int]  # axes, unit and stretches of a factor


def realize(
    rule: Rule, mesh: Mesh, roles: Sequence[tuple[str, Role]], operands: Sequence[Spec], results: Sequence[Spec]
) -> Assignment:
    """The Assignment for `roles`; axes that cut the same factor do so in the order listed."""
    cuts: dict[int, _Cut] = {}
    passes: list[tuple[str, PassedPartial]] = []
    owners = _owners(rule, roles)
    for axis, role in roles:
        if isinstance(role, Shard):
            cuts.setdefault(role.factor, ([], rule.unit(role.factor, role.unit), role.stretches))[0].append(axis)
        elif isinstance(role, PassedPartial):
            passes.append((axis, role))

    def cut(dims: Dims) -> tuple[DimSharding, ...]:
        return tuple(_dim_sharding(rule, dims, d, cuts) for d in range(len(dims)))

    def wanted(i: int) -> Layout:
        partial = tuple((a, p.op) for a, p in passes if i in rule.linear[p.mode].operands)
        return Layout(mesh, cut(rule.operands[i]), partial, rule.owned(i, owners)).normalized(operands[i].shape)

    def layout_of(i: int) -> Layout:
        inside = {f for dim in rule.results[i] for f in dim}
        owned = rule.owned(len(operands) + i, owners)
        kept = {a for a, _, _ in owned}
        partial_axes = [
            (a, rule.reduce_op(f)) for f, (axes, *_) in cuts.items() if f not in inside for a in axes if a not in kept
        ]
        partial_axes += [(a, "sum") for a, f, key in owners if key and f not in inside]
        partial = (*partial_axes, *((a, p.op) for a, p in passes))
        return Layout(mesh, cut(rule.results[i]), tuple(partial), owned).normalized(results[i].shape)

    return Assignment(
        tuple(roles),
        tuple(wanted(i) for i in range(len(operands))),
        tuple(layout_of(i) for i in range(len(results))),
    )


def _owners(rule: Rule, roles: Sequence[tuple[str, Role]]) -> list[tuple[str, int, str]]:
    """The axes along which devices own rows, in the form that `Rule.owned` takes."""
    owners: list[tuple[str, int, str]] = []
    for axis, role in roles:
        if isinstance(role, Own):
            owners.append((axis, role.factor, role.key))
        elif isinstance(role, Shard) and rule.keyed is not None and role.factor == rule.keyed.experts:
            owners.append((axis, role.factor, ""))
    return owners


def _dim_sharding(rule: Rule, dims: Dims, d: int, cuts: dict[int, _Cut]) -> DimSharding:
    factor = next((f for f in dims[d] if f in cuts), None) if rule.is_strided else rule.outer(dims, d)
    if factor is None or factor not in cuts:
        return DimSharding()
    axes, unit, stretches = cuts[factor]
    inner, outer = rule.inner_size(dims, d, factor), rule.outer_size(dims, d, factor)
    return DimSharding(tuple(axes), unit * inner, stretches * outer)


def follow_result(rule: Rule, wanted: Layout, operands: Sequence[Spec], results: Sequence[Spec]) -> Assignment:
    """The Assignment whose first result is sharded like `wanted`, as far as its dims can be cut."""
    roles: list[tuple[str, Role]] = []
    for d, dim in enumerate(wanted.dims):
        role = _follow(rule, rule.results[0], d, wanted)
        roles += [(axis, role) for axis in dim.axes if role is not None]
    return realize(rule, wanted.mesh, roles, operands, results)


def proposals(rule: Rule, axis: str, layouts_of: Sequence[Sequence[Layout]]) -> list[Role]:
    """What `axis` could do, given the operands' layouts: follow a sharding, pass a partial value, or nothing."""
    roles: list[Role] = []
    for i, layouts in enumerate(layouts_of):
        for layout in layouts:
            d = layout.dim_of(axis)
            if d is not None:
                role = _follow(rule, rule.operands[i], d, layout)
                roles += [r for r in _ways_to_follow(rule, role, axis, layout.mesh.size(axis)) if r not in roles]
            owning = [entry for entry in layout.owned if entry[0] == axis]
            roles += [own for entry in owning if (own := _own(rule, i, *entry[1:])) not in (None, *roles)]
            op = dict(layout.partial).get(axis)
            modes = [m for m, mode in enumerate(rule.linear) if i in mode.operands and op in mode.ops]
            roles += [p for p in (PassedPartial(m, op) for m in modes if op is not None) if p not in roles]
    return [*roles, None]


def _ways_to_follow(rule: Rule, role: Shard | None, axis: str, parts: int) -> list[Shard]:
    """The roles that follow from an axis that cuts an operand: the same cut, or the rule's alternative, in equal
    pieces."""
    if role is None:
        return []
    others = [to for of, to in rule.instead if of == role.factor]
    fitting = [Shard(to) for to in others if rule.sizes[to] % parts == 0]
    if rule.is_instead and others and not fitting:
        raise PlanError(
            "key heads do not divide over the devices of a sequence",
            where=f"axis '{axis}'",
            got=f"{rule.sizes[others[0]]} key heads",
            expected=f"a multiple of {parts}",
            hint='mw.Plan.cp(axis, "gather"), or "auto"',
        )
    return fitting if rule.is_instead and others else [role, *fitting]


def as_asked(rule: Rule, attention: str) -> Rule:
    """The rule of an op, restricted to the alternatives that `attention` (`Plan.cp`) allows."""
    if attention == "auto" or not rule.instead:
        return rule
    if attention in ("gather", "ring"):  # the ring pass rewrites the gathers
        return replace(rule, instead=())
    return replace(rule, is_instead=True)


def home(rule: Rule, index: int, operands: Sequence[Operand]) -> Layout | None:
    """The layout that result `index` is moved to right after the op: that of an operand."""
    at = rule.back[index] if rule.back else -1
    return None if at < 0 else _resolve(operands[at].layouts[0]).without_owned()


def homes(rule: Rule, results: Sequence[Spec | None], operands: Sequence[Operand]) -> dict[int, Layout]:
    """The homes of the results that have a home, by their positions among all results."""
    places = (at for at, spec in enumerate(results) if spec is not None)
    known = ((at, home(rule, index, operands)) for index, at in enumerate(places))
    return {at: layout for at, layout in known if layout is not None}


def _own(rule: Rule, position: int, dim: int, key: str) -> Shard | Own | None:
    """How an op continues with rows of operand `position` that devices own: by its own experts, or row by row."""
    rows, keyed = rule.rows_in(rule.operands[position][dim]), rule.keyed
    if keyed is not None and (keyed.rows, keyed.key) == (rows, key):
        return Shard(keyed.experts) if position in keyed.positions else None
    return Own(rows, key) if keyed is None and rows >= 0 and rule.can_own(rows) else None


def _follow(rule: Rule, dims: Dims, d: int, layout: Layout) -> Shard | None:
    stretches = layout.dims[d].stretches
    factor = rule.outer(dims, d) if stretches == 1 else rule.factor_after(dims, d, stretches)
    if factor is None or not rule.is_shardable(factor):
        return None
    inner, unit = rule.inner_size(dims, d, factor), layout.dims[d].unit
    unit = rule.unit(factor, unit // inner if unit % inner == 0 else 1)
    return Shard(factor, unit, stretches // rule.outer_size(dims, d, factor))


def candidates(
    rule: Rule,
    mesh: Mesh,
    layouts: Sequence[Sequence[Layout]],
    operands: Sequence[Spec],
    results: Sequence[Spec],
    wanted: Sequence[Layout] = (),
) -> Iterator[Assignment]:
    """Every combination of roles of the axes. Axes that cut the same factor keep the order that they have in an
    operand. `wanted` are layouts in which the first result is needed: they propose shardings, too."""
    axes = [a for a, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1]
    choices = [_with_wanted(rule, axis, proposals(rule, axis, layouts), wanted) for axis in axes]
    order = _order_of_layouts(axes, layouts)
    for combination in product(*choices):
        roles = dict(zip(axes, combination, strict=True))
        if _agree(roles.values()) and _has_whole_blocks(rule, mesh, roles):
            yield realize(rule, mesh, [(a, roles[a]) for a in order], operands, results)


def _with_wanted(rule: Rule, axis: str, roles: list[Role], wanted: Sequence[Layout]) -> list[Role]:
    for layout in wanted:
        d = layout.dim_of(axis)
        role = None if d is None else _follow(rule, rule.results[0], d, layout)
        roles = roles if role in roles else [role, *roles]
    return roles


def _agree(roles: Iterable[Role]) -> bool:
    """Whether axes that cut the same factor cut it in the same unit."""
    units: dict[int, int] = {}
    shards = [r for r in roles if isinstance(r, Shard)]
    return all(units.setdefault(r.factor, r.unit) == r.unit for r in shards)


def _has_whole_blocks(rule: Rule, mesh: Mesh, roles: Mapping[str, Role]) -> bool:
    """Whether every device has equally many blocks of rows, if the op has rows in blocks."""
    parts = prod(mesh.size(a) for a, r in roles.items() if isinstance(r, Shard) and r.factor == rule.block >= 0)
    return parts == 1 or rule.sizes[rule.block] % parts == 0


def _order_of_layouts(axes: Sequence[str], layouts_of: Sequence[Sequence[Layout]]) -> list[str]:
    order: list[str] = []
    for layouts in layouts_of:
        for layout in layouts[:1]:
            for dim in layout.dims:
                order += [a for a in dim.axes if a not in order and a in axes]
            order += [a for a in layout.owned_axes if a not in order and a in axes]
    return order + [a for a in axes if a not in order]


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand: its spec, the layouts in which it exists, the factor on the price of moving it, and how many ops use
    it (they share the cost of reducing a partial value)."""

    spec: Spec
    layouts: tuple[Layout, ...]
    weight: float = 1.0
    num_users: int = 1


@dataclass(frozen=True, slots=True)
class OpPrices:
    """Seconds of moves of operands and of each result (of a gradient a share, if it is reduced once for several
    microbatches), and the rates of work."""

    operands: Price
    results: tuple[Price, ...]
    rates: Rates = default_rates


def cheapest(
    rule: Rule,
    mesh: Mesh,
    operands: Sequence[Operand],
    results: Sequence[Spec],
    prices: OpPrices,
    wanted: Sequence[Layout] = (),
    proposed: Sequence[Layout] = (),
) -> Assignment:
    """The assignment of least cost: moves of operands, reduction of partial results, and repeated work.

    If the first result is needed in the layouts `wanted`, moving it there counts instead of reducing it. `proposed` are
    layouts of it that may be useful: they cost nothing and require nothing. Ties go to fewer moves (a partial value
    with a single user flows on, and may meet another), then to fewer partial results, then to the first candidate, so
    that the choice is deterministic.
    Raises RuleError when an operand is partial in a way that no move can reduce.
    """
    best: tuple[int, int, int] | None = None
    chosen: Assignment | None = None
    specs = [h.spec for h in operands]
    for option in candidates(rule, mesh, [h.layouts for h in operands], specs, results, (*wanted, *proposed)):
        cost = sum(_fetch(h, layout, prices.operands) for h, layout in zip(operands, option.operands, strict=True))
        if wanted:
            cost += sum(prices.results[0](option.results[0], layout, results[0]) for layout in wanted)
        else:
            ends = [home(rule, i, operands) or _resolve(r) for i, r in enumerate(option.results)]
            ways = zip(prices.results, option.results, ends, results, strict=True)
            cost += sum(price(result, end, spec) for price, result, end, spec in ways)
        cost += _repeated_seconds(rule, option, mesh, results, prices.rates)
        moved = sum(layout not in h.layouts for h, layout in zip(operands, option.operands, strict=True))
        rank = (round(cost * _TICKS), moved, sum(len(r.partial) for r in option.results))
        if best is None or rank < best:
            best, chosen = rank, option
    if chosen is None:
        raise RuleError("no axis assignment fits", got=str([str(h.layouts[0]) for h in operands]))
    return chosen


def _fetch(operand: Operand, wanted: Layout, price: Price) -> float:
    if wanted in operand.layouts:
        return 0.0
    return operand.weight * min(
        _share(operand, layout, wanted) * price(layout, wanted, operand.spec) for layout in operand.layouts
    )


def _share(operand: Operand, layout: Layout, wanted: Layout) -> float:
    """A consumer's share of a move: a partial value with several users is reduced once for all of them."""
    return 1.0 / max(operand.num_users, 1) if layout.partial and not wanted.partial else 1.0


def _resolve(layout: Layout) -> Layout:
    return Layout(layout.mesh, layout.dims, (), layout.owned)


def _repeated_seconds(rule: Rule, option: Assignment, mesh: Mesh, results: Sequence[Spec], rates: Rates) -> float:
    """Time of the op on a device beyond its time if every axis did its share."""
    used = prod(mesh.size(axis) for axis, role in option.roles if isinstance(role, (Shard, Own)))
    whole = rates(results[0].dtype).seconds(rule.num_steps, results) if results else 0.0
    return whole * (1.0 / used - 1.0 / mesh.num_devices)
