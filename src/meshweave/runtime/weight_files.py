"""Weights in safetensors files, in Hugging Face's format: read piece by piece into a state, and written tensor by
tensor from it, so that a process never has more than its pieces and a single tensor.

A folder has `model.safetensors`, or several files and `model.safetensors.index.json`, which maps tensors to files. A
file is the length of a header (8 bytes, little endian), the header (JSON) and the tensors' bytes. Source:
https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from meshweave.errors import CheckpointError
from meshweave.ir.graph import Spec
from meshweave.ir.pieces import Box
from meshweave.runtime.messages import bytes_of, dense

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LOG = logging.getLogger("meshweave")
# Names of dtypes in headers: safetensors 0.8, bindings/python/py_src/safetensors/torch.py.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Tensors in files: for each name the file, the name in it, and its shape and dtype there."""

    where: Path
    tensors: Mapping[str, tuple[Path, str, Spec]]

    @staticmethod
    def of(path: str | os.PathLike[str], model: nn.Module) -> WeightFiles:
        """The weights in a folder or file that `model` has, by the model's names; tied weights are looked up under each
        of their names. Only headers are read.

        Warns about tensors that only the files or only the model have. CheckpointError for a folder without such files,
        for another shape, and if no parameter is in them.
        """
        at = Path(path)
        present = {name: (file, name, spec) for file in _files(at) for name, spec in _header(file).items()}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        first: dict[int, str] = {}
        files: dict[str, tuple[Path, str, Spec]] = {}
        for name, tensor in named:
            own = first.setdefault(id(tensor), name)
            if name in present and own not in files:
                files[own] = present[name]
                _check_shape(at, name, present[name][2], tensor)
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
        file, its_name, spec = self.tensors[name]
        with _safe_open(file) as opened:
            for box in boxes:
                if not spec.shape:
                    yield opened.get_tensor(its_name).to(dtype)
                elif not box.num_elements:
                    yield torch.empty(box.size, dtype=dtype)
                else:
                    yield opened.get_slice(its_name)[box.slices()].to(dtype)


def _safe_open(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError(
            "reading weights needs the package safetensors", where=str(file), hint="pip install safetensors"
        ) from error
    return safe_open(file, framework="pt", device="cpu")


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


def _header(file: Path) -> dict[str, Spec]:
    """Shapes and dtypes of the tensors in a file."""
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, file.stat().st_size)))
        return {n: Spec(tuple(e["shape"]), DTYPES[e["dtype"]]) for n, e in header.items() if n != "__metadata__"}
    except (OSError, ValueError, KeyError) as error:
        got = f"{type(error).__name__}: {error}"
        raise CheckpointError("not a file of weights", where=str(file), got=got[:200]) from error


def _check_shape(at: Path, name: str, spec: Spec, tensor: Tensor) -> None:
    if spec.shape != tuple(tensor.shape):
        raise CheckpointError(
            "a tensor has another shape in the files",
            where=f"{at}, '{name}'",
            got=str(list(spec.shape)),
            expected=str(list(tensor.shape)),
        )


def _note(at: Path, missing: set[str], unexpected: set[str]) -> None:
    for what, names in (("are initialised, because they are not in it", missing), ("are not the model's", unexpected)):
        if names:
            shown = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
            _LOG.warning("%s: %d tensors %s: %s", at, len(names), what, shown)


# Writing


def write_weights(
    folder: Path, specs: Mapping[str, Spec], values: Iterable[tuple[str, Tensor]], max_file_bytes: int, writes: bool
) -> None:
    """Write tensors, in the order of `specs`, into files of at most so many bytes (or of a single tensor) and their
    index. `values` yields each in that order; if not `writes`, they are consumed and nothing is written. Raises
    CheckpointError for a dtype that the format lacks."""
    _check_dtypes(folder, specs)
    files = _cut(specs, max_file_bytes)
    tensors = iter(values)
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        if not writes:
            for _ in names:
                next(tensors)
            continue
        staged = folder / f"{file}.tmp"
        with open(staged, "wb") as stream:
            _write_header(stream, {name: specs[name] for name in names})
            for _ in names:
                _, tensor = next(tensors)
                stream.write(bytes_of(dense(tensor.detach().cpu())).numpy().data)
        os.replace(staged, folder / file)
    if writes:
        _write_index(folder, specs, files)


def _check_dtypes(folder: Path, specs: Mapping[str, Spec]) -> None:
    for name, spec in specs.items():
        if spec.dtype not in _NAMES:
            raise CheckpointError(
                "safetensors files cannot have a tensor of this dtype",
                where=f"{folder}, '{name}'",
                got=str(spec.dtype),
                expected=", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES),
                hint="save checkpoints by step.save(path), or make a buffer that need not be saved persistent=False",
            )


def _cut(specs: Mapping[str, Spec], max_file_bytes: int) -> dict[str, list[str]]:
    """Names by file."""
    groups: list[list[str]] = [[]]
    num_bytes = 0
    for name, spec in specs.items():
        if num_bytes and num_bytes + _num_bytes(spec) > max_file_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(name)
        num_bytes += _num_bytes(spec)
    if len(groups) == 1:
        return {_SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def _num_bytes(spec: Spec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def _write_header(stream: IO[bytes], specs: Mapping[str, Spec]) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by from_pretrained
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + _num_bytes(spec)
        entries[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8 bytes
    stream.write(len(text).to_bytes(8, "little") + text)


def _write_index(folder: Path, specs: Mapping[str, Spec], files: Mapping[str, Sequence[str]]) -> None:
    """The index, if there are several files; that of an earlier save is removed."""
    if len(files) > 1:
        total = sum(_num_bytes(spec) for spec in specs.values())
        where = {name: file for file, names in files.items() for name in names}
        staged = folder / f"{INDEX}.tmp"
        staged.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))
        os.replace(staged, folder / INDEX)
    stale = {*folder.glob("model-*-of-*.safetensors"), folder / _SINGLE} - {folder / file for file in files}
    for path in stale | ({folder / INDEX} if len(files) == 1 else set()):
        path.unlink(missing_ok=True)
