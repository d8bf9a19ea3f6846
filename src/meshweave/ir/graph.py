"""Access to fx graphs: the metadata of nodes at every stage, and the text form.

Every node has `meta["spec"]` (its value), `meta["origin"]` (where it comes from) and, once placed, `meta["layout"]`.
Nothing else is read from `meta` across rooms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from meshweave.interop.graphs import copy_signature, is_erased
from meshweave.interop.ops import arguments_of, is_operator


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are accumulated: float32 for half precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@dataclass(frozen=True, slots=True)
class Spec:
    """Global shape and dtype of a tensor value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def is_integer(self) -> bool:
        return not self.dtype.is_floating_point and not self.dtype.is_complex and self.dtype != torch.bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


Specs = Spec | tuple[Spec | None, ...] | None  # spec of an op's result: a tensor, several values, no tensor


def specs_of(value: Any) -> Specs:
    """The Specs of an op's results."""
    if isinstance(value, (tuple, list)):
        return tuple(Spec(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else None for v in value)
    return Spec(tuple(map(int, value.shape)), value.dtype) if isinstance(value, torch.Tensor) else None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from: the phase, the module's path and the line of the model's source.

    Phases are prepare, forward, loss, backward, reduce and update. Nodes of prepare are among those of forward: they
    cast and move parameters, run in the first microbatch only, and all microbatches use their results. Nodes of reduce
    are among those of backward: they move accumulated gradients, and run in the last microbatch only.

    `call` numbers the ops that autograd recorded, from 2: a forward node has the number of its op, or of the last one
    before it (1: of none), a backward node that of the op whose gradient it computes; otherwise 0. `stage` is its stage
    in a pipeline (`place.stages`).
    """

    phase: str
    module: str = ""
    source: str = ""
    call: int = 0
    stage: int = 0

    def __str__(self) -> str:
        return " ".join(filter(None, [self.source, f"({self.module})" if self.module else "", f"[{self.phase}]"]))


NOWHERE = Origin("forward")


def is_prepared(node: fx.Node) -> bool:
    """Whether a node runs in the first microbatch only."""
    return origin_of(node).phase == "prepare"


# the part of a step that a phase runs in
PARTS = {"prepare": 0, "forward": 0, "loss": 0, "backward": 1, "reduce": 1, "update": 2}
_BLOCK = re.compile(r"^(?:[^.]+\.)*?\d+(?=\.|$)")  # up to the first index: model.layers.3


def block_name(origin: Origin) -> str:
    """The block of the model that a node belongs to: its module up to the first index (`model.layers.3`), else ""."""
    match = _BLOCK.match(origin.module)
    return match.group() if match else ""


@dataclass(frozen=True, slots=True)
class Input:
    """A placeholder of a step graph: `kind` is param, buffer, state, batch, scalar or constant."""

    kind: str
    name: str
    spec: Spec
    requires_grad: bool = False


def output_node(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def returned_values(graph: fx.Graph) -> list[fx.Node]:
    """The values that a graph returns, as a list."""
    return list(output_node(graph).args[0])  # type: ignore[arg-type]


class NamedGraph:
    """A graph whose placeholders are `inputs`, and the elements of whose output are `outputs`, both in order."""

    __slots__ = ()
    graph: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[tuple[str, str], ...]

    @property
    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def output_values(self) -> list[fx.Node]:
        return returned_values(self.graph)

    @property
    def sources(self) -> dict[fx.Node, Input]:
        """The placeholders, each with its input."""
        return dict(zip(self.placeholders, self.inputs, strict=True))

    @property
    def results(self) -> dict[tuple[str, str], fx.Node]:
        """The values of the outputs, by (kind, name)."""
        return dict(zip(self.outputs, self.output_values, strict=True))


@dataclass(slots=True)
class StepGraph(NamedGraph):
    """A training step as a functional graph of global shapes.

    Placeholder i of `graph` is `inputs[i]`; element i of its output is `outputs[i]` = (kind, name), with kind loss,
    metric (a number that the loss function returns with it), grad, acc, param, buffer, state or output (what the model
    returns). `constants` are tensors that the model's code created while it was traced.
    """

    graph: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[tuple[str, str], ...]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def updated(self) -> list[str]:
        """Names of the parameters that the step changes."""
        return [name for kind, name in self.outputs if kind == "param"]

    def text(self, *, layouts: bool = True) -> str:
        return graph_text(self.graph, layouts=layouts)


def spec_of(node: fx.Node) -> Spec:
    """The Spec of a node with a single tensor result."""
    spec = node.meta["spec"]
    assert isinstance(spec, Spec), f"{node.name} returns {spec}"
    return spec


def origin_of(node: fx.Node) -> Origin:
    return node.meta.get("origin", NOWHERE)


def fold_numbers(module: str) -> str:
    """A module path with `*` for its numbers: the common path of twins in repeated layers."""
    return re.sub(r"\b\d+\b", "*", module)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node in the order of its schema, lists flattened: operands 0, 1, ... of rules. An
    operand that occurs twice is listed twice.
    """
    tensors: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: tensors.append(n) if isinstance(n.meta.get("spec"), Spec) else None)
    return tensors


def replace_inputs(node: fx.Node, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """args and kwargs of `node` with its tensor operands replaced, in the order of `tensor_inputs`."""
    rest = iter(values)
    return map_nodes(node, lambda n: next(rest) if isinstance(n.meta.get("spec"), Spec) else n)


def map_nodes(node: fx.Node, function: Callable[[fx.Node], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """args and kwargs of `node` with every node in them, however deep, replaced by `function` of it."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), function)
    return args, kwargs  # type: ignore[return-value]


def value_numbers(
    graph: fx.Graph, forms: dict[Any, int], own_form: Callable[[fx.Node], Any | None]
) -> dict[fx.Node, int]:
    """Equal numbers for equal values: of the same op on equal operands, or with the same `own_form` if a node has one.
    `forms` numbers the forms so far, also of other graphs."""
    numbers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        form = own_form(node)
        if form is None:
            args, kwargs = map_nodes(node, lambda n: ("value", numbers[n]))
            form = (node.op, node.target, repr(args), repr(sorted(kwargs.items())))
        numbers[node] = forms.setdefault(form, len(forms))
    return numbers


def with_ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that they are computed from."""
    ancestors, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in ancestors:
            ancestors.add(node)
            waiting += node.all_input_nodes
    return ancestors


def erase_unused(
    graph: fx.Graph, nodes: Iterable[fx.Node], stays: Callable[[fx.Node], bool] = lambda node: False
) -> None:
    """Erase those of the nodes that are unused, and what only they used, unless it `stays`."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.users or node.op != "call_function" or node.graph is not graph or is_erased(node) or stays(node):
            continue
        waiting += node.all_input_nodes
        graph.erase_node(node)


def op_name(target: Any) -> str:
    """`aten.mm` for an op overload, with the overload's name unless it is `default`."""
    if is_operator(target):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def argument(node: fx.Node, position: int, default: Any = None) -> Any:
    """An argument by its position in the op's schema, whether it was passed by position or by name; `default` if it was
    omitted."""
    if position < len(node.args):
        return node.args[position]
    arguments = arguments_of(node.target) if node.kwargs and is_operator(node.target) else []
    return node.kwargs.get(arguments[position].name, default) if position < len(arguments) else default


def named_argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument by its name in the op's schema; `default` if it was omitted."""
    return argument(node, [entry.name for entry in arguments_of(node.target)].index(name), default)  # type: ignore[arg-type]


def is_descending(sort: fx.Node) -> bool:
    """Whether a sort, of all elements or of each block, puts the largest first."""
    return bool(named_argument(sort, "descending"))


def row_index(node: fx.Node) -> fx.Node | None:
    """The only index, 1-d and of integers, along dim 0 of a lookup or of an indexed sum; None for any other."""
    args: Any = node.args
    is_select = node.target is torch.ops.aten.index_select.default
    if len(args) <= 1 + is_select:  # passed by name
        return None
    if is_select:
        indices = [args[2]] if args[1] == 0 else []
    else:
        indices = [args[1]] if isinstance(args[1], fx.Node) else list(args[1])
    if len(indices) != 1 or indices[0] is None:
        return None
    spec = spec_of(indices[0])
    return indices[0] if spec.is_integer and len(spec.shape) == 1 else None


def place_of(node: fx.Node) -> str:
    """A node in messages: its name, its op and, if known, its module and source line."""
    origin = node.meta.get("origin")
    source = str(origin) if origin is not None else _stack_line(node)
    return f"node {node.name} ({op_name(node.target)})" + (f", {source}" if source else "")


def _stack_line(node: fx.Node) -> str:
    """The innermost line of a node's stack trace: `model.py:12`."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    parts = lines[-1].split('"')
    number = parts[2].split("line", 1)[-1].split(",")[0].strip() if len(parts) > 2 else ""
    return f"{parts[1]}:{number}" if number else parts[1]


def copied_graph(graph: fx.Graph, copies: dict[fx.Node, fx.Node] | None = None) -> fx.Graph:
    """A copy of the graph, with nodes and meta of its own. `copies`, if not None, is filled: old to new."""
    copy, node_map = fx.Graph(), {} if copies is None else copies
    for node in graph.nodes:
        node_map[node] = copy.node_copy(node, node_map.__getitem__)
    return copy


def module_like(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module that runs another graph like `gm` runs its own: the same signature, constants and meta."""
    copy_signature(gm.graph, graph)
    module = fx.GraphModule(gm, graph)
    module.meta.update(gm.meta)
    return module


def copied_module(gm: fx.GraphModule) -> fx.GraphModule:
    """The same module with a graph of its own."""
    return module_like(gm, copied_graph(gm.graph))


def graph_text(graph: fx.Graph, *, layouts: bool = True) -> str:
    """A line per node: name, value, layout (if any), op and operands. Stable, so that tests can pin it."""
    return "\n".join(_lines(graph, layouts)) + "\n"


def _lines(graph: fx.Graph, layouts: bool) -> Iterator[str]:
    for node in graph.nodes:
        if node.op == "output":
            yield f"return {_arg(node.args[0])}"
            continue
        value = node.meta.get("spec")
        shown = "" if value is None else f": {_specs(value)}"
        layout = node.meta.get("layout") if layouts else None
        placed = "" if layout is None else f" {_specs(layout)}"
        call = "input" if node.op == "placeholder" else call_text(node)
        yield f"{node.name}{shown}{placed} = {call}"


def _specs(value: Any) -> str:
    return "(" + ", ".join(map(str, value)) + ")" if isinstance(value, tuple) else str(value)


def call_text(node: fx.Node) -> str:
    """The op and its arguments: `aten.mm(x, w)`."""
    args = [_arg(a) for a in node.args] + [f"{k}={_arg(v)}" for k, v in node.kwargs.items()]
    return f"{op_name(node.target)}({', '.join(args)})"


def _arg(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_arg(v) for v in value) + "]"
    return str(value).removeprefix("torch.")


def copy_meta(source: fx.Node, target: fx.Node, **changes: Any) -> fx.Node:
    """Copy the metadata of `source` to `target`, with changes."""
    target.meta.update({key: source.meta[key] for key in ("spec", "origin") if key in source.meta}, **changes)
    return target


def tokens_of(step: StepGraph) -> int:
    """Tokens of a microbatch: the elements of the largest integer input of the batch, else the size of its dim 0."""
    batch = [item.spec for item in step.inputs if item.kind == "batch" and item.spec.shape]
    integers = [spec for spec in batch if not spec.dtype.is_floating_point and len(spec.shape) > 1]
    return max((prod(spec.shape) for spec in integers), default=max((spec.shape[0] for spec in batch), default=0))
