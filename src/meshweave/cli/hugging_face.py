"""Models of transformers with random weights, and batches for them: of a type with small sizes (`hf:llama`), of a name
with its published sizes (`llama3-8b`), of a configuration in a folder or a repository.

No weights are downloaded: a model is created from its configuration.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import Tensor, nn

from meshweave.cli.named_models import named_models
from meshweave.errors import MeshweaveError, near_miss

MAX_CONTEXT = 8192
_TEXT_BYTES = 1 << 20  # bytes of the standard library's sources: enough for a thousand different batches
_HASH = 2654435761  # Knuth's multiplicative hash, The Art of Computer Programming 6.4: 2**32 over the golden ratio

MakeBatch = Callable[[int], dict[str, Tensor]]


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


def _labelled_batch(index: int, batch: int, seq: int, config: Any, seed: int) -> dict[str, Tensor]:
    """A label for each row of text."""
    ids = text_windows(index, batch, seq, seed)
    return {"input_ids": ids % config.vocab_size, "labels": ids[:, 0] % config.num_labels}


# The first whose mapping in transformers has the type, unless `task=` names one. Bert-like types have a causal head
# too, hence the order.
_TASKS = (
    _ModelFamily("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _image_batch),
    _ModelFamily(
        "AutoModelForSeq2SeqLM",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        _causal_batch,
        {"decoder_start_token_id": 0},
    ),
    _ModelFamily("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", _masked_batch),
    _ModelFamily("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _causal_batch),
    _ModelFamily(
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        _labelled_batch,
        {"pad_token_id": 0},
    ),
)
_SMALL_IMAGE = 32
# What a configuration says of the files that it was saved with.
_OF_FILES = ("model_type", "architectures", "transformers_version", "_name_or_path", "auto_map", "torch_dtype", "dtype")


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


def from_configuration(
    text: str, batch: int, length: int | None, seed: int, device: str
) -> tuple[nn.Module, MakeBatch]:
    """The model of `hf:MODEL_TYPE`, a name, a folder or `hf:ORG/NAME`, with `?field=value&...`, and its batches by
    number."""
    target, _, query = text.removeprefix("hf:").partition("?")
    chosen = _parse(query, text)
    name = chosen.pop("task", None)
    published = _published(text, target, chosen)
    model_type = target if published is None else published.model_type
    task = _task_of(model_type, name, text)
    if published is None:
        seq = _context(_plain(model_type), chosen) if length is None else length
        config = _small_config(model_type, chosen, seq, text, task.fields)
    else:
        seq, config = _context(published, {}) if length is None else length, published
        _check_length(config, seq, text)
    with torch.device(device):
        model = _build(task, config, text)
    return model.train(), lambda index: task.make_batch(index, batch, seq, config, seed)


def is_configuration(text: str) -> bool:
    """Whether MODEL has a configuration of transformers: a type or a repository (`hf:`), a name, or a folder with a
    config.json."""
    target = text.partition("?")[0]
    return target.startswith("hf:") or target in named_models() or (Path(target) / "config.json").is_file()


def _published(text: str, target: str, overrides: Mapping[str, Any]) -> Any:
    """The configuration of a name, a folder or a repository, with other values of some fields; None for a type."""
    named = named_models().get(text.partition("?")[0])
    if named is not None:
        plain = _plain(named.model_type)
        fields = {key: _value(value) if isinstance(value, str) else value for key, value in named.fields.items()}
        return _configured(plain, {**fields, "use_cache": False, **_checked(plain, overrides, text)}, text)
    if "/" not in target and not Path(target).is_dir():
        return None
    config = _read(text, target)
    values = {key: value for key, value in config.to_dict().items() if key not in _OF_FILES}
    return _configured(config, {**values, "use_cache": False, **_checked(config, overrides, text)}, text)


def _read(text: str, target: str) -> Any:
    """The configuration of a folder, or of a repository in transformers' cache, else on huggingface.co."""
    read = partial(_transformers().AutoConfig.from_pretrained, target)
    try:
        try:
            return read(local_files_only=True)
        except OSError:
            if Path(target).is_dir():
                raise
            return read()
    except (OSError, ValueError, KeyError) as error:
        raise MeshweaveError(
            f"no configuration of '{target}'",
            where=text,
            got=str(error).partition("\n")[0],
            expected="a folder with a config.json, or a repository on huggingface.co that can be reached or is in the "
            "cache",
            hint=f"a folder with its config.json needs no network, nor does a name: {_nearest_names(target)}",
        ) from error


def _nearest_names(repository: str) -> str:
    """The name with the sizes of a repository, else names like it."""
    same = [name for name, model in named_models().items() if model.source.lower() == repository.lower()]
    return ", ".join(same) or near_miss(repository.rpartition("/")[2].lower(), named_models())


def _plain(model_type: str) -> Any:
    return _transformers().AutoConfig.for_model(model_type)


def _check_length(config: Any, seq: int, text: str) -> None:
    context = getattr(config, "max_position_embeddings", None)
    if isinstance(context, int) and seq > context:
        raise MeshweaveError(
            "the sequences are longer than the model's context",
            where=text,
            got=f"--seq {seq}",
            expected=f"at most {context}",
            hint=f"set its context, too: {text}{'&' if '?' in text else '?'}max_position_embeddings={seq}",
        )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MeshweaveError(
            "hf: models need transformers", got=str(error), hint="pip install 'meshweave[hf]'"
        ) from error
    return transformers


def _task_of(model_type: str, name: str | None, text: str) -> _ModelFamily:
    _transformers()
    from transformers.models.auto import modeling_auto

    tasks = [task for task in _TASKS if name in (None, task.name)]
    if not tasks:
        known_tasks = ", ".join(task.name for task in _TASKS)
        raise MeshweaveError("no such task", where=text, got=f"task={name}", expected=known_tasks)
    tables = {task.mapping: dict(getattr(modeling_auto, task.mapping)) for task in tasks}
    task = next((task for task in tasks if model_type in tables[task.mapping]), None)
    if task is None:
        known = sorted(set().union(*tables.values()))
        raise MeshweaveError(
            f"no model of type '{model_type}' with a loss whose batches are known here",
            where=text,
            got=model_type,
            expected=near_miss(model_type, known),
            hint=f"write {model_type} without hf:"
            if model_type in named_models()
            else "types are those of transformers' AutoConfig, such as llama, gpt2, bert, t5, vit; else write "
            "a factory: file.py:factory",
        )
    return task


def _context(config: Any, overrides: Mapping[str, Any]) -> int:
    """The tokens of a model's context, at most MAX_CONTEXT; as many if its configuration does not say."""
    name = dict(type(config).attribute_map).get("max_position_embeddings", "max_position_embeddings")
    context = overrides.get("max_position_embeddings", overrides.get(name, getattr(config, name, None)))
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


def _checked(config: Any, overrides: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The overrides by the names of the configuration's own fields. Raises MeshweaveError for other names."""
    fields, aliases = set(config.to_dict()) | {"num_labels"}, dict(type(config).attribute_map)
    _check_simple(config, text)
    for name in overrides:
        if name not in fields and name not in aliases:
            raise MeshweaveError(
                f"{type(config).__name__} has no field '{name}'",
                where=text,
                got=name,
                expected=near_miss(name, sorted(fields | aliases.keys())),
            )
    return {aliases.get(name, name): value for name, value in overrides.items()}


def _small_config(
    model_type: str, overrides: Mapping[str, Any], seq: int, text: str, of_task: Mapping[str, Any]
) -> Any:
    plain = _plain(model_type)
    fields, aliases = set(plain.to_dict()) | {"num_labels"}, dict(type(plain).attribute_map)
    chosen = _checked(plain, overrides, text)
    for name, value in {**_small(chosen, aliases, seq), **of_task}.items():
        key = aliases.get(name, name)
        if key in fields or name in of_task:
            chosen.setdefault(key, value)
    vocabulary = chosen.get(aliases.get("vocab_size", "vocab_size"), 0)
    for token in (name for name in fields if name.endswith("_token_id")):
        default = chosen.get(token, getattr(plain, token, None))
        if isinstance(default, int) and default >= vocabulary > 0:
            chosen[token] = vocabulary - 1
    return _configured(plain, chosen, text)


def _configured(plain: Any, values: Mapping[str, Any], text: str) -> Any:
    """A configuration of the class of `plain` with these values."""
    try:
        return type(plain)(**values)
    except Exception as error:
        raise MeshweaveError(
            f"{type(plain).__name__} refuses these values", where=text, got=f"{type(error).__name__}: {error}"
        ) from error


def _check_simple(config: Any, text: str) -> None:
    """A configuration composed of others (vision and text) has no sizes of its own to set here."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    model_types = [getattr(part, "model_type", "") for part in parts]
    types = [name for name in model_types if name not in ("", config.model_type)]
    if types:
        raise MeshweaveError(
            f"'{config.model_type}' is composed of several models",
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
