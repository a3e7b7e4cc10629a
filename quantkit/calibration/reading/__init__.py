"""Reads rows from files, hubs and logs in all common formats."""
