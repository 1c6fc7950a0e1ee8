"""What the server means by the errors with which it closes a channel. Pure."""

from onward.brokers.rabbitmq.amqp import AmqpError, ChannelClosed, ConnectFailed, ConnectionLost

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
    while each is not None and not isinstance(each, ConnectFailed):
        if isinstance(each, ConnectionLost):
            return True
        each = each.__cause__
    return False


def lacks_replica(error: AmqpError) -> bool:
    """The node of this connection has no copy of the stream. Another node has."""
    return isinstance(error, ChannelClosed) and "does not have a replica" in error.text


def explained(error: AmqpError, what: str) -> str:
    """The error with its cure. `what`: the thing that was asked for, such as "stream onward.orders.0"."""
    if not isinstance(error, ChannelClosed):
        return f"{what}: {error}"
    match error.code:
        case 403 if "ACCESS_REFUSED" in error.text:
            cure = "allow it with `rabbitmqctl set_permissions`, or use another user"
        case 406:
            cure = "it exists with other arguments: delete it, or use another name"
        case _:
            cure = ""
    return f"{what}: {error.text}{f'; {cure}' if cure else ''}"
