"""Settings: frozen, parsed once at the edge. A keyword wins over the URL's query, then ONWARD_* in the environment,
then onward.toml in the current folder, then the defaults below."""

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

_MOST_S = 100 * 366 * 86_400.0  # a hundred years; so no time is infinite
Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=_MOST_S)]
Positive = Annotated[float, Meta(gt=0, le=_MOST_S)]
FileMode = Literal["private", "umask"]
Lease = Annotated[float, Meta(ge=0.1, le=_MOST_S)]  # a shorter one is over before it can be renewed


class ClientSettings(dict[str, Any]):
    """Settings of the broker's own client library, by its names. They may be secret, so they are never printed."""

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: ***' for name in self)}}}"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    url: str = "sqlite:///onward.db"
    app: str | None = None  # MODULE:APP, for the commands that need the application
    client: "ClientSettings" = msgspec.field(default_factory=lambda: ClientSettings())  # in a URL: client.NAME=value

    # topics
    partitions: Annotated[int, Meta(ge=1, le=4096)] | None = None  # of a new topic, 8; one that differs is refused
    auto_declare: bool = True
    on_partition_growth: Literal["stop", "accept"] = "stop"
    replication: Annotated[int, Meta(ge=1, le=32767)] | None = None  # copies of a new topic; the cluster's default
    durability: Literal["fsync", "window"] | None = None  # the broker's own; window: a power cut may take some events

    file_mode: FileMode = "private"  # of the broker's files: for this user only, or as the umask says

    # limits
    max_event_bytes: Bytes = 1_048_576
    max_backlog_bytes: Bytes = 1 << 30  # events that some group has not finished, per topic
    max_outgoing_bytes: Bytes = 64 << 20  # events that wait in this process to be published
    retention_s: Seconds = 7 * 86_400.0  # finished events are kept this long
    retention_bytes: Bytes = 256 << 20  # and at most this much of them, per topic
    max_in_flight: Count = 1_000  # delivered and not done, per partition
    max_in_flight_bytes: Bytes = 32 << 20
    receive_batch: Count = 1_000
    max_delayed: Count = 100  # of those in flight, waiting in place for a retry
    max_parked: Count = 100_000  # records set aside, per partition: at that it is paused
    max_gap: Count = 1_000_000  # events done behind one that is not, per partition: at that it is paused
    crash_limit: Count = 3  # crashes of the process that one event may cause
    dead_threshold: Annotated[int, Meta(ge=0)] = 100  # more dead letters of a topic and group are an alert; 0: any is

    # seeing it
    metrics_prefix: Annotated[str, Meta(pattern="^[a-zA-Z_][a-zA-Z0-9_]*$")] = "onward"

    # times
    publish_timeout_s: Positive = 30.0
    lease_s: Lease = 10.0  # unless the scheme has another default
    takeover_grace_s: Seconds = 1.0
    max_poll_gap_s: Positive = 300.0
    revoke_grace_s: Seconds = 40.0  # longer than a handler may run, or it overlaps with the next owner's run
    drain_timeout_s: Seconds = 30.0
    settle_interval_s: Seconds = 0.05
    park_after_s: Seconds = 30.0  # a retry due later than this leaves the flow, and its key with it
    dead_check_s: Positive = 300.0  # how often they are counted

    # Where each value was given, until brokers.completed has checked that the broker takes it.
    sources: Mapping[str, str] | None = None

    def __repr__(self) -> str:
        """What was set, without secrets."""
        usual = Settings()
        shown = {name: getattr(self, name) for name in _TYPES} | {"url": redacted(self.url)}
        given = [f"{name}={value!r}" for name, value in shown.items() if value != getattr(usual, name)]
        return f"Settings({', '.join(given)})"


_TYPES: Mapping[str, Any] = {
    name: type_ for name, type_ in get_type_hints(Settings, include_extras=True).items() if name != "sources"
}
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_EXAMPLES = {"app": "shop:app", "partitions": 8, "replication": 3}  # of those without a default
_BROKEN = "half a surrogate pair, which is no character: write it in UTF-8"
_PREFIX = "ONWARD_"  # of names in the environment
_OTHER_NAMES = ("metrics", "child", "storm_s")  # of the command line, of a worker, and of Onward's own tests
_NEAR = 0.8  # how alike a misspelt name is; less and ONWARD_METRICS_PORT, which Kubernetes may set, would be one
_SHORT = 4  # letters
_warned: set[str] = set()
_CLIENT = "client."  # before the client library's own names, in a URL


class Source(msgspec.Struct, frozen=True):
    """A place where settings are given."""

    name: str  # in errors
    client: str  # how a setting of the client library is written there


_KEYWORD = Source("a keyword", "client={{{0!r}: ...}}")
_URL = Source("the URL", "client.{0}=...")
_ENVIRONMENT = Source("the environment", "client.NAME=... in the query of ONWARD_URL")
_FILE = Source("onward.toml", '"{0}" = ... under the heading [client]')


def load(url: str | None = None, **keywords: Any) -> Settings:
    """Settings from every source, each value checked and blamed on where it came from."""
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
    """Refuse or report the names in the environment that are no settings. `load` does so too."""
    _environment()


def trust_environment() -> None:
    """Another process has reported these names: `load` need not repeat the warning."""
    _warned.update(os.environ)


def redacted(url: str) -> str:
    """The URL without user, password and query, fit for logs and errors. What looks wrong is hidden too: all up to the
    last @, but for the path of a file of the default broker, which may hold an @ of its own."""
    scheme = Settings().url.partition(":")[0]
    if re.fullmatch(rf"{scheme}:///[^:?]*", url):
        return url
    hidden = re.sub(r"\A([A-Za-z][A-Za-z0-9+.-]*://)?.*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"\?.*", "?***", hidden, flags=re.DOTALL)


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
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting(f"onward.toml cannot be read: {error}") from error
    for heading, table in (("[onward]", found.get("onward")), ("[tool.onward]", found.get("tool"))):
        if isinstance(table, dict):
            raise BadSetting(f"onward.toml: settings stand at its top, under no heading; remove the line {heading}")
    if isinstance(client := found.get("client"), dict):
        found["client"] = dict(_dotted(client))
    return found


def _dotted(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """TOML makes a table of a name with dots that stands without quotes: these are names again."""
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
    """A name that is nearly one of ours is an error. Others may be set by Kubernetes, for a service named onward, and
    are named in a warning, once."""
    for name in names:
        if near := _near(name.removeprefix(_PREFIX)):
            raise BadSetting(f"the environment sets {name}, which is no setting; did you mean {_PREFIX}{near}?")
    if not _warned.issuperset(names) and not context.in_worker:  # its parent has said it
        _warned.update(names)
        log.warning("the environment sets what is no setting of Onward, and is ignored: %s", ", ".join(names))


def _near(name: str) -> str:
    """The name that was probably meant; empty: nothing comes near."""
    import difflib

    ours = [known.upper() for known in (*_TYPES, *_OTHER_NAMES)]
    similar = difflib.get_close_matches(name, ours, 1, _NEAR)
    # One wrong letter of three or four makes a name too unlike for the ratio.
    return next(iter(similar or [each for each in ours if len(name) <= _SHORT and _one_letter_differs(each, name)]), "")


def _one_letter_differs(one: str, other: str) -> bool:
    return len(one) == len(other) and sum(a != b for a, b in zip(one, other, strict=True)) == 1


def _split(url: Any) -> tuple[str, dict[str, Any]]:
    """The URL without its query, and the settings in that."""
    parts = _parts(_check_url(url))
    # urlunsplit would drop the empty host of scheme:///file.
    base = url.split("?", 1)[0] if parts.query else urlunsplit(parts) if parts.netloc else url
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query: dict[str, Any] = {name: value for name, value in pairs if not name.startswith(_CLIENT)}
    client = {name.removeprefix(_CLIENT): value for name, value in pairs if name.startswith(_CLIENT)}
    if client and "client" not in query:
        query["client"] = client
    return base, query


def _check_url(url: Any) -> str:
    """Its text. Errors do not show what was given: it may hold a password."""
    if not isinstance(url, str):
        raise BadSetting(f"the URL is no text but of type {type(url).__name__}; write it in quotes")
    if _is_broken(url):
        raise BadSetting(f"the URL holds {_BROKEN}")
    return url


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
    if "#" in url:
        raise BadSetting("the URL holds a #, and nothing behind it would count: write it as %23")
    return parts


def _check(source: Source, name: str, value: Any) -> Any:
    """The value as its setting's type."""
    if name == "url":
        return _check_url(value)
    if name == "client":
        return _check_client(source, value)
    if name not in _TYPES:
        raise BadSetting(_unknown(source, name))
    if _is_broken(value):
        raise BadSetting(f"{name}={value!r} from {source.name} holds {_BROKEN}")
    try:
        return msgspec.convert(value, _TYPES[name], strict=False)
    except msgspec.ValidationError as error:
        raise BadSetting(f"{name}={value!r} from {source.name}: {error}; {_cure(name)}") from error


def _check_client(source: Source, value: Any) -> ClientSettings:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise BadSetting(f"client from {source.name} has no names; write {source.client.format('NAME')}")
    if broken := [name for name, each in value.items() if _is_broken(name) or _is_broken(each)]:
        raise BadSetting(f"client {broken[0]!r} from {source.name} holds {_BROKEN}")
    return ClientSettings(value)


def _is_broken(value: Any) -> bool:
    """A text that has no bytes. Python makes one of an argument or a variable that is not UTF-8."""
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)


def _unknown(source: Source, name: str) -> str:
    if "." in name:
        cure = f"a setting of the client library is written {source.client.format(name)}"
        return f"{source.name} sets {name!r}, which is no setting; {cure}"
    import difflib

    near = difflib.get_close_matches(name, _TYPES, 1)
    return f"{source.name} sets {name!r}, which is no setting{f'; did you mean {near[0]!r}?' if near else ''}"


def _cure(name: str) -> str:
    """What to write in place of a value that cannot be."""
    type_, default = _TYPES[name], getattr(Settings(), name)
    choices = [each for part in (type_, *get_args(type_)) for each in get_args(part) if isinstance(each, str)]
    if type_ is bool or choices:
        return f"use {' or '.join(choices or ['true', 'false'])}"
    unit = "seconds, " if name.endswith("_s") else "bytes, " if name.endswith("_bytes") else ""
    return f"use {unit}such as {name}={_EXAMPLES.get(name, default)}"
