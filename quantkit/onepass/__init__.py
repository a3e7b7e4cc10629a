"""From a source model and recipes to quantised tensors."""
