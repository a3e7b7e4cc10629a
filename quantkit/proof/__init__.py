"""Is what a real serving engine computes what the checkpoint says? Loaded, asked, compared."""
