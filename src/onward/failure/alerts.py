"""The alert hooks of the library: a webhook in Slack's format, and mail. They use only the standard library.

Both block, so the monitor calls them in a thread. Neither logs its secrets; the path of a webhook is one.
"""

import http.client
import json
import smtplib
import ssl
from collections.abc import Sequence
from email.message import EmailMessage
from urllib.parse import urlsplit

from onward.errors import AlertError, BadSetting
from onward.failure.watch import Alert

__all__ = ["Alert", "Mail", "Webhook"]

_TIMEOUT_S = 10.0
_MARKS = {"high": "\N{POLICE CARS REVOLVING LIGHT}", "broken": "\N{WARNING SIGN}"}


class Webhook:
    """Posts `{"text": ...}`, which Slack, Mattermost and many others accept."""

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadSetting("Webhook needs a URL such as https://hooks.slack.com/services/...")
        self._secure = parts.scheme == "https"
        self._host = parts.netloc.rpartition("@")[2]
        self._target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        self._timeout_s = timeout_s
        self.__name__ = f"webhook {self._host}"

    def __call__(self, alert: Alert) -> None:
        mark = _MARKS.get(alert.kind, "\N{WHITE HEAVY CHECK MARK}")
        body = json.dumps({"text": f"{mark} {_escaped(alert.text)}"}).encode()
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, timeout=self._timeout_s)
        try:
            connection.request("POST", self._target, body, {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                reply = answer.read(200).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise AlertError(f"{self._host} cannot be reached: {error!r}; check the address and the network") from error
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            raise AlertError(f"{self._host} refused the alert: {answer.status} {reply!r}; check the webhook's URL")


class Mail:
    """Sends a mail by SMTP: without TLS, with `tls="starttls"`, or with `tls="implicit"` (usually port 465).

    With TLS, this system must trust the server's certificate. `SSL_CERT_FILE` can name other authorities."""

    def __init__(
        self,
        host: str,
        *,
        sender: str,
        to: Sequence[str] | str,
        port: int = 25,
        login: tuple[str, str] | None = None,
        tls: str | None = None,
    ) -> None:
        if tls not in (None, "starttls", "implicit"):
            raise BadSetting(f"Mail(tls={tls!r}): use None, 'starttls' or 'implicit'")
        self._address = host, port
        self._sender = sender
        self._to = [to] if isinstance(to, str) else list(to)
        self._login = login
        self._tls = tls
        self.__name__ = f"mail by {host}:{port}"

    def __call__(self, alert: Alert) -> None:
        message = EmailMessage()
        message["Subject"] = f"[onward] {alert.kind}: {alert.subject}"
        message["From"], message["To"] = self._sender, ", ".join(self._to)
        message.set_content(alert.text)
        try:
            self._send(message)
        except (OSError, smtplib.SMTPException) as error:
            host, port = self._address
            raise AlertError(
                f"no mail could be sent by {host}:{port}: {error!r}; check the server, its port and the login"
            ) from error

    def _send(self, message: EmailMessage) -> None:
        with self._connected() as server:
            if self._tls == "starttls":
                server.starttls(context=ssl.create_default_context())
            if self._login is not None:
                server.login(*self._login)
            server.send_message(message)

    def _connected(self) -> smtplib.SMTP:
        if self._tls != "implicit":
            return smtplib.SMTP(*self._address, timeout=_TIMEOUT_S)
        return smtplib.SMTP_SSL(*self._address, timeout=_TIMEOUT_S, context=ssl.create_default_context())


def _escaped(text: str) -> str:
    """Slack's three special characters."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
