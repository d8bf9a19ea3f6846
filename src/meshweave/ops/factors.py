"""Factors: what a sharding rule says about an op.

An op is described like an einsum. Each factor is an independent loop over the global tensors; the rule says which
factors each dim of each operand and result consists of. Sharding a factor over an axis shards every dim whose outermost
part it is; a result without a sharded factor becomes partial. A factor may be whole: the op cannot run on a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from meshweave.errors import RuleError
from meshweave.ir.graph import Spec

Dim = tuple[int, ...]  # factor ids, outermost first; () is a dim of size 1 that is broadcast
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Linear:
    """A way in which partial values pass through an op: the operands that are partial together; the others are
    replicated.

    `ops` are the reduce ops that pass. Sums pass linear ops; every reduce op passes pure data movement.
    """

    operands: frozenset[int]
    ops: frozenset[str] = frozenset({"sum"})


@dataclass(frozen=True, slots=True)
class Keyed:
    """Rows that a key value assigns to experts. An axis that cuts the factor `experts` gives every device the rows of
    its own experts in the tensors at `positions` (operands first, then results); their dims of factor `rows` are then
    owned by the key."""

    experts: int
    rows: int
    key: str
    positions: frozenset[int]


@dataclass(frozen=True, slots=True)
class Rule:
    """Sharding rule of an op for given shapes. Factor f has `sizes[f]` elements.

    `instead` are pairs of factors: an axis that would cut the first may (must, where `is_instead`) cut the second,
    though no operand is cut so. `back` names for each result the operand to whose layout it is moved right after the
    op; -1 if it stays. `placed` are factors along which the op uses indices into the whole dim (a lookup in a table):
    the op on a piece gets the piece's offset, so the cuts have to be known at compile time. `block` is the factor of
    blocks of rows (`ir.blocks`): devices may own rows of the blocks that they have. `is_strided`: factors that are not
    outermost can be cut, too (`DimSharding.stretches`).
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[int] = frozenset()
    linear: tuple[Linear, ...] = ()
    reduce: tuple[tuple[int, str], ...] = ()  # factor -> reduce op of results without it; sum if not listed
    instead: tuple[tuple[int, int], ...] = ()
    is_instead: bool = False
    back: tuple[int, ...] = ()
    keyed: Keyed | None = None
    placed: frozenset[int] = frozenset()
    block: int = -1
    is_strided: bool = False

    @property
    def num_steps(self) -> int:
        """Number of iterations of all loops together. A lookup loops over its positions, whatever the table's size."""
        tables = self.placed if len(self.placed) < len(self.sizes) else ()
        return prod(size for factor, size in enumerate(self.sizes) if factor not in tables)

    def reduce_op(self, factor: int) -> str:
        return dict(self.reduce).get(factor, "sum")

    def outer(self, dims: Dims, dim: int) -> int | None:
        """The factor that sharding `dim` would shard: its outermost factor of more than one element, unless whole."""
        factor = self.outermost(dims[dim])
        return None if factor < 0 or factor in self.whole else factor

    def outermost(self, dim: Dim) -> int:
        """The outermost factor of a dim of more than one element, whole or not; -1 if there is none."""
        return next((f for f in dim if self.sizes[f] > 1), -1)

    def inner_size(self, dims: Dims, dim: int, factor: int) -> int:
        """Number of elements of `dim` per iteration of its `factor`: the unit in which the dim is then cut."""
        return prod(self.sizes[f] for f in dims[dim][dims[dim].index(factor) + 1 :])

    def outer_size(self, dims: Dims, dim: int, factor: int) -> int:
        """Number of iterations of the factors of `dim` outside of `factor`."""
        return prod(self.sizes[f] for f in dims[dim][: dims[dim].index(factor)])

    def factor_after(self, dims: Dims, dim: int, steps: int) -> int | None:
        """The factor of `dim` that a cut of each of its `steps` equal stretches cuts."""
        for factor in dims[dim]:
            outer = self.outer_size(dims, dim, factor)
            if (
                steps % outer == 0
                and self.sizes[factor] % (steps // outer) == 0
                and self.sizes[factor] > steps // outer
            ):
                return factor
        return None

    def loop(self, dims: Dims, dim: int) -> int | None:
        """The factor that a cut of `dim` cuts: the outer factor, or the only factor even if it has one element.
        Placement never chooses the latter cut (a single device works and the others have empty pieces), but parameters
        may be stored so."""
        only = dims[dim][0] if len(dims[dim]) == 1 else None
        return only if only is not None and self.is_single(only) else self.outer(dims, dim)

    def is_single(self, factor: int) -> bool:
        """Whether the factor has one element, is not whole, and is alone in every dim that contains it."""
        if factor in self.whole or self.sizes[factor] != 1:
            return False
        return all(dim == (factor,) for dims in (*self.operands, *self.results) for dim in dims if factor in dim)

    def unit(self, factor: int, unit: int) -> int:
        """The block size of a factor when `unit` is requested: experts are cut singly, since a layout of owned rows
        names their ends, not blocks."""
        return 1 if self.keyed is not None and factor == self.keyed.experts else unit

    def can_own(self, factor: int) -> bool:
        """Whether rows of this factor, alone in its dims, pass through the op independently or are summed: results
        without it are then partial sums. Ops by expert say in `keyed` which rows they own."""
        if self.keyed is not None:
            return False
        inside = [{f for dim in dims for f in dim} for dims in self.results]
        with_rows = [dim for dims in (*self.operands, *self.results) for dim in dims if factor in dim]
        alone = all(self.rows_in(dim) == factor for dim in with_rows)
        is_kept = all(factor in factors for factors in inside) or self.reduce_op(factor) == "sum"
        is_free = factor not in self.whole and factor not in self.placed and self.sizes[factor] > 1
        return is_free and alone and is_kept

    def rows_in(self, dim: Dim) -> int:
        """The factor of the rows of a dim that devices may own: its only factor, or the rows of each block; else -1."""
        is_in_blocks = len(dim) == 2 and dim[0] == self.block
        return dim[-1] if len(dim) == 1 or is_in_blocks else -1

    def owned(self, position: int, axes: Sequence[tuple[str, int, str]]) -> tuple[tuple[str, int, str], ...]:
        """`Layout.owned` of the tensor at `position`. `axes` are (axis, factor, key): the axis cuts the experts of this
        rule, or each of its devices owns rows of the factor by the key."""
        dims = (*self.operands, *self.results)[position]
        entries = []
        for axis, factor, key in axes:
            if self.keyed is not None and factor == self.keyed.experts:
                factor, key = (self.keyed.rows, self.keyed.key) if position in self.keyed.positions else (-1, "")
            entries += [(axis, d, key) for d, dim in enumerate(dims) if self.rows_in(dim) == factor >= 0 and key]
        return tuple(entries)

    def is_shardable(self, factor: int) -> bool:
        """Whether the factor can be sharded: not whole, and outermost in every dim."""
        if factor in self.whole or self.sizes[factor] < 2:
            return False
        return self.is_strided or all(
            self.outer(dims, d) == factor
            for dims in (*self.operands, *self.results)
            for d in range(len(dims))
            if factor in dims[d]
        )


class RuleBuilder:
    """Collects factors while a rule function reads shapes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.fixed: set[int] = set()

    def factor(self, size: int, *, whole: bool = False) -> int:
        self.sizes.append(size)
        if whole:
            self.fixed.add(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def dims(self, shape: Sequence[int], *, whole: Iterable[int] = ()) -> list[Dim]:
        """A new factor for every dim."""
        return [(self.factor(size, whole=d in set(whole)),) for d, size in enumerate(shape)]

    def broadcast(self, shape: Sequence[int], dims: Sequence[Dim]) -> list[Dim]:
        """Dims of an operand of `shape` that broadcasts to `dims` from the right; equal sizes, even 1, do not
        broadcast."""
        last = dims[len(dims) - len(shape) :]
        return [dim if size == prod(self.sizes[f] for f in dim) else () for size, dim in zip(shape, last, strict=True)]

    def dims_from(self, shape: Sequence[int], known: Mapping[int, Dim]) -> list[Dim]:
        """Dim d consists of the factors `known[d]` if listed, else of a whole factor of its own."""
        return [known[d] if d in known else (self.factor(size, whole=True),) for d, size in enumerate(shape)]

    def rule(
        self,
        operands: Sequence[Sequence[Dim]],
        results: Sequence[Sequence[Dim]],
        linear: Sequence[Linear] = (),
        reduce: Mapping[int, str] | None = None,
    ) -> Rule:
        return Rule(
            tuple(self.sizes),
            tuple(tuple(d) for d in operands),
            tuple(tuple(d) for d in results),
            frozenset(self.fixed),
            tuple(linear),
            tuple((reduce or {}).items()),
        )


def sums(*groups: Iterable[int]) -> tuple[Linear, ...]:
    """A mode per group of operands in which partial sums pass."""
    return tuple(Linear(frozenset(g)) for g in groups)


ANY_REDUCTION = frozenset({"sum", "avg", "max", "min"})


def moved(operands: Iterable[int]) -> tuple[Linear, ...]:
    """All partial values pass if these operands are partial together: the op only moves elements."""
    return (Linear(frozenset(operands), ANY_REDUCTION),)


_TOKEN = re.compile(r"\(([^()]*)\)|([^\s()]+)|([()])")
Names = tuple[str, ...]  # of the factors of one dim
Text = tuple[tuple[Names, ...], ...]  # per tensor, per dim


def parse_factors(text: str) -> tuple[Text, Text]:
    """Read `"m k, k n -> m n"`. A merged dim is `(h d)`, a dim of size 1 is `1`, a whole factor ends in `!`.

    An empty side is a single tensor without dims. Raises RuleError for text that is not of this form.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError("not a factor rule", got=text, expected="something like 'm k, k n -> m n'")
    return _side(left, text), _side(right, text)


def _side(part: str, text: str) -> Text:
    return tuple(tuple(_dim(m, text) for m in _TOKEN.finditer(value)) for value in part.split(","))


def _dim(token: re.Match[str], text: str) -> Names:
    group, name, stray = token.groups()
    if stray:
        raise RuleError("unbalanced parenthesis", got=text, expected="a merged dim written (h d)")
    return () if name == "1" else tuple((group or name or "").split())


def rule_from_text(text: str, operands: Sequence[Spec], results: Sequence[Spec], linear: Sequence[Linear] = ()) -> Rule:
    """The Rule of a factor text for operands and results of these shapes.

    Sizes come from dims of a single factor; at most one factor of a merged dim may have its size nowhere else. A factor
    marked `!` anywhere is whole everywhere. Raises RuleError if ranks or sizes contradict each other.
    """
    left, right = parse_factors(text)
    left = () if left == ((),) and not operands else left
    if len(left) != len(operands) or len(right) != len(results):
        raise RuleError(
            "the rule and the op differ in their number of tensors",
            where=text,
            got=f"{len(left)} -> {len(right)}",
            expected=f"{len(operands)} -> {len(results)}",
        )
    whole = {n.rstrip("!") for dims in (*left, *right) for names in dims for n in names if n.endswith("!")}
    bare = [tuple(tuple(n.rstrip("!") for n in names) for names in dims) for dims in (*left, *right)]
    sizes = _sizes(text, list(zip(bare, (*operands, *results), strict=True)))
    order = list(sizes)
    build = RuleBuilder()
    for name in order:
        build.factor(sizes[name], whole=name in whole)
    values = [[tuple(order.index(n) for n in names) for names in dims] for dims in bare]
    return build.rule(values[: len(left)], values[len(left) :], linear)


def _sizes(text: str, values: Sequence[tuple[tuple[Names, ...], Spec]]) -> dict[str, int]:
    """Size of every factor, in order of appearance."""
    sizes: dict[str, int] = {}
    for dims, spec in values:
        if len(dims) != len(spec.shape):
            raise RuleError("the rule and a tensor differ in their number of dims", where=text, got=str(spec))
        every = [n for names in dims for n in names]
        if len(set(every)) < len(every):
            raise RuleError("a factor stands twice in one tensor", where=text, got=" ".join(every))
        for names, size in zip(dims, spec.shape, strict=True):
            if not names and size != 1:
                raise RuleError("the rule has a 1 where the dim is not of size 1", where=text, got=str(spec))
            if len(names) == 1 and sizes.setdefault(names[0], size) != size:
                raise RuleError(f"factor {names[0]} has two sizes", got=f"{sizes[names[0]]} and {size}", where=text)
    for dims, spec in values:
        for names, size in zip(dims, spec.shape, strict=True):
            unknown = [n for n in names if n not in sizes]
            if len(unknown) > 1:
                raise RuleError(f"the sizes of {', '.join(unknown)} are not determined", where=text, got=str(spec))
            known = prod(sizes[n] for n in names if n in sizes)
            if unknown and known and size % known == 0:
                sizes[unknown[0]] = size // known
            elif unknown or known != size:
                raise RuleError(f"({' '.join(names)}) does not divide the dim", where=text, got=str(spec))
    return sizes
