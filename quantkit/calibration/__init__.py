"""Text to calibrate and score with."""
