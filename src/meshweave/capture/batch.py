"""A batch: the tensors in a nest of dicts, tuples and lists, its other contents, and the model's arguments in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshweave.errors import CaptureError, PlanError
from meshweave.interop import pytree


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of a batch by name (NumPy arrays among them), its other contents (`rest`: whole containers if they
    contain no tensor), and how to rebuild a batch from other tensors and another rest."""

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    rest: Mapping[str, Any]
    join: Callable[[Mapping[str, Any]], Any] = field(repr=False)

    @staticmethod
    def of(batch: Any) -> Batch:
        """Flatten a dict, tuple, list or dataclass, or a nest of them."""
        whole = dict(batch) if isinstance(batch, Mapping) else batch
        values, join = _flat(whole) if _is_flat(whole) else _nested(whole)
        tensors = {name: leaf for name, leaf in values.items() if isinstance(leaf, Tensor)}
        if not tensors:
            raise CaptureError(
                "the batch contains no tensor",
                got=type(batch).__name__,
                expected="tensors in a dict, tuple, list or dataclass, or in a nest of them",
            )
        if nested := [name for name, tensor in tensors.items() if tensor.is_nested or tensor.is_sparse]:
            raise CaptureError(
                "the batch has a tensor that is nested or sparse",
                where=f"entry '{nested[0]}'",
                expected="dense tensors, of the same shape in every batch or of few shapes",
                hint="pad it (torch.nested.to_padded_tensor(x, 0.0)) and pass the lengths or a mask beside it; "
                "x.to_dense() of a sparse tensor",
            )
        rest = {name: leaf for name, leaf in values.items() if name not in tensors}
        return Batch(tuple(tensors), tuple(tensors.values()), rest, join)

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of the tensors."""
        return tuple((n, tuple(t.shape)) for n, t in zip(self.names, self.tensors, strict=True))

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """The batch with these tensors, in the order of `names`."""
        return self.join({**self.rest, **dict(zip(self.names, tensors, strict=True))})

    def with_numbers(self, names: Collection[str], dtype: torch.dtype) -> Batch:
        """The batch with these of its numbers as 0-dim tensors: integers in int64, others in `dtype`."""
        numbers = {n: v for n, v in self.rest.items() if n in names and is_plain_number(v)}
        if not numbers:
            return self
        tensors = [torch.tensor(v, dtype=torch.int64 if isinstance(v, int) else dtype) for v in numbers.values()]
        rest = {name: value for name, value in self.rest.items() if name not in numbers}
        return Batch((*self.names, *numbers), (*self.tensors, *tensors), rest, self.join)

    def split(self, parts: int, names: Collection[str] | None = None) -> list[tuple[Tensor, ...]]:
        """The tensors of each of `parts` equal microbatches: those named are cut along dim 0, by default those that
        have the batch's size there. Raises PlanError if the batch does not divide.
        """
        rows = self._rows(parts, names)
        cut = [t.chunk(parts) if n in rows else (t,) * parts for n, t in zip(self.names, self.tensors, strict=True)]
        return list(zip(*cut, strict=True))

    def shapes_in_parts(self, parts: int, names: Collection[str] | None = None) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of a microbatch, by name, as `split` cuts them."""
        rows = self._rows(parts, names)
        return {name: (shape[0] // parts, *shape[1:]) if name in rows else shape for name, shape in self.shapes}

    def parts_from(self, parts: int, names: Collection[str] | None = None) -> int:
        """The least number of equal microbatches that is not below `parts`; one for each row if there are fewer."""
        size = batch_size(shape for name, shape in self.shapes if names is None or name in names) or 0
        return next((n for n in range(parts, size) if size % n == 0), size or parts)

    def _rows(self, parts: int, names: Collection[str] | None) -> Collection[str]:
        """The names of the tensors that microbatches cut. Raises PlanError if the batch does not divide."""
        check_microbatches(parts)
        size = batch_size(shape for name, shape in self.shapes if names is None or name in names) or 0
        if size % parts:
            raise PlanError(
                "the batch does not divide into microbatches",
                got=f"batch size {size}, accumulate={parts}",
                expected=f"a batch size that {parts} divides",
                hint=f"accumulate={self.parts_from(parts, names)} for this batch, of compile or of "
                "step(batch, accumulate=...): the same step unless a warning says what couples microbatches; or "
                "drop_last=True in the DataLoader",
            )
        return names if names is not None else [name for name, shape in self.shapes if shape[:1] == (size,)]

    def micros(self, parts: int, names: Collection[str] | None = None) -> list[Any]:
        """The microbatches, each with the structure of the batch, as `split` cuts them."""
        return [self.rebuild(tensors) for tensors in self.split(parts, names)]


_LEAVES = frozenset({Tensor, bool, int, float, str, type(None)})
Join = Callable[[Mapping[str, Any]], Any]


def _is_flat(whole: Any) -> bool:
    return type(whole) is dict and all(type(value) in _LEAVES for value in whole.values())


def _flat(whole: Mapping[Any, Any]) -> tuple[dict[str, Any], Join]:
    """What `_nested` returns, for a dict without containers: without a walk that takes longer than many small ops."""
    return {str(key): value for key, value in whole.items()}, lambda new: {key: new[str(key)] for key in whole}


def _nested(whole: Any) -> tuple[dict[str, Any], Join]:
    """The leaves of a nest by name, with arrays as tensors, and how to rebuild it from others."""
    plain = _fields_as_dicts(whole)
    leaves, tree = pytree.tree_flatten_with_path(plain, is_leaf=lambda part: not _holds_tensor(part))
    values = {_path_name(path): _as_tensor(leaf) for path, leaf in leaves}
    order = tuple(values)
    return values, lambda new: _fields_as_dataclasses(whole, pytree.tree_unflatten([new[n] for n in order], tree))


def is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def is_plain_number(value: Any) -> bool:
    """Whether a value is one of Python's integers or floats."""
    return type(value) in (int, float)


def check_microbatches(number: Any) -> None:
    """Raise PlanError unless this is a number of microbatches."""
    if not is_number(number, Integral) or number < 1:
        raise PlanError("invalid number of microbatches", got=repr(number), expected="1 or more")


def _is_record(part: Any) -> bool:
    return is_dataclass(type(part)) and not issubclass(type(part), Mapping)


def _record(part: Any) -> dict[str, Any]:
    """The fields of a dataclass that have a value."""
    return {f.name: getattr(part, f.name) for f in fields(part) if hasattr(part, f.name)}


def _fields_as_dicts(part: Any) -> Any:
    """Dataclasses that contain tensors replaced by dicts, at any depth."""

    def opened(leaf: Any) -> Any:
        values = _fields_as_dicts(_record(leaf)) if _is_record(leaf) else None
        return values if _holds_tensor(values) else leaf

    return pytree.tree_map(opened, part)


def _fields_as_dataclasses(like: Any, part: Any) -> Any:
    """`part`, with dataclasses where `like` has them: copies of those in `like` with other field values. Dataclasses
    without tensors are reused as they are."""

    def is_plain(p: Any) -> bool:
        return not _holds_tensor(_fields_as_dicts(p))

    leaves, tree = pytree.tree_flatten(like, is_leaf=is_plain)
    parts = zip(leaves, tree.flatten_up_to(part), strict=True)
    closed = [_filled(leaf, new) if _is_record(leaf) and not is_plain(leaf) else new for leaf, new in parts]
    return pytree.tree_unflatten(closed, tree)


def _filled(record: Any, values: Any) -> Any:
    filled = copy(record)
    for name, value in _fields_as_dataclasses(_record(record), values).items():
        object.__setattr__(filled, name, value)  # also sets fields of frozen dataclasses
    return filled


def _holds_tensor(part: Any) -> bool:
    return any(isinstance(_as_tensor(leaf), Tensor) for leaf in pytree.tree_leaves(part))


def _as_tensor(leaf: Any) -> Any:
    """A NumPy array of numbers as a tensor; anything else as it is."""
    if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.kind not in "biufc":
        return leaf
    array = np.asarray(leaf, dtype=leaf.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except TypeError:  # a dtype that torch has not
        return leaf


def _path_name(path: Sequence[Any]) -> str:
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path) or "batch"


def shapes_text(shapes: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Shapes of the tensors of a batch for people: by name if they have names, `item 1` in a tuple."""
    named = list(shapes)
    if [name for name, _ in named] == ["batch"]:  # a batch that is a tensor
        return str(list(named[0][1]))
    return ", ".join(f"{'item ' if name[0].isdigit() else ''}{name} {list(shape)}" for name, shape in named)


def listed_batches(shapes: Any) -> tuple[Any, ...]:
    """The batches of `shapes=`. Raises PlanError unless they are listed."""
    if not isinstance(shapes, (list, tuple)):
        raise PlanError(
            "shapes= takes a list of batches",
            where="shapes=",
            got=type(shapes).__name__,
            expected="a list or tuple of batches like example=",
            hint="shapes=[batch], also for a single further batch",
        )
    return tuple(shapes)


def batch_size(shapes: Iterable[torch.Size | tuple[int, ...]]) -> int | None:
    """Size of dim 0 of the first tensor of a batch that has dims."""
    return next((shape[0] for shape in shapes if len(shape)), None)


def in_float64(batch: Any) -> Any:
    """The batch with floating-point tensors in float64."""
    return pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model with the arguments of its forward in a batch: keys of a dict by name, a tuple by position, fields
    of a dataclass by name or, if forward knows none of them, the dataclass."""
    if isinstance(batch, Tensor):
        return model(batch)
    parameters = inspect.signature(model.forward).parameters.values()
    if _is_record(batch):
        record = _record(batch)
        if record.keys().isdisjoint(p.name for p in parameters):
            return model(batch)
        batch = record
    if isinstance(batch, Mapping):
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        names = {p.name for p in parameters}
        return model(**{key: value for key, value in batch.items() if takes_all or key in names})
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return model(*batch[:1])
    return model(*batch[: max(1, len(_required(parameters)))])


def unused_parameters(model: nn.Module, batch: Any) -> list[str]:
    """The optional parameters of forward that further items of a tuple could be for, which `call_model` does not
    pass."""
    if isinstance(batch, Tensor | Mapping) or _is_record(batch):
        return []
    parameters = inspect.signature(model.forward).parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return positional[max(1, len(_required(parameters))) : len(batch)]


def _required(parameters: Collection[inspect.Parameter]) -> list[inspect.Parameter]:
    """The positional parameters without a default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in parameters if p.default is inspect.Parameter.empty and p.kind in kinds]


def split_loss(value: Any) -> tuple[Any, dict[str, Any]]:
    """What a loss function returned: the loss, and further numbers by name if it is (loss, {name: number})."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        return value[0], {str(name): number for name, number in value[1].items()}
    return value, {}
