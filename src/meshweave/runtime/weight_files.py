"""Weights in safetensors files, in Hugging Face's format: read piece by piece into a state, and written file by file.

A folder has `model.safetensors`, or several files and `model.safetensors.index.json`, which maps tensors to files.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from meshweave.errors import CheckpointError
from meshweave.ir.graph import Spec
from meshweave.ir.pieces import Box

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LOG = logging.getLogger("meshweave")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Tensors in files: for each name the file and the name in it."""

    where: Path
    tensors: Mapping[str, tuple[Path, str]]

    @staticmethod
    def of(path: str | os.PathLike[str], model: nn.Module) -> WeightFiles:
        """The weights in a folder or file that `model` has, by the model's names; tied weights are looked up under each
        of their names. Only headers are read.

        Warns about tensors that only the files or only the model have. CheckpointError for a folder without such files,
        for another shape, and if no parameter is in them.
        """
        at = Path(path)
        present = {name: (file, shape) for file in _files(at) for name, shape in _shapes(file).items()}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        first: dict[int, str] = {}
        files: dict[str, tuple[Path, str]] = {}
        for name, tensor in named:
            own = first.setdefault(id(tensor), name)
            if name in present and own not in files:
                file, shape = present[name]
                files[own] = file, name
                _check_shape(at, name, shape, tensor)
        _note(at, {name for name, _ in model.named_parameters()} - {*files}, {*present} - {name for name, _ in named})
        if not files:
            raise CheckpointError(
                "none of the model's parameters is in these files",
                where=str(at),
                got=", ".join(sorted(present)[:3]),
                expected=", ".join(name for name, _ in named[:3]),
                hint="names are those of model.named_parameters(): pass the model that the files belong to, not a "
                "module inside or around it",
            )
        return WeightFiles(at, files)

    def pieces(self, name: str, boxes: Sequence[Box], dtype: torch.dtype) -> Iterator[Tensor]:
        """The pieces of a tensor, each read separately, in a dtype."""
        file, its_name = self.tensors[name]
        with safe_open(file, framework="pt") as opened:
            for box in boxes:
                if not box.size:
                    yield opened.get_tensor(its_name).to(dtype)
                elif not box.num_elements:
                    yield torch.empty(box.size, dtype=dtype)
                else:
                    yield opened.get_slice(its_name)[box.slices()].to(dtype)


def _files(at: Path) -> list[Path]:
    if at.is_file():
        return [at]
    if (at / INDEX).is_file():
        names = set(json.loads((at / INDEX).read_text())["weight_map"].values())
        missing = [name for name in sorted(names) if not (at / name).is_file()]
        if missing:
            raise CheckpointError("weights are missing", where=str(at), got=f"no {missing[0]}", expected=f"as {INDEX}")
        return [at / name for name in sorted(names)]
    if (at / _SINGLE).is_file():
        return [at / _SINGLE]
    raise CheckpointError(
        "there are no weights here",
        where=str(at),
        expected=f"{_SINGLE}, or {INDEX} and the files that it names",
        hint="weights= takes a local folder: huggingface_hub.snapshot_download(name) gives one",
    )


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a file."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError("not a file of weights", where=str(file), got=str(error)[:200]) from error


def _check_shape(at: Path, name: str, shape: tuple[int, ...], tensor: Tensor) -> None:
    if shape != tuple(tensor.shape):
        raise CheckpointError(
            "a tensor has another shape in the files",
            where=f"{at}, '{name}'",
            got=str(list(shape)),
            expected=str(list(tensor.shape)),
        )


def _note(at: Path, missing: set[str], unexpected: set[str]) -> None:
    for what, names in (("are initialised, because they are not in it", missing), ("are not the model's", unexpected)):
        if names:
            shown = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
            _LOG.warning("%s: %d tensors %s: %s", at, len(names), what, shown)


def write_weights(
    folder: Path, specs: Mapping[str, Spec], values: Iterable[tuple[str, Tensor]], max_file_bytes: int, writes: bool
) -> None:
    """Write tensors, in the order of `specs`, into files of at most so many bytes (or of a single tensor) and their
    index. `values` yields each in that order; if not `writes`, they are consumed and nothing is written. The tensors of
    a file are in memory while it is written. Raises CheckpointError for a dtype that the format lacks."""
    files = _cut(specs, max_file_bytes)
    tensors = iter(values)
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        contents: dict[str, Tensor] = {}
        for _ in names:
            name, tensor = next(tensors)
            if writes:
                contents[name] = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if writes:
            _write_file(folder / file, contents)
    if writes:
        _write_index(folder, specs, files)


def _write_file(path: Path, contents: dict[str, Tensor]) -> None:
    staged = path.with_name(f"{path.name}.tmp")
    try:
        save_file(contents, staged, metadata={"format": "pt"})  # required by from_pretrained
    except (KeyError, SafetensorError) as error:
        raise CheckpointError(
            "a safetensors file cannot be written; it may lack a dtype",
            where=str(path),
            got=f"{type(error).__name__}: {error}",
            hint="save checkpoints by step.save(path), or make a buffer that need not be saved persistent=False",
        ) from error
    os.replace(staged, path)


def _cut(specs: Mapping[str, Spec], max_file_bytes: int) -> dict[str, list[str]]:
    """Names by file."""
    groups: list[list[str]] = [[]]
    num_bytes = 0
    for name, spec in specs.items():
        if num_bytes and num_bytes + spec.num_bytes > max_file_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(name)
        num_bytes += spec.num_bytes
    if len(groups) == 1:
        return {_SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def _write_index(folder: Path, specs: Mapping[str, Spec], files: Mapping[str, Sequence[str]]) -> None:
    """The index, if there are several files; that of an earlier save is removed."""
    if len(files) > 1:
        total = sum(spec.num_bytes for spec in specs.values())
        where = {name: file for file, names in files.items() for name in names}
        staged = folder / f"{INDEX}.tmp"
        staged.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))
        os.replace(staged, folder / INDEX)
    stale = {*folder.glob("model-*-of-*.safetensors"), folder / _SINGLE} - {folder / file for file in files}
    for path in stale | ({folder / INDEX} if len(files) == 1 else set()):
        path.unlink(missing_ok=True)
