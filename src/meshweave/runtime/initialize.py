"""Initial parameters and buffers of a model on the meta device, computed module by module.

A module's values depend only on the seed and the module's path: they are the same on any mesh, in any order, and only a
single module's own tensors are in memory at a time.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.errors import CaptureError
from meshweave.interop.modules import copied_dicts, own_tensors, restore_dicts, set_submodules, twin_of
from meshweave.interop.storages import version_of


@dataclass(frozen=True, slots=True)
class _Owner:
    """A module that owns tensors: its ancestors and itself, outermost first, and the name and key of each tensor."""

    path: str
    chain: tuple[nn.Module, ...]
    tensors: tuple[tuple[str, str], ...]


def materialize(model: nn.Module, seed: int, wanted: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full CPU tensor) for each parameter and buffer of `model`, or for those named in `wanted`.

    Names are those of `named_parameters` and `named_buffers`; a tied tensor is yielded once. The model is not changed.
    A tensor that is not on the meta device is yielded with its value (and shares its memory if on CPU). The others are
    initialised as when the model is built on CPU: by `_init_weights` of the module's Hugging Face model, or else by the
    module's `reset_parameters`; then by each enclosing module in turn, since a block may rescale its children's values.
    Random numbers come from a generator seeded with a hash of `seed` and the module's path; the global generators are
    unchanged.

    Raises CaptureError for a tensor that nothing initialises, and for a name in `wanted` that the model lacks.
    """
    owners = list(_owners(_skeleton(model)))
    names = {name for owner in owners for name, _ in owner.tensors}
    requested = names if wanted is None else set(wanted)
    _check_names(requested, names)
    real = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return _walk(owners, requested, {name: t for name, t in real.items() if not t.is_meta}, seed)


def _walk(
    owners: Sequence[_Owner], requested: set[str], real: dict[str, Tensor], seed: int
) -> Iterator[tuple[str, Tensor]]:
    for owner in owners:
        names = [name for name, _ in owner.tensors if name in requested]
        yield from ((name, full_values(real[name]).cpu()) for name in names if name in real)
        if any(name not in real for name in names):
            tensors = _make(owner, [name for name, _ in owner.tensors if name not in real], seed)
            yield from ((name, tensors.pop(name)) for name in names if name not in real)
            del tensors  # or a tensor that is not wanted would live on while the next module is initialised


def full_values(tensor: Any) -> Tensor:
    """A tensor's values; for a DTensor, those of the full tensor, which all ranks request together."""
    values: Tensor = tensor.detach()
    return values.full_tensor() if hasattr(values, "full_tensor") else values


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
            yield _Owner(path, _chain(root, path), tuple((prefix + key, key) for key in keys))


def _chain(root: nn.Module, path: str) -> tuple[nn.Module, ...]:
    chain = [root]
    for key in filter(None, path.split(".")):
        chain.append(chain[-1].get_submodule(key))
    return tuple(chain)


def _make(owner: _Owner, missing: Sequence[str], seed: int) -> dict[str, Tensor]:
    """The initial tensors named `missing` of a module, which is back on the meta device when this returns."""
    module = owner.chain[-1]
    before = copied_dicts(module)
    keys = {name: key for name, key in owner.tensors if name in missing}
    try:
        _fill_with_sentinels(module, keys.values())
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            # Not torch.manual_seed, which would also reseed every accelerator.
            torch.default_generator.manual_seed(_seed(seed, owner.path))
            _initialise(owner, keys)
        return {name: _finished(owner, name, key, before) for name, key in keys.items()}
    finally:
        restore_dicts(module, before)


def _seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest(), "big")


def _initialise(owner: _Owner, keys: dict[str, str]) -> None:
    _run_chain(owner)
    module = owner.chain[-1]
    if not any(_untouched(_own(module, key)) for key in keys.values()):
        return
    # A Hugging Face model leaves modules of unknown classes as their constructors initialise them.
    reset = _own_reset(module)
    if reset is None or _family(owner.chain) is None:
        return
    _guarded(owner, reset)
    _run_chain(owner)


def _run_chain(owner: _Owner) -> None:
    for depth in range(len(owner.chain), 0, -1):
        chain = owner.chain[:depth]
        family = _family(chain)
        initialise = _own_reset(chain[-1]) if family is None else family
        if initialise is not None:
            _guarded(owner, initialise)


def _guarded(owner: _Owner, initialise: Callable[[], object]) -> None:
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


def _family(chain: Sequence[nn.Module]) -> Callable[[], object] | None:
    """`_init_weights` of the innermost Hugging Face model around the last module of `chain`, bound to that module.

    As `PreTrainedModel.initialize_weights` dispatches (transformers 5, modeling_utils.py).
    """
    for module in reversed(chain):
        if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
            init_weights: Any = module._init_weights
            return lambda: init_weights(chain[-1])
    return None


def _own_reset(module: nn.Module) -> Callable[[], object] | None:
    # torch's own MultiheadAttention and Transformer have the private name only.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def _fill_with_sentinels(module: nn.Module, keys: Iterable[str]) -> None:
    wanted = set(keys)
    for table in ("_parameters", "_buffers"):
        own = dict(getattr(module, table))
        for key in wanted & own.keys():
            own[key] = _empty(own[key], "cpu")
            own[key].detach().fill_(_sentinel(own[key].dtype))
        setattr(module, table, own)


def _sentinel(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max - 17


def _untouched(tensor: Tensor) -> bool:
    """Whether any number, or every integer, is still the sentinel.

    Integers are compared as a whole, and count as touched once they were written in place, because the sentinel may be
    a valid small integer.
    """
    if tensor.numel() == 0:
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
        return bool((wide != wide).any())
    return bool((tensor == _sentinel(tensor.dtype)).all()) and version_of(tensor) <= 1


def _own(module: nn.Module, key: str) -> Tensor:
    tensor = own_tensors(module).get(key)
    assert tensor is not None
    return tensor


def _finished(owner: _Owner, name: str, key: str, before: Sequence[dict[str, Any]]) -> Tensor:
    declared = {**before[0], **before[1]}[key]
    tensor = _own(owner.chain[-1], key).detach()
    if tensor.shape != declared.shape or tensor.dtype != declared.dtype:
        raise CaptureError(
            f"the initialiser of '{name}' returned another tensor than the model declares",
            where=_where(owner),
            got=f"{tuple(tensor.shape)} {tensor.dtype}",
            expected=f"{tuple(declared.shape)} {declared.dtype}",
        )
    if _untouched(_own(owner.chain[-1], key)):
        raise CaptureError(
            f"nothing initialises '{name}', which lost its value on the meta device",
            where=_where(owner),
            expected="a method reset_parameters() that sets every parameter and buffer that the module itself owns",
            hint=f"define reset_parameters in {type(owner.chain[-1]).__name__}, or build this module on CPU",
        )
    return tensor


def _where(owner: _Owner) -> str:
    return f"module '{owner.path}' ({type(owner.chain[-1]).__name__})"


def _check_names(requested: set[str], names: set[str]) -> None:
    unknown = sorted(requested - names)
    if unknown:
        raise CaptureError(
            f"the model has no parameter or buffer '{unknown[0]}'",
            got=f"{len(unknown)} unknown names, first: {', '.join(unknown[:3])}",
            expected=", ".join(difflib.get_close_matches(unknown[0], names)),
            hint="use the names of named_parameters() and named_buffers(); a tied tensor has its first name only",
        )
