"""The HTTP API of the server's management plugin. It is optional, and only read."""

import asyncio
import base64
import contextlib
import http.client
import json
import ssl as tls
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlencode, urlsplit

from onward.brokers.rabbitmq.address import RabbitAddress, RabbitClient
from onward.brokers.rabbitmq.operate.topology import Binding
from onward.errors import BadSetting, BrokerError
from onward.settings import redacted

_TIMEOUT_S = 5.0
_LARGEST_BYTES = 64 << 20
_PAGE = 500  # queues in one answer; RabbitMQ allows no more
_PORTS = {"http": 15672, "https": 15671}
_PLUGIN = "turn it on with `rabbitmq-plugins enable rabbitmq_management`, or remove management_url"


class ManagementError(BrokerError):
    """The management API cannot be reached, refuses the user, or answers with something else than expected."""


class ManagementPlace(NamedTuple):
    """Where the API is, and who asks. `name` has no secret in it."""

    name: str
    host: str
    port: int
    path: str
    login: str  # the value of the Authorization header
    vhost: str
    context: tls.SSLContext | None  # None: no TLS

    @classmethod
    def of(
        cls, url: str, *, vhost: str, user: str, password: str, context: tls.SSLContext | None = None
    ) -> "ManagementPlace":
        """User and password are used if the URL names none, and `context` if it begins with https. Raises BadSetting
        if the URL cannot be read."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise BadSetting(f"management_url={redacted(url)}: {error}") from None
        if parts.scheme not in _PORTS or not parts.hostname:
            raise BadSetting(f"management_url={redacted(url)}: write http://host:15672, or https:// for TLS")
        if parts.username is not None:
            user, password = unquote(parts.username), unquote(parts.password or "")
        login = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        secure = (context or tls.create_default_context()) if parts.scheme == "https" else None
        name = f"{parts.scheme}://{parts.hostname}:{port or _PORTS[parts.scheme]}"
        return cls(name, parts.hostname, port or _PORTS[parts.scheme], parts.path.rstrip("/"), login, vhost, secure)


class ManagementApi:
    """Each call raises ManagementError if it gets no answer. It asks in a thread, so the event loop goes on."""

    def __init__(self, place: ManagementPlace, timeout_s: float = _TIMEOUT_S) -> None:
        self.place = place
        self._timeout_s = timeout_s

    @classmethod
    def of(cls, address: RabbitAddress) -> "ManagementApi | None":
        """None: the client settings name no management_url. Raises BadSetting if it cannot be used."""
        client = address.client
        if client.management_url is None:
            return None
        place = ManagementPlace.of(
            client.management_url,
            vhost=address.vhost,
            user=address.user,
            password=address.password,
            context=_context(client),
        )
        return cls(place)

    async def overview(self) -> dict[str, Any]:
        return dict(await self._get("/api/overview"))

    async def nodes(self) -> list[dict[str, Any]]:
        return list(await self._get("/api/nodes"))

    async def feature_flags(self) -> dict[str, str]:
        """The state of each feature flag."""
        return {each["name"]: each["state"] for each in await self._get("/api/feature-flags")}

    async def queue(self, name: str) -> dict[str, Any] | None:
        """None: there is no such queue."""
        path = f"/api/queues/{self._vhost}/{quote(name, safe='')}"
        found: dict[str, Any] | None = await asyncio.to_thread(self._answer, path, may_lack=True)
        return found

    async def queues(self, columns: Sequence[str]) -> list[dict[str, Any]]:
        """All queues of the virtual host, with these fields of each."""
        found: list[dict[str, Any]] = []
        page, pages = 1, 1
        while page <= pages:
            query = {"page": page, "page_size": _PAGE, "columns": ",".join(columns)}
            answer = await self._get(f"/api/queues/{self._vhost}?{urlencode(query)}")
            found += answer["items"]
            page, pages = page + 1, answer["page_count"]
        return found

    async def exchanges(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in await self._get(f"/api/exchanges/{self._vhost}")}

    async def bindings(self) -> list[Binding]:
        """All but those of the default exchange, which every queue has."""
        return list(_bindings(await self._get(f"/api/bindings/{self._vhost}")))

    async def policies(self) -> list[dict[str, Any]]:
        return list(await self._get(f"/api/policies/{self._vhost}"))

    async def operator_policies(self) -> list[dict[str, Any]]:
        return list(await self._get(f"/api/operator-policies/{self._vhost}"))

    @property
    def _vhost(self) -> str:
        return quote(self.place.vhost, safe="")

    async def _get(self, path: str) -> Any:
        return await asyncio.to_thread(self._answer, path)

    def _answer(self, path: str, *, may_lack: bool = False) -> Any:
        status, text = self._asked(path)
        what = f"the management API at {self.place.name}"
        if status == 404 and may_lack:
            return None
        if status in (401, 403):
            raise ManagementError(
                f"{what} refuses the user for {path.partition('?')[0]}; give it the tag monitoring with `rabbitmqctl "
                "set_user_tags USER monitoring`, or name another user in management_url"
            )
        if status != 200:
            raise ManagementError(f"{what} answers {status} to {path.partition('?')[0]}; check management_url")
        try:
            return json.loads(text)
        except ValueError:
            raise ManagementError(f"{what} does not answer in JSON; does management_url name another server?") from None

    def _asked(self, path: str) -> tuple[int, bytes]:
        place = self.place
        connection = (
            http.client.HTTPConnection(place.host, place.port, timeout=self._timeout_s)
            if place.context is None
            else http.client.HTTPSConnection(place.host, place.port, timeout=self._timeout_s, context=place.context)
        )
        try:
            connection.request("GET", place.path + path, headers={"Authorization": place.login})
            with connection.getresponse() as answer:
                text = answer.read(_LARGEST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise ManagementError(f"the management API at {place.name} does not answer: {why}; {_PLUGIN}") from error
        finally:
            connection.close()
        if len(text) > _LARGEST_BYTES:
            raise ManagementError(f"the management API at {place.name} answers with over {_LARGEST_BYTES:,} bytes")
        return answer.status, text


def _context(client: RabbitClient) -> tls.SSLContext:
    context = tls.create_default_context(cafile=client.cafile)
    if not client.verify:
        context.check_hostname = False
        context.verify_mode = tls.CERT_NONE
    return context


def _bindings(found: Sequence[Mapping[str, Any]]) -> Iterator[Binding]:
    for each in found:
        target = {"queue": "queue", "exchange": "to_exchange"}[each["destination_type"]]
        ends = {"exchange": each["source"], target: each["destination"]}
        if each["source"]:
            with contextlib.suppress(BadSetting):  # of another program, with a name that we allow to no binding
                yield Binding(**ends, key=each["routing_key"], arguments=each["arguments"])
