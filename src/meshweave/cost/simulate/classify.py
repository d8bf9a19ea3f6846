"""The kind of work of each op, from a single table, and its amounts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.interop.ops import arguments_of, is_operator
from meshweave.ir import local_ops
from meshweave.ir.causal import Causal
from meshweave.ir.graph import argument, op_name, origin_of
from meshweave.ir.rank import linear, operands_of
from meshweave.ir.traits import base_name, inner_target, work_kind
from meshweave.ir.values import Value, Values
from meshweave.ir.work import Attention, Matmul, MemoryWork, Work
from meshweave.ops.registry import TABLE

aten = torch.ops.aten
Operands = Sequence[Value]
Priced = Callable[[fx.Node, Operands, Operands], tuple[Work, ...]]

_FUSIBLE = frozenset({"pointwise", "reduction", "strided", "gather", "fill", "random"})
_GATHERED = frozenset({"gather", "scatter"})


def known_kind(node: fx.Node) -> str:
    """`matmul`, `attention`, `registered` (work by a user's function) or a kind of memory work; "" if unknown."""
    target = inner_target(node)
    if (op := TABLE.get(target)) is not None and op.cost:
        return "registered" if callable(op.cost) else op.cost
    if target is aten.scatter.value or (target is local_ops.scatter and not isinstance(node.args[3], fx.Node)):
        # one-hot: compilers compute it where the index is compared, eager kernels write a few elements
        return "pointwise"
    return work_kind(target) if node.op == "call_function" else ""


def priced_by_bytes(names: Iterable[str]) -> tuple[str, ...]:
    """The note on ops of no known kind, if there are any: they are priced like a copy of what they read and write."""
    shown = ", ".join(sorted(set(names)))
    return (f"priced by bytes moved: {shown}; mw.register_rule(op, ..., cost=...) is more exact",) if shown else ()


def is_fusible(kind: str) -> bool:
    """Whether a compiler such as Inductor fuses ops of this kind with their neighbours."""
    return kind in _FUSIBLE


def is_closing(node: fx.Node, operands: Operands, results: Operands) -> bool:
    """Whether a reduction ends its kernel: it reduces more than the innermost dims, so later ops need the complete
    result."""
    if known_kind(node) != "reduction" or not operands or not results:
        return False
    before, after = operands[0].shape, results[0].shape
    if len(before) == len(after):
        reduced = [d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        return bool(reduced) and reduced[0] < len(before) - len(reduced)
    return before[: len(after)] != after or not after


def operand_values(node: fx.Node, values: Mapping[fx.Node, Values]) -> Operands:
    """The operands of an op in the order of its arguments, with repetitions: `x @ x` has two."""
    return [x for n in operands_of(node) for x in values.get(n, ())]


def work_of(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    """The work of an op by itself: it reads operands from and writes results to device memory; an op of no known kind
    does nothing else (`priced_by_bytes`)."""
    kind = known_kind(node)
    if kind == "registered":
        return _registered_work(node, operands, results)
    if kind == "matmul":
        return _MATMULS[base_name(inner_target(node))](node, operands, results)
    if kind == "attention":
        return _attention(node, operands, results)
    return (memory_work(kind or "pointwise", operands, results),)


def _registered_work(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    target = inner_target(node)
    cost = TABLE[target].cost
    assert callable(cost)
    try:
        registered = cost(node, operands, results)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise MeshweaveError(f"the cost of {op_name(target)} failed", where=str(origin_of(node)), got=got) from error
    works = registered if isinstance(registered, tuple) else (registered,)
    if not all(isinstance(work, Work) for work in works):
        expected = "Matmul, Attention or Memory of meshweave.cost.hardware, or a tuple of them"
        raise MeshweaveError(f"the cost of {op_name(target)} is not a work", got=repr(registered), expected=expected)
    return works


def memory_work(kind: str, operands: Operands, results: Operands) -> MemoryWork:
    """A kernel that reads `operands` and writes `results`, each storage once."""
    written = sum(x.bytes for x in results)
    read = sum(_unique(operands).values())
    if kind in _GATHERED and operands:  # reads as many rows as it writes, or adds as many as its operand has
        read = min(read, 2 * max(written, *(x.bytes for x in operands[1:] or operands)))
    elements = max((x.num_elements for x in (*operands, *results)), default=0)
    dtype = (results or operands)[0].dtype if (results or operands) else torch.float32
    shown = "reduction" if kind == "scan" else kind
    return MemoryWork(shown, read + written, elements, dtype)


def _unique(values: Operands) -> dict[int, int]:
    """Bytes read per storage."""
    read: dict[int, int] = {}
    for x in values:
        read[x.storage] = min(max(read.get(x.storage, 0), x.bytes), x.storage_bytes)
    return read


def _total(operands: Operands, results: Operands) -> int:
    return sum(_unique(operands).values()) + sum(x.bytes for x in results)


def _product(m: int, n: int, k: int, batch: int, operands: Operands, results: Operands) -> tuple[Work, ...]:
    return (Matmul(m, n, k, batch, operands[-1].dtype, _total(operands, results)),)


def _mm(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    """mm, mv, dot, bmm, meshweave::matmul: the last two operands are the factors (addmm adds the first)."""
    a, b = operands[-2:]
    n = b.shape[-1] if len(b.shape) > 1 else 1
    return _product(a.shape[-2], n, a.shape[-1], prod(a.shape[:-2]), operands, results)


def _contract(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    """A product over several dims is a matmul of the merged dims."""
    a, b = operands[:2]
    over = argument(node, 2)
    k = prod(a.shape[d] for d in over)
    m, n = (prod(x.shape) // max(k, 1) for x in (a, b))
    return _product(m, n, k, 1, operands, results)


def _first_two(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    """Matmuls whose first two operands are the factors; scales and offsets follow."""
    a, b = operands[:2]
    return (Matmul(prod(a.shape[:-1]), b.shape[-1], a.shape[-1], 1, a.dtype, _total(operands, results)),)


def _grouped_mm(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    x, weight = operands[:2]
    return (Matmul(x.shape[0], weight.shape[2], weight.shape[1], 1, x.dtype, _total(operands, results)),)


def _grouped_outer(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    x, grad = operands[:2]
    return (Matmul(x.shape[1], grad.shape[1], x.shape[0], 1, x.dtype, _total(operands, results)),)


def _convolution(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    """The implicit matmul: rows are output positions, k is the window of a group's input channels."""
    weight = operands[1]
    groups = _groups(operands[0] if not _argument(node, 6) else results[0], weight)
    return _product(
        results[0].shape[0] * prod(results[0].shape[2:]),
        weight.shape[0] // groups,
        prod(weight.shape[1:]),
        groups,
        operands,
        results,
    )


def _convolution_backward(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    """Gradients of input and weight, each a matmul of the forward's size."""
    grad, x, weight = operands[:3]
    groups, mask = _groups(grad if _argument(node, 7) else x, weight), _argument(node, 10)
    rows, columns, window = grad.shape[0] * prod(grad.shape[2:]), weight.shape[0] // groups, prod(weight.shape[1:])
    num_bytes = _total(operands, results)
    shapes = ((rows, window, columns), (columns, window, rows))
    wanted = [shape for shape, is_wanted in zip(shapes, mask, strict=False) if is_wanted]
    return tuple(Matmul(m, n, k, groups, grad.dtype, num_bytes // len(wanted)) for m, n, k in wanted)


def _groups(channels: Value, weight: Value) -> int:
    """Groups of a convolution on a piece: of its input channels (for a transposed convolution: output channels), a
    filter sees those of its group."""
    return max(1, channels.shape[1] // max(1, weight.shape[1]))


def _argument(node: fx.Node, index: int) -> Any:
    """Argument `index` of the op, past the three that a wrapper has before it."""
    return argument(node, index + (3 if inner_target(node) is not node.target else 0))


def _attention(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    target = inner_target(node)
    is_backward = base_name(target).endswith("backward")
    q, k = operands[1:3] if is_backward and len(operands) > 3 else operands[:2]
    if len(q.shape) < 3:
        return (memory_work("pointwise", operands, results),)
    names = [a.name for a in arguments_of(target)] if is_operator(target) else []
    arguments = {name: _argument(node, i) for i, name in enumerate(names) if i < len(node.args)}
    heads, (queries, dim), keys = prod(q.shape[:-2]), q.shape[-2:], k.shape[-2]
    blocks = _blocks(arguments, queries, keys)
    total, pairs = _total(operands, results), sum(rows * columns for rows, columns, _ in blocks) or 1
    works: list[Work] = [
        Attention(heads, rows, columns, dim, is_causal, is_backward, q.dtype, total * rows * columns // pairs)
        for rows, columns, is_causal in blocks
    ]
    return (*works, *_reorder_copies(arguments, operands, results, q, k))


def _blocks(arguments: Mapping[str, Any], queries: int, keys: int) -> tuple[tuple[int, int, bool], ...]:
    """The (queries, keys) blocks on the device with the most work, and whether each is triangular.

    If queries are cut under a causal mask that is the last device, unless they are cut in head-tail order: its queries
    see all keys before them, and each other up to themselves. In a ring, in every step some device sees a whole foreign
    piece of keys.
    """
    first_query, first_key, starts = (arguments.get(name) for name in ("first_query", "first_key", "starts"))
    if not arguments.get("is_causal", False):
        return ((queries, keys, False),)
    if not (isinstance(first_query, fx.Node) or isinstance(first_key, fx.Node) or starts):
        return ((queries, keys, True),)
    num_devices = prod(first_query.args[2]) if isinstance(first_query, fx.Node) else 1  # type: ignore[arg-type]
    if isinstance(first_key, fx.Node) and first_key.target is linear:
        first_key = first_key.args[1][0]  # type: ignore[index]
    sign, shift = first_key.args[2:] if isinstance(first_key, fx.Node) else (0, (first_key or 0) // max(keys, 1))
    return _most_work(queries, keys, num_devices, (sign, shift), tuple(starts or ()))


@cache
def _most_work(
    queries: int, keys: int, num_devices: int, owner: tuple[int, int], starts: tuple[int, ...]
) -> tuple[tuple[int, int, bool], ...]:
    """Among devices with `queries` each, the blocks of the device with the most pairs; device r has the keys of (sign *
    r + shift) mod n, with `owner` (sign, shift)."""
    sign, shift = owner
    options = []
    for r in range(num_devices):
        first_key = keys * ((sign * r + shift) % num_devices)
        options.append(Causal.of(queries, keys, r * queries, first_key, starts).ascending.blocks)
    most = max(options, key=lambda blocks: sum(block.pairs for block in blocks))
    return tuple((b.rows.stop - b.rows.start, b.keys.stop - b.keys.start, b.is_causal) for b in most)


def _reorder_copies(
    arguments: Mapping[str, Any], operands: Operands, results: Operands, q: Value, k: Value
) -> tuple[MemoryWork, ...]:
    """Copies of tensors that are stored in another order than that of their positions."""
    starts = arguments.get("starts")
    if not starts or not arguments.get("is_causal", False):
        return ()
    length = len(starts) * min(start for start in starts if start)
    whole = {x.shape[2] for x in (q, k) if x.shape[2] == length}
    copied = [x for x in (*operands, *results) if len(x.shape) > 2 and x.shape[2] in whole]
    return tuple(memory_work("copy", (x,), (x,)) for x in copied)


_MATMULS: Mapping[str, Priced] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "matmul"), _mm),
    **dict.fromkeys(("_scaled_mm", "_grouped_mm"), _first_two),
    **dict.fromkeys(("grouped_mm", "mm_piece"), _grouped_mm),
    **dict.fromkeys(("grouped_outer", "outer_piece"), _grouped_outer),
    "contract": _contract,
    "mv": lambda node, operands, results: _product(operands[0].shape[0], 1, operands[0].shape[1], 1, operands, results),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
