"""From scorecards to a comparison that people and programs decide by."""
