"""Pages for people: one self-contained HTML file with tables and pictures, and no network."""
