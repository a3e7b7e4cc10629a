"""Removes personal data and secrets from text before it is stored."""
