"""Bits where they matter: a format for each unit, so that a model fits a budget at its best."""
