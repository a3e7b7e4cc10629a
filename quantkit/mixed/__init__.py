"""Bits where they matter: which format each unit of a model gets, so that the whole fits a budget."""
