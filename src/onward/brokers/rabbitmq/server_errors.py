"""What the server means by the errors with which it closes a channel. Pure."""

import re
from collections.abc import Sequence

from onward.brokers.rabbitmq.amqp import AmqpError, ChannelClosed, ConnectFailed, ConnectionLost
from onward.brokers.rabbitmq.operate.differences import in_words

_NO_STREAMS = re.compile(r"unsupported queue type 'stream'|'rabbit_stream_queue'.*feature flag is disabled", re.DOTALL)
_STREAMS_CURE = "upgrade it to 3.10 or later, or run `rabbitmqctl enable_feature_flag stream_queue`"
_DIFFERS_CURE = "another program uses this name: delete it at the server, or use another name or virtual host"

_REFUSED_CURE = (
    'allow it with `rabbitmqctl set_permissions` ("Permissions" in docs/rabbitmq.md has the pattern), or use another '
    "user"
)

APPLY = "create it with `onward topology apply --app MODULE:APP`"

NOT_FOUND, DIFFERS, REFUSED, LOCKED = 404, 406, 403, 405


def is_missing(error: AmqpError) -> bool:
    """There is no such queue or exchange."""
    return isinstance(error, ChannelClosed) and error.code == NOT_FOUND and not is_passing(error)


def is_passing(error: AmqpError) -> bool:
    """It exists, but its node is down, or has just started. The same call may succeed some seconds later."""
    return isinstance(error, ChannelClosed) and (
        "down or inaccessible" in error.text or "timeout" in error.text.lower()
    )


def is_interrupted(error: BaseException) -> bool:
    """The connection has ended, and this error, or its cause, says so. On a new connection the same call may succeed.

    RabbitMQ ends a connection with 541 INTERNAL_ERROR if it uses a stream that another one is creating or deleting."""
    each: BaseException | None = error
    while each is not None and not isinstance(each, ConnectFailed) and not lacks_streams(each):
        if isinstance(each, ConnectionLost):
            return True
        each = each.__cause__
    return False


def is_starting(error: BaseException) -> bool:
    """This error, or its cause, is passing: the queue exists, and another process may just have declared it."""
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, AmqpError) and is_passing(each):
            return True
        each = each.__cause__
    return False


def lacks_replica(error: AmqpError) -> bool:
    """The node of this connection has no copy of the stream. Another node has."""
    return isinstance(error, ChannelClosed) and "does not have a replica" in error.text


def lacks_streams(error: BaseException) -> bool:
    """The server has no streams: it is too old, or the feature flag is off."""
    return isinstance(error, ChannelClosed | ConnectionLost) and bool(_NO_STREAMS.search(error.text))


def explained(error: AmqpError, what: str) -> str:
    """The error with its cure. `what`: the thing that was asked for, such as "stream onward.orders.0"."""
    if lacks_streams(error):
        return f"{what}: this server has no streams; {_STREAMS_CURE}"
    if not isinstance(error, ChannelClosed):
        return f"{what}: {error}"
    if error.code == REFUSED and "ACCESS_REFUSED" in error.text:
        return f"{what}: {error.text}; {_REFUSED_CURE}"
    if error.code == DIFFERS and (why := _difference(error.text, what)):
        return f"{what}: {why}; {_DIFFERS_CURE}"
    return f"{what}: {error.text}"


def undeclared(what: str, missing: Sequence[str] = ()) -> str:
    """The error of a thing that does not exist, or lacks parts, while auto_declare is off."""
    why = f"has no {', '.join(missing)}" if missing else "does not exist"
    return f"{what} {why}, and auto_declare is off; {APPLY}, or turn auto_declare on"


def _difference(text: str, what: str) -> str:
    """How the object at the server differs. Empty: the server says something else."""
    if (found := in_words(text)) is not None:
        name, difference = found
        return f"{'it' if name.split(' ', 1)[1] in what.split() else name} exists and differs: {difference}"
    return "it exists and is no stream" if "x-stream-offset" in text else ""
