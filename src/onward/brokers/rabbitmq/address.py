"""Where the servers are, and how to connect to them: what the URL and the client settings say. Pure."""

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple, get_type_hints
from urllib.parse import unquote, urlsplit

import msgspec

from onward.errors import BadSetting
from onward.settings import Settings, redacted

_PORTS = {"amqp": 5672, "amqps": 5671}
_FORM = "write amqp://user:password@host:5672/vhost, with amqps:// for TLS and commas between several hosts"
_LEAST_HEARTBEAT_S = 2.0  # a shorter one cuts connections whose process is only busy


class RabbitHost(NamedTuple):
    name: str
    port: int

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


class RabbitClient(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The client settings: `client={...}` in the code, `client.NAME=` in the URL."""

    heartbeat_s: float = 5.0
    connect_timeout_s: float = 10.0  # for one host
    cafile: str | None = None  # certificates to trust, in place of the system's
    certfile: str | None = None  # our own certificate
    keyfile: str | None = None
    verify: bool = True  # check the server's certificate and its name
    management_url: str | None = None
    alternate_exchange: str | None = None  # gets the messages that no queue of a topic takes
    cluster_nodes: int | None = None  # how many nodes the cluster has, where the management API does not say it


_TYPES: Mapping[str, Any] = get_type_hints(RabbitClient)
_FORMS: Mapping[Any, str] = {
    float: "a number of seconds",
    bool: "true or false",
    int | None: "a whole number",
    str | None: "text",
}


class RabbitAddress(NamedTuple):
    name: str  # without user, password and settings
    hosts: tuple[RabbitHost, ...]
    vhost: str
    user: str
    password: str
    is_encrypted: bool
    client: RabbitClient

    def __repr__(self) -> str:
        return f"RabbitAddress({self.name})"

    @classmethod
    def of(cls, url: str, settings: Settings) -> "RabbitAddress":
        """Raises BadSetting, without showing the password."""
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.netloc:
            raise BadSetting(f"{redacted(url)}: {_FORM}")
        login, _, places = parts.netloc.rpartition("@")
        user, _, password = login.partition(":")
        default = _PORTS[parts.scheme]
        return cls(
            redacted(url),
            tuple(dict.fromkeys(_host(place, default, url) for place in places.split(","))),
            _vhost(parts.path, url),
            unquote(user) if user else "guest",
            unquote(password) if login else "guest",
            parts.scheme == "amqps",
            _client(settings.client, encrypted=parts.scheme == "amqps"),
        )


def _host(place: str, default: int, url: str) -> RabbitHost:
    name, _, port = place.rpartition(":") if not place.endswith("]") and ":" in place else (place, "", "")
    if not port:
        port = str(default)
    name = name.removeprefix("[").removesuffix("]")
    if not name or not port.isdecimal() or not 0 < int(port) < 65_536 or any(each in name for each in "[]@ "):
        raise BadSetting(f"{redacted(url)}: {place!r} is no host and port; {_FORM}")
    return RabbitHost(unquote(name), int(port))


def _vhost(path: str, url: str) -> str:
    name = path.removeprefix("/")
    if "/" in name:
        cure = "a / in the name of a virtual host is written %2F; for the virtual host / write no path"
        raise BadSetting(f"{redacted(url)}: {path!r} is no virtual host: {cure}")
    return unquote(name) or "/"


def _client(given: Mapping[str, Any], *, encrypted: bool) -> RabbitClient:
    known = RabbitClient.__struct_fields__
    if unknown := sorted(given.keys() - set(known)):
        near = difflib.get_close_matches(unknown[0], known, 1)
        cure = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"
        raise BadSetting(f"client {unknown[0]!r}: RabbitMQ has no such setting; {cure}")
    client = RabbitClient(**{name: _converted(name, value) for name, value in given.items()})
    _check(client, encrypted=encrypted)
    return client


def _converted(name: str, value: Any) -> Any:
    type_ = _TYPES[name]
    try:
        return msgspec.convert(value, type_, strict=False)
    except msgspec.ValidationError as error:
        raise BadSetting(f"client {name}={value!r}: use {_FORMS[type_]}") from error


def _check(client: RabbitClient, *, encrypted: bool) -> None:
    if not _LEAST_HEARTBEAT_S <= client.heartbeat_s <= 600:
        raise BadSetting(f"client heartbeat_s={client.heartbeat_s:g}: use {_LEAST_HEARTBEAT_S:g} to 600 seconds")
    if not 0 < client.connect_timeout_s <= 600:
        raise BadSetting(f"client connect_timeout_s={client.connect_timeout_s:g}: use more than 0, up to 600 seconds")
    if client.cluster_nodes is not None and client.cluster_nodes < 1:
        raise BadSetting(f"client cluster_nodes={client.cluster_nodes}: use the number of nodes, 1 or more")
    if client.keyfile and not client.certfile:
        raise BadSetting("client keyfile: it belongs to a certificate; give certfile as well")
    for_tls = [name for name in ("cafile", "certfile", "keyfile") if getattr(client, name)]
    for_tls += [] if client.verify else ["verify"]
    if for_tls and not encrypted:
        raise BadSetting(f"client {for_tls[0]!r}: it is for TLS; write the URL with amqps://, or remove it")
    if client.management_url is not None and not client.management_url.startswith(("http://", "https://")):
        raise BadSetting("client management_url: write it as http://user:password@host:15672")
