"""Measuring: what a pair costs here, whether it pays, and reports of it."""
