"""What takes long to import, and is imported when it is first needed."""

from __future__ import annotations

import importlib
import random
from typing import Any


def load_inductor() -> Any:
    """`interop.inductor`. Importing Inductor draws from Python's generator of random numbers; as that belongs to the
    user's script, it is put back."""
    state = random.getstate()
    try:
        return importlib.import_module("meshweave.interop.inductor")
    finally:
        random.setstate(state)
