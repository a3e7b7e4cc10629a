"""Serving benchmarks: latency, throughput, memory and cost under load."""
