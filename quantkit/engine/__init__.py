"""Serving engines as programs beside this one: started, watched, understood, and ended."""
