"""Confluent's Parallel Consumer, from its Maven artifact: KEY order, a thread for each event in flight, -Xmx1g."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from bench.kit import HERE, Ran, run_command

PROJECT = HERE / "java"
BUILD_S = 600.0
NEEDS = "mvn and javac (on Debian: apt-get install maven default-jdk-headless)"


def build(say: Callable[[str], None]) -> bool:
    """Compile it, and download its jars the first time. False: there is no Maven or no JDK."""
    if not shutil.which("mvn") or not shutil.which("javac"):
        say(f"kafka: Confluent's Parallel Consumer is skipped: it needs {NEEDS}")
        return False
    if not _is_fresh():
        say("kafka: building Confluent's Parallel Consumer with Maven")
        command = ["mvn", "-q", "-B", "-f", str(PROJECT / "pom.xml"), "process-classes"]
        subprocess.run(command, check=True, timeout=BUILD_S, capture_output=True)
    return True


def run(
    cwd: Path, *, servers: str, topic: str, group: str, events: int, concurrency: int = 256, wait_ms: int = 0
) -> Ran:
    classes = f"{PROJECT}/target/classes:{PROJECT}/target/lib/*"
    arguments = [servers, topic, group, str(events), str(concurrency), str(wait_ms)]
    return run_command(["java", "-Xmx1g", "-cp", classes, "onward.bench.ParallelConsumer", *arguments], cwd)


def _is_fresh() -> bool:
    built = list((PROJECT / "target" / "classes").rglob("*.class"))
    sources = [PROJECT / "pom.xml", *(PROJECT / "src").rglob("*.java")]
    return bool(built) and min(each.stat().st_mtime for each in built) > max(each.stat().st_mtime for each in sources)
