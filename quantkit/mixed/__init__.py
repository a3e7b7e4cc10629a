"""Mixed precision: a format per unit, for the best quality within a size budget."""
