"""Transport: the contract in base.py, and one folder or file for each broker. A URL's scheme chooses.

Other packages bring brokers by the entry point group `onward.brokers`: the scheme's name, and a function
`open_broker(url, settings)`.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from urllib.parse import urlsplit

import msgspec

from onward.brokers.base import Broker
from onward.errors import MissingExtra, UnknownScheme
from onward.settings import Settings, redacted


class Scheme(msgspec.Struct, frozen=True):
    module: str  # has open_broker(url, settings)
    needs: str | None = None  # the client library it imports
    extra: str | None = None  # the extra of ours that installs it


GROUP = "onward.brokers"  # of entry points
SCHEMES: Mapping[str, Scheme] = {
    "sqlite": Scheme("onward.brokers.sqlite"),
    "kafka": Scheme("onward.brokers.kafka", "confluent_kafka", "kafka"),
}


async def open_broker(settings: Settings, schemes: Mapping[str, Scheme] = SCHEMES) -> Broker:
    """The broker that the URL names, open and checked."""
    name = urlsplit(settings.url).scheme
    scheme = schemes.get(name)
    if scheme is None:
        opened: Broker = _foreign(name, settings.url, schemes)(settings.url, settings)
        return opened
    if scheme.needs is not None and find_spec(scheme.needs) is None:
        raise MissingExtra(
            f"{name}:// needs {scheme.needs}, which is not installed: pip install 'onward[{scheme.extra}]'"
        )
    broker: Broker = import_module(scheme.module).open_broker(settings.url, settings)
    return broker


def _foreign(name: str, url: str, schemes: Mapping[str, Scheme]) -> Callable[[str, Settings], Broker]:
    """How another package opens this scheme. Looked up only here: it takes a look at everything that is installed."""
    from importlib.metadata import entry_points

    found = [point for point in entry_points(group=GROUP) if point.name == name]
    if not found:
        known = ", ".join(f"{known}://" for known in (*schemes, *sorted(entry_points(group=GROUP).names)))
        raise UnknownScheme(
            f"no broker for {redacted(url)!r}: here are {known}; another package may bring one (entry point {GROUP})"
        )
    if len({point.value for point in found}) > 1:
        raise UnknownScheme(f"{name}:// is claimed by {' and '.join(p.value for p in found)}; uninstall one of them")
    try:
        opener: Callable[[str, Settings], Broker] = found[0].load()
    except (ImportError, AttributeError) as error:
        raise MissingExtra(f"{name}:// is {found[0].value}, which cannot be imported: {error}; reinstall it") from error
    return opener
