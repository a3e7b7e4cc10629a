"""Checks that a real serving engine computes what the checkpoint says."""
