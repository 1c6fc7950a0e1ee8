"""A wall clock that a test can set, for the processes that are started with its environment."""

import struct
import subprocess
from pathlib import Path


class WallClock:
    def __init__(self, folder: Path) -> None:
        library = folder / "clock_step.so"
        source = Path(__file__).with_name("clock_step.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
        self._file = folder / "offset"
        self._file.write_bytes(struct.pack("q", 0))
        self.environment = {"LD_PRELOAD": str(library), "ONWARD_CLOCK_FILE": str(self._file)}

    def step(self, seconds: int) -> None:
        """Set the clock, counted from its first value."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", seconds))
