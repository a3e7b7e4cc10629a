"""Source models, read without being loaded whole."""
