"""Measures Onward beside a bare client loop and its peers, and checks in the same run that nothing was lost."""
