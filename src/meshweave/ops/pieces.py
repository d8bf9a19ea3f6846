"""How ops run on pieces. Most run as they are; an op with arguments that are shapes or positions is written for its
piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from meshweave.ir import local_ops
from meshweave.ir.graph import Spec, spec_of, tensor_inputs
from meshweave.ir.layout import Layout
from meshweave.ops.emit import Emitter, Number
from meshweave.ops.factors import Dim, Rule


@dataclass(frozen=True, slots=True)
class PieceCall:
    """An op of the placed graph that is to be written for the pieces of its operands. `args` and `kwargs` have local
    values in place of tensors; `values` are these in order."""

    emit: Emitter
    node: fx.Node
    values: Sequence[fx.Node]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return spec_of(self.node).shape

    @property
    def layout(self) -> Layout:
        layout = self.node.meta["layout"]
        assert isinstance(layout, Layout)
        return layout

    def operand(self, index: int) -> tuple[Spec, Layout]:
        operand = tensor_inputs(self.node)[index]
        return spec_of(operand), operand.meta["layout"]

    def write(self, target: Any, *args: Any) -> fx.Node:
        return self.emit.call(target, args, {})

    def same_op(self, *args: Any) -> fx.Node:
        """The op itself, with these arguments."""
        return self.emit.call(self.node.target, args, self.kwargs)

    def local_shape(self) -> list[Number]:
        return self.emit.local_shape(self.shape, self.layout)

    def size(self, dim: int) -> Number:
        """Local size of the result along `dim`."""
        return self.emit.extent(self.shape, self.layout, dim)

    def start(self, dim: int) -> Number:
        """Where the piece of the result begins along `dim`."""
        return self.emit.offset(self.shape, self.layout, dim)

    def is_cut(self, operand: int, dim: int) -> bool:
        dims = self.operand(operand)[1].dims
        return dim < len(dims) and bool(dims[dim].axes)

    def start_of(self, operand: int, dim: int) -> Number:
        """Where the piece of an operand begins along `dim`; 0 if it is whole."""
        spec, layout = self.operand(operand)
        return self.emit.offset(spec.shape, layout, dim)

    def write_at(self, dim: int, target: Any, *args: Any) -> fx.Node | None:
        """A call that also gets the start of the first operand's piece along `dim`, if that is cut."""
        return self.write(target, *args, self.start_of(0, dim)) if self.is_cut(0, dim) else None


@dataclass(frozen=True, slots=True)
class OnPiece:
    """How an op runs on pieces.

    `write` writes the call; None: the op runs as it is. `is_placed`: the call depends on which rows a device has, so
    that each needs all rows of its piece; an op with tables of indices says in its rule along which factors
    (`Rule.placed`). `in_chunks`: whether chunks of rows may run it as it is: along any dim, those of its index, its
    first dim, or none. `shape_at`: the argument that is the shape of the result, -1 without. `is_ordered`: its result
    depends on the order of rows. `indexed`: the dims of a table that it reads or writes by numbers, each with its
    index; the table is its first operand, or its result if it `makes_table`.
    """

    write: Callable[[PieceCall], fx.Node | None]
    is_placed: bool = True
    in_chunks: Literal["any", "index", "batch", ""] = ""
    shape_at: int = -1
    is_ordered: bool = False
    indexed: Callable[[fx.Node], Sequence[tuple[int, fx.Node]]] = lambda node: ()
    makes_table: bool = False

    def looked_up(self, node: fx.Node, rule: Rule) -> list[Dim]:
        """The factors of the indexed dims."""
        tables = rule.results if self.makes_table else rule.operands
        return [tables[0][dim] for dim, _ in self.indexed(node)]

    def call(self, emit: Emitter, node: fx.Node, values: Sequence[fx.Node], args: Any, kwargs: Any) -> fx.Node:
        """The call on local values that computes the piece of `node`."""
        written = self.write(PieceCall(emit, node, values, args, kwargs))
        return emit.call(node.target, args, kwargs) if written is None else written


def guarded(call: PieceCall, *args: Any) -> fx.Node | None:
    """Kernels that reject empty tensors: if a piece may be empty, the result is zeros without a call. `args` replace
    those of the op."""
    operands = [(spec_of(n), n.meta["layout"]) for n in tensor_inputs(call.node)]
    sizes = [size for spec, layout in operands for size in call.emit.local_shape(spec.shape, layout)]
    if not any(isinstance(size, fx.Node) for size in sizes):
        return call.same_op(*args) if args else None
    specs, layouts, args = call.node.meta["spec"], call.node.meta["layout"], args or call.args
    if isinstance(specs, Spec):
        given = (call.node.target, call.local_shape(), specs.dtype, *args)
        return call.emit.call(local_ops.or_zeros, given, call.kwargs)
    results = list(zip(specs, layouts, strict=True))
    shapes = [None if s is None else call.emit.local_shape(s.shape, layout) for s, layout in results]
    dtypes = [None if s is None else s.dtype for s, _ in results]
    return call.emit.call(local_ops.or_zeros_each, (call.node.target, shapes, dtypes, *args), call.kwargs)


AS_IT_IS = OnPiece(lambda call: None, is_placed=False, in_chunks="any")
GUARDED = OnPiece(guarded, in_chunks="any")
