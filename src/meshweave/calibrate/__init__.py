"""Measures the machine at hand into a profile file: ops as our executor runs them, communications as our communicator
makes them, on all processes of a job at the same time."""

from meshweave.calibrate.automatic import ALPHA_BETA, AUTO, ChosenCosts, costs_for
from meshweave.calibrate.figures import ErrorRow
from meshweave.calibrate.measure import BRIEF, FULL, QUICK, Calibration, MeasurementPlan, calibrate

__all__ = [
    "ALPHA_BETA",
    "AUTO",
    "BRIEF",
    "FULL",
    "QUICK",
    "Calibration",
    "ChosenCosts",
    "ErrorRow",
    "MeasurementPlan",
    "calibrate",
    "costs_for",
]
