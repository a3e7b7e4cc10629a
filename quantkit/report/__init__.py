"""From scorecards to a comparison that people and programs can decide by."""
