"""Graphs as JSON and back: nodes with their names, targets, arguments and metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from meshweave.ir.graph import StepGraph
from meshweave.ir.rank import RankGraph
from meshweave.stored.codec import Decoder, Encoder, NoFormError

_META = ("spec", "origin", "layout", "assignment", "plan", "move", "global", "key", "ring")
_META_NUMBERS = {name: number for number, name in enumerate(_META)}
_OPS = ("call_function", "placeholder", "output")


def graph_form(graph: fx.Graph, encoder: Encoder) -> list[Any]:
    """For each node its op, name, target, arguments and metadata. Raises NoFormError for what has no form."""
    numbers: dict[fx.Node, int] = {}
    forms = []
    for node in graph.nodes:
        if node.op not in _OPS:
            raise NoFormError(f"a node {node.op} is not stored")
        form = [
            _OPS.index(node.op),
            node.name,
            encoder.value(node.target),
            [encoder.value(each, numbers) for each in node.args],
            _meta_form(node, encoder),
        ]
        if node.kwargs:
            form.append([[name, encoder.value(each, numbers)] for name, each in node.kwargs.items()])
        forms.append(form)
        numbers[node] = len(numbers)
    return forms


def _meta_form(node: fx.Node, encoder: Encoder) -> list[Any]:
    form: list[Any] = []
    for name, value in node.meta.items():
        if name not in _META_NUMBERS:
            raise NoFormError(f"the metadata {name} is not stored")
        form += _META_NUMBERS[name], encoder.value(value)
    return form


def graph_of(forms: Sequence[Any], decoder: Decoder) -> fx.Graph:
    """The graph. Raises ValueError for a name that is taken or is none; the verifier checks the rest."""
    graph, nodes = fx.Graph(), list[fx.Node]()
    value = decoder.value
    for op, name, target, args, meta, *more in forms:
        arguments = tuple([value(each, nodes) for each in args])
        kwargs = {str(key): value(each, nodes) for key, each in more[0]} if more else {}
        node = graph.create_node(_OPS[op], value(target), arguments, kwargs, name)
        if node.name != name:
            raise ValueError(f"{name} is not the name of a node")
        for number, each in zip(meta[::2], meta[1::2], strict=True):
            node.meta[_META[number]] = value(each)
        nodes.append(node)
    return graph


def step_form(step: StepGraph, encoder: Encoder) -> list[Any]:
    return [graph_form(step.graph, encoder), *map(encoder.value, (step.inputs, step.outputs, step.constants))]


def step_of(form: Sequence[Any], decoder: Decoder) -> StepGraph:
    graph, *rest = form
    return StepGraph(graph_of(graph, decoder), *map(decoder.value, rest))


_ROLE = ("mesh", "inputs", "layouts", "outputs", "output_layouts", "constants", "devices", "meshes", "transfers")


def role_form(role: RankGraph, encoder: Encoder) -> list[Any]:
    prologue = None if role.prologue is None else role_form(role.prologue, encoder)
    return [graph_form(role.graph, encoder), prologue, *(encoder.value(getattr(role, name)) for name in _ROLE)]


def role_of(form: Sequence[Any], decoder: Decoder) -> RankGraph:
    graph, prologue, *rest = form
    values = dict(zip(_ROLE, map(decoder.value, rest), strict=True))
    return RankGraph(
        graph_of(graph, decoder), **values, prologue=None if prologue is None else role_of(prologue, decoder)
    )
