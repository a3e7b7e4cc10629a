"""Every tensor of a checkpoint, planned before any weight is read."""
