"""Resolves MODEL of the command line: a factory in a file, or a small Hugging Face model with random weights.

Nothing is downloaded: a configuration is created from its class, and the model from the configuration.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from urllib.parse import parse_qsl

import torch
from torch import Tensor, nn

from meshweave.errors import MeshweaveError
from meshweave.interop import pytree

Loss = Callable[[Any, Any], Tensor]

MAX_CONTEXT = 8192
_TEXT_BYTES = 1 << 20  # bytes of the standard library's sources: enough for a thousand different batches
_HASH = 2654435761  # Knuth's multiplicative hash, The Art of Computer Programming 6.4: 2**32 over the golden ratio


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
    """Read MODEL: `file.py:factory`, or `hf:MODEL_TYPE?num_hidden_layers=2&hidden_size=64`.

    `batch` is the global batch size; without `seq` a Hugging Face model gets sequences of its context, at most
    MAX_CONTEXT tokens. `dtype` float64 makes parameters and data float64, other dtypes leave them
    float32. A factory gets those of batch, seq and seed that it has parameters for. On device "meta" the model
    allocates nothing. Raises MeshweaveError for what is missing or unknown, with near misses.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if text.startswith("hf:"):
            source = _hugging_face(text, batch or 2, seq, seed, device)
        else:
            source = _from_file(text, batch, seq, seed, device)
    if dtype is not torch.float64:
        return source
    return _source(source.name, source.model.double(), source.loss, lambda index: in_float64(source.make_batch(index)))


def _source(name: str, model: nn.Module, loss: Loss, make: Callable[[int], Any]) -> Source:
    batch = make(0)
    count, unit = _count(batch)
    return Source(name=name, model=model, loss=loss, batch=batch, make_batch=make, tokens_per_batch=count, unit=unit)


def in_float64(batch: Any) -> Any:
    """The batch with floating-point tensors in float64."""
    return pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)


def _count(batch: Any) -> tuple[int, str]:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if isinstance(ids, Tensor):
        return ids.numel(), "tokens"
    return next((t.shape[0] for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()), 1), "samples"


def near_miss(got: str, names: Iterable[str]) -> str:
    """The names most similar to `got`, best first and joined by commas; the first few if none is similar."""
    known = list(names)
    suggestions = difflib.get_close_matches(got, known, 3, 0.5) or known[:5]
    return ", ".join(suggestions)


# files


def _from_file(text: str, batch: int | None, seq: int | None, seed: int, device: str) -> Source:
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise MeshweaveError(
            "MODEL is neither a file nor a Hugging Face type",
            got=text,
            expected="file.py:factory or hf:MODEL_TYPE",
            hint="for example examples/mlp.py:factory or hf:llama?num_hidden_layers=2",
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
        source = _with_guards(lambda: factory(**arguments), path, f"{name}() failed")
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
        _with_guards(lambda: spec.loader.exec_module(module), str(path), "the file cannot be imported")  # type: ignore[union-attr]
    finally:
        sys.path.remove(folder)
    return module


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


def _with_guards(call: Callable[[], Any], path: str, what: str) -> Any:
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


# Hugging Face


@dataclass(frozen=True, slots=True)
class _ModelFamily:
    """A family of models: the auto class that creates it, its batches, from (index, batch, seq, config, seed), and
    values of its configurations' fields."""

    auto_class: str
    mapping: str
    make_batch: Callable[[int, int, int, Any, int], dict[str, Tensor]]
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The part after AutoModelFor, which `task=` names."""
        return self.auto_class.removeprefix("AutoModelFor")


def _causal_batch(index: int, batch: int, seq: int, config: Any, seed: int) -> dict[str, Tensor]:
    ids = text_windows(index, batch, seq, seed) % config.vocab_size
    return {"input_ids": ids, "labels": ids.clone()}


def _masked_batch(index: int, batch: int, seq: int, config: Any, seed: int) -> dict[str, Tensor]:
    """Every position has a label; 15 in 100 inputs (Devlin et al., NAACL 2019) are masked by the last token id."""
    ids = text_windows(index, batch, seq, seed) % config.vocab_size
    position = torch.arange(ids.numel()).view_as(ids) + index * ids.numel()
    hidden = (position * _HASH % 2**32) < 0.15 * 2**32
    return {"input_ids": torch.where(hidden, config.vocab_size - 1, ids), "labels": ids}


def _image_batch(index: int, batch: int, seq: int, config: Any, seed: int) -> dict[str, Tensor]:
    size = config.image_size if hasattr(config, "image_size") else _SMALL_IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    pixels = torch.randn(batch, getattr(config, "num_channels", 3), height, width, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (batch,), generator=generator)}


def _spoken_batch(index: int, batch: int, seq: int, config: Any, seed: int) -> dict[str, Tensor]:
    """Features of sound, and the text in it."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    sound = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
    return {"input_features": sound, "labels": text_windows(index, batch, seq, seed) % config.vocab_size}


def _sound_batch(index: int, batch: int, seq: int, config: Any, seed: int) -> dict[str, Tensor]:
    """Sound of `seq` frames, or a spectrogram of the model's length, and its class."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    is_plain = hasattr(config, "conv_stride")
    shape = (seq * math.prod(config.conv_stride) + 80,) if is_plain else (config.max_length, config.num_mel_bins)
    sound = torch.randn(batch, *shape, generator=generator)
    return {"input_values": sound, "labels": torch.randint(config.num_labels, (batch,), generator=generator)}


def _labelled_batch(names: Sequence[str], by_token: bool, limit: str) -> Callable[..., dict[str, Tensor]]:
    """Batches of text, with labels below a number, of which `limit` is the field ("": the length of the text)."""

    def make(index: int, batch: int, seq: int, config: Any, seed: int) -> dict[str, Tensor]:
        ids = text_windows(index, batch, seq, seed)
        labels = (ids if by_token else ids[:, 0]) % (getattr(config, limit) if limit else seq)
        return {"input_ids": ids % config.vocab_size, **{name: labels.clone() for name in names}}

    return make


# The first whose mapping in transformers has the type, unless `task=` names one. Bert-like types have a causal head
# too, hence the order. In training, transformers skips layers and hides frames by random numbers of Python.
_WITHOUT_PYTHON = {"layerdrop": 0.0, "mask_time_prob": 0.0, "apply_spec_augment": False}
_SMALL_SOUND = {"conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
_TASKS = (
    _ModelFamily("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _image_batch),
    _ModelFamily(
        "AutoModelForSpeechSeq2Seq",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        _spoken_batch,
        {**_WITHOUT_PYTHON, "max_source_positions": 32},
    ),
    _ModelFamily(
        "AutoModelForSeq2SeqLM",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        _causal_batch,
        {"decoder_start_token_id": 0},
    ),
    _ModelFamily("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", _masked_batch),
    _ModelFamily("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _causal_batch),
    _ModelFamily(
        "AutoModelForAudioClassification",
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
        _sound_batch,
        {**_WITHOUT_PYTHON, **_SMALL_SOUND},
    ),
    _ModelFamily(
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        _labelled_batch(["labels"], False, "num_labels"),
        {"pad_token_id": 0},
    ),
    _ModelFamily(
        "AutoModelForTokenClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        _labelled_batch(["labels"], True, "num_labels"),
    ),
    _ModelFamily(
        "AutoModelForQuestionAnswering",
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
        _labelled_batch(["start_positions", "end_positions"], False, ""),
        {"num_labels": 2},
    ),
)
_SMALL_IMAGE = 32


def text_windows(index: int, batch: int, seq: int, seed: int = 0) -> Tensor:
    """int64 [batch, seq]: bytes of the standard library's sources, at offsets that differ by index, row and seed."""
    data = _text()
    rows = torch.arange(batch) + index * batch + seed * _HASH
    starts = rows * _HASH % (len(data) - seq)
    return data[starts[:, None] + torch.arange(seq)].long()


@cache
def _text() -> Tensor:
    folder = Path(inspect.getfile(inspect)).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:_TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _hugging_face(text: str, batch: int, length: int | None, seed: int, device: str) -> Source:
    model_type, _, query = text.removeprefix("hf:").partition("?")
    chosen = _parse(query, text)
    task = _task_of(model_type, chosen.pop("task", None))
    seq = _context(model_type, chosen) if length is None else length
    config = _config(model_type, chosen, seq, text, task.fields)
    with torch.device(device):
        model = _build(task, config, text)

    def make(index: int) -> dict[str, Tensor]:
        return task.make_batch(index, batch, seq, config, seed)

    return _source(text, model.train(), lambda out, _: out.loss, make)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MeshweaveError(
            "hf: models need transformers", got=str(error), hint="pip install 'meshweave[hf]'"
        ) from error
    return transformers


def _task_of(model_type: str, name: str | None) -> _ModelFamily:
    _transformers()
    from transformers.models.auto import modeling_auto

    tasks = [task for task in _TASKS if name in (None, task.name)]
    if not tasks:
        known_tasks = ", ".join(task.name for task in _TASKS)
        raise MeshweaveError("no such task", where=f"hf:{model_type}", got=f"task={name}", expected=known_tasks)
    tables = {task.mapping: dict(getattr(modeling_auto, task.mapping)) for task in tasks}
    task = next((task for task in tasks if model_type in tables[task.mapping]), None)
    if task is None:
        known = sorted(set().union(*tables.values()))
        raise MeshweaveError(
            f"no model of type '{model_type}' with a loss whose batches are known here",
            where=f"hf:{model_type}",
            got=model_type,
            expected=near_miss(model_type, known),
            hint="types are those of transformers' AutoConfig, such as llama, gpt2, bert, t5, vit, whisper; else write "
            "a factory: file.py:factory",
        )
    return task


def _context(model_type: str, overrides: Mapping[str, Any]) -> int:
    """The tokens of a model's context, at most MAX_CONTEXT; as many if its configuration does not say."""
    plain = _transformers().AutoConfig.for_model(model_type)
    name = dict(type(plain).attribute_map).get("max_position_embeddings", "max_position_embeddings")
    context = overrides.get("max_position_embeddings", overrides.get(name, getattr(plain, name, None)))
    return min(context, MAX_CONTEXT) if isinstance(context, int) else MAX_CONTEXT


def _parse(query: str, text: str) -> dict[str, Any]:
    try:
        pairs = parse_qsl(query, strict_parsing=True) if query else []
    except ValueError as error:
        raise MeshweaveError(
            "the part after ? is not a query", where=text, got=query, expected="field=value&field=value"
        ) from error
    return {key: _value(value) for key, value in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


def _config(model_type: str, overrides: Mapping[str, Any], seq: int, text: str, of_task: Mapping[str, Any]) -> Any:
    auto_config = _transformers().AutoConfig
    plain = auto_config.for_model(model_type)
    fields, aliases = set(plain.to_dict()) | {"num_labels"}, dict(type(plain).attribute_map)
    _check_simple(plain, model_type, text)
    for name in overrides:
        if name not in fields and name not in aliases:
            raise MeshweaveError(
                f"{type(plain).__name__} has no field '{name}'",
                where=text,
                got=name,
                expected=near_miss(name, sorted(fields | aliases.keys())),
            )
    chosen = {aliases.get(name, name): value for name, value in overrides.items()}
    for name, value in {**_small(chosen, aliases, seq), **of_task}.items():
        key = aliases.get(name, name)
        if key in fields or name in of_task:
            chosen.setdefault(key, value)
    vocabulary = chosen.get(aliases.get("vocab_size", "vocab_size"), 0)
    for token in (name for name in fields if name.endswith("_token_id")):
        default = chosen.get(token, getattr(plain, token, None))
        if isinstance(default, int) and default >= vocabulary > 0:
            chosen[token] = vocabulary - 1
    try:
        return auto_config.for_model(model_type, **chosen)
    except Exception as error:
        raise MeshweaveError(
            f"{type(plain).__name__} refuses these values", where=text, got=f"{type(error).__name__}: {error}"
        ) from error


def _check_simple(config: Any, model_type: str, text: str) -> None:
    """A configuration composed of others (vision and text) has no sizes of its own to set here."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    model_types = [getattr(part, "model_type", "") for part in parts]
    types = [name for name in model_types if name not in ("", model_type)]
    if types:
        raise MeshweaveError(
            f"'{model_type}' is composed of several models",
            where=text,
            expected=f"one of its parts: {', '.join(types)}",
        )


def _small(overrides: Mapping[str, Any], aliases: Mapping[str, str], seq: int) -> dict[str, Any]:
    """Sizes that train in seconds on a laptop, by the field names that Hugging Face configurations share."""

    def setting(name: str, default: int) -> int:
        value = overrides.get(aliases.get(name, name), default)
        return value if isinstance(value, int) and value > 0 else default

    hidden, heads = setting("hidden_size", 64), setting("num_attention_heads", 4)
    return {
        **dict.fromkeys(("num_decoder_layers", "encoder_layers", "decoder_layers"), 2),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads),
        **dict.fromkeys(("d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 2 * hidden),
        "max_target_positions": max(seq, 128),
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": max(1, hidden // heads),
        "intermediate_size": 2 * hidden,
        "vocab_size": 257,
        "max_position_embeddings": max(seq, 128) + 2,  # roberta counts positions from 2
        "image_size": _SMALL_IMAGE,
        "patch_size": 8,
        "num_labels": 10,
        "use_cache": False,
    }


def _build(task: _ModelFamily, config: Any, text: str) -> nn.Module:
    try:
        return getattr(_transformers(), task.auto_class).from_config(config)  # type: ignore[no-any-return]
    except Exception as error:
        raise MeshweaveError(
            "the model cannot be built from this configuration",
            where=text,
            got=f"{type(error).__name__}: {error}",
            hint="sizes must fit together: hidden_size a multiple of num_attention_heads, and so on",
        ) from error
