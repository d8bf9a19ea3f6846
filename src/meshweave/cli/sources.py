"""Resolves MODEL of the command line: a factory in a file, or a model of transformers with random weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.batch import in_float64
from meshweave.cli.hugging_face import from_configuration, is_configuration
from meshweave.cli.named_models import named_models
from meshweave.errors import MeshweaveError, near_miss
from meshweave.interop import pytree
from meshweave.user_code import call_user_code, import_file

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model to train with its data. `make_batch(i)` returns batch i, the same at every call; `batch` is batch 0.

    `tokens_per_batch` counts tokens for a model that takes `input_ids`, else samples; `unit` says which.
    """

    name: str
    model: nn.Module
    loss: Loss
    batch: Any
    make_batch: Callable[[int], Any]
    tokens_per_batch: int
    unit: str


def load_source(
    text: str,
    *,
    batch: int | None = None,
    seq: int | None = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> Source:
    """Read MODEL: `file.py:factory`, a name of data/models.toml, a folder with a config.json, `hf:ORG/NAME`, or
    `hf:MODEL_TYPE`, which is small; `?num_hidden_layers=2&hidden_size=64` changes fields of all but the first.

    `batch` is the global batch size; without `seq` a model of transformers gets sequences of its context, at most
    MAX_CONTEXT tokens. `dtype` float64 makes parameters and data float64, other dtypes leave them
    float32. A factory gets those of batch, seq and seed that it has parameters for. On device "meta" the model
    allocates nothing. Raises MeshweaveError for what is missing or unknown, with near misses.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if is_configuration(text):
            model, make = from_configuration(text, batch or 2, seq, seed, device)
            source = _source(text, model, lambda out, _: out.loss, make)
        else:
            source = _from_file(text, batch, seq, seed, device)
    if dtype is not torch.float64:
        return source
    return _source(source.name, source.model.double(), source.loss, lambda index: in_float64(source.make_batch(index)))


def _source(name: str, model: nn.Module, loss: Loss, make: Callable[[int], Any]) -> Source:
    batch = make(0)
    count, unit = _count(batch)
    return Source(name=name, model=model, loss=loss, batch=batch, make_batch=make, tokens_per_batch=count, unit=unit)


def _count(batch: Any) -> tuple[int, str]:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if isinstance(ids, Tensor):
        return ids.numel(), "tokens"
    return next((t.shape[0] for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()), 1), "samples"


# files


def _from_file(text: str, batch: int | None, seq: int | None, seed: int, device: str) -> Source:
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        names = near_miss(text.partition("?")[0].lower(), named_models())
        raise MeshweaveError(
            "MODEL is neither a file nor the name of a model",
            got=text,
            expected=f"{names}; file.py:factory; a folder with a config.json; hf:MODEL_TYPE",
            hint="for example llama3-8b, examples/mlp.py:factory or hf:llama?num_hidden_layers=2",
        )
    module = import_file(Path(path))
    factory = _function(module, name, path)
    wanted = {"batch": batch, "seq": seq, "seed": seed}
    parameters = inspect.signature(factory).parameters
    arguments = {key: value for key, value in wanted.items() if key in parameters and value is not None}
    if batch is not None and "batch" not in parameters:
        raise MeshweaveError(
            "the factory chooses its own batch size",
            where=text,
            got=f"a batch of {batch}",
            hint=f"give it a parameter: def {name}(batch: int = {batch}), or omit --local-batch and --batch",
        )
    with torch.device(device):
        source = call_user_code(lambda: factory(**arguments), path, f"{name}() failed")
    return _read(source, text)


def _read(source: Any, text: str) -> Source:
    if not (
        isinstance(source, tuple) and len(source) == 3 and isinstance(source[0], nn.Module) and callable(source[2])
    ):
        kinds = ", ".join(type(m).__name__ for m in source) if isinstance(source, tuple) else type(source).__name__
        raise MeshweaveError(
            "the factory did not return a model, a batch and a loss",
            where=text,
            got=kinds,
            expected="(nn.Module, batch, loss), with batch a dict or tuple of tensors or a function of the index, and "
            "loss(outputs, batch) -> scalar",
        )
    model, data, loss = source
    return _source(text, model, loss, data if callable(data) else lambda index: data)


def _function(module: ModuleType, name: str, path: str) -> Callable[..., Any]:
    factory = getattr(module, name, None)
    if callable(factory):
        return factory  # type: ignore[no-any-return]
    own = [n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    raise MeshweaveError(
        f"the file has no function '{name}'",
        where=path,
        got=name,
        expected=near_miss(name, own) or "a function that returns (model, batch, loss)",
    )
