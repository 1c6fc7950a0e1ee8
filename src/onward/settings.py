"""The settings of an application: their names, types, defaults and meanings, and how they are loaded.

A setting can be given in four places. The first of these wins: a keyword, the query of the URL, ONWARD_* in the
environment, onward.toml in the current folder. `make docs` writes the descriptions below to docs/settings.md.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

import msgspec
from msgspec import Meta

from onward import context
from onward.errors import BadName, BadSetting

log = logging.getLogger("onward")

_MOST_S = 100 * 366 * 86_400.0  # a hundred years, so that no time is infinite
Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=_MOST_S)]
Positive = Annotated[float, Meta(gt=0, le=_MOST_S)]
FileMode = Literal["private", "umask"]
Lease = Annotated[float, Meta(ge=0.1, le=_MOST_S)]  # a shorter lease would end before it can be renewed


class ClientSettings(dict[str, Any]):
    """Settings of the broker's own client library, by its names. They may be secret, so they are never printed."""

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: ***' for name in self)}}}"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The string under each field is its description on the settings page, so it is written in Markdown."""

    url: str = "sqlite:///onward.db"
    """The broker, see [Brokers](brokers.md). The scheme of the URL selects its kind."""
    app: str | None = None
    """The application for `onward run` and the other commands: `shop:app` is `app` in `shop.py`."""
    client: "ClientSettings" = msgspec.field(default_factory=lambda: ClientSettings())
    """Settings of the broker's client, by the client's own names. They are never printed."""

    debug: bool = False
    """Warn if code publishes directly while a transaction with events in the outbox is open."""

    # topics
    partitions: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Partitions of a new topic. If this is set and a topic has another number, Onward raises `PartitionsDiffer`."""
    auto_declare: bool = True
    """Create topics that do not exist. When it is off, a missing topic is an error; run `onward topology apply`."""
    on_partition_growth: Literal["stop", "accept"] = "stop"
    """Partitions that were added to a topic: `accept` reads them, `stop` does not and the member is not ready."""
    replication: Annotated[int, Meta(ge=1, le=32767)] | None = None
    """Kafka: copies of each partition of a new topic. Redis: servers that must have an event before `publish` returns,
    the master included."""
    streams: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Topics whose streams belong to other programs, see [Redis](redis.md#streams-of-other-programs)."""
    durability: Literal["fsync", "window"] | None = None
    """`fsync`: an accepted event survives a power cut. `window`: faster, but a power cut may lose the last moments."""
    file_mode: FileMode = "private"
    """Mode of new files. `private`: only this user may read and write them. `umask`: as the process's umask says."""

    # limits
    max_event_bytes: Bytes = 1_048_576
    """Size of one event: its value, key and headers. `publish` refuses a larger event with `TooLarge`."""
    max_backlog_bytes: Bytes = 1 << 30
    """Events of one topic that some group has not finished. Beyond this size `publish` raises `Backlogged`."""
    max_outgoing_bytes: Bytes = 64 << 20
    """Events that wait in this process to be stored. Beyond this size `publish` raises `Backlogged`."""
    max_in_flight: Count = 1_000
    """Open events (delivered and not done) per partition. At the limit the partition pauses; at 70 % it goes on."""
    max_in_flight_bytes: Bytes = 32 << 20
    """The same limit in bytes."""
    receive_batch: Count = 1_000
    """Events that a member takes from the broker in one call."""
    max_delayed: Count = 100
    """Open events per partition that wait in memory for a retry. At the limit, further retries wait in the store."""
    max_parked: Count = 100_000
    """Waiting and held events in the store, per partition. At the limit the partition pauses; at 70 % it goes on."""
    max_gap: Count = 1_000_000
    """Events per partition that are done after one that is still open. The partition pauses in the same way."""
    crash_limit: Count = 3
    """Crashes of the process that one event may cause while it runs alone. Then it becomes a dead letter."""
    dead_threshold: Annotated[int, Meta(ge=0)] = 100
    """More dead letters than this, in one topic and group, are an alert. With 0 the first dead letter is one."""

    # metrics
    metrics_prefix: Annotated[str, Meta(pattern="^[a-zA-Z_][a-zA-Z0-9_]*$")] = "onward"
    """The text before the name of each metric: `onward` gives `onward_events_done_total`."""

    # retention
    retention_s: Seconds = 7 * 86_400.0
    """How long events stay stored. SQLite and Redis remove only events that every group has
    finished; Kafka and RabbitMQ remove any. RabbitMQ stores it with the topic when it creates it."""
    retention_bytes: Bytes = 256 << 20
    """Finished events that stay stored, per topic. Beyond this size the oldest are removed before `retention_s`."""

    retention_events: Count | None = None
    """Finished events that stay stored, per partition. Beyond this number the oldest are removed before
    `retention_s`."""

    # streams of other programs
    reclaim_idle_s: Positive = 300.0
    """How long another consumer of the group must have done nothing before its pending entries are taken over."""
    reclaim_every_s: Positive = 60.0
    """How often pending entries of other consumers are looked for."""
    reclaim_batch: Count = 100
    """Pending entries that are taken over in one call."""

    # outbox
    outbox_url: str | None = None
    """The database of the outbox, see [Outbox](outbox.md). An `Outbox` that is given a database ignores it."""
    outbox_relay: bool = True
    """`onward run` and `app.running()` also publish the events of the outbox. When it is off, run `onward relay`."""
    outbox_max_age_s: Positive = 60.0
    """The relay is not ready while an event has waited longer than this in the outbox."""
    outbox_keep_s: Seconds = 0.0
    """PostgreSQL: how long published rows stay in the outbox before they are deleted."""

    # times
    publish_timeout_s: Positive = 30.0
    """How long `publish` waits for the broker. Then it raises `PublishError`."""
    lease_s: Lease = 10.0
    """How long a member that has died keeps its partitions. The default is 10 s, on RabbitMQ 15 s. On Kafka it is the
    session timeout; a cluster accepts no less than 6 s by default."""
    takeover_grace_s: Seconds = 1.0
    """How long the next owner also waits when the last owner ended without releasing the partition."""
    max_poll_gap_s: Positive = 300.0
    """How long a member may not ask for events, for example because its event loop is blocked. Then it loses its
    partitions."""
    revoke_grace_s: Seconds = 40.0
    """How long running events may take to finish when a partition moves to another member. Use more than the longest
    `timeout_s` of your handlers: a run that takes longer may overlap with a run of the next owner."""
    drain_timeout_s: Seconds = 30.0
    """How long a stop waits for running handlers. Then they are cut off, and their events run again."""
    settle_interval_s: Seconds = 0.05
    """How often progress is stored. After a crash, events that were done since then run again."""
    park_after_s: Seconds = 30.0
    """A retry that is due later than this waits in the store, and the later events of its key wait there too."""
    dead_check_s: Positive = 300.0
    """How often dead letters are counted, for the metrics and the alerts."""

    # Where each value was given; None after brokers.completed has checked that the broker accepts them.
    sources: Mapping[str, str] | None = None

    def __repr__(self) -> str:
        """The settings that differ from their defaults, without secrets."""
        usual = Settings()
        shown = {name: getattr(self, name) for name in _TYPES} | {"url": redacted(self.url)}
        shown["outbox_url"] = None if self.outbox_url is None else redacted(self.outbox_url)
        given = [f"{name}={value!r}" for name, value in shown.items() if value != getattr(usual, name)]
        return f"Settings({', '.join(given)})"


_TYPES: Mapping[str, Any] = {
    name: type_ for name, type_ in get_type_hints(Settings, include_extras=True).items() if name != "sources"
}
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_EXAMPLES = {"app": "shop:app", "partitions": 8, "replication": 3}  # for settings whose default is None
_BROKEN = "half a surrogate pair, which is not a character; write it in UTF-8"
_PREFIX = "ONWARD_"  # of names in the environment
_OTHER_NAMES = ("metrics", "child", "storm_s")  # of the command line, of a worker, and of Onward's own tests
_NEAR = 0.8  # similarity of a misspelt name; lower, and ONWARD_METRICS_PORT, which Kubernetes may set, would count
_SHORT = 4  # letters
_warned: set[str] = set()
_CLIENT = "client."  # in a URL, the prefix of the client library's own names


class Source(msgspec.Struct, frozen=True):
    """A place where settings are given."""

    name: str  # in errors
    client: str  # how a setting of the client library is written there


_KEYWORD = Source("a keyword", "client={{{0!r}: ...}}")
_URL = Source("the URL", "client.{0}=...")
_ENVIRONMENT = Source("the environment", "client.NAME=... in the query of ONWARD_URL")
_FILE = Source("onward.toml", '"{0}" = ... under the heading [client]')


def load(url: str | None = None, **keywords: Any) -> Settings:
    """The settings from every source. BadSetting names a bad value, its source and the cure."""
    given = {name: value for name, value in keywords.items() if value is not None}
    if url is not None:
        given["url"] = url
    layers = [(_FILE, _toml()), (_ENVIRONMENT, _environment()), (_KEYWORD, given)]
    base, query = _split(next((values["url"] for _, values in reversed(layers) if "url" in values), Settings().url))
    layers.insert(2, (_URL, query))
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, raw in layers:
        checked = {name: _check(source, name, value) for name, value in raw.items()}
        if "client" in checked:
            checked["client"] = ClientSettings(values.get("client", {}) | checked["client"])
        values |= checked
        sources |= dict.fromkeys(checked, source.name)
    return Settings(**(values | {"url": base, "sources": sources}))


def check_environment() -> None:
    """BadSetting for a misspelt ONWARD_* variable, a warning for other unknown ones. `load` does this too."""
    _environment()


def trust_environment() -> None:
    """Do not warn about the present variables: another process has already done so."""
    _warned.update(os.environ)


def redacted(url: str) -> str:
    """The URL without user, password and query, for logs and errors.

    In a malformed URL everything up to the last @ is hidden. The path of a file of the default broker is shown, because
    it may contain an @.
    """
    scheme = Settings().url.partition(":")[0]
    if re.fullmatch(rf"{scheme}:///[^:?]*", url):
        return url
    hidden = re.sub(r"\A([A-Za-z][A-Za-z0-9+.-]*://)?.*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"\?.*", "?***", hidden, flags=re.DOTALL)


def check_name(kind: str, name: str) -> str:
    """Return the name. BadName: not every broker accepts it as a topic or group."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in {".", ".."}:
        raise BadName(f"{kind} {name!r}: use 1 to 200 of the characters A-Z a-z 0-9 . _ -, which every broker accepts")
    return name


def _toml() -> dict[str, Any]:
    path = Path("onward.toml")
    if not path.is_file():
        return {}
    import tomllib  # rarely needed, and it would slow down every import of onward

    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting(f"onward.toml cannot be read: {error}") from error
    for heading, table in (("[onward]", found.get("onward")), ("[tool.onward]", found.get("tool"))):
        if isinstance(table, dict):
            raise BadSetting(f"onward.toml: write settings at the top, without a heading; remove the line {heading}")
    if isinstance(client := found.get("client"), dict):
        found["client"] = dict(_dotted(client))
    return found


def _dotted(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """TOML parses an unquoted name with dots as nested tables. Return the names with their dots again."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _environment() -> dict[str, str]:
    found = {name.removeprefix(_PREFIX).lower(): name for name in os.environ if name.startswith(_PREFIX)}
    if unknown := sorted(name for short, name in found.items() if short not in _TYPES and short not in _OTHER_NAMES):
        _judge_unknown(unknown)
    return {short: os.environ[name] for short, name in found.items() if short in _TYPES}


def _judge_unknown(names: Sequence[str]) -> None:
    """A name that is similar to one of ours is an error. Other names get one warning: Kubernetes sets some for a
    service named onward."""
    for name in names:
        if near := _near(name.removeprefix(_PREFIX)):
            raise BadSetting(f"the environment sets {name}, which is not a setting; did you mean {_PREFIX}{near}?")
    if not _warned.issuperset(names) and not context.in_worker:  # a worker's parent has logged it
        _warned.update(names)
        log.warning("ignored these environment variables, which are not settings of Onward: %s", ", ".join(names))


def _near(name: str) -> str:
    """The name that was probably meant; empty if none is similar."""
    import difflib

    ours = [known.upper() for known in (*_TYPES, *_OTHER_NAMES)]
    similar = difflib.get_close_matches(name, ours, 1, _NEAR)
    # In a name of three or four letters, one wrong letter brings the ratio below _NEAR.
    return next(iter(similar or [each for each in ours if len(name) <= _SHORT and _one_letter_differs(each, name)]), "")


def _one_letter_differs(one: str, other: str) -> bool:
    return len(one) == len(other) and sum(a != b for a, b in zip(one, other, strict=True)) == 1


def _split(url: Any) -> tuple[str, dict[str, Any]]:
    """The URL without its query, and the settings in the query."""
    parts = _parts(_check_url(url))
    # urlunsplit would drop the empty host of scheme:///file
    base = url.split("?", 1)[0] if parts.query else urlunsplit(parts) if parts.netloc else url
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query: dict[str, Any] = {name: value for name, value in pairs if not name.startswith(_CLIENT)}
    client = {name.removeprefix(_CLIENT): value for name, value in pairs if name.startswith(_CLIENT)}
    if client and "client" not in query:
        query["client"] = client
    return base, query


def _check_url(url: Any) -> str:
    """Return the URL. Errors do not show it, because it may contain a password."""
    if not isinstance(url, str):
        raise BadSetting(f"the URL must be text, not {type(url).__name__}; write it in quotes")
    if _is_broken(url):
        raise BadSetting(f"the URL contains {_BROKEN}")
    return url


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None  # not chained: the text of the error may contain a part of the password
    # A / ? or # in the password ends the host before the @ that belongs to it.
    if parts is None or (parts.netloc and "@" in parts.path + parts.query + parts.fragment):
        raise BadSetting(
            "the URL cannot be read (it is not shown, because it may contain a password): encode the reserved "
            "characters of user, password and values, such as / @ ? # [, with urllib.parse.quote(text, safe='')"
        )
    if "#" in url:
        raise BadSetting("the URL contains a #, and everything after it would be ignored; write it as %23")
    return parts


def _check(source: Source, name: str, value: Any) -> Any:
    """The value, converted to the type of its setting."""
    if name in ("url", "outbox_url"):
        return _check_url(value)
    if name == "client":
        return _check_client(source, value)
    if name == "streams":
        return _check_streams(source, value)
    if name not in _TYPES:
        raise BadSetting(_unknown(source, name))
    if _is_broken(value):
        raise BadSetting(f"{name}={value!r} from {source.name} contains {_BROKEN}")
    try:
        return msgspec.convert(value, _TYPES[name], strict=False)
    except msgspec.ValidationError as error:
        raise BadSetting(f"{name}={value!r} from {source.name}: {error}; {_cure(name)}") from error


def _check_client(source: Source, value: Any) -> ClientSettings:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise BadSetting(f"client from {source.name} has no names; write {source.client.format('NAME')}")
    if broken := [name for name, each in value.items() if _is_broken(name) or _is_broken(each)]:
        raise BadSetting(f"client {broken[0]!r} from {source.name} contains {_BROKEN}")
    return ClientSettings(value)


def _check_streams(source: Source, value: Any) -> Mapping[str, Any]:
    """The broker checks what is behind each name."""
    if not isinstance(value, Mapping):
        cure = 'write streams={"scan": Streams("scan:events")} in the code, or a table [streams.scan] in onward.toml'
        raise BadSetting(f"streams from {source.name} is no mapping of topics; {cure}")
    return {check_name("topic", name): streams for name, streams in value.items()}


def _is_broken(value: Any) -> bool:
    """Is it text that cannot be encoded? Python makes such text from an argument or a variable that is not UTF-8."""
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)


def _unknown(source: Source, name: str) -> str:
    import difflib

    near = [] if "." in name else difflib.get_close_matches(name, _TYPES, 1)
    client = f"a setting of the client library is written {source.client.format(name)}"
    return f"{source.name} sets {name!r}, which is not a setting; {f'did you mean {near[0]!r}?' if near else client}"


def _cure(name: str) -> str:
    """What to write instead of an invalid value."""
    type_, default = _TYPES[name], getattr(Settings(), name)
    choices = [each for part in (type_, *get_args(type_)) for each in get_args(part) if isinstance(each, str)]
    if type_ is bool or choices:
        return f"use {' or '.join(choices or ['true', 'false'])}"
    example = _EXAMPLES.get(name, default)
    unit = "seconds" if name.endswith("_s") else "bytes" if name.endswith("_bytes") else ""
    kind = unit or ("a number" if isinstance(example, int) else "text")
    return f"use {kind}, such as {name}={example}"
