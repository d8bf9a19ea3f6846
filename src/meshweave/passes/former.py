"""Keywords that `compile` and `backend` do not take any more: an error says how the same is written now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from meshweave.capture.step import Precision
from meshweave.errors import MeshweaveError
from meshweave.passes.options import PassesArgument
from meshweave.passes.table import Decompose, Overlap, Split
from meshweave.runtime.session import RunOptions

_OBJECTS: Mapping[str, type[Any]] = {"precision": Precision, "run": RunOptions}
# Short forms of single passes; those with options as an object have a class.
_PASSES: Mapping[str, type[Any] | None] = {
    "recompute": None,
    "prefetch": None,
    "split": Split,
    "decompose": Decompose,
    "overlap": Overlap,
    "options": Overlap,
}
_OF_COMPILE = {*(f.name for kind in _OBJECTS.values() for f in fields(kind)), *_PASSES} - {"options"}
_OF_BACKEND = {"split", "decompose", "options"}


def refuse_former(function: str, given: Mapping[str, object], passes: PassesArgument) -> None:
    """Raise MeshweaveError for former keywords of a function, with what to write instead as its hint; TypeError for
    keywords that it never took. `passes` is what the caller passes as such."""
    if not given:
        return
    for name in given:
        if name not in (_OF_COMPILE if function == "compile" else _OF_BACKEND):
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
    now = [text for parameter, kind in _OBJECTS.items() if (text := _object(parameter, kind, given))]
    short = {name: value for name, value in given.items() if name in _PASSES}
    if short:
        if function != "compile" and passes is None:
            short = {"options": True} | short  # its default
        now.append(f"passes={_passes(short, passes)}")
    raise MeshweaveError(
        f"{function}() takes no {' or '.join(f'{name}=' for name in given)} any more",
        where=f"mw.{function}",
        got=", ".join(f"{name}={_text(name, value)}" for name, value in given.items()),
        expected="precision=, passes= and run= (docs/api.md)" if function == "compile" else "passes=",
        hint=", ".join(now),
    )


def _text(name: str, value: object) -> str:
    return name if callable(value) else repr(value)


def _object(parameter: str, kind: type[Any], given: Mapping[str, object]) -> str:
    own = [f"{f.name}={_text(f.name, given[f.name])}" for f in fields(kind) if f.name in given]
    return f"{parameter}=mw.{kind.__name__}({', '.join(own)})" if own else ""


def _passes(short: Mapping[str, Any], passes: PassesArgument) -> str:
    """A value of `passes=` that asks for `passes` and for short forms: text, or a list where one has options."""
    asked = {name: value for name, value in short.items() if value is not None and value is not False and value != 0}
    if any(is_dataclass(value) for value in asked.values()) or isinstance(passes, Sequence) > isinstance(passes, str):
        known = "*passes" if not isinstance(passes, str) else f"*mw.passes.pass_list({passes!r})"
        from_text = [f"*mw.passes.pass_list({_name(n, v)!r})" for n, v in asked.items() if not is_dataclass(v)]
        built = [_call(name, value) for name, value in asked.items() if is_dataclass(value)]
        return f"[{', '.join([*([] if passes is None else [known]), *from_text, *built])}]"
    if not asked and passes is None and all(value is None for value in short.values()):
        return "None"
    texts = [*([passes] if isinstance(passes, str) and passes != "none" else []), *map(_name, asked, asked.values())]
    return repr(",".join(texts) or "none")


def _name(name: str, value: object) -> str:
    """A pass as text."""
    if name in ("overlap", "options"):
        return "carry,overlap" if name == "overlap" else "overlap"
    return name if value is True else f"{name}={value}"


def _call(name: str, options: Any) -> str:
    """A pass as an expression, with the options that differ from its default."""
    kind: Any = _PASSES[name]
    shown = [f"{f.name}={getattr(options, f.name)!r}" for f in fields(kind) if getattr(options, f.name) != f.default]
    carry = "mw.passes.Carry(), " if name == "overlap" else ""
    return f"{carry}mw.passes.{kind.__name__}({', '.join(shown)})"
