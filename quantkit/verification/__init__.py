"""Checks that a checkpoint is what its manifest and recipe say, without a serving engine."""
