"""GPUs and the like: what each can do, and which engine runs which format on it."""
