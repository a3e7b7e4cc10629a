"""What rows share with each other, and with what models are scored on."""
