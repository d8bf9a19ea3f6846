"""The update of many small parameters with a call per op, instead of one per op and parameter.

An optimizer does the same arithmetic for every parameter. Where parameters are small, most of the time of an update is
the calls of its ops: AdamW on 8 parameters takes 113. PyTorch's `_foreach` ops take lists of tensors, of any shapes; on
processors the results are bit for bit those of a call per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import fx

from meshweave.interop.ops import aten_ops, operator_name
from meshweave.ir.collectives import STARTS, WAIT
from meshweave.ir.graph import Spec, origin_of
from meshweave.ir.rank import RankGraph
from meshweave.runtime.regions.cut import Fused

aten = torch.ops.aten
Step = fx.Node | Fused

LARGEST = 1 << 15  # elements of a tensor that is batched: the calls of larger ones cost little beside their arithmetic
GROUP = 1 << 16  # elements of the parameters of a group, whose intermediate values exist at once: they stay in a cache

_BATCHED = frozenset(
    aten_ops(
        "add.Tensor sub.Tensor mul.Tensor div.Tensor div.Tensor_mode maximum minimum pow.Tensor_Scalar sqrt reciprocal "
        "neg abs sign"
    )
)
_COMMUTATIVE = frozenset(aten_ops("add.Tensor mul.Tensor"))


def batched_updates(
    role: RankGraph,
    devices: Sequence[int],
    device: torch.device,
    parts: Sequence[Sequence[fx.Node]],
    kept: Collection[fx.Node],
) -> list[list[Step]]:
    """The parts of a step, of which the update computes equal ops on small tensors together."""
    return [_batched(part, kept) if part and origin_of(part[-1]).phase == "update" else list(part) for part in parts]


def _batched(nodes: Sequence[fx.Node], kept: Collection[fx.Node]) -> list[Step]:
    """The nodes of an update in rounds, with groups of small tensors, each as soon as what it needs is there. As they
    are, if communications would have another order."""
    steps: list[Step] = []
    for alone, small in _rounds(nodes):
        place = {node: i for i, node in enumerate(alone)}
        ready: dict[int, list[Step]] = {}  # groups, by the place of the last node that they need
        for group in _groups(small):
            needed = (place[n] for node in chain.from_iterable(group) for n in node.all_input_nodes if n in place)
            own = [_Group(group, kept).fused()] if len(group) > 1 else group[0]
            ready.setdefault(max(needed, default=-1), []).extend(own)
        steps += ready.get(-1, [])
        for i, node in enumerate(alone):
            steps += [node, *ready.get(i, [])]
    return steps if _communications(steps) == _communications(nodes) else list(nodes)


def _communications(steps: Sequence[Step]) -> list[Step]:
    return [n for n in steps if isinstance(n, fx.Node) and (n.target in STARTS or n.target is WAIT)]


def _rounds(nodes: Sequence[fx.Node]) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """In each round the nodes that run by themselves, which need nothing that is batched in this round or later, and
    those that are batched."""
    number: dict[fx.Node, int] = {}
    small = {node for node in nodes if _is_small(node)}
    rounds: list[tuple[list[fx.Node], list[fx.Node]]] = [([], [])]
    for node in nodes:
        needed = [n for n in node.all_input_nodes if n in number]
        later = node not in small
        number[node] = max((number[n] + (later and n in small) for n in needed), default=0)
        while len(rounds) <= number[node]:
            rounds.append(([], []))
        rounds[number[node]][node in small].append(node)
    return rounds


def _is_small(node: fx.Node) -> bool:
    spec = node.meta.get("spec")
    if node.target not in _BATCHED or not isinstance(spec, Spec) or spec.shape == () or spec.num_elements > LARGEST:
        return False
    return all(isinstance(a.meta.get("spec"), Spec) if isinstance(a, fx.Node) else _is_number(a) for a in node.args)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _groups(nodes: Sequence[fx.Node]) -> Iterator[list[list[fx.Node]]]:
    """The chains of ops, one for each parameter, in groups of at most `GROUP` elements."""
    chains: dict[fx.Node, list[fx.Node]] = {}  # by node; those of a chain have the same list
    for node in nodes:
        joined = list({id(c): c for n in node.all_input_nodes if (c := chains.get(n)) is not None}.values())
        whole = [*chain.from_iterable(joined), node]
        chains.update(dict.fromkeys(whole, whole))
    order = {node: i for i, node in enumerate(nodes)}
    group, size = list[list[fx.Node]](), 0
    for members in {id(c): c for c in chains.values()}.values():
        elements = max(n.meta["spec"].num_elements for n in members)
        if group and size + elements > GROUP:
            yield group
            group, size = [], 0
        group.append(sorted(members, key=order.__getitem__))
        size += elements
    if group:
        yield group


@dataclass(slots=True)
class _Group:
    """The function of chains. The nodes of a row have the same op, on rows, on the same scalars, or on inputs; their
    values are a list."""

    chains: Sequence[Sequence[fx.Node]]
    kept: Collection[fx.Node]
    rows: dict[Any, list[fx.Node]] = field(default_factory=dict)  # by what they have in common
    number: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)  # row, and place in it
    inputs: dict[fx.Node, int] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)

    def fused(self) -> Fused:
        nodes = list(chain.from_iterable(self.chains))
        numbers: dict[Any, int] = {}
        for node in nodes:
            key = (node.target, *map(self._kind, node.args), str(node.kwargs))
            row = self.rows.setdefault(key, [])
            self.number[node] = (numbers.setdefault(key, len(numbers)), len(row))
            row.append(node)
            for operand in node.all_input_nodes:
                if operand not in self.number:
                    self.inputs.setdefault(operand, len(self.inputs))
        outputs = [n for n in nodes if n in self.kept or any(user not in self.number for user in n.users)]
        lines = ["def run(x, device):"]
        lines += [f"    r{i} = {self._row(list(row))}" for i, row in enumerate(self.rows.values())]
        lines += ["    x.clear()", f"    return [{', '.join(map(self._text_of, outputs))}]"]
        exec(compile("\n".join(lines), "<meshweave: batched updates>", "exec"), self.names)
        return Fused(tuple(nodes), tuple(self.inputs), tuple(outputs), self.names["run"])

    def _kind(self, value: Any) -> Any:
        """What operands of a row have in common."""
        if not isinstance(value, fx.Node):
            return type(value), value
        if value in self.number:
            return "row", self.number[value][0]
        return ("scalar", value) if _is_scalar(value) else ("input",)

    def _text_of(self, value: Any) -> str:
        if not isinstance(value, fx.Node):
            return repr(value)
        if value in self.number:
            row, place = self.number[value]
            return f"r{row}[{place}]"
        return f"x[{self.inputs[value]}]"

    def _all(self, values: Sequence[fx.Node]) -> str:
        row = self._whole_row(values)
        return f"r{row}" if row is not None else f"[{', '.join(map(self._text_of, values))}]"

    def _whole_row(self, values: Sequence[fx.Node]) -> int | None:
        number, _ = self.number.get(values[0], (None, 0))
        return number if number is not None and list(self.rows.values())[number] == list(values) else None

    def _row(self, row: list[fx.Node]) -> str:
        """The expression that computes a row."""
        target: Any = row[0].target
        kwargs = {k: v for k, v in row[0].kwargs.items() if v is not None}
        operands: list[list[Any]] = [[node.args[i] for node in row] for i in range(len(row[0].args))]
        if len(operands) == 2 and _is_shared(operands[0]) and target in _COMMUTATIVE and not kwargs:
            operands.reverse()
        first, *others = operands
        function = None if kwargs or _is_shared(first) else self._foreach(target, others, "")
        if len(row) == 1 or function is None:
            name = self._named(target)
            calls = (f"{name}({', '.join(map(self._text_of, n.args))}{_keywords(n.kwargs)})" for n in row)
            return f"[{', '.join(calls)}]"
        texts = [self._all(first), *(self._text_of(o[0]) if _is_shared(o) else self._all(o) for o in others)]
        in_place = self._foreach(target, others, "_") if self._is_last(row, first) else None
        if in_place is not None:
            return f"{texts[0]}; {self._named(in_place)}({', '.join(texts)})"
        return f"{self._named(function)}({', '.join(texts)})"

    def _is_last(self, row: Sequence[fx.Node], operands: Sequence[fx.Node]) -> bool:
        """Whether a row may overwrite its first operands: values of this group of the same form, which nothing else
        reads."""
        return self._whole_row(operands) is not None and all(
            x not in self.kept and list(x.users) == [node] and x.meta["spec"] == node.meta["spec"]
            for x, node in zip(operands, row, strict=True)
        )

    def _foreach(self, target: Any, others: Sequence[Sequence[Any]], suffix: str) -> Any:
        """The op that computes a whole row, given the operands after the first."""
        packet = getattr(aten, f"_foreach_{operator_name(target)}{suffix}", None)
        form = "default" if not others else "List"
        if others and _is_shared(others[0]):
            form = "Tensor" if isinstance(others[0][0], fx.Node) else "Scalar"
        return getattr(packet, form, None) if len(others) < 2 else None

    def _named(self, function: Callable[..., Any]) -> str:
        name = f"f_{len(self.names)}"
        self.names[name] = function
        return name


def _is_scalar(node: fx.Node) -> bool:
    spec = node.meta.get("spec")
    return isinstance(spec, Spec) and spec.shape == ()


def _is_shared(operands: Sequence[Any]) -> bool:
    """Whether all nodes of a row have the same number as an operand."""
    return not isinstance(operands[0], fx.Node) or _is_scalar(operands[0])


def _keywords(kwargs: Any) -> str:
    return "".join(f", {name}={value!r}" for name, value in kwargs.items())
