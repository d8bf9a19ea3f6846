"""Modules that are slow to import, imported on first use."""

from __future__ import annotations

import importlib
import random
from typing import Any


def load_inductor() -> Any:
    """`interop.inductor`. Importing Inductor draws from Python's random number generator, which belongs to the user's
    script, so its state is restored."""
    state = random.getstate()
    try:
        return importlib.import_module("meshweave.interop.inductor")
    finally:
        random.setstate(state)
