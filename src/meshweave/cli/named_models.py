"""Models by name: the published sizes in data/models.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

_FILE = resources.files("meshweave.cli") / "data" / "models.toml"


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A published model: its type in transformers, the fields of its configuration, the repository on huggingface.co
    whose config.json has these, and its number of parameters."""

    model_type: str
    fields: Mapping[str, Any]
    source: str
    parameters: int


@cache
def named_models() -> Mapping[str, NamedModel]:
    """All models by name, in the order of the file."""
    models = {}
    for name, fields in tomllib.loads(_FILE.read_text(encoding="utf-8")).items():
        about = {key: fields.pop(key) for key in ("model_type", "source", "parameters")}
        models[name] = NamedModel(fields=fields, **about)
    return models
