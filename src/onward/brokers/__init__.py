"""Brokers: the contract in base.py, the code that all brokers share in core/, and a folder for each broker.

A URL's scheme selects a module with `open_broker(url, settings)`, which may be async. The module may also have
`absent(settings)`, `uncompared(settings, topology)`, `holder(settings)` and `keeps_log_in(settings, connection)`; see
the functions of these names below.
Another package adds a scheme with an entry point in the group `onward.brokers`: its name is the scheme, its value is
the package's `open_broker`.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from onward.brokers.base import Broker, Holder, Topology
from onward.errors import BadSetting, MissingExtra, UnknownScheme
from onward.settings import Settings, redacted

Opener = Callable[[str, Settings], Broker | Awaitable[Broker]]
_LEASE_S = 10.0


class Scheme(msgspec.Struct, frozen=True):
    module: str
    label: str  # the broker's name as people write it
    needs: str | None = None  # the client library that the module imports
    extra: str | None = None  # the extra of Onward that installs it
    takes: frozenset[str] = frozenset()  # the settings that it accepts and some other broker does not
    lease_s: float = _LEASE_S  # the default of the setting
    least_lease_s: float = 0.0  # the smallest value that its servers allow by default


_REDIS = Scheme(
    "onward.brokers.redis",
    "Redis",
    needs="redis",
    extra="redis",
    takes=frozenset(
        {
            "client",
            "durability",
            "max_backlog_bytes",
            "max_outgoing_bytes",
            "reclaim_batch",
            "reclaim_every_s",
            "reclaim_idle_s",
            "replication",
            "retention_bytes",
            "retention_events",
            "streams",
        }
    ),
)
_RABBITMQ = Scheme(
    "onward.brokers.rabbitmq", "RabbitMQ", takes=frozenset({"client", "max_outgoing_bytes"}), lease_s=15.0
)
GROUP = "onward.brokers"  # the group of entry points
SCHEMES: Mapping[str, Scheme] = {
    "sqlite": Scheme(
        "onward.brokers.sqlite",
        "SQLite",
        takes=frozenset({"durability", "file_mode", "max_backlog_bytes", "max_outgoing_bytes", "retention_bytes"}),
    ),
    "kafka": Scheme(
        "onward.brokers.kafka",
        "Kafka",
        needs="confluent_kafka",
        extra="kafka",
        takes=frozenset({"client", "max_outgoing_bytes", "on_partition_growth", "replication"}),
        least_lease_s=6.0,
    ),
    "redis": _REDIS,
    "rediss": _REDIS,
    "redis+cluster": _REDIS,
    "rediss+cluster": _REDIS,
    "redis+sentinel": _REDIS,
    "rediss+sentinel": _REDIS,
    "amqp": _RABBITMQ,
    "amqps": _RABBITMQ,
}
_SPECIAL = frozenset().union(*[scheme.takes for scheme in SCHEMES.values()])


async def open_broker(settings: Settings, schemes: Mapping[str, Scheme] = SCHEMES) -> Broker:
    """Open and check the broker that the URL names."""
    opened = _found(settings.url, schemes).opener(settings.url, completed(settings))
    return await opened if inspect.isawaitable(opened) else opened


def completed(settings: Settings) -> Settings:
    """The settings with the defaults of their scheme. Raises BadSetting for a setting that the scheme does not have."""
    if settings.sources is None:
        return settings
    scheme = scheme_of(settings.url)
    for name, source in settings.sources.items():
        if name in _SPECIAL - scheme.takes:
            raise BadSetting(_not_taken(f"{name}={getattr(settings, name)!r} from {source}", name, scheme))
    lease_s = settings.lease_s if "lease_s" in settings.sources else scheme.lease_s
    return msgspec.structs.replace(settings, lease_s=lease_s, sources=None)


def _not_taken(given: str, name: str, scheme: Scheme) -> str:
    others = dict.fromkeys(other.label for other in SCHEMES.values() if name in other.takes)
    return f"{given}: {scheme.label} has no such setting; remove it there (it is for {' and '.join(others)})"


def scheme_of(url: str) -> Scheme:
    """The facts about the URL's scheme. A scheme of another package accepts every setting."""
    name = urlsplit(url).scheme
    return SCHEMES.get(name) or Scheme("", name, takes=_SPECIAL, least_lease_s=_LEASE_S)


def label(settings: Settings) -> str:
    """The broker's name as people write it, such as SQLite."""
    return scheme_of(settings.url).label


def absent(settings: Settings) -> str:
    """Why there is no store to open, such as a missing file that open_broker would create. "" if there is one."""
    ask: Callable[[Settings], str] | None = getattr(_found(settings.url).module, "absent", None)
    return "" if ask is None else ask(settings)


def uncompared(settings: Settings, topology: Topology) -> str:
    """What of the topology the broker cannot compare with its server, and why. "" if it compares everything."""
    ask: Callable[[Settings, Topology], str] | None = getattr(_found(settings.url).module, "uncompared", None)
    return "" if ask is None else ask(completed(settings), topology)


def holder(settings: Settings) -> Holder | None:
    """The process that holds the store's lock now. None if the lock is free or the broker has no such lock."""
    ask: Callable[[Settings], Holder | None] | None = getattr(_found(settings.url).module, "holder", None)
    return None if ask is None else ask(settings)


def keeps_log_in(settings: Settings, connection: Any) -> bool:
    """Whether the broker keeps its log in the database of this DB-API connection. It does not open the broker."""
    if scheme_of(settings.url).needs is not None:  # the client library of a server
        return False
    ask: Callable[[Settings, Any], bool] | None = getattr(_found(settings.url).module, "keeps_log_in", None)
    return ask is not None and ask(settings, connection)


def embedded(path: Path) -> str:
    """The URL that opens the file with SQLite, the broker that needs no server."""
    return f"sqlite:///{quote(str(path))}"


class _Found(NamedTuple):
    module: ModuleType
    opener: Opener


def _found(url: str, schemes: Mapping[str, Scheme] = SCHEMES) -> _Found:
    name = urlsplit(url).scheme
    scheme = schemes.get(name)
    if scheme is None:
        return _foreign(name, url, schemes)
    if scheme.needs is not None and find_spec(scheme.needs) is None:
        raise MissingExtra(
            f"{name}:// needs {scheme.needs}, which is not installed: pip install 'onward[{scheme.extra}]'"
        )
    module = import_module(scheme.module)
    return _Found(module, module.open_broker)


def _hint(name: str, url: str, schemes: Mapping[str, Scheme]) -> str:
    """A question with the URL that the user probably meant. "" if no known URL is similar."""
    import difflib

    if not name and re.fullmatch(r"[^:@?]+\.(db|sqlite3?)", url):
        return f"did you mean {embedded(Path(url))}?"
    if "kafka" in schemes and re.fullmatch(r"[A-Za-z0-9.-]+:9092(,[A-Za-z0-9.:-]+)*", url):
        return f"did you mean kafka://{url}?"
    near = difflib.get_close_matches(name, schemes, 1)
    return f"did you mean {redacted(near[0] + url[len(name) :])}?" if near else ""


def _foreign(name: str, url: str, schemes: Mapping[str, Scheme]) -> _Found:
    """The scheme of another package. Only called when needed, because it reads the metadata of every package."""
    from importlib.metadata import entry_points

    found = [point for point in entry_points(group=GROUP) if point.name == name]
    if not found:
        known = ", ".join(f"{known}://" for known in (*schemes, *sorted(entry_points(group=GROUP).names)))
        hint = _hint(name, url, schemes) or f"another package may add one (entry point {GROUP})"
        raise UnknownScheme(f"no broker for {redacted(url)!r}: the known schemes are {known}; {hint}")
    if len({point.value for point in found}) > 1:
        raise UnknownScheme(f"{name}:// is claimed by {' and '.join(p.value for p in found)}; uninstall one of them")
    try:
        opener: Opener = found[0].load()
        return _Found(import_module(found[0].module), opener)
    except (ImportError, AttributeError) as error:
        raise MissingExtra(f"{name}:// is {found[0].value}, which cannot be imported: {error}; reinstall it") from error
