"""How fast a checkpoint serves: load, latencies, throughput, memory and cost, measured."""
