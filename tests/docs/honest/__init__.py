"""Checks of the documentation against what exists. Each takes pages and returns the problems that it finds."""
