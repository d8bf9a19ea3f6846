"""Interpolation between measured points."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, inf, log

from meshweave.cost.hardware.schema import Fit, Point
from meshweave.cost.hardware.volumes import bytes_received

_NEIGHBOURS = 4  # points that interpolate between measured shapes
_PAIRWISE = ("permute", "transfer")  # a single message per device, whatever the size of the group


def along(curve: Sequence[Point], x: float) -> float:
    """Seconds at `x` on a rising curve of (x, seconds): linear between its points, constant below the first,
    extrapolated above the last with the slope of the last two (or, for a single point, in proportion)."""
    if x <= curve[0][0]:
        return curve[0][1]
    i = bisect_right(curve, x, key=lambda point: point[0])
    if i == len(curve):
        return curve[-1][1] + (x - curve[-1][0]) * last_slope(curve)
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return y0 + (x - x0) * (y1 - y0) / (x1 - x0)


def last_slope(curve: Sequence[Point]) -> float:
    if len(curve) == 1:
        return curve[0][1] / curve[0][0] if curve[0][0] else 0.0
    (x0, y0), (x1, y1) = curve[-2:]
    return (y1 - y0) / (x1 - x0)


def curve_of(op: str, level: str, group_size: int, fits: Sequence[Fit]) -> tuple[Point, ...] | None:
    """Rising points (local bytes, seconds) of `op` in groups of `group_size`; None if nothing was measured.

    The points are those of the measured group size nearest in ratio (the smaller of two), at sizes where a device
    receives equally many bytes, with the start-up (the first point's time) scaled by the number of peers."""
    fit = nearest(op, level, group_size, fits)
    if fit is None:
        return None
    stretch = _per_byte(op, fit.group_size) / _per_byte(op, group_size)
    peers = 1.0 if op in _PAIRWISE else (group_size - 1) / (fit.group_size - 1)
    added = fit.points[0][1] * (peers - 1)
    return tuple((x * stretch, seconds + added) for x, seconds in fit.points)


def nearest(op: str, level: str, group_size: int, fits: Sequence[Fit]) -> Fit | None:
    """The measurements of an op in groups of the size nearest in ratio."""
    matching = [fit for fit in fits if fit.op == op and fit.level == level]
    return min(matching, key=lambda fit: (abs(log(fit.group_size / group_size)), fit.group_size), default=None)


def fastest(op: str, curve: Sequence[Point], group_size: int) -> float:
    """The highest rate, in bytes per second, at which a device receives anywhere on a curve of groups of
    `group_size`."""
    per_byte, slope = _per_byte(op, group_size), last_slope(curve)
    at_points = max(x * per_byte / seconds for x, seconds in curve)
    return max(at_points, per_byte / slope if slope else inf if len(curve) > 1 else 0.0)


def _per_byte(op: str, group_size: int) -> float:
    return bytes_received(op, group_size, 1.0, "fit")


def interpolate_seconds(points: Sequence[Point], features: Sequence[float], amount: float) -> float:
    """Seconds of a shape among measured shapes: `amount` (flops) / a rate between those of the nearest points.

    A point is its features, its amount and its seconds. Distances are between the logarithms of features; logarithms of
    rates are averaged, weighted by the inverse square of the distance, so that a measured shape has its own rate.
    Beyond the measured shapes the nearest rates apply.
    """
    at = [log(max(value, 1.0)) for value in features]
    by_distance = sorted(
        (sum((log(max(p, 1.0)) - a) ** 2 for p, a in zip(point, at, strict=False)), i) for i, point in enumerate(points)
    )
    total = weights = 0.0
    for distance, i in by_distance[:_NEIGHBOURS]:
        *_, measured_amount, seconds = points[i]
        weight = 1.0 / (distance + 1e-9)  # at a measured point only its own weight counts
        total += weight * log(measured_amount / seconds)
        weights += weight
    return amount / exp(total / weights)
