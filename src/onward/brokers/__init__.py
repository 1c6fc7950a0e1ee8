"""Transport: the contract in base.py, and one folder or file for each broker. A URL's scheme chooses."""

from collections.abc import Mapping
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


SCHEMES: Mapping[str, Scheme] = {
    "sqlite": Scheme("onward.brokers.sqlite"),
    "kafka": Scheme("onward.brokers.kafka", "confluent_kafka", "kafka"),
}


async def open_broker(settings: Settings, schemes: Mapping[str, Scheme] = SCHEMES) -> Broker:
    """The broker that the URL names, open and checked."""
    name = urlsplit(settings.url).scheme
    scheme = schemes.get(name)
    if scheme is None:
        known = ", ".join(f"{known}://" for known in schemes)
        raise UnknownScheme(f"no broker for {redacted(settings.url)!r}: this version speaks {known}")
    if scheme.needs is not None and find_spec(scheme.needs) is None:
        raise MissingExtra(
            f"{name}:// needs {scheme.needs}, which is not installed: pip install 'onward[{scheme.extra}]'"
        )
    broker: Broker = import_module(scheme.module).open_broker(settings.url, settings)
    return broker
