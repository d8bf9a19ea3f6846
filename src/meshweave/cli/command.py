"""A command is a dataclass of options and a function of them; its signature and help follow from both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from inspect import Parameter, Signature, get_annotations
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from meshweave.cli.screen import Screen, guarded


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of every command. Each field of a subclass is an option of its command; options are declared nowhere
    else."""

    json: Annotated[bool, typer.Option("--json", help="one JSON object as the last line of stdout")] = False
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False


OptionsT = TypeVar("OptionsT", bound=Options)
Body = Callable[[Screen, OptionsT], int]


def add_command(app: typer.Typer, name: str, options: type[OptionsT], body: Body[OptionsT]) -> None:
    """Add command `name` to `app`. `body(screen, options)` returns the exit code; its docstring is the help. The help
    lists the command's own options first, then those of its base classes."""

    def command(**values: Any) -> None:
        chosen = options(**values)
        guarded(Screen(name, chosen.json), chosen.debug, lambda screen: body(screen, chosen))

    command.__doc__ = body.__doc__
    command.__signature__ = _signature(options)  # type: ignore[attr-defined]
    app.command(name)(command)


def _signature(options: type[Options]) -> Signature:
    """A keyword per field of a class and its bases, in the order of the help."""
    known = {field.name: field for field in fields(options)}
    hints = get_type_hints(options, include_extras=True)
    names = dict.fromkeys(n for base in options.__mro__ for n in get_annotations(base))
    return Signature(
        [Parameter(n, Parameter.KEYWORD_ONLY, default=_default(known[n]), annotation=hints[n]) for n in names]
    )


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default
