"""Measures this machine into a profile file: ops as meshweave's executor runs them, communications as its communicator
runs them, on all processes of a job at the same time."""

from meshweave.calibrate.automatic import ALPHA_BETA, AUTO, SMALL_BYTES, ChosenCosts, costs_for
from meshweave.calibrate.measure import BRIEF, MeasurementPlan, calibrate, thorough_plan

__all__ = [
    "ALPHA_BETA",
    "AUTO",
    "BRIEF",
    "SMALL_BYTES",
    "ChosenCosts",
    "MeasurementPlan",
    "calibrate",
    "costs_for",
    "thorough_plan",
]
