"""What a plan decides about a captured step before its values are placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshweave.ir.graph import Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.sharding.mapping import Homes


@dataclass(frozen=True, slots=True)
class Placement:
    """The decisions of a plan: the layouts of every input as stored and of parameters as used, and the mesh of every op
    of the captured step."""

    mesh: Mesh
    stored: Mapping[tuple[str, str], Layout]
    used: Mapping[str, Layout]
    homes: Homes
    kept: frozenset[str] = frozenset()  # parameters that stay gathered from forward to backward
    accumulate_in: str = "whole"  # see `sharding.sums`
    attention: str = "auto"  # see `Plan.cp`

    def keeping(self, other: Placement) -> Placement:
        """The same, with the layouts of parameters, buffers and optimizer state of `other`: for a second program on the
        same state."""
        lasting = {key: layout for key, layout in other.stored.items() if key[0] in ("param", "buffer", "state")}
        return replace(self, stored={**self.stored, **lasting}, used={**self.used, **other.used})

    def layout(self, kind: str, name: str, spec: Spec) -> Layout:
        """Layout of an input or output: new values are stored like old values, gradients like their parameters."""
        stored = self.stored.get(("param" if kind == "grad" else kind, name))
        return stored if stored is not None else Layout.replicated(self.mesh, len(spec.shape))
