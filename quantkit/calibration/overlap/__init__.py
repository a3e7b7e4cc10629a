"""Overlap of rows with each other, and with evaluation data."""
