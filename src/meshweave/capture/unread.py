"""A value that nothing may read, to detect whether anything does."""

from __future__ import annotations

from typing import Any


class WasRead(Exception):
    """Raised when an Unread value is used."""


class Unread:
    """Every use of it, except passing it on, is recorded and raises WasRead."""

    def __init__(self) -> None:
        object.__setattr__(self, "was_read", False)

    def __getattribute__(self, name: str) -> Any:
        if name == "was_read":
            return object.__getattribute__(self, name)
        return _refuse(self)


def _refuse(self: Unread, *_: Any) -> Any:
    object.__setattr__(self, "was_read", True)
    raise WasRead("the step reads a value that has changed since compile")


# Operators are looked up on the class, past __getattribute__.
_OPERATORS = (
    "bool int float complex index str repr format bytes hash len iter next contains call getitem setitem delitem "
    "eq ne lt le gt ge neg pos abs invert round trunc floor ceil enter exit setattr delattr "
    "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or "
    "radd rsub rmul rmatmul rtruediv rfloordiv rmod rdivmod rpow rlshift rrshift rand rxor ror"
)
for _name in _OPERATORS.split():
    setattr(Unread, f"__{_name}__", _refuse)
