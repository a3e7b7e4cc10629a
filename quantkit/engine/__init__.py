"""Serving engines as child processes: starting, supervising, diagnosing and stopping them."""
