"""From the traced graph to the global graph: names, specs, few op kinds, a single use of a parameter per phase."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import fx

from meshweave.interop.ops import aten_ops
from meshweave.ir.graph import Input, Origin, Spec, Specs, StepGraph, map_nodes, origin_of, returned_values, spec_of
from meshweave.ir.traits import IDENTITIES, is_random

aten = torch.ops.aten

WriteUpdate = Callable[["Normalizer", Sequence[fx.Node]], Mapping[tuple[str, str], fx.Node]]


def normalize(
    graph: fx.Graph,
    inputs: tuple[Input, ...],
    outputs: tuple[tuple[str, str], ...],
    constants: Mapping[str, torch.Tensor],
    update: WriteUpdate = lambda normalizer, grads: {},
) -> StepGraph:
    """The global graph of a traced step. `update` appends the update, which is not traced: it takes the values that the
    traced graph returns after `outputs`, and returns more outputs.

    Postconditions: every node has a Spec and an Origin; no identities (a functional graph needs no clone); squeezes,
    selects and transposes are views, slices and permutes; unchanged buffers and unused constants are gone; dead code is
    gone.
    """
    result = Normalizer(inputs, constants).run(graph, outputs, update)
    result.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return _drop_unused_constants(result)


class Normalizer:
    """Copies a graph node by node, each op through the table of rewrites. New nodes get `origin`."""

    def __init__(self, inputs: tuple[Input, ...], constants: Mapping[str, torch.Tensor]) -> None:
        self.inputs, self.constants = list(inputs), dict(constants)
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.own: dict[tuple[str, str], fx.Node] = {}  # input -> its placeholder
        self.origin = Origin("forward")
        self.lifted: dict[str, fx.Node] = {}
        self.computed: dict[Any, fx.Node] = {}  # scalars once per phase, masks and indices once per module

    def run(self, old: fx.Graph, outputs: tuple[tuple[str, str], ...], update: WriteUpdate) -> StepGraph:
        sources = [n for n in old.nodes if n.op == "placeholder"]
        for node, item in zip(sources, self.inputs, strict=True):
            self.env[node] = self.own[item.kind, item.name] = self._placeholder(item)
        for node in [n for n in old.nodes if n.op == "get_attr"]:
            self.env[node] = self._constant(str(node.target))
        for node in old.nodes:
            if node.op == "call_function":
                self.origin = origin_of(node)
                args, kwargs = map_nodes(node, lambda n: self.env[n])
                self.env[node] = self.call(node.target, args, kwargs, node.meta["spec"])
        values = [self.env[n] for n in returned_values(old)]
        results = dict(zip(outputs, values, strict=False))
        results |= update(self, values[len(outputs) :])
        kept = {key: v for key, v in results.items() if key[0] != "buffer" or v is not self.own[key]}
        self.graph.output([*kept.values()])
        return StepGraph(self.graph, tuple(self.inputs), tuple(kept), self.constants)

    def _placeholder(self, item: Input) -> fx.Node:
        node = self.graph.placeholder(_identifier(item))
        node.meta["spec"] = item.spec
        node.meta["origin"] = Origin("update" if item.kind == "state" else "forward", item.name)
        return node

    def _constant(self, name: str) -> fx.Node:
        if name not in self.lifted:
            value = self.constants[name]
            item = Input("constant", name, Spec(tuple(value.shape), value.dtype))
            self.inputs.append(item)
            self.lifted[name] = self._placeholder(item)
        return self.lifted[name]

    def call(self, target: Any, args: Any, kwargs: Mapping[str, Any], specs: Specs) -> Any:
        """The nodes that an op becomes, through the table of rewrites."""
        if target is operator.getitem:
            value, index = args
            return value[index] if isinstance(value, (tuple, list)) else self.emit(target, args, {}, specs)
        if target in IDENTITIES:
            return args[0]
        rewrite = _REWRITES.get(target)
        if rewrite is not None:
            return rewrite(self, specs, *args, **_without_memory(kwargs))
        return self.emit(target, args, _without_memory(kwargs), specs)

    def emit(self, target: Any, args: Any, kwargs: Any, spec: Any) -> fx.Node:
        key = None
        if isinstance(spec, Spec) and _is_computed_once(target, spec):
            module = self.origin.module if spec.shape else ""  # another may be on other devices
            key = (target, str(args), str(kwargs), spec, self.origin.phase, module)
        if key in self.computed:
            return self.computed[key]
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        node.meta["spec"], node.meta["origin"] = spec, self.origin
        if key is not None:
            self.computed[key] = node
        return node

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        old = spec_of(x)
        if old.shape == tuple(shape):
            return x
        return self.emit(aten.view.default, (x, list(shape)), {}, Spec(tuple(shape), old.dtype))


def _is_computed_once(target: Any, spec: Spec) -> bool:
    """Whether equal calls are a single node: of scalars, masks and indices, which are small beside what is trained."""
    if is_random(target):
        return False
    return not spec.shape or not (spec.dtype.is_floating_point or spec.dtype.is_complex)


def _without_memory(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Options without those about a single device's memory: the graph is device-neutral, the runtime chooses
    strides."""
    return {
        k: v for k, v in kwargs.items() if k not in ("memory_format", "device", "pin_memory", "layout", "non_blocking")
    }


def _identifier(item: Input) -> str:
    text = f"{item.kind}_{item.name}" if item.kind != "param" else item.name
    return "".join(c if c.isalnum() else "_" for c in text)


def _permute(r: Normalizer, spec: Spec, x: fx.Node, dims: Sequence[int]) -> fx.Node:
    order = [d % len(dims) for d in dims]
    if x.target is aten.permute.default:  # autograd transposes a weight twice
        base, inner = cast(tuple[fx.Node, list[int]], x.args)
        x, order = base, [inner[d] for d in order]
    if order == sorted(order):
        return x
    return r.emit(aten.permute.default, (x, order), {}, spec)


def _transpose(r: Normalizer, spec: Spec, x: fx.Node, a: int, b: int) -> fx.Node:
    order = list(range(len(spec.shape)))
    if order:
        order[a], order[b] = order[b], order[a]
    return _permute(r, spec, x, order)


def _select(r: Normalizer, spec: Spec, x: fx.Node, dim: int, index: int) -> fx.Node:
    old = spec_of(x)
    dim = dim % len(old.shape)
    index = index % old.shape[dim]
    kept = Spec((*old.shape[:dim], 1, *old.shape[dim + 1 :]), old.dtype)
    return r.view(r.emit(aten.slice.Tensor, (x, dim, index, index + 1), {}, kept), spec.shape)


def _slice(
    r: Normalizer, spec: Spec, x: fx.Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> fx.Node:
    old = spec_of(x)
    dim = dim % len(old.shape)
    first, last, stride = slice(start, end, step).indices(old.shape[dim])
    if (first, last, stride) == (0, old.shape[dim], 1):
        return x
    args = (x, dim, first, max(last, first)) if stride == 1 else (x, dim, first, max(last, first), stride)
    return r.emit(aten.slice.Tensor, args, {}, spec)


def _cat(r: Normalizer, spec: Spec, values: Sequence[fx.Node], dim: int = 0) -> fx.Node:
    """cat of the non-empty operands: caches of Hugging Face models begin with an empty tensor."""
    nonempty = [v for v in values if spec_of(v).num_elements]
    if len(nonempty) == 1 and spec_of(nonempty[0]) == spec:
        return nonempty[0]
    return r.emit(aten.cat.default, (nonempty or list(values), dim), {}, spec)


def _full(value: float) -> Callable[..., fx.Node]:
    def rewrite(r: Normalizer, spec: Spec, *_: Any, **__: Any) -> fx.Node:
        return r.emit(aten.full.default, (list(spec.shape), value), {"dtype": spec.dtype}, spec)

    return rewrite


def _full_of(position: int) -> Callable[..., fx.Node]:
    def rewrite(r: Normalizer, spec: Spec, *args: Any, **kwargs: Any) -> fx.Node:
        value = args[position] if len(args) > position else kwargs["fill_value"]
        return r.emit(aten.full.default, (list(spec.shape), value), {"dtype": spec.dtype}, spec)

    return rewrite


def _copy(r: Normalizer, spec: Spec, x: fx.Node, source: fx.Node, *_: Any) -> fx.Node:
    """x.copy_(source) as a value: the source, cast and expanded."""
    old = spec_of(source)
    if old.dtype != spec.dtype:
        source = r.emit(aten._to_copy.default, (source,), {"dtype": spec.dtype}, Spec(old.shape, spec.dtype))
    if old.shape == spec.shape:
        return source
    return r.emit(aten.expand.default, (source, list(spec.shape)), {}, spec)


def _arange(start: int, step_at: int) -> Callable[..., fx.Node]:
    def rewrite(r: Normalizer, spec: Spec, *args: Any, **_: Any) -> fx.Node:
        first = args[0] if start else 0
        step = args[step_at] if step_at and len(args) > step_at else 1
        end = first + spec.shape[0] * step
        return r.emit(aten.arange.start_step, (first, end, step), {"dtype": spec.dtype}, spec)

    return rewrite


def _conv_backward(
    r: Normalizer, spec: Any, grad: fx.Node, x: fx.Node, w: fx.Node, bias_sizes: Any, *rest: Any
) -> tuple[fx.Node | None, ...]:
    """An op per gradient: the three depend on different operands, so they shard differently."""
    *options, mask = rest
    results: list[fx.Node | None] = [None, None, None]
    for i in range(2):
        if mask[i]:
            only = [j == i for j in range(3)]
            specs = tuple(spec[j] if j == i else None for j in range(3))
            both = r.emit(aten.convolution_backward.default, (grad, x, w, None, *options, only), {}, specs)
            results[i] = r.emit(operator.getitem, (both, i), {}, spec[i])
    if mask[2]:
        dims = [d for d in range(len(spec_of(grad).shape)) if d != 1]
        results[2] = r.emit(aten.sum.dim_IntList, (grad, dims), {}, spec[2])
    return tuple(results)


def _attention(
    r: Normalizer,
    spec: Any,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: fx.Node | None = None,
    scale: float | None = None,
) -> fx.Node:
    scale = spec_of(q).shape[-1] ** -0.5 if scale is None else scale
    return r.emit(torch.ops.meshweave.attention.default, (q, k, v, attn_mask, is_causal, scale), {}, spec)


def _attention_backward(
    r: Normalizer,
    spec: Any,
    grad: fx.Node,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    out: fx.Node,
    lse: fx.Node,
    dropout: float,
    is_causal: bool,
    *,
    attn_mask: fx.Node | None = None,
    scale: float | None = None,
) -> fx.Node:
    scale = spec_of(q).shape[-1] ** -0.5 if scale is None else scale
    args = (grad, q, k, v, attn_mask, out, lse, is_causal, scale)
    return r.emit(torch.ops.meshweave.attention_backward.default, args, {}, spec)


def _index(r: Normalizer, spec: Spec, x: fx.Node, indices: Sequence[Any]) -> fx.Node:
    """x[arange(rows), i]: each row at an index of its own, as a gather, which needs no other rows."""
    at = _index_of_rows(r, x, indices)
    if at is None:
        return r.emit(aten.index.Tensor, (x, indices), {}, spec)
    own = Spec(spec_of(at).shape, spec.dtype)
    return r.view(r.emit(aten.gather.default, (x, 1, at), {}, own), spec.shape)


def _index_put(
    r: Normalizer, spec: Spec, x: fx.Node, indices: Sequence[Any], values: fx.Node, accumulate: bool = False
) -> fx.Node:
    at = _index_of_rows(r, x, indices)
    if at is None:
        return r.emit(aten.index_put.default, (x, indices, values, *([True] if accumulate else [])), {}, spec)
    shape = torch.broadcast_shapes(*(spec_of(i).shape for i in indices)) + spec.shape[2:]
    if spec_of(values).shape != shape:
        values = r.emit(aten.expand.default, (values, list(shape)), {}, Spec(tuple(shape), spec.dtype))
    target = aten.scatter_add.default if accumulate else aten.scatter.src
    return r.emit(target, (x, 1, at, r.view(values, spec_of(at).shape)), {}, spec)


def _index_of_rows(r: Normalizer, x: fx.Node, indices: Sequence[Any]) -> fx.Node | None:
    """The index i of x[arange(rows), i] for a gather: [rows, positions, ...], from 0 on. None for other indices."""
    shape = spec_of(x).shape
    if len(indices) != 2 or None in indices or spec_of(indices[1]).dtype not in (torch.int32, torch.int64):
        return None
    rows, at = indices
    wide = torch.broadcast_shapes(*(spec_of(i).shape for i in indices))
    own, source = spec_of(rows).shape, rows.args[0] if rows.target is aten.view.default else rows
    if own != (shape[0], *(1 for _ in wide[1:])) or source.target is not aten.arange.start_step:
        return None
    if source.args != (0, shape[0], 1):
        return None
    old = Spec(spec_of(at).shape, torch.int64)
    if spec_of(at).dtype != torch.int64:
        at = r.emit(aten._to_copy.default, (at,), {"dtype": torch.int64}, old)
    is_from_end = r.emit(aten.lt.Scalar, (at, 0), {}, Spec(old.shape, torch.bool))
    at = r.emit(aten.where.self, (is_from_end, r.emit(aten.add.Tensor, (at, shape[1]), {}, old), at), {}, old)
    if old.shape != wide:
        at = r.emit(aten.expand.default, (at, list(wide)), {}, Spec(tuple(wide), torch.int64))
    at = r.view(at, (shape[0], prod(wide[1:]), *(1 for _ in shape[2:])))
    every = (*spec_of(at).shape[:2], *shape[2:])
    return (
        at
        if every == spec_of(at).shape
        else r.emit(aten.expand.default, (at, list(every)), {}, Spec(every, torch.int64))
    )


_RESHAPES = aten_ops(
    "view _unsafe_view reshape unsqueeze squeeze squeeze.dim squeeze.dims flatten.using_ints view_copy unsqueeze_copy "
    "squeeze_copy.dim _reshape_copy"
)
_ZEROS = aten_ops(  # memory without values becomes zeros
    "zeros zeros_like new_zeros empty.memory_format empty_like empty_strided new_empty new_empty_strided"
)
_REWRITES: dict[Any, Callable[..., Any]] = {
    aten.t.default: lambda r, spec, x: _transpose(r, spec, x, 0, 1) if len(spec.shape) == 2 else x,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    **dict.fromkeys(_RESHAPES, lambda r, spec, x, *_, **__: r.view(x, spec.shape)),
    aten.copy.default: _copy,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.cat.default: _cat,
    **dict.fromkeys(_ZEROS, _full(0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _full(1)),
    aten.new_full.default: _full_of(2),
    aten.full_like.default: _full_of(1),
    aten.full.default: _full_of(1),
    aten.scalar_tensor.default: _full_of(0),
    aten.arange.default: _arange(0, 0),
    aten.arange.start: _arange(1, 0),
    aten.arange.start_step: _arange(1, 2),
    aten.convolution_backward.default: _conv_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}


def _drop_unused_constants(step: StepGraph) -> StepGraph:
    kept = []
    for node, item in step.sources.items():
        if item.kind == "constant" and not node.users:
            step.graph.erase_node(node)
            continue
        kept.append(item)
    names = {item.name for item in kept}
    constants = {n: v for n, v in step.constants.items() if n in names}
    return StepGraph(step.graph, tuple(kept), step.outputs, constants)
