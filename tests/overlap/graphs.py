"""Graphs with collectives, built by hand, and three oracles of their own: values on four ranks, seconds and bytes.

Nothing here imports meshweave: what the oracles say of a graph stands on PyTorch's operators alone.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch._subclasses.fake_tensor import FakeTensorMode

ATEN = torch.ops.aten
C10D = torch.ops._c10d_functional
CONVERT = torch.ops.prims.convert_element_type.default
WAIT = C10D.wait_tensor.default

IN_PLACE = (C10D.all_reduce_.default,)
# The last positional argument of each names the group.
STARTS = (
    *IN_PLACE,
    C10D.all_gather_into_tensor_out.default,
    C10D.all_gather_into_tensor.default,
    C10D.all_gather_into_tensor_coalesced.default,
    C10D.reduce_scatter_tensor.default,
    C10D.reduce_scatter_tensor_coalesced.default,
    C10D.all_reduce.default,
    C10D.all_reduce_coalesced.default,
    C10D.all_to_all_single.default,
    C10D.broadcast.default,
)
# Four ranks on a 2 x 2 mesh: pairs by row, pairs by column, all of them.
ROWS, COLUMNS, WORLD = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)
MESH: Mapping[str, tuple[tuple[int, ...], ...]] = {"a": ROWS, "b": COLUMNS, "w": WORLD}
RANKS = 4

Cost = Callable[..., Any]
# What AOTAutograd says of an input of its backward graphs; of saved values it says nothing.
ROLES = {"tangents": TangentAOTInput(PlainAOTOutput(0)), "primals": PlainAOTInput(0)}


def groups_of(rank: int, mesh: Mapping[str, Sequence[tuple[int, ...]]] = MESH) -> dict[str, tuple[int, ...]]:
    """The groups that a rank is in: what `overlap` is handed."""
    return {name: next(g for g in groups if rank in g) for name, groups in mesh.items()}


class Builder:
    """An fx graph in the form that Inductor's post-grad passes see: ATen overloads, fake tensors in meta["val"]."""

    def __init__(self, mesh: Mapping[str, Sequence[tuple[int, ...]]] = MESH) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        # torch 2.13: from its second call on, as_strided_scatter of a view has another offset and a smaller storage.
        self.mode.cache_enabled = False
        self.mesh = mesh

    def placeholder(self, name: str, shape: Sequence[int] = (8, 8), dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(tuple(shape), dtype=dtype)
        role = next((role for role in ROLES if name.startswith(role)), None)
        if role is not None:
            node.meta["desc"] = ROLES[role]
        return node

    def placeholders(self, names: str, shape: Sequence[int] = (8, 8), dtype: torch.dtype = torch.float32) -> list[Any]:
        return [self.placeholder(name, shape, dtype) for name in names.split()]

    def call(self, name: str | None, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.create_node("call_function", op, args, kwargs, name=name)
        node.meta["val"] = self.value(op, args, kwargs)
        return node

    def value(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            if op is WAIT:  # the result itself, which the fake kernel would copy
                return values[0][0]
            return op(*values[0], **values[1])

    def mm(self, name: str, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.call(name, ATEN.mm.default, x, y)

    def add(self, name: str, x: fx.Node, y: Any) -> fx.Node:
        return self.call(name, ATEN.add.Tensor, x, y)

    def relu(self, name: str, x: fx.Node) -> fx.Node:
        return self.call(name, ATEN.relu.default, x)

    def start(self, name: str, kind: str, x: Any, group: str = "a", reduce: str = "sum") -> fx.Node:
        """A collective of `kind`; of a list, a coalesced one."""
        size = len(self.mesh[group][0])
        op = getattr(C10D, kind + "_coalesced" * isinstance(x, list)).default
        arguments: dict[str, tuple[Any, ...]] = {
            "all_gather_into_tensor": (size, group),
            "reduce_scatter_tensor": (reduce, size, group),
            "all_reduce": (reduce, group),
            "broadcast": (0, group),
        }
        if kind == "all_to_all_single":
            arguments[kind] = (splits := [x.meta["val"].shape[0] // size] * size, splits, group)
        return self.call(name, op, x, *arguments[kind])

    def gather(self, name: str, x: Any, group: str = "a") -> fx.Node:
        return self.start(name, "all_gather_into_tensor", x, group)

    def scatter(self, name: str, x: Any, group: str = "a", reduce: str = "sum") -> fx.Node:
        return self.start(name, "reduce_scatter_tensor", x, group, reduce)

    def reduce(self, name: str, x: Any, group: str = "a", reduce: str = "sum") -> fx.Node:
        return self.start(name, "all_reduce", x, group, reduce)

    def wait(self, name: str | None, start: fx.Node) -> fx.Node:
        return self.call(name, WAIT, start)

    def item(self, name: str | None, node: fx.Node, index: int) -> fx.Node:
        return self.call(name, operator.getitem, node, index)

    def done(self, *outputs: Any) -> fx.GraphModule:
        self.graph.output(outputs)
        self.graph.lint()
        return fx.GraphModule({}, self.graph)


def by_name(table: Mapping[str, float], other: float = 0.0) -> Cost:
    """Seconds by the node's name: cost(node)."""
    return lambda node: table.get(node.name, other)


def by_size(table: Mapping[str, float], latency: float, seconds: float, num_bytes: int = 256) -> Cost:
    """Compute by name; a collective takes `latency` plus `seconds` for every `num_bytes` that a rank hands in."""

    def cost(node: fx.Node, size: int | None = None) -> float:
        if node.target not in STARTS:
            return table.get(node.name, 0.0)
        return latency + seconds * (handed_in(node) if size is None else size) / num_bytes

    return cost


def starts(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.target in STARTS]


def position(gm: fx.GraphModule) -> dict[str, int]:
    return {n.name: i for i, n in enumerate(gm.graph.nodes)}


def renamed(gm: fx.GraphModule, names: Mapping[str, str]) -> fx.GraphModule:
    """The same graph with other names of groups."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        if node.target in STARTS:
            node.args = (*node.args[:-1], names[node.args[-1]])
    return fx.GraphModule({}, graph)


# ---- values -----------------------------------------------------------------------------------------------------


def run(
    gm: fx.GraphModule | Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Tensor]],
    mesh: Mapping[str, Sequence[tuple[int, ...]]] = MESH,
    seed: int = 0,
    has_meta: bool = True,
) -> Ran:
    """Run all ranks in lockstep; with `has_meta`, every value is as meta["val"] says.

    Ranks may have graphs of their own: the k-th start or wait of each is of one op and group.

    A collective's result is garbage until its wait, which also checks that nobody wrote to the operand or to the result
    in between; so is an input that the graph waits for, as if an earlier graph had begun to fill it. Every rank has a
    random generator of its own, which random ops draw from in graph order.
    """
    ran = Ran([gm] * len(inputs) if isinstance(gm, fx.GraphModule) else gm, inputs, mesh, seed, has_meta)
    with torch.random.fork_rng(devices=[]):
        ran.run()
    return ran


class Ran:
    """A graph as it ran: every value of every rank, by its own nodes; `gm` is that of rank 0."""

    def __init__(
        self, gms: Sequence[fx.GraphModule], inputs: Sequence[Sequence[Tensor]], mesh: Any, seed: int, has_meta: bool
    ) -> None:
        self.gm, self.mesh, self.has_meta = gms[0], mesh, has_meta
        self.gms, self.nodes = gms, [list(gm.graph.nodes) for gm in gms]
        self.done = [0] * len(gms)  # nodes of each rank
        events = [[n for n in nodes if n.target in (*STARTS, WAIT)] for nodes in self.nodes]
        self.own = {column[0]: column for column in zip(*events, strict=True)}
        for column in self.own.values():
            kinds = {(n.target, n.args[-1] if n.target in STARTS else "") for n in column}
            assert len(kinds) == 1, f"ranks communicate in different orders: {column}"
        self.envs: list[dict[fx.Node, Any]] = [{} for _ in inputs]
        self.inputs = [[t.clone() if isinstance(t, Tensor) else t for t in tensors] for tensors in inputs]
        self.feeds: list[Iterator[Tensor]] = [iter(tensors) for tensors in self.inputs]
        self.states = [torch.Generator().manual_seed(seed * RANKS + r).get_state() for r in range(len(inputs))]
        self.pending: dict[fx.Node, tuple[Any, Any]] = {}  # of a start: operands at its time, results
        self.coming: dict[fx.Node, list[Tensor]] = {}  # inputs that are waited for: by rank what comes
        for number, node in enumerate(self.gm.graph.find_nodes(op="placeholder", sort=True)):
            if any(origin_of_wait(wait) is node for wait in self.gm.graph.find_nodes(op="call_function", target=WAIT)):
                self.coming[node] = [tensors[number].clone() for tensors in self.inputs]
                for tensors in self.inputs:
                    tensors[number].copy_(_garbage(tensors[number]))
        self.outputs: list[Any] = []

    def nodes_of(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Of a start or wait of rank 0, that of every rank."""
        return self.own[node]

    def run(self) -> None:
        for column in (*self.own.values(), None):
            for rank in range(len(self.nodes)):
                self._advance(rank)
            if column is not None:
                (self._wait if column[0].target is WAIT else self._start)(column[0])
                for rank, node in enumerate(column):
                    self.done[rank] += 1
                    self._check(node, rank)

    def _advance(self, rank: int) -> None:
        """Run a rank up to its next start or wait."""
        for node in self.nodes[rank][self.done[rank] :]:
            if node.target in (*STARTS, WAIT):
                return
            self.done[rank] += 1
            if node.op == "placeholder":
                self.envs[rank][node] = next(self.feeds[rank])
            elif node.op == "get_attr":
                self.envs[rank][node] = operator.attrgetter(str(node.target))(self.gms[rank])
            elif node.op == "output":
                self.outputs.append(fx.map_arg(node.args[0], self.envs[rank].__getitem__))
            else:
                self._compute(node, rank)
            self._check(node, rank)

    def _check(self, node: fx.Node, rank: int) -> None:
        if self.has_meta:
            check_meta(node, [self.envs[rank]])

    def _compute(self, node: fx.Node, rank: int) -> None:
        env = self.envs[rank]
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        torch.set_rng_state(self.states[rank])
        env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        self.states[rank] = torch.get_rng_state()

    def _operands(self, node: fx.Node) -> list[Any]:
        pairs = zip(self.nodes_of(node), self.envs, strict=True)
        return [fx.map_arg(one.args[0], env.__getitem__) for one, env in pairs]

    def _start(self, node: fx.Node) -> None:
        operands, nodes = self._operands(node), self.nodes_of(node)
        results: list[Any] = [None] * len(operands)
        for members in self.mesh[node.args[-1]]:
            made = _exchange([nodes[m] for m in members], [operands[m] for m in members])
            for member, result in zip(members, made, strict=True):
                results[member] = result
        for one, env, operand, result in zip(nodes, self.envs, operands, results, strict=True):
            into = operand if node.target in IN_PLACE else fx.map_arg(one.kwargs.get("out"), env.__getitem__)
            env[one] = _each(result, _garbage) if into is None else into.copy_(_garbage(into))
        self.pending[node] = ([_each(x, Tensor.clone) for x in operands], results)

    def _wait(self, node: fx.Node) -> None:
        """The first wait for any result of a start completes it: a coalesced collective is one piece of work."""
        start = origin_of_wait(node)
        assert start in self.envs[0], f"{node.name} waits for what has not been started"
        for one, env, value in zip(self.nodes_of(node), self.envs, self.coming.pop(start, ()), strict=False):
            there = env[origin_of_wait(one)]
            assert _same(there, _garbage(there)), f"{start} was written to before it was waited for"
            there.copy_(value)
        if start in self.pending:
            before, results = self.pending.pop(start)
            rows = zip(self.nodes_of(start), self.envs, self._operands(start), before, results, strict=True)
            for one, env, operand, old, result in rows:
                assert _same(operand, old), f"the operand of {start} changed in flight"
                assert _same(env[one], _each(result, _garbage)), f"the result of {start} was written to in flight"
                values = env[one] if isinstance(result, list) else [env[one]]
                for value, part in zip(values, result if isinstance(result, list) else [result], strict=True):
                    value.copy_(part)
        for one, env in zip(self.nodes_of(node), self.envs, strict=True):
            env[one] = env[one.args[0]]  # type: ignore[index]

    def results(self) -> list[list[Tensor]]:
        """Outputs and final placeholders of every rank."""
        return [
            [x for x in (*outputs, *tensors) if isinstance(x, Tensor)]
            for outputs, tensors in zip(self.outputs, self.inputs, strict=True)
        ]


def origin_of_wait(wait: fx.Node) -> fx.Node:
    """The start or the input that a wait is for, past views, items and other waits."""
    node = wait.args[0]
    while isinstance(node, fx.Node) and node.op == "call_function" and node.target not in STARTS:
        node = node.args[0]
    assert isinstance(node, fx.Node)
    return node


def _each(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return [function(t) for t in value] if isinstance(value, list | tuple) else function(value)


def _garbage(like: Tensor) -> Tensor:
    made = torch.ones_like(like)
    if like.dtype is not torch.bool:
        made.view(-1).view(torch.uint8).fill_(0xA5)
    return made


def same_bits(x: Tensor, y: Tensor) -> bool:
    return _form(x) == _form(y) and _bits(x).equal(_bits(y))


def _form(x: Tensor) -> tuple[Any, ...]:
    """Shape, dtype and strides, but those of dims of size 1, which mean nothing and differ between kernels."""
    strides = tuple(step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1)
    return tuple(x.shape), x.dtype, strides if x.numel() else ()


def _bits(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _same(x: Any, y: Any) -> bool:
    pairs = zip(x, y, strict=True) if isinstance(x, list | tuple) else [(x, y)]
    return all(_bits(a).equal(_bits(b)) for a, b in pairs)


def _exchange(nodes: Sequence[fx.Node], operands: Sequence[Any]) -> list[Any]:
    """What each member of one group gets; `nodes` are the members'."""
    if isinstance(operands[0], list | tuple):
        columns = [_exchange_one(nodes, list(column)) for column in zip(*operands, strict=True)]
        return [list(row) for row in zip(*columns, strict=True)]
    return _exchange_one(nodes, operands)


def _exchange_one(nodes: Sequence[fx.Node], operands: Sequence[Tensor]) -> list[Tensor]:
    size, node = len(operands), nodes[0]
    kind = re.sub(r"(_coalesced|_out|_)?\..*", "", node.target.__name__)  # type: ignore[union-attr]
    if kind == "all_gather_into_tensor":
        assert node.args[1] == size
        return [torch.cat(list(operands)) for _ in operands]
    if kind == "broadcast":
        return [operands[node.args[1]].clone() for _ in operands]  # type: ignore[index]
    if kind == "all_to_all_single":
        assert all(x.is_contiguous() for x in operands), f"{node.name} takes what is not contiguous"
        sent = [x.split(one.args[2]) for one, x in zip(nodes, operands, strict=True)]  # type: ignore[arg-type]
        for i, one in enumerate(nodes):
            assert [len(sent[j][i]) for j in range(size)] == list(one.args[1]), f"blocks for member {i} do not fit"
        return [torch.cat([sent[j][i] for j in range(size)]) for i in range(size)]
    total = _reduced(str(node.args[1]), operands)
    if kind == "all_reduce":
        return [total.clone() for _ in operands]
    assert kind == "reduce_scatter_tensor"
    assert node.args[2] == size
    return [piece.clone() for piece in total.chunk(size)]


def _reduced(op: str, operands: Sequence[Tensor]) -> Tensor:
    total = operands[0].contiguous().clone()
    for x in operands[1:]:
        total = torch.maximum(total, x) if op == "max" else total + x.contiguous()
    return total / len(operands) if op == "avg" else total


def check_meta(node: fx.Node, envs: Sequence[Mapping[fx.Node, Any]]) -> None:
    """meta["val"] says what a node really gives: later passes rely on it."""
    for value in (env.get(node) for env in envs):
        if isinstance(value, list | tuple):
            # What is not asked for may be there: a bias of convolution_backward, by some libraries.
            pairs = [pair for pair in zip(value, node.meta["val"], strict=True) if pair[1] is not None]
        else:
            pairs = [(value, node.meta.get("val"))]
        for real, fake in pairs:
            if isinstance(real, Tensor):
                assert isinstance(fake, Tensor), f"{node.name} has no meta['val']"
                found, said = _form(real), _form(fake)
                assert found == said, f"{node.name} gives {found}, meta['val'] says {said}"


def random_inputs(gm: fx.GraphModule, seed: int = 0, num_ranks: int = RANKS) -> list[list[Tensor]]:
    """Other values on every rank; small integers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    vals = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder", sort=True)]

    def one(v: Any) -> Any:  # inputs that are no tensors are objects that nothing is computed with
        return torch.randint(-3, 4, v.shape, generator=generator).to(v.dtype) if isinstance(v, Tensor) else None

    return [[one(v) for v in vals] for _ in range(num_ranks)]


def assert_same_values(before: fx.GraphModule, after: fx.GraphModule, mesh: Any = MESH, seed: int = 0) -> None:
    inputs = random_inputs(before, seed)
    assert_same_results(run(before, inputs, mesh, seed), run(after, inputs, mesh, seed))


def assert_same_results(before: Ran, after: Ran) -> None:
    for rank, pair in enumerate(zip(before.results(), after.results(), strict=True)):
        for i, (x, y) in enumerate(zip(*pair, strict=True)):
            assert same_bits(x, y), f"result {i} of rank {rank} differs"
            assert _home(x) == _home(y), f"result {i} of rank {rank} lies at {_home(y)} of its storage, not {_home(x)}"
        assert sharing(pair[0]) == sharing(pair[1]), f"other results of rank {rank} share storages"


def _home(x: Tensor) -> tuple[int, int]:
    """Where in its storage a tensor begins, and the bytes of that."""
    return x.storage_offset() if x.numel() else 0, x.untyped_storage().nbytes()


def sharing(results: Sequence[Tensor]) -> list[int]:
    """By result the first that lives in the same storage."""
    first: dict[int, int] = {}
    return [first.setdefault(x.untyped_storage().data_ptr() or -i, i) for i, x in enumerate(results)]


# ---- seconds ----------------------------------------------------------------------------------------------------


def is_free(node: fx.Node) -> bool:
    """Placeholders, outputs, waits, views and items take no time."""
    if node.op != "call_function" or node.target in (WAIT, operator.getitem):
        return True
    schema = node.target._schema  # type: ignore[union-attr]
    aliases = [a.alias_info for a in schema.arguments if a.alias_info is not None]
    return node.target not in STARTS and bool(aliases) and not any(a.is_write for a in aliases)


def _is_kernel(view: fx.Node) -> bool:
    """Whether a view may cost something: not where a communication makes its base that it does not wait for."""
    base: Any = view
    while base.op == "call_function" and base.target is not WAIT and is_free(base):
        base = base.args[0]
    waits = view.graph.find_nodes(op="call_function", target=WAIT)
    is_coming = base.target in STARTS or (base.op == "placeholder" and base in map(origin_of_wait, waits))
    return isinstance(view.target, torch._ops.OpOverload) and view.target is not WAIT and not is_coming


def handed_in(node: fx.Node) -> int:
    """Bytes of the tensors that a node takes: of a start, what one rank hands in. A tensor that stands twice among the
    operands counts twice, by whatever names: a coalesced collective moves it twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return sum(n.meta["val"].nbytes for n in found if isinstance(n.meta["val"], Tensor))


def play(gm: fx.GraphModule, cost: Cost) -> tuple[float, float]:
    """Makespan and exposed seconds in graph order: one compute stream, one first-in-first-out channel per group."""
    now = exposed = 0.0
    free: dict[str, float] = {}
    ends: dict[fx.Node, float] = {}
    for node in gm.graph.nodes:
        if node.target in STARTS:
            group = node.args[-1]
            ends[node] = free[group] = max(now, free.get(group, 0.0)) + cost(node)
        elif node.target is WAIT:
            end = ends.get(origin_of_wait(node), 0.0)
            exposed += max(0.0, end - now)
            now = max(now, end)
        elif not is_free(node) or _is_kernel(node):
            now += cost(node)
    last = max([now, *free.values()])  # of a start that nobody waits for too
    return last, exposed + last - now


# ---- bytes ------------------------------------------------------------------------------------------------------


def peak(gm: fx.GraphModule, can_free: Callable[[fx.Node], bool] = lambda node: False) -> int:
    """True peak of rank 0 in bytes, see `peak_of`."""
    return peak_of(run(gm, random_inputs(gm)), can_free)


def peak_of(ran: Ran, can_free: Callable[[fx.Node], bool]) -> int:
    """True peak of rank 0 in bytes: storages as a real run makes them, from their node to their last use.

    A collective's operand lives until its wait, placeholders to the end unless `can_free`, outputs to the end.
    """
    nodes = list(ran.gm.graph.nodes)
    index = {n: i for i, n in enumerate(nodes)}
    waited = {n: min((index[w] for w in waits_of(n)), default=len(nodes)) for n in nodes if n.target in STARTS}
    births: dict[int, int] = {}
    deaths: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for node in nodes[:-1]:
        value = ran.envs[0].get(node)
        last = max([index[node], *(waited.get(u, index[u]) for u in node.users)])
        held = (node.op == "placeholder" and not can_free(node)) or waited.get(node) == len(nodes)
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor):
                key = tensor.untyped_storage().data_ptr()
                births.setdefault(key, -1 if node.op == "placeholder" else index[node])
                deaths[key] = max(deaths.get(key, 0), len(nodes) if held else last)
                sizes[key] = tensor.untyped_storage().nbytes()
    change = [0] * (len(nodes) + 3)
    for key, size in sizes.items():
        change[births[key] + 1] += size
        change[deaths[key] + 2] -= size
    best = live = 0
    for delta in change:
        live += delta
        best = max(best, live)
    return best


def waits_of(start: fx.Node) -> list[fx.Node]:
    """Its waits: of its result, of a part of that, or of a view."""
    found, left = [], [start]
    for node in left:
        found += [u for u in node.users if u.target is WAIT]
        left += [u for u in node.users if u.target is not WAIT and u.op == "call_function" and is_free(u)]
    return list(dict.fromkeys(found))
