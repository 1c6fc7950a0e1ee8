"""Compares Onward with a bare client loop and with its peers, and checks in the same run that no event was lost."""
