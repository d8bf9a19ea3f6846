"""Parses --profile."""

from __future__ import annotations

from collections.abc import Iterable

from meshweave.cost.hardware import AlphaBeta, Costs, MachineProfile, load_profile
from meshweave.cost.simulate.frameworks import MESHWEAVE, framework_named
from meshweave.errors import MeshweaveError


def parse_costs(text: str, axes: Iterable[str]) -> Costs:
    """The name of a machine profile, its file, or an AlphaBeta: `alpha=10e-6,a=50e9,b=400e9` or `alpha=10e-6,50e9`.

    Omitted values of an AlphaBeta have their defaults. Raises MeshweaveError for an axis that is not in `axes`, and the
    errors of `load_profile`.
    """
    if not text:
        return AlphaBeta()
    if "=" not in text and not _is_number(text):
        return load_profile(text)
    known = tuple(dict.fromkeys(axes))
    usual = AlphaBeta()
    alpha, everywhere, by_axis = usual.alpha_s, usual.bandwidth, dict[str, float]()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, figure = part.rpartition("=")
        value = _number(figure, text)
        if not equals:
            everywhere = value
        elif name == "alpha":
            alpha = value
        else:
            by_axis[name.strip()] = value
    for axis in by_axis:
        if axis not in known:
            expected = f"alpha or one of {', '.join(known) or '(no axes)'}"
            raise MeshweaveError(f"no mesh has an axis '{axis}'", where="--profile", got=text, expected=expected)
    return AlphaBeta(alpha, by_axis or everywhere)


_SCALES = ("bandwidth", "node_bandwidth", "net_bandwidth", "compute", "memory_bandwidth", "latency")
_SIZES = ("memory_bytes", "devices_per_node", "num_devices")
_KERNELS = {"attention": MachineProfile.with_attention, "update": MachineProfile.with_update}


def parse_machine(text: str, scale: str, framework: str = MESHWEAVE) -> MachineProfile:
    """A machine profile by name or file, with the kernels of a framework, changed by `--scale`:
    `compute=1.5,attention=cudnn,update=foreach`."""
    machine = framework_named(framework).machine(load_profile(text))
    changes: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in scale.split(","))):
        name, _, figure = part.partition("=")
        if name in _KERNELS:
            machine = _KERNELS[name](machine, figure)
            continue
        is_known = name in _SCALES + _SIZES and _is_number(figure)
        if not is_known or (name in _SIZES[1:] and not float(figure).is_integer()):
            raise MeshweaveError(
                f"'{part}' changes nothing of a machine",
                where=f"--scale {scale}",
                got=part,
                expected=f"factors of {', '.join(_SCALES)}, or new {', '.join(_SIZES)} (whole numbers), "
                f"{', '.join(_KERNELS)}",
                hint="--scale net_bandwidth=2,update=foreach",
            )
        changes[name] = int(float(figure)) if name in _SIZES[1:] else float(figure)
    return machine.scaled(**changes) if changes else machine  # type: ignore[arg-type]


def _is_number(text: str) -> bool:
    try:
        float(text.split(",")[0])
    except ValueError:
        return False
    return True


def _number(figure: str, text: str) -> float:
    try:
        return float(figure)
    except ValueError:
        expected = "a machine profile such as h100, or something like alpha=10e-6,a=50e9,b=400e9"
        raise MeshweaveError("not a profile", where="--profile", got=repr(text), expected=expected) from None
