"""GPUs and other devices: what each can do, and which engine runs which format on it."""
