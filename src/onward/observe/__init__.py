"""Seeing it: what a running application says of itself."""
