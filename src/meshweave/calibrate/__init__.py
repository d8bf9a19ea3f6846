"""Measures this machine into a profile file: ops as meshweave's executor runs them, communications as its communicator
runs them, on all processes of a job at the same time."""

from meshweave.calibrate.automatic import ALPHA_BETA, AUTO, SMALL_BYTES, ChosenCosts, costs_for
from meshweave.calibrate.figures import ErrorRow
from meshweave.calibrate.measure import BRIEF, FULL, QUICK, Calibration, MeasurementPlan, calibrate

__all__ = [
    "ALPHA_BETA",
    "AUTO",
    "BRIEF",
    "FULL",
    "QUICK",
    "SMALL_BYTES",
    "Calibration",
    "ChosenCosts",
    "ErrorRow",
    "MeasurementPlan",
    "calibrate",
    "costs_for",
]
