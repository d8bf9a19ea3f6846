"""Compute between communications as one compiled function: regions of a rank graph, and who compiles them."""
