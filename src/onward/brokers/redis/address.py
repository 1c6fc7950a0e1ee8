"""Where the servers are, and how to connect to them: one server, a cluster, or servers behind Sentinels."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

from redis.backoff import NoBackoff
from redis.connection import URL_QUERY_ARGUMENT_PARSERS, Connection, parse_url
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as NoConnection
from redis.retry import Retry

from onward.errors import BadSetting
from onward.settings import Settings, redacted

_parse_url: Callable[[str], Any] = parse_url
_parsers: Mapping[str, Any] = URL_QUERY_ARGUMENT_PARSERS

_OURS = frozenset({"decode_responses", "health_check_interval", "protocol", "retry", "retry_on_error"})
_OURS |= {"retry_on_timeout", "socket_timeout"}
_OF_SENTINELS = "sentinel_"  # the prefix of client settings for the Sentinels
_SENTINEL_S = 1.0  # for the answer of a Sentinel
_FORMS = "write redis://host:port, rediss:// for TLS, redis+cluster:// or redis+sentinel://host:port/service"
_PORTS = {"cluster": 6379, "sentinel": 26379}

Host = tuple[str, int]  # a name and a port
Kind = Literal["server", "cluster", "sentinel"]


class WrongSentinel(ResponseError):
    """Every Sentinel has answered, and none of them names a master."""


class RedisAddress(NamedTuple):
    """What a URL and the client settings say."""

    name: str  # without secrets
    options: Mapping[str, Any]  # of a connection, by redis-py's names
    hosts: dict[Host, None]  # of the Sentinels, or of the cluster's nodes, which are more when they are learned
    kind: Kind = "server"
    service: str = ""  # what the Sentinels call the master

    @classmethod
    def of(cls, url: str, settings: Settings) -> "RedisAddress":
        if "://" not in url:
            raise BadSetting(f"{redacted(url)}: {_FORMS}")
        try:
            client = {name: _client_value(name, value) for name, value in settings.client.items()}
            address = _server(url, client) if "+" not in url.partition("://")[0] else _several(url, client)
        except (ValueError, TypeError) as error:
            raise BadSetting(f"{redacted(url)}: {error}") from error
        if taken := sorted(_OURS & address.options.keys()):
            raise BadSetting(f"client {taken[0]!r}: Onward sets it itself; remove it")
        return address

    def at(self, host: Host) -> "RedisAddress":
        """One node of the cluster."""
        return RedisAddress("{}:{}".format(*host), {**self.options, "host": host[0], "port": host[1]}, {})

    def connection(self, timeout_s: float) -> Any:
        """`timeout_s`: for connecting, and for each answer. Sentinels are asked for the master each time."""
        if self.kind != "sentinel":
            return self._connection(self.server_options, timeout_s)
        host, port = self.master(min(timeout_s, _SENTINEL_S))
        return self._connection({**self.server_options, "host": host, "port": port}, timeout_s)

    def master(self, timeout_s: float = _SENTINEL_S) -> Host:
        """As the first Sentinel says that answers. NoConnection: none of them knows. WrongSentinel: all of them have
        answered, and asking again would not help."""
        problems: dict[Host, Exception] = {}
        for host, port in list(self.hosts):
            try:
                if (found := self._asked({**self.sentinel_options, "host": host, "port": port}, timeout_s)) is not None:
                    return found
                problems[host, port] = ResponseError(f"knows no master with the name {self.service}")
            except (RedisError, OSError) as error:
                problems[host, port] = error
                self.hosts[host, port] = self.hosts.pop((host, port), None)  # it is asked last from now on
        raise _unknown_master(problems)

    def _asked(self, options: Mapping[str, Any], timeout_s: float) -> Host | None:
        connection = self._connection(options, timeout_s)
        try:
            connection.connect()
            connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
            found = connection.read_response()
        finally:
            connection.disconnect()
        return None if found is None else (found[0].decode(), int(found[1]))

    @property
    def is_encrypted(self) -> bool:
        return "connection_class" in self.options

    @property
    def server_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if not name.startswith(_OF_SENTINELS)}

    @property
    def sentinel_options(self) -> dict[str, Any]:
        """The same encryption; user and password of their own, and no database."""
        own = {name: value for name, value in self.options.items() if name.startswith(_OF_SENTINELS)}
        plain = {
            name: value for name, value in self.server_options.items() if name not in ("username", "password", "db")
        }
        return plain | {name.removeprefix(_OF_SENTINELS): value for name, value in own.items()}

    def _connection(self, options: Mapping[str, Any], timeout_s: float) -> Any:
        options = {"socket_connect_timeout": timeout_s, "socket_keepalive": True, **options}
        kind = options.pop("connection_class", Connection)
        try:
            return kind(**options, socket_timeout=timeout_s, protocol=2, retry=Retry(NoBackoff(), 0))
        except TypeError as error:
            raise BadSetting(f"client settings of {self.name}: {error}; use the names of redis-py") from error


def _unknown_master(problems: Mapping[Host, Exception]) -> RedisError:
    why = "; ".join(f"Sentinel {host}:{port}: {error}" for (host, port), error in problems.items())
    answered = all(isinstance(each, AuthenticationError | ResponseError) for each in problems.values())
    return WrongSentinel(why) if answered else NoConnection(why)


def _client_value(name: str, value: Any) -> Any:
    """In a URL all values are texts."""
    parser = _parsers.get(name)
    return parser(value) if parser is not None and isinstance(value, str) else value


def _server(url: str, client: Mapping[str, Any]) -> RedisAddress:
    options = cast("dict[str, Any]", _parse_url(url))
    path = url.partition("://")[2].partition("/")[2]
    if path and not path.isdigit():
        raise BadSetting(f"{redacted(url)}: {path!r} is no database; use a number, such as /0, or nothing")
    return RedisAddress(redacted(url), {**options, **client}, {})


def _several(url: str, client: Mapping[str, Any]) -> RedisAddress:
    """`redis+cluster://host:port,host:port` or `redis+sentinel://host:port,host:port/service/0`."""
    scheme, _, rest = url.partition("://")
    base, _, kind = scheme.partition("+")
    places, _, path = rest.partition("/")
    user, at, places = places.rpartition("@")
    found = [_parse_url(f"{base}://{user}{at}{place}") for place in places.split(",")]
    hosts = {(each.get("host", "localhost"), each.get("port", _PORTS[kind])): None for each in found}
    shared = {**{name: value for name, value in found[0].items() if name not in ("host", "port")}, **client}
    if kind == "cluster":
        if path or shared.get("db"):
            raise BadSetting(f"{redacted(url)}: a cluster has no numbered databases; end the URL with the last host")
        return RedisAddress(redacted(url), shared, hosts, "cluster")
    service, _, database = path.partition("/")
    if not service or (database and not database.isdigit()):
        raise BadSetting(
            f"{redacted(url)}: write the name of the master behind the Sentinels, such as /mymaster, and a database "
            "behind it if it is not 0, such as /mymaster/1"
        )
    return RedisAddress(redacted(url), {"db": int(database or 0), **shared}, hosts, "sentinel", service)
