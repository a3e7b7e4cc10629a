"""Quantised tensors in the forms that serving engines read."""
