"""How long `import onward` and `onward --help` take. Checks that neither imports the package of an extra."""

import subprocess
import sys
import time
from pathlib import Path

from bench.kit import Bench, Figure, child_environment, median, spread

EXTRAS = ("confluent_kafka", "redis", "aio_pika", "sqlalchemy", "starlette", "opentelemetry")
IMPORT = "import time; t = time.perf_counter(); import onward; print((time.perf_counter() - t) * 1e3)"
TIMEOUT_S = 30.0


def run(bench: Bench) -> None:
    times = bench.sized(10, 5)
    bench.say(f"startup: {times} fresh interpreters each")
    _python(bench, "-c", IMPORT)  # the first run compiles
    imports, bare = [], []
    for _ in range(times):
        imports.append(float(_python(bench, "-c", IMPORT).stdout))
        bare.append(_wall_ms(bench, sys.executable, "-c", "pass"))
    _report(bench, "import onward", imports, bare, limit_ms=150)
    _check_extras(bench, "import onward", "-c", "import onward")
    script = str(Path(sys.executable).with_name("onward"))
    helps = [_wall_ms(bench, script, "--help") for _ in range(times)]
    _report(bench, "onward --help, the whole process", helps, bare, limit_ms=300)
    _check_extras(bench, "onward --help", script, "--help")


def _report(bench: Bench, what: str, found: list[float], bare: list[float], *, limit_ms: int) -> None:
    bench.add(
        Figure(
            what=what,
            measured=f"{spread(found)} ms",
            value=median(found),
            beside=f"bare interpreter, start to end: {spread(bare)} ms",
            target=f"≤ {limit_ms} ms",
            met=median(found) <= limit_ms,
            samples={"ms": found, "interpreter_ms": bare},
        )
    )


def _check_extras(bench: Bench, what: str, *arguments: str) -> None:
    lines = _python(bench, "-X", "importtime", *arguments).stderr.splitlines()
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in lines}
    found = sorted(imported & set(EXTRAS))
    bench.check(f"{what} imports no extra", "onward" in imported and not found, f"extras imported: {found or 'none'}")


def _wall_ms(bench: Bench, *command: str) -> float:
    start = time.perf_counter()
    _completed(bench, *command)
    return (time.perf_counter() - start) * 1e3


def _python(bench: Bench, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _completed(bench, sys.executable, *arguments)


def _completed(bench: Bench, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=bench.folder,
        env=child_environment(),
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
