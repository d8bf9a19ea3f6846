"""Measures the machine at hand into a profile file: ops as our executor runs them, communications as our communicator
makes them, on all processes of a job at the same time."""

from meshweave.calibrate.figures import ErrorRow
from meshweave.calibrate.measure import FULL, QUICK, Calibration, MeasurementPlan, calibrate

__all__ = ["FULL", "QUICK", "Calibration", "ErrorRow", "MeasurementPlan", "calibrate"]
