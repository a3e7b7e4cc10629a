"""From a pool of pieces to samples that stand for it."""
