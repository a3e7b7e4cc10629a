"""Rows out of files, hubs and logs of every usual kind."""
