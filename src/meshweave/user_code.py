"""Python files of the user: models, and passes of their own. Their errors name the file and the line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from meshweave.errors import MeshweaveError, near_miss


def import_file(path: Path) -> ModuleType:
    """The module of a file. Raises MeshweaveError, with file and line, if it cannot be imported."""
    if not path.is_file():
        near = near_miss(path.name, sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else [])
        raise MeshweaveError("no such file", got=str(path), expected=near and f"in {path.parent}: {near}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look a module up by its name
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        call_user_code(lambda: spec.loader.exec_module(module), str(path), "the file cannot be imported")  # type: ignore[union-attr]
    finally:
        sys.path.remove(folder)
    return module


def call_user_code(call: Callable[[], Any], path: str, what: str) -> Any:
    """The result of a call of code in the file `path`. Raises MeshweaveError with `what` and the line if it fails."""
    try:
        return call()
    except MeshweaveError:
        raise
    except Exception as error:
        _raise_at_line(error, path, what)


def _raise_at_line(error: Exception, path: str, what: str) -> NoReturn:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(Path(path).name)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    raise MeshweaveError(
        what, where=f"{path}:{line}" if line else path, got=f"{type(error).__name__}: {error}"
    ) from error
