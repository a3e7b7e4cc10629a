"""Text for calibration and scoring."""
