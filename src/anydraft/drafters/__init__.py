"""Drafters, loaded by name."""
