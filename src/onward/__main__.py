"""`python -m onward`, the same as `onward`."""

from onward.cli import main

main()
