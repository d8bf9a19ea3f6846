"""Compute between communications as compiled functions: regions of a rank graph, and their compiler."""
