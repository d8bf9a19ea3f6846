"""The copies of a value while a step is placed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from meshweave.ir.graph import Spec, origin_of
from meshweave.ir.layout import Layout


@dataclass(slots=True)
class Copy:
    """A layout in which a value exists, and the phase since which it does."""

    node: fx.Node
    layout: Layout
    phase: str


def phase_of(node: fx.Node) -> str:
    """Forward and loss share copies; backward and update do not."""
    phase = origin_of(node).phase
    return "forward" if phase == "loss" else phase


def is_no_larger(copy: Layout, original: Layout, spec: Spec) -> bool:
    """Whether a device has no more elements in the copy's layout than in the original's."""

    def elements(layout: Layout) -> int:
        return torch.Size(layout.local_shape(spec.shape)).numel()

    return elements(copy) <= elements(original)
