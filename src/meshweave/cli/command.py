"""A command is a dataclass of options and a function of them; its signature and help follow from both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import Parameter, Signature, get_annotations
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from meshweave.cli.screen import Screen, guarded


def option(default: Any = MISSING, help: str = "", **settings: Any) -> Any:
    """A field that is an option, named as the field: `local_batch` is --local-batch. `settings` are typer's; `flags`
    are other names. A list is empty by default; an option with neither a default nor a list is required."""
    return _field(default, {"kind": typer.Option, "help": help, **settings})


def argument(metavar: str, help: str, **settings: Any) -> Any:
    """A field that is a positional argument."""
    return _field(MISSING, {"kind": typer.Argument, "metavar": metavar, "help": help, **settings})


def _field(default: Any, settings: Mapping[str, Any]) -> Any:
    kept = MappingProxyType(settings)
    return field(default_factory=default, metadata=kept) if default is list else field(default=default, metadata=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of every command. Each field of a subclass is an option of its command; options are declared nowhere
    else."""

    json: bool = option(False, "one JSON object as the last line of stdout")
    debug: bool = option(False, "show the traceback of an error")

    @property
    def is_verbose(self) -> bool:
        """Whether details are shown; commands that have some have an option for that."""
        return False


OptionsT = TypeVar("OptionsT", bound=Options)
Body = Callable[[Screen, OptionsT], int]


def add_command(app: typer.Typer, name: str, options: type[OptionsT], body: Body[OptionsT]) -> None:
    """Add command `name` to `app`. `body(screen, options)` returns the exit code; its docstring is the help. The help
    lists the command's own options first, then those of its base classes."""

    def command(**values: Any) -> None:
        chosen = options(**values)
        guarded(Screen(name, chosen.json, chosen.is_verbose), chosen.debug, lambda screen: body(screen, chosen))

    command.__doc__ = body.__doc__
    command.__signature__ = _signature(options)  # type: ignore[attr-defined]
    app.command(name)(command)


def _signature(options: type[Options]) -> Signature:
    """A keyword per field of a class and its bases, in the order of the help."""
    known = {each.name: each for each in fields(options)}
    hints = get_type_hints(options)
    names = dict.fromkeys(n for base in options.__mro__ for n in get_annotations(base))
    return Signature([_parameter(known[n], hints[n]) for n in names])


def _parameter(each: Field[Any], hint: Any) -> Parameter:
    settings = dict(each.metadata)
    kind = settings.pop("kind")
    flags = () if kind is typer.Argument else settings.pop("flags", (f"--{each.name.replace('_', '-')}",))
    default = Parameter.empty if each.default is MISSING else each.default
    if each.default_factory is not MISSING:
        default = each.default_factory()
    return Parameter(
        each.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, kind(*flags, **settings)]
    )
