"""Newer versions of RabbitMQ: each in a small Debian of another release, to which the node changes its root."""

from pathlib import Path
from typing import ClassVar

from tests.servers.needs import RABBITMQ_NEWER, Need
from tests.servers.rabbitmq import RabbitMQServer

_INSIDE = Path("/srv")  # where the node sees its folder
_PROGRAMS = Path("/usr/lib/rabbitmq/bin")
# The mounts are private to the process that makes them, and end with it.
_CHANGE_ROOT = """\
root="$1" folder="$2"; shift 2
mount --bind "$folder" "$root/srv"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
exec chroot "$root" "$@"
"""


class NewerRabbitMQ(RabbitMQServer):
    name = "RabbitMQ-4.0"
    root: ClassVar[Need] = RABBITMQ_NEWER["RabbitMQ-4.0"]

    @property
    def inside(self) -> Path:
        return _INSIDE

    def command(self) -> list[str]:
        return self.tool("rabbitmq-server")

    def tool(self, name: str) -> list[str]:
        unshared = ["unshare", "--mount", "/bin/sh", "-e", "-c", _CHANGE_ROOT, "sh"]
        return [*unshared, str(self.root.path), str(self.folder), str(_PROGRAMS / name)]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


class NewestRabbitMQ(NewerRabbitMQ):
    """4.3 or newer."""

    name = "RabbitMQ-sid"
    root = RABBITMQ_NEWER["RabbitMQ-sid"]
