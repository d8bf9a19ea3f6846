"""The errors that a user can meet. Each says where it happened, what was got, what was expected and what to do."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable

# Packages whose frames are not a caller's: what they raise, called by meshweave, is a fault of meshweave.
_LIBRARIES = sys.stdlib_module_names | {"meshweave", "torch", "numpy", "sympy"}


class MeshweaveError(Exception):
    """A mistake that the user can fix.

    `where` names the place (a source line, a tensor, a file), `got` and `expected` state the facts and
    `hint` is the next step to take. Empty parts are left out of the message.
    """

    def __init__(self, what: str, *, where: str = "", got: str = "", expected: str = "", hint: str = "") -> None:
        self.what, self.where, self.got, self.expected, self.hint = what, where, got, expected, hint
        parts = [("where", where), ("got", got), ("expected", expected), ("hint", hint)]
        super().__init__("\n".join([what, *(f"  {label}: {text}" for label, text in parts if text)]))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.got, self.expected, self.hint)


def _rebuild(kind: type[MeshweaveError], what: str, where: str, got: str, expected: str, hint: str) -> MeshweaveError:
    return kind(what, where=where, got=got, expected=expected, hint=hint)


def near_miss(got: str, names: Iterable[str]) -> str:
    """The names most similar to `got`, best first and joined by commas; the first few if none is similar."""
    known = list(names)
    suggestions = difflib.get_close_matches(got, known, 3, 0.5) or known[:5]
    return ", ".join(suggestions)


class MeshError(MeshweaveError):
    """A mesh that cannot be built, or an axis that it does not have."""


class LayoutError(MeshweaveError):
    """A layout that does not fit its mesh, its tensor or the operator that should take it."""


class CaptureError(MeshweaveError):
    """A model whose training step cannot be captured as one graph."""


class RuleError(MeshweaveError):
    """An op without a sharding rule, or an op used in a way that its rule does not cover."""


class PlanError(MeshweaveError):
    """A plan that matches nothing, contradicts itself or asks for what the model does not support."""


class VerifyError(MeshweaveError):
    """A graph that breaks an invariant of its stage: a bug in meshweave or in a registered rule."""


class StepError(MeshweaveError):
    """A training step that failed while it ran. The state of the last completed step is intact unless the message says
    otherwise."""


class OutdatedUpdate(StepError):
    """The optimizer needs an update that was not compiled: other groups, or an option switched on or off."""


class CheckpointError(MeshweaveError):
    """A checkpoint that is missing, damaged or of another model."""


def internal_cause(error: Exception) -> str:
    """What failed, and where, if an exception is a fault of meshweave; "" if it is the caller's: a MeshweaveError, or
    an exception of a function that the caller handed in. To be called where the exception is caught."""
    frames = list(traceback.walk_tb(error.__traceback__))
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    if isinstance(error, MeshweaveError) or not all(package in _LIBRARIES for package in packages):
        return ""
    own = [(frame, line) for (frame, line), package in zip(frames, packages, strict=True) if package == "meshweave"]
    frame, line = own[-1]
    return f"{type(error).__name__}: {error} ({frame.f_globals['__name__']}, line {line})"
