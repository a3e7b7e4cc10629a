"""Acceptance and speed-up of a draft model for its target, measured before a server starts."""
