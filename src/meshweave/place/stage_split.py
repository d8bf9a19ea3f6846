"""The chain of layers that a pipeline cuts into stages: its order, the work of each layer, and where to cut it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod

from torch import fx, nn

from meshweave.cost.simulate.classify import known_kind, work_of
from meshweave.ir.graph import PARTS, Spec, StepGraph, origin_of, tensor_inputs, with_ancestors
from meshweave.ir.values import Value
from meshweave.ir.work import MemoryWork

_FORWARD, _BACKWARD = PARTS["forward"], PARTS["backward"]
_PRODUCTS = ("matmul", "attention", "registered")  # kinds of work with multiplications
_BEFORE = -1  # the place of an op that no layer comes before


@dataclass(frozen=True, slots=True)
class LayerChain:
    """The layers of the model's longest list (that with the most layers; lists within equal layers are parts of these),
    in the order in which forward comes to them.

    `work` are the FLOPs of each layer's matmuls and attentions in forward and backward. Those of the ops beside the
    layers are with the last layer before them, in front of all with the first: so the first has the embedding's (a
    lookup is no matmul), the last those of head and loss. In a model without matmuls it is the number of parameters.
    `before` and `after` are the modules with parameters of their own that run before and after all layers.
    """

    list_name: str
    layers: tuple[str, ...]
    work: tuple[int, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]


def chain_of_layers(step: StepGraph, model: nn.Module) -> LayerChain:
    """The chain of a captured step. Layers without parameters, or that forward does not call, are left out: they run
    where their operands are."""
    ops = [node for node in step.graph.nodes if node.op == "call_function"]
    ahead = [node for node in ops if PARTS[origin_of(node).phase] == _FORWARD]
    name, sizes = _longest_list(model, {origin_of(node).module for node in ahead})
    layer_of = _layers_around(sizes)
    used = {node: layer for node in ahead if (layer := layer_of(origin_of(node).module))}
    layers = tuple(dict.fromkeys(used.values()))
    places = _places(step, ahead, used, {layer: at for at, layer in enumerate(layers)})
    before, after = _modules_beside(model, name, used, places)
    work = _work(ops, places, len(layers))
    return LayerChain(name, layers, work if any(work) else tuple(sizes[n] for n in layers), before, after)


def _longest_list(model: nn.Module, modules: Iterable[str]) -> tuple[str, dict[str, int]]:
    """The list with the most layers, of several that with the most parameters, and the number of these in each layer:
    of its entries those that have any, and that some of the `modules` of ops are in. A dict of modules of one class is
    a list, too. What several entries of a list have, of one class, is a part of them: an MLP of three modules in each
    of two blocks."""
    called = {"", *modules}
    for module in modules:
        while module := module.rpartition(".")[0]:
            called.add(module)
    names = {module: name for name, module in model.named_modules()}  # by its first name, as in origins
    lists: dict[str, dict[str, int]] = {}
    for module, name in names.items():
        is_dict = isinstance(module, nn.ModuleDict) and len({*map(type, module.values())}) == 1
        if is_dict or isinstance(module, nn.ModuleList | nn.Sequential):
            layers = {names[layer]: sum(p.numel() for p in layer.parameters()) for layer in module.children()}
            lists[name] = {layer: size for layer, size in layers.items() if size and layer in called}
    classes = {name: type(module) for module, name in names.items()}
    parts = {name for name in lists for outer in lists.values() if _is_repeated(name, outer, lists, classes)}
    whole = ((name, its) for name, its in lists.items() if name not in parts)
    return max(whole, key=lambda item: (len(item[1]), sum(item[1].values())), default=("", {}))


def _is_repeated(name: str, entries: Iterable[str], lists: Collection[str], classes: Mapping[str, type]) -> bool:
    """Whether a list is in one of these entries, and another of its class has a list at the same place."""
    for entry in entries:
        if f"{name}.".startswith(f"{entry}."):
            place = name.removeprefix(entry)
            alike = [other for other in entries if other != entry and classes[other] is classes[entry]]
            return any(f"{other}{place}" in lists for other in alike)
    return False


def _layers_around(layers: Iterable[str]) -> Callable[[str], str]:
    """The layer that a module is in, "" if it is in none."""
    known = frozenset(layers)

    @cache
    def layer_of(module: str) -> str:
        return module if module in known or not module else layer_of(module.rpartition(".")[0])

    return layer_of


def _places(
    step: StepGraph, ahead: Sequence[fx.Node], used: Mapping[fx.Node, str], numbers: Mapping[str, int]
) -> dict[fx.Node, int]:
    """The number of each forward op's layer; beside the layers, of the last that it depends on. What follows from
    parameters and constants alone, such as a weight in another dtype, is where it is first used."""
    places: dict[fx.Node, int] = {}
    varying = {node for node, item in step.sources.items() if item.kind == "batch"}
    for node in ahead:
        before = max((places.get(n, _BEFORE) for n in node.all_input_nodes), default=_BEFORE)
        places[node] = numbers[used[node]] if node in used else before
        if node in used or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
    for node in reversed(ahead):
        if node not in varying:
            places[node] = min((places[user] for user in node.users if user in places), default=places[node])
    return places


def _modules_beside(
    model: nn.Module, list_name: str, used: Mapping[fx.Node, str], places: Mapping[fx.Node, int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules with parameters of their own all of whose ops run before the layers, and those all of whose ops run
    after them. A module around the list is neither."""
    feeding = with_ancestors(used)
    sides: dict[str, set[str]] = {}
    for node, place in places.items():
        module = origin_of(node).module
        if node not in used and module and not f"{list_name}.".startswith(f"{module}."):
            side = "before" if place == _BEFORE else "between" if node in feeding else "after"
            sides.setdefault(module, set()).add(side)
    known = dict(model.named_modules())
    own = [m for m in sides if m in known and any(True for _ in known[m].parameters(recurse=False))]
    before, after = (tuple(m for m in own if sides[m] == {side}) for side in ("before", "after"))
    return before, after


def _work(ops: Iterable[fx.Node], places: Mapping[fx.Node, int], count: int) -> tuple[int, ...]:
    """FLOPs by layer, of a backward op with the layer of its forward op."""
    of_call = {call: place for node, place in places.items() if (call := origin_of(node).call)}
    work = [0] * count
    for node in ops:
        is_ahead = node in places
        place = places[node] if is_ahead else of_call.get(origin_of(node).call)
        is_of_pass = is_ahead or PARTS[origin_of(node).phase] == _BACKWARD
        if count and is_of_pass and place is not None and known_kind(node) in _PRODUCTS:
            work[max(place, 0)] += _flops(node)
    return tuple(work)


def _flops(node: fx.Node) -> int:
    result = node.meta.get("spec")
    results = [result] if isinstance(result, Spec) else [spec for spec in result or () if spec is not None]
    operands = [_value(n.meta["spec"], at) for at, n in enumerate(tensor_inputs(node))]
    works = work_of(node, operands, [_value(spec, -1) for spec in results])
    return sum(int(work.flops) for work in works if not isinstance(work, MemoryWork))


def _value(spec: Spec, storage: int) -> Value:
    """A contiguous tensor of this shape."""
    strides = [prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape))]
    return Value(spec.shape, tuple(strides), spec.dtype, storage, spec.num_bytes)


def balanced_sizes(work: Sequence[int], count: int) -> tuple[int, ...]:
    """How many consecutive layers each of `count` stages has, at least one, so that the most work of a stage is least.

    Of the cuts with that least, the one with the most even work (the least sum of squares) is taken; of these, the one
    whose first stages have fewer layers, since they store the most microbatches at a time. Exact; needs `count` <=
    layers. Time O(layers^2 log layers)."""
    before = [0, *accumulate(work)]
    limits = sorted({before[j] - before[i] for i in range(len(work)) for j in range(i + 1, len(before))})
    limit = limits[bisect_left(limits, True, key=lambda most: _num_stages(work, most) <= count)]
    layers = len(work)
    # of the layers from i on, in `left` stages: the least sum of squares, and the number of layers of the first stage
    costs: dict[int, int] = {layers: 0}
    cuts: list[dict[int, int]] = []
    for left in range(1, count + 1):
        rows: dict[int, tuple[int, int]] = {}
        for i in range(layers - left, -1, -1):
            for j in range(i + 1, layers + 1):
                own = before[j] - before[i]
                if own > limit:
                    break
                if j in costs and (i not in rows or own**2 + costs[j] < rows[i][0]):
                    rows[i] = own**2 + costs[j], j - i
        costs = {i: cost for i, (cost, _) in rows.items()}
        cuts.append({i: size for i, (_, size) in rows.items()})
    sizes: list[int] = []
    for first in reversed(cuts):
        sizes.append(first[sum(sizes)])
    return tuple(sizes)


def _num_stages(work: Sequence[int], limit: int) -> int:
    """The least number of stages of at most so much work; more than there are layers if one has more."""
    if max(work) > limit:
        return len(work) + 1
    count, load = 1, 0
    for own in work:
        count, load = (count, load + own) if load + own <= limit else (count + 1, own)
    return count
