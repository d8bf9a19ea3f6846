"""Initial parameters and buffers of a model on the meta device, computed module by module.

A module's values depend only on the seed and the module's path: they are the same on any mesh, in any order, and only a
single module's own tensors are in memory at a time.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.errors import CaptureError
from meshweave.interop.modules import own_tensors
from meshweave.interop.storages import version_of


@dataclass(frozen=True, slots=True)
class _Owner:
    """A module that owns tensors: its ancestors and itself, outermost first, and the key of each tensor by name."""

    path: str
    chain: tuple[nn.Module, ...]
    keys: dict[str, str]


def materialize(model: nn.Module, seed: int, wanted: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each parameter and buffer of `model`, or for those named in `wanted`.

    Names are those of `named_parameters` and `named_buffers`; a tied tensor is yielded once. The model is not changed.
    A tensor or DTensor that is not on the meta device is yielded as it is. The others are full CPU tensors, initialised
    as when the model is built on CPU: by `reset_parameters` of the module and of each enclosing module in turn, since a
    block may rescale its children's values; in a Hugging Face model then by its `_init_weights`. Random numbers come
    from a generator seeded with a hash of `seed` and the module's path; the global generators are unchanged.

    Raises CaptureError for a tensor that nothing initialises.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    requested = set(tensors if wanted is None else wanted)
    yield from ((name, x.detach()) for name, x in tensors.items() if name in requested and not x.is_meta)
    missing = {name for name, x in tensors.items() if name in requested and x.is_meta}
    for owner in _owners(_on_meta(model)) if missing else ():
        if names := [name for name in owner.keys if name in missing]:
            initial = _initialise(owner, names, seed)
            yield from ((name, initial.pop(name)) for name in names)


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model with every tensor on the meta device."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(x): _empty(x) for x in tensors})


def _empty(like: Tensor) -> Tensor:
    tensor = torch.empty(like.shape, dtype=like.dtype, device="meta")
    return nn.Parameter(tensor, requires_grad=like.requires_grad) if isinstance(like, nn.Parameter) else tensor


def _owners(root: nn.Module) -> Iterator[_Owner]:
    """The first module that owns each tensor, in the order of `named_modules`."""
    seen: set[int] = set()
    for path, module in root.named_modules():
        own = own_tensors(module)
        first = {id(tensor): key for key, tensor in reversed(own.items())}
        keys = [key for key, tensor in own.items() if first[id(tensor)] == key and id(tensor) not in seen]
        seen.update(first)
        if keys:
            prefix = f"{path}." if path else ""
            yield _Owner(path, _chain(root, path), {prefix + key: key for key in keys})


def _chain(root: nn.Module, path: str) -> tuple[nn.Module, ...]:
    chain = [root]
    for key in filter(None, path.split(".")):
        chain.append(chain[-1].get_submodule(key))
    return tuple(chain)


def _initialise(owner: _Owner, names: Sequence[str], seed: int) -> dict[str, Tensor]:
    """Initial tensors of a module, by name. It is back on the meta device when this returns."""
    module = owner.chain[-1]
    module.to_empty(device="cpu", recurse=False)
    empty = own_tensors(module)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        for tensor in filter(_has_nan, empty.values()):
            tensor.fill_(torch.nan)
        # Not torch.manual_seed, which would also reseed every accelerator.
        torch.default_generator.manual_seed(_seed(seed, owner.path))
        for initialise in _initialisers(owner.chain):
            _run(owner, initialise)
    initial = own_tensors(module)
    for name in names:
        _check(owner, name, empty[owner.keys[name]], initial[owner.keys[name]])
    module.to_empty(device="meta", recurse=False)
    return {name: initial[owner.keys[name]].detach() for name in names}


def _has_nan(x: Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def _seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest(), "big")


def _initialisers(chain: Sequence[nn.Module]) -> Iterator[Callable[[], object]]:
    """What initialises the last module of `chain`, in order: as constructors do it, from the inside out, and
    `PreTrainedModel.initialize_weights` at the end of a model's constructor (transformers 5, modeling_utils.py)."""
    inside = next((i for i, module in enumerate(chain) if _is_hugging_face(module)), len(chain))
    yield from _resets(chain[inside:])
    for depth in range(len(chain), inside, -1):
        model: Any = next(module for module in reversed(chain[:depth]) if _is_hugging_face(module))
        yield partial(model._init_weights, chain[depth - 1])
    yield from _resets(chain[:inside])


def _resets(chain: Sequence[nn.Module]) -> Iterator[Callable[[], object]]:
    for module in reversed(chain):
        # torch's own MultiheadAttention and Transformer have the private name only.
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            yield reset


def _is_hugging_face(module: nn.Module) -> bool:
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def _run(owner: _Owner, initialise: Callable[[], object]) -> None:
    try:
        initialise()
    except Exception as error:
        raise CaptureError(
            "a module cannot be initialised alone",
            where=_where(owner),
            got=f"{type(error).__name__}: {error}",
            expected="an initialiser that needs no values of other modules",
            hint="build this model on CPU instead of the meta device, or load a checkpoint",
        ) from error


def _check(owner: _Owner, name: str, empty: Tensor, initial: Tensor) -> None:
    """CaptureError unless a tensor has been initialised: every number of it (`empty` was NaN), or any integer."""
    if (initial.shape, initial.dtype) == (empty.shape, empty.dtype):
        if _has_nan(initial):
            wide = initial.float() if initial.dtype.itemsize == 1 else initial
            if not bool(wide.isnan().any()):
                return
        elif initial is not empty or version_of(initial) or not initial.numel():
            return
    kind = type(owner.chain[-1]).__name__
    raise CaptureError(
        f"nothing initialises '{name}', which lost its value on the meta device",
        where=_where(owner),
        expected="a method reset_parameters() that sets every parameter and buffer that the module itself owns",
        hint=f"define reset_parameters in {kind}, or build this module on CPU",
    )


def _where(owner: _Owner) -> str:
    return f"module '{owner.path}' ({type(owner.chain[-1]).__name__})"
