"""Parses `passes=` and `--passes` into a list of passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeGuard

from meshweave.errors import MeshweaveError
from meshweave.passes.base import Pass
from meshweave.passes.optimize import PassList
from meshweave.passes.table import GROUPS, PASSES, Overlap, Prefetch, Recompute, RingAttention, Split
from meshweave.user_code import import_file

PassesArgument = str | Sequence[Pass[Any]] | None


def pass_list_of(
    passes: PassesArgument = None, *, memory_cap_bytes: int | None = None, keeps_gradients: bool = False
) -> PassList:
    """The passes that a caller asks for, and options common to all.

    `memory_cap_bytes` implies the overlap pass, which keeps to the cap. Raises MeshweaveError for an unknown pass, a
    pass named twice, and a cap that is not a size.
    """
    listed = parse_passes(passes)
    if memory_cap_bytes is not None:
        if not isinstance(memory_cap_bytes, int) or memory_cap_bytes <= 0:
            raise MeshweaveError("memory_cap_bytes is not a size", got=repr(memory_cap_bytes), expected="more than 0")
        names = {each_pass.name for each_pass in listed}
        if Overlap.name not in names:
            listed = (*listed, Overlap())
    return PassList(listed, memory_cap_bytes, keeps_gradients)


def parse_passes(requested: PassesArgument) -> tuple[Pass[Any], ...]:
    """The passes of a list, or of text: names separated by commas, in any order, with a value for the first option of
    those that take a value. Some names mean several passes: "none", "exact" (keep, overlap) and "default" (keep,
    split, decompose, overlap; if a plan cuts sequences also ring). A pass that is named by itself replaces that of a
    group.

        "overlap"   "default,split=4"   "recompute=selective,prefetch=1"   "overlap,my_passes.py:Fuse"

    "recompute=full?", with a question mark, is nothing for a model without repeated blocks, instead of an error.
    Your own pass is written as its file or module and its name there: a class, or an instance.
    Raises MeshweaveError for an unknown pass or an invalid value of its option.
    """
    if requested is None or isinstance(requested, str):
        return tuple(_named("none" if requested is None else requested))
    if not isinstance(requested, Sequence) or not all(_is_pass(each_pass) for each_pass in requested):
        raise MeshweaveError(
            "passes is not a list of passes",
            where="passes=",
            got=repr(requested),
            expected=f'[meshweave.passes.Overlap(), ...], or text such as "default,split=2" of {", ".join(PASSES)}',
        )
    return tuple(requested)  # type: ignore[arg-type]


def _is_pass(value: Any) -> TypeGuard[Pass[Any]]:
    return not isinstance(value, type) and _has_parts(value)


def _has_parts(value: Any) -> bool:
    return all(hasattr(value, part) for part in ("name", "numerics", "stage", "run"))


def _named(text: str) -> list[Pass[Any]]:
    parts = [part.strip() for part in text.split(",")]
    if parts == ["none"]:
        return []
    single = [_pass(part) for part in parts if part not in GROUPS]
    by_name = {each_pass.name: each_pass for part in parts for each_pass in map(_pass, GROUPS.get(part, ()))}
    if len(set(parts)) < len(parts) or len({each_pass.name for each_pass in single}) < len(single):
        raise MeshweaveError("a pass is asked for twice", where="passes=", got=text, expected="each at most once")
    by_name |= {each_pass.name: each_pass for each_pass in single}
    order = [*PASSES, *by_name]
    return sorted(by_name.values(), key=lambda chosen: order.index(chosen.name))


def _pass(text: str) -> Pass[Any]:
    name, equals, value = text.partition("=")
    if ":" in name:
        return _load(text)
    kind = PASSES.get(name)
    if kind is None:
        raise MeshweaveError(
            "unknown pass",
            where="passes=",
            got=repr(text),
            expected=f"none, exact, default, or some of {', '.join(PASSES)} separated by commas",
        )
    if not equals:
        return kind()
    number = int(value) if value.isdecimal() else value
    reads: Mapping[str, Callable[[Any], Pass[Any]]] = {
        "recompute": lambda policy: Recompute(str(policy).removesuffix("?"), is_optional=str(policy).endswith("?")),
        "prefetch": Prefetch,
        "ring": RingAttention,
        "split": lambda count: Split((count,)),
    }
    if name not in reads:
        raise MeshweaveError("this pass takes no value in a text", where="passes=", got=text, expected=name)
    return reads[name](number)


def _load(text: str) -> Pass[Any]:
    """The pass of this name in a file or a module."""
    module, _, name = text.rpartition(":")
    path = Path(module)
    try:
        source = import_file(path) if module.endswith(".py") else import_module(module)
    except ImportError as error:
        raise MeshweaveError(
            "there is no such module",
            where="passes=",
            got=module,
            expected="a file.py, or a module that can be imported",
        ) from error
    named = getattr(source, name, None)
    loaded = named() if isinstance(named, type) and _has_parts(named) else named
    if not _is_pass(loaded):
        raise MeshweaveError(
            f"{module} has no pass '{name}'",
            where="passes=",
            got=repr(named),
            expected="a meshweave.passes.Pass, or an instance of one",
        )
    return loaded
