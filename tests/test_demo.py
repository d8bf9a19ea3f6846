"""`make demo` is no test: what it hands to the runtime is compared with what the runtime asks for."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path

from meshweave.runtime.executor import Meter

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def test_the_meter_of_the_demo_has_what_the_runtime_calls() -> None:
    spec = importlib.util.spec_from_file_location("meshweave_demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = demo
    spec.loader.exec_module(demo)
    calls = {name: f for name, f in vars(Meter).items() if inspect.isfunction(f) and not name.startswith("_")}
    assert calls
    for name, asked in calls.items():
        own = getattr(demo.LiveBytes, name)
        assert list(inspect.signature(own).parameters) == list(inspect.signature(asked).parameters)
