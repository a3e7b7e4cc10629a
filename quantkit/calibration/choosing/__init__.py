"""Selection of samples that represent a pool of pieces."""
