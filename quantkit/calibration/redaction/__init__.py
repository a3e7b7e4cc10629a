"""Takes personal and secret strings out of text before it is kept."""
