"""Settings: frozen, parsed once at the edge. A keyword wins over the URL's query, that over ONWARD_* in the
environment, that over onward.toml in the current folder, that over the defaults below."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

import msgspec
from msgspec import Meta

from onward.errors import BadName, BadSetting

Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


class ClientSettings(dict[str, Any]):
    """Settings of the broker's own client library, by its names. They may be secret, so they are never printed."""

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: ***' for name in self)}}}"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    url: str = "sqlite:///onward.db"
    app: str | None = None  # MODULE:APP, for the commands that need the application
    client: "ClientSettings" = msgspec.field(default_factory=lambda: ClientSettings())  # Kafka: names with a dot

    # topics
    partitions: Annotated[int, Meta(ge=1, le=4096)] | None = None  # of a new topic, 8; one that differs is refused
    auto_declare: bool = True
    on_partition_growth: Literal["stop", "accept"] = "stop"
    replication: Annotated[int, Meta(ge=1, le=32767)] | None = None  # copies of a new topic; the cluster's default
    durability: Literal["fsync", "window"] | None = None  # None: the broker's own

    # limits
    max_event_bytes: Bytes = 1_048_576
    max_backlog_bytes: Bytes = 1 << 30  # events that some group has not finished, per topic
    max_outgoing_bytes: Bytes = 64 << 20  # events that wait in this process to be sent
    retention_s: Seconds = 7 * 86_400.0  # finished events are kept this long
    retention_bytes: Bytes = 256 << 20  # and at most this much of them, per topic
    max_in_flight: Count = 1_000  # delivered and not done, per partition
    max_in_flight_bytes: Bytes = 32 << 20
    receive_batch: Count = 1_000
    max_delayed: Count = 100  # of those in flight, waiting in place for a retry
    max_parked: Count = 100_000  # records set aside, per partition: at that it is paused
    max_gap: Count = 1_000_000  # events done behind one that is not, per partition: at that it is paused
    crash_limit: Count = 3  # crashes of the process that one event may cause
    dead_threshold: Count = 100  # more dead letters of a topic and group are an alert

    # seeing it
    metrics_prefix: Annotated[str, Meta(pattern="^[a-zA-Z_][a-zA-Z0-9_]*$")] = "onward"

    # times
    publish_timeout_s: Positive = 30.0
    lease_s: Positive = 10.0
    takeover_grace_s: Seconds = 1.0
    max_poll_gap_s: Positive = 300.0
    revoke_grace_s: Seconds = 40.0  # longer than a handler may run, or it overlaps with the next owner's run
    drain_timeout_s: Seconds = 30.0
    settle_interval_s: Seconds = 0.05
    park_after_s: Seconds = 30.0  # a retry due later than this leaves the flow, and its key with it
    dead_check_s: Positive = 300.0  # how often they are counted

    def __repr__(self) -> str:
        """What was set, without secrets."""
        usual = Settings()
        shown = {name: getattr(self, name) for name in self.__struct_fields__} | {"url": redacted(self.url)}
        given = [f"{name}={value!r}" for name, value in shown.items() if value != getattr(usual, name)]
        return f"Settings({', '.join(given)})"


_TYPES: Mapping[str, Any] = get_type_hints(Settings, include_extras=True)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


def load(url: str | None = None, **keywords: Any) -> Settings:
    """Settings from every source, each value checked and blamed on where it came from."""
    given = {name: value for name, value in keywords.items() if value is not None}
    if url is not None:
        given["url"] = url
    values = (
        _checked("onward.toml", _toml()) | _checked("the environment", _environment()) | _checked("a keyword", given)
    )
    base, query = _split(values.get("url", Settings().url))
    from_url = _checked("the URL", query)
    client = values.get("client", {}) | from_url.get("client", {}) | _checked("a keyword", given).get("client", {})
    values = values | from_url | {name: values[name] for name in given if name in values and name != "url"}
    return Settings(**(values | {"url": base, "client": ClientSettings(client)}))


def redacted(url: str) -> str:
    """The URL without user and password, fit for logs and errors. A path without a host may hold an @ of its own."""
    return re.sub(r"://(?!/).*@", "://***@", url, flags=re.DOTALL)


def check_name(kind: str, name: str) -> str:
    """The name, if every broker takes it as a topic or group."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in {".", ".."}:
        raise BadName(f"{kind} {name!r}: use 1 to 200 of the characters A-Z a-z 0-9 . _ -, which every broker accepts")
    return name


def _toml() -> dict[str, Any]:
    path = Path("onward.toml")
    if not path.is_file():
        return {}
    import tomllib  # seldom needed, and every import of onward would pay for it

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting(f"onward.toml cannot be read: {error}") from error


def _environment() -> dict[str, str]:
    # Other programs own other ONWARD_ variables, so here an unknown name is no error.
    return {name: os.environ[f"ONWARD_{name.upper()}"] for name in _TYPES if f"ONWARD_{name.upper()}" in os.environ}


def _split(url: str) -> tuple[str, dict[str, str]]:
    parts = _parts(url)
    # urlunsplit would shorten sqlite:///file to sqlite:/file.
    base = url.split("?", 1)[0] if parts.query else urlunsplit(parts) if parts.netloc else url
    return base, dict(parse_qsl(parts.query, keep_blank_values=True))


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None  # its text may hold a part of the password
    # A / ? or # of the password has ended the host's part before the @ that belongs to it.
    if parts is None or (parts.netloc and "@" in parts.path + parts.query + parts.fragment):
        raise BadSetting(
            "the URL cannot be read (not shown, it may hold a password): write the reserved characters of user, "
            "password and values, such as / @ ? # [, as urllib.parse.quote(text, safe='') gives them"
        )
    return parts


def _checked(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Each value as its type. Names with a dot are the client library's, and are checked by it."""
    client = {name: value for name, value in values.items() if "." in name}
    checked = {name: _check(source, name, value) for name, value in values.items() if name not in client}
    return checked | {"client": ClientSettings(checked.get("client", {}) | client)} if client else checked


def _check(source: str, name: str, value: Any) -> Any:
    if name not in _TYPES:
        import difflib

        near = difflib.get_close_matches(name, _TYPES, 1)
        raise BadSetting(f"{source} sets {name!r}, which is no setting{f'; did you mean {near[0]!r}?' if near else ''}")
    if name == "client":
        if not isinstance(value, Mapping):
            raise BadSetting(f"client from {source}: a mapping of the client library's own names to values")
        return ClientSettings(value)
    try:
        return msgspec.convert(value, _TYPES[name], strict=False)
    except msgspec.ValidationError as error:
        raise BadSetting(f"{name}={value!r} from {source}: {error}") from error
