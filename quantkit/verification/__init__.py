"""Is a checkpoint what its manifest and recipe say? No serving engine is needed to tell."""
