"""What can go wrong between us and the server.

AmqpError
├── ConnectFailed       the connection could not be opened
│   └── LoginRefused    the server does not accept the user, the password or the virtual host
├── ConnectionLost      the connection has ended
│   └── ClosedByUs      because we have closed it
├── ChannelClosed       the channel has ended, and the connection lives on
└── Malformed           bytes that are not AMQP 0.9.1
"""


class AmqpError(Exception):
    """The root of all errors of this client."""


class ConnectFailed(AmqpError):
    """The connection could not be opened: TCP, TLS, or the handshake."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class LoginRefused(ConnectFailed):
    """The server refused the user, the password or the virtual host. `why` has its text."""


class ConnectionLost(AmqpError):
    """The connection has ended: closed by the server (`code`, `text`), reset, silent for too long, or closed by us
    (`code` 0)."""

    def __init__(self, why: str, *, code: int = 0, text: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.code = code
        self.text = text


class ClosedByUs(ConnectionLost):
    """We have closed the connection."""

    def __init__(self, why: str = "closed by us") -> None:
        super().__init__(why)


class ChannelClosed(AmqpError):
    """The server closed the channel because of `method` (`code` 404, 406, 403, 405 …), or we closed it (`code` 0)."""

    def __init__(self, why: str, *, code: int = 0, text: str = "", method: str = "") -> None:
        super().__init__(why)
        self.code = code
        self.text = text
        self.method = method


class Malformed(AmqpError):
    """The server sent bytes that are not AMQP 0.9.1, or not what may come at this point."""
