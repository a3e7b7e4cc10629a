"""Is a draft model any good for its target? Acceptance and speed-up, before a server starts."""
