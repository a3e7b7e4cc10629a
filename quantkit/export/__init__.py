"""Quantised checkpoints in the formats that serving engines read."""
