"""The same tests on the same tokens for the source and for every checkpoint."""
