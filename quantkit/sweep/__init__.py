"""Sweeps: models x recipes x calibration sets as a graph of steps, run here or on a cluster."""
