"""Initial parameters and buffers of a model on the meta device, computed module by module.

A module's values depend only on the seed and the module's path: they are the same on any mesh, in any order, and only a
single module's own tensors are in memory at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.errors import CaptureError
from meshweave.interop.modules import copied_dicts, own_tensors, restore_dicts, set_submodules, twin_of
from meshweave.interop.storages import version_of
from meshweave.ir.layout import Layout


@dataclass(frozen=True, slots=True)
class _Owner:
    """A module that owns tensors: its ancestors and itself, outermost first, and the key of each tensor by name."""

    path: str
    chain: tuple[nn.Module, ...]
    keys: dict[str, str]


def materialize(model: nn.Module, seed: int, wanted: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full CPU tensor) for each parameter and buffer of `model`, or for those named in `wanted`.

    Names are those of `named_parameters` and `named_buffers`; a tied tensor is yielded once. The model is not changed.
    A tensor that is not on the meta device is yielded with its value (and shares its memory if on CPU). The others are
    initialised as when the model is built on CPU: by `reset_parameters` of the module and of each enclosing module in
    turn, since a block may rescale its children's values; in a Hugging Face model then by its `_init_weights`. Random
    numbers come from a generator seeded with a hash of `seed` and the module's path; the global generators are
    unchanged.

    Raises CaptureError for a tensor that nothing initialises.
    """
    requested = None if wanted is None else set(wanted)
    real = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for owner in _owners(_skeleton(model)):
        names = [name for name in owner.keys if requested is None or name in requested]
        yield from ((name, full_values(real[name]).cpu()) for name in names if not real[name].is_meta)
        if any(real[name].is_meta for name in names):
            tensors = _initialised(owner, {n: k for n, k in owner.keys.items() if real[n].is_meta}, seed)
            yield from ((name, tensors.pop(name)) for name in names if real[name].is_meta)
            del tensors  # or a tensor that is not wanted would live on while the next module is initialised


def full_values(tensor: Any) -> Tensor:
    """A tensor's values; for a DTensor, those of the full tensor, which all ranks request together."""
    values: Tensor = tensor.detach()
    return values.full_tensor() if hasattr(values, "full_tensor") else values


def has_layout(tensor: Any, layout: Layout) -> bool:
    """Whether a tensor is a DTensor of this layout, on the layout's mesh."""
    if not hasattr(tensor, "placements"):
        return False
    from meshweave.runtime.dtensor_parameters import is_placed  # slow to import

    return is_placed(tensor, layout, tuple(tensor.shape))


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of the module tree with every tensor on the meta device; other attributes are shared with the model."""
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}

    def meta(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            tensors[id(tensor)] = _empty(tensor, "meta")
        return tensors[id(tensor)]

    def copy(module: nn.Module | None) -> nn.Module | None:
        if module is None or id(module) in modules:
            return module and modules[id(module)]
        twin, children = twin_of(module, meta)
        modules[id(module)] = twin
        set_submodules(twin, {key: copy(child) for key, child in children.items()})
        return twin

    root = copy(model)
    assert root is not None
    return root


def _empty(like: Tensor, device: str) -> Tensor:
    tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    return nn.Parameter(tensor, requires_grad=like.requires_grad) if isinstance(like, nn.Parameter) else tensor


def _owners(root: nn.Module) -> Iterator[_Owner]:
    """The first module that owns each tensor, in the order of `named_modules`."""
    seen: set[int] = set()
    for path, module in root.named_modules():
        own = own_tensors(module)
        first = {id(tensor): key for key, tensor in reversed(own.items()) if tensor is not None}
        keys = [key for key, tensor in own.items() if first.get(id(tensor)) == key and id(tensor) not in seen]
        seen.update(first)
        if keys:
            prefix = f"{path}." if path else ""
            yield _Owner(path, _chain(root, path), {prefix + key: key for key in keys})


def _chain(root: nn.Module, path: str) -> tuple[nn.Module, ...]:
    chain = [root]
    for key in filter(None, path.split(".")):
        chain.append(chain[-1].get_submodule(key))
    return tuple(chain)


def _initialised(owner: _Owner, keys: dict[str, str], seed: int) -> dict[str, Tensor]:
    """Initial tensors of a module, which is back on the meta device when this returns. `keys` by name."""
    module = owner.chain[-1]
    declared, before = own_tensors(module), copied_dicts(module)
    try:
        fresh = {key: _unset(declared[key]) for key in keys.values()}
        params, buffers = ({key: fresh.get(key, x) for key, x in own.items()} for own in before)
        restore_dicts(module, (params, buffers))
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            # Not torch.manual_seed, which would also reseed every accelerator.
            torch.default_generator.manual_seed(_seed(seed, owner.path))
            for initialise in _initialisers(owner.chain):
                _run(owner, initialise)
        now = own_tensors(module)
        for name, key in keys.items():
            _check(owner, name, declared[key], now[key])
        return {name: now[key].detach() for name, key in keys.items()}  # type: ignore[union-attr]
    finally:
        restore_dicts(module, before)


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


def _unset(like: Tensor | None) -> Tensor:
    """A CPU tensor whose values show that nothing has set them."""
    assert like is not None, "a tensor of the module"
    tensor = _empty(like, "cpu")
    tensor.detach().fill_(_unset_value(like.dtype))
    return tensor


def _unset_value(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max - 17


def _check(owner: _Owner, name: str, declared: Tensor | None, tensor: Tensor | None) -> None:
    """CaptureError unless every number, or any integer, has been set: integers that were written in place may have any
    value."""
    assert declared is not None, "a tensor of the module"
    if tensor is not None and (tensor.shape, tensor.dtype) == (declared.shape, declared.dtype):
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
            if not bool(wide.isnan().any()):
                return
        elif not tensor.numel() or version_of(tensor) > 1 or bool((tensor != _unset_value(tensor.dtype)).any()):
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
