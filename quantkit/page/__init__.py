"""Self-contained HTML pages with tables and figures, which need no network."""
