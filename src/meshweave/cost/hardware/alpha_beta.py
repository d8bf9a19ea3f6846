"""The simplest cost model: a start-up time per collective, and a bandwidth per mesh axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshweave.cost.hardware.volumes import LOCAL, bad_figure, bytes_received
from meshweave.errors import MeshweaveError
from meshweave.ir.mesh import Mesh
from meshweave.ir.work import Work


@dataclass(frozen=True, slots=True, init=False)
class AlphaBeta:
    """Seconds of a collective = `alpha_s` + bytes received / bandwidth of the slowest axis of its group.

    `bandwidth` is in bytes per second and direction: a number for all axes, or a number per axis name (stored as sorted
    pairs, so that it is hashable). Local ops and collectives in groups of one device cost nothing. The defaults are 10
    us, and 50 GB/s as between nodes with 400 Gbit/s links.

    Raises MeshweaveError for a negative or NaN figure, a bandwidth of 0, and for an axis without a bandwidth.
    """

    alpha_s: float
    bandwidth: float | tuple[tuple[str, float], ...]

    def __init__(
        self, alpha_s: float = 10e-6, bandwidth: Mapping[str, float] | Iterable[tuple[str, float]] | float = 50e9
    ) -> None:
        table = bandwidth if isinstance(bandwidth, int | float) else tuple(sorted(dict(bandwidth).items()))
        figures = [("", table)] if isinstance(table, int | float) else [(f" of axis '{a}'", v) for a, v in table]
        if not (0 <= alpha_s < math.inf):
            raise bad_figure("alpha_s", alpha_s, "0 or more seconds", "AlphaBeta")
        for of_axis, figure in figures:
            if not figure > 0:
                raise bad_figure(f"the bandwidth{of_axis}", figure, "more than 0 bytes per second", "AlphaBeta")
        object.__setattr__(self, "alpha_s", alpha_s)
        object.__setattr__(self, "bandwidth", table)

    @property
    def name(self) -> str:
        """Its name in tables."""
        return "alpha-beta"

    @property
    def version(self) -> str:
        """The figures themselves, since they are all there is."""
        links = self.bandwidth if isinstance(self.bandwidth, int | float) else dict(self.bandwidth)
        return f"alpha_s={self.alpha_s}, bandwidth={links}"

    @property
    def usable_bytes(self) -> None:
        """None: AlphaBeta has no figures of memory."""
        return None

    def bytes_received(self, op: str, group_size: int, local_bytes: float) -> float:
        """Bytes that a device receives when `op` runs in groups of `group_size` on local inputs of `local_bytes`.

        Raises MeshweaveError for an unknown op and for a size that is negative or NaN.
        """
        return bytes_received(op, group_size, local_bytes, "AlphaBeta")

    def seconds(self, op: str, mesh: Mesh, axes: Sequence[str], local_bytes: float) -> float:
        """Duration of `op` over the flattened `axes` of `mesh`.

        A transfer without axes goes between meshes, and neither needs to have the axis that it crosses (the stages of a
        pipeline): it uses the lowest bandwidth in the table. Its `local_bytes` are the most that a device sends to
        others, or receives from them. Raises MeshweaveError as `bytes_received` does, for an axis without a bandwidth,
        and for a transfer if the table is empty.
        """
        group_size = mesh.flat_size(axes)
        received = self.bytes_received(op, group_size, local_bytes)
        if op in LOCAL or (group_size == 1 and op != "transfer"):
            return 0.0
        return self.alpha_s + received / self._slowest(mesh, axes)

    def bandwidth_of(self, mesh: Mesh, axis: str) -> float:
        """Bytes per second and direction along one axis. Raises MeshweaveError for an axis without a bandwidth."""
        return self._slowest(mesh, (axis,))

    def compute_seconds(self, work: Work) -> float:
        """Raises MeshweaveError: AlphaBeta covers only communication."""
        raise MeshweaveError(
            "AlphaBeta has no compute costs",
            where="AlphaBeta",
            got=type(work).__name__,
            expected="costs with compute rates",
            hint='use a machine profile such as load_profile("h100")',
        )

    def _slowest(self, mesh: Mesh, axes: Sequence[str]) -> float:
        if isinstance(self.bandwidth, int | float):
            return self.bandwidth
        table = dict(self.bandwidth)
        for axis in axes:
            if axis not in table:
                raise MeshweaveError(
                    f"the profile has no bandwidth for axis '{axis}'",
                    where=f"mesh {mesh}",
                    got=f"bandwidths of {', '.join(table) or 'no axis'}",
                    expected=f"a value for '{axis}'",
                    hint=f"add it: AlphaBeta(bandwidth={{..., '{axis}': 50e9}}), or pass a single number for all axes",
                )
        if not table:
            raise MeshweaveError(
                "the profile has no bandwidth",
                where="AlphaBeta",
                got="an empty table",
                expected="a bandwidth for every axis, or a single number",
            )
        return min(table[axis] for axis in axes or table)
