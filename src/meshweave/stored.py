"""Programs on disk: a start whose captured step, plan, costs and options are those of an earlier start loads its
program.

The key is a digest of all that the stages after capture read. An entry is a pickle of data: nothing in it is executed.
`_ProgramUnpickler` admits frozen dataclasses of meshweave, graphs, containers and dtypes; operators and functions are
text in the nodes of a graph, and are looked up among those that a graph may have. Constructors check what they get, and
the verifier runs over all graphs as after every stage.
"""

from __future__ import annotations

import operator
import pickle
import platform
import secrets
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from hashlib import sha256
from importlib import import_module
from inspect import isfunction
from io import BytesIO
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from meshweave.disk_cache import CacheEntry, cache_directory, package_digest
from meshweave.interop.ops import OpOverload, find_operator, is_operator
from meshweave.ir.graph import Origin, Spec, StepGraph
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_placed, verify_rank, verify_step
from meshweave.ops.registry import registrations
from meshweave.optimize.overlap.report import Deferred
from meshweave.program import PlanInputs, Planned
from meshweave.search import Gathered

_OPS = ("call_function", "placeholder", "output")
_OPERATORS = frozenset({"aten", "prims", "_c10d_functional", "meshweave"})  # namespaces
_OWN, _FUNCTIONS, _GETITEM = "meshweave.", "meshweave.ir.", "_operator.getitem"
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
_PLAIN = (
    StepGraph,
    RankGraph,
    immutable_dict,
    immutable_list,
    torch.Size,
    torch.device,
    tuple,
    list,
    dict,
    set,
    frozenset,
    slice,
    complex,
)


class NoFormError(Exception):
    """A value that has no form on disk: the program is not stored."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The program of an earlier start with the same inputs, if `entry` has it on every process: they read, agree and
    write together."""

    entry: CacheEntry
    inputs: PlanInputs
    gathered: Gathered

    def read(self) -> tuple[Planned | None, str]:
        """The program, if every process has the same, and why the entry was of no use, else an empty text."""
        data, trouble = self.entry.read()
        mark = 1 + int.from_bytes(sha256(data).digest()[:7]) if data else 0
        if len(set(self.gathered(mark))) > 1 or not data:
            return None, trouble
        planned = None
        try:
            planned = load(data, self.inputs)
        except Exception as error:  # whatever a changed entry leads to: the program is built anew
            trouble = f"{self.entry.path} has no program of this step ({type(error).__name__}: {error})"
        return (planned if all(self.gathered(int(planned is not None))) else None), trouble

    def write(self, planned: Planned) -> str:
        """Store a program for the next start, once per host. Returns why that was not possible, else an empty text. A
        search that was cut short is not stored: the next start may have more time."""
        if any(variant.is_untried for variant in planned.optimized.variants) or not self._is_writer():
            return ""
        try:
            return self.entry.write(dump(planned, self.inputs))
        except (NoFormError, pickle.PicklingError) as error:
            return f"it could not be stored ({error})"

    def _is_writer(self) -> bool:
        """Whether this process is the first of its host."""
        own, host = secrets.randbits(62), int.from_bytes(sha256(platform.node().encode()).digest()[:7])
        index = list(self.gathered(own)).index(own)
        return host not in self.gathered(host)[:index]


def storage_of(inputs: PlanInputs) -> tuple[Storage | None, str]:
    """Where the program of these inputs would be; None if none is stored, or if the program depends on code
    that is neither torch's nor meshweave's (passes, costs, rules as functions); and that reason."""
    gathered = inputs.pass_list.recalls
    if gathered is None:
        return None, ""
    digest, trouble = "", ""
    try:
        digest = key_of(inputs)
    except NoFormError as error:
        trouble = f"it depends on code that the key cannot contain ({error})"
    if len(set(gathered(int(digest[:15] or "0", 16)))) > 1:
        return None, trouble or "other processes have other keys"
    if trouble:
        return None, trouble
    key = f"{package_digest()} torch {torch.__version__} {digest}"
    return Storage(CacheEntry(cache_directory() / "programs", key, ".program"), inputs, gathered), ""


# The key


def key_of(inputs: PlanInputs) -> str:
    """A digest of all that the program depends on. Raises NoFormError for code that is neither torch's nor
    meshweave's."""
    pass_list, lasting = inputs.pass_list, inputs.lasting
    read = (
        inputs.captured,
        (inputs.mesh, inputs.resolved, inputs.costs, inputs.options),
        (pass_list.passes, pass_list.memory_cap_bytes, pass_list.keeps_gradients, pass_list.least_gain),
        pass_list.is_default,
        None if lasting is None else (lasting.stored, lasting.used),
        _registered(),
        _settings(),
    )
    return sha256(_KeyText().of(read).encode()).hexdigest()


def _registered() -> tuple[str, ...]:
    """The rules and costs that the user registered, as text."""
    texts = registrations()
    if None in texts:
        raise NoFormError("a registered rule or cost is a function")
    return tuple(sorted(filter(None, texts)))


def _settings() -> tuple[Any, ...]:
    """The settings of torch that rules and kernels read."""
    cuda = torch.backends.cuda
    kernels = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    return platform.python_version(), torch.get_default_dtype(), kernels, cuda.cudnn_sdp_enabled()


@dataclass(slots=True)
class _KeyText:
    """Values as text: equal values have equal texts. An object of a class has the digest of its text."""

    _digests: dict[int, tuple[Any, str]] = field(default_factory=dict)  # with the object, so that ids stay unique

    def of(self, value: Any) -> str:
        cls = type(value)
        if value is None or cls in (bool, int, float, complex, str) or isinstance(value, (*_CONSTANTS, torch.device)):
            return repr(value)
        if cls is fx.Node:
            return f"%{value.name}"
        if isinstance(value, Mapping):
            return f"{{{self._joined(part for item in value.items() for part in item)}}}"
        if isinstance(value, list | tuple):
            return f"[{self._joined(value)}]" if isinstance(value, list) else f"({self._joined(value)})"
        if isinstance(value, set | frozenset):
            return f"set({','.join(sorted(map(self.of, value)))})"
        if is_operator(value) or isfunction(value) or value is operator.getitem:
            return _target_name(value)
        known = self._digests.get(id(value))
        if known is None:
            known = self._digests[id(value)] = value, sha256(self._of_object(value).encode()).hexdigest()
        return known[1]

    def _joined(self, values: Iterable[Any]) -> str:
        return ",".join(map(self.of, values))

    def _of_object(self, value: Any) -> str:
        cls = type(value)
        if isinstance(value, Mesh):
            return value.text
        if isinstance(value, fx.Graph):
            return "\n".join(self.of((n.op, n.name, n.target, n.args, n.kwargs, n.meta)) for n in value.nodes)
        if isinstance(value, torch.Tensor):
            return f"tensor {value.dtype} {tuple(value.shape)} {_content(value)}"
        if not is_dataclass(cls) or not _is_own(cls):
            raise NoFormError(f"{cls.__module__}.{cls.__qualname__} is not code of meshweave")
        return f"{cls.__module__}.{cls.__qualname__}({self._joined(_field_values(value))})"


def _content(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        raise NoFormError("a tensor without data is not stored")
    raw = tensor.detach().cpu().contiguous().flatten()
    return sha256(raw.view(torch.uint8).numpy().tobytes()).hexdigest()


# Entries


@dataclass(frozen=True, slots=True)
class _NodeNumber:
    """Represents a node of a graph in the arguments of later nodes."""

    number: int


def dump(planned: Planned, inputs: PlanInputs) -> bytes:
    """A program as data. Raises NoFormError or PicklingError if it has no form."""
    optimized, placement = planned.optimized, planned.placement
    if list(placement.homes) != list(planned.captured.graph.nodes):
        raise NoFormError("the placement is of another graph")
    homes = tuple(placement.homes.values())  # by number of the node
    plain = replace(
        planned,
        optimized=replace(optimized, reports=dict(optimized.reports)),
        placement=replace(placement, stored=dict(placement.stored), used=dict(placement.used), homes={}),
    )
    file = BytesIO()
    _ProgramPickler(file, _known_values(inputs)).dump((plain, homes))
    return zlib.compress(file.getvalue(), 1)


def load(data: bytes, inputs: PlanInputs) -> Planned:
    """The program of an entry, after the verifier. Raises any error for other data, and executes nothing in them."""
    planned, homes = _ProgramUnpickler(BytesIO(zlib.decompress(data)), inputs).load()
    if planned.captured is not inputs.captured:
        verify_step(planned.captured)
    verify_placed(planned.placed)
    optimized = planned.optimized
    for role in {id(role): role for role in (*optimized.expanded, *optimized.unscheduled, *optimized.roles)}.values():
        verify_rank(role)
    places = dict(zip(planned.captured.graph.nodes, homes, strict=True))
    return replace(planned, placement=replace(planned.placement, homes=places))


def _known_values(inputs: PlanInputs) -> dict[str, Any]:
    """Values of the inputs that the reader has too; entries contain their names."""
    constants = inputs.captured.constants
    values = {f"constants/{name}": value for name, value in constants.items()}
    return {"captured": inputs.captured, "costs": inputs.costs, **values}


class _ProgramPickler(pickle.Pickler):
    """Pickles dataclasses of meshweave as the values of their fields, and graphs as rows. Raises NoFormError for
    anything that the reader would refuse."""

    def __init__(self, file: BytesIO, known: Mapping[str, Any]) -> None:
        super().__init__(file, protocol=5)
        self._names = {id(value): name for name, value in known.items()}
        self._same: dict[Any, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        cls: Any = type(value)
        if (name := self._names.get(id(value))) is not None:
            return _part, ("known", name)
        if isinstance(value, type) or value is _part:
            return NotImplemented if value is _part or _is_admitted(value) else _refuse(value)
        if is_dataclass(value) and _is_admitted(cls):
            return _part, (cls, *_field_values(value))
        if cls in _CONSTANTS:
            return _part, ("torch", str(value).removeprefix("torch."))
        if cls is Mesh:
            return _part, ("mesh", value.text)
        if cls is Deferred:
            return tuple, (value.rows(),)
        if cls is fx.Graph:
            return _part, ("graph", *self._rows(value))
        return NotImplemented if _is_admitted(cls) else _refuse(value)

    def _rows(self, graph: fx.Graph) -> list[Any]:
        """For each node its op, name, target, arguments and metadata. Equal metadata are stored once."""
        numbers = {node: _NodeNumber(i) for i, node in enumerate(graph.nodes)}
        rows = []

        def number_of(value: Any) -> Any:
            return numbers[value] if type(value) is fx.Node else value

        for node in graph.nodes:
            if node.op not in _OPS:
                raise NoFormError(f"a node {node.op} is not stored")
            target = _target_name(node.target) if node.op == "call_function" else node.target
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), number_of)
            meta = {name: self._shared(value) for name, value in node.meta.items()}
            rows.append((node.op, node.name, target, args, kwargs, meta))
        return rows

    def _shared(self, value: Any) -> Any:
        return self._same.setdefault(value, value) if type(value) in (Spec, Origin, Layout) else value


def _part(kind: Any, *values: Any) -> Any:
    """Stands in an entry for `_ProgramUnpickler.part`."""
    raise AssertionError


class _ProgramUnpickler(pickle.Unpickler):
    """Admits classes that only hold data, and `part`."""

    def __init__(self, file: BytesIO, inputs: PlanInputs) -> None:
        super().__init__(file)
        self._known = _known_values(inputs)
        targets = (node.target for node in inputs.captured.graph.nodes)
        self._operators = {str(target): target for target in targets if is_operator(target)}  # also those of the user

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for what is not admitted."""
        if (module, name) == (__name__, _part.__name__):
            return self.part
        if module.startswith(_OWN):
            import_module(module)
        value = vars(sys.modules[module]).get(name)
        if isinstance(value, type) and _is_admitted(value):
            return value
        raise pickle.UnpicklingError(f"{module}.{name} is not admitted")

    def part(self, kind: Any, *values: Any) -> Any:
        """A known value, a constant of torch, a mesh, a graph, or an object of a dataclass: constructed, so that it
        checks its fields."""
        if kind == "known":
            return self._known[values[0]]
        if kind == "torch":
            return _constant(values[0])
        if kind == "mesh":
            return Mesh.parse(values[0])
        if kind == "graph":
            return self._graph(values)
        return kind(**dict(zip(_field_names(kind), values, strict=True)))

    def _graph(self, rows: Iterable[Any]) -> fx.Graph:
        """The graph. Raises ValueError for a name that is taken or is none; the verifier checks the rest."""
        graph, nodes = fx.Graph(), list[fx.Node]()

        def node_of(value: Any) -> Any:
            return nodes[value.number] if type(value) is _NodeNumber else value

        for op, name, target, args, kwargs, meta in rows:
            args, kwargs = fx.node.map_aggregate((args, kwargs), node_of)
            node = graph.create_node(op, self._target(target) if op == "call_function" else target, args, kwargs, name)
            if node.name != name:
                raise ValueError(f"{name} is not the name of a node")
            node.meta.update(meta)
            nodes.append(node)
        return graph

    def _target(self, name: str) -> Callable[..., Any]:
        return self._operators.get(name) or _target_named(name)


def _constant(name: str) -> Any:
    """A dtype, layout or memory format of torch. Raises ValueError for anything else."""
    value = vars(torch).get(name)
    if not isinstance(value, _CONSTANTS):
        raise ValueError(f"torch.{name} is no dtype, layout or memory format")
    return value


@cache
def _target_named(name: str) -> Callable[..., Any]:
    """The function or operator with this name. Raises ValueError for what is none of torch's or meshweave's ops."""
    module, _, function = name.rpartition(".")
    if name == _GETITEM:
        return operator.getitem
    if name.startswith(_FUNCTIONS):
        value = vars(import_module(module)).get(function)
        if isfunction(value) and value.__module__ == module:
            return value
    elif name.partition(".")[0] in _OPERATORS and isinstance(op := find_operator(name), OpOverload):
        return op
    raise ValueError(f"{name} is not an operator or function of a graph")


def _target_name(target: Any) -> str:
    """Raises NoFormError for a function that is not meshweave's."""
    if is_operator(target):
        return str(target)
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
    if name != _GETITEM and not name.startswith(_FUNCTIONS):
        raise NoFormError(f"{name} has no form")
    return name


@cache
def _is_admitted(cls: Any) -> bool:
    """Whether objects of a class only hold data: frozen dataclasses of meshweave, graphs, containers and sizes."""
    params = getattr(cls, "__dataclass_params__", None)
    is_frozen = params is not None and params.frozen
    return cls in _PLAIN or (_is_own(cls) and is_frozen)


def _is_own(cls: Any) -> bool:
    return cls.__module__.startswith(_OWN)


def _refuse(value: Any) -> Any:
    name = getattr(value, "__qualname__", type(value).__qualname__)
    raise NoFormError(f"{name} of {getattr(value, '__module__', type(value).__module__)} has no form")


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(cls) if each.init)


def _field_values(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, name) for name in _field_names(value.__class__))
