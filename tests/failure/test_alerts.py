"""The hooks that come with the library, against a real HTTP server and a real SMTP server."""

import http.server
import json
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Message as MessageHandler
from aiosmtpd.smtp import AuthResult, LoginPassword

from onward.errors import AlertError, BadSetting
from onward.failure.alerts import Mail, Webhook
from onward.failure.watch import Alert

ALERT = Alert("high", "orders/billing/depth", "orders: 140 dead letters of group <billing> & more")


class Desk(http.server.BaseHTTPRequestHandler):
    got: list[tuple[str, str, Any]]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"ok" if self.status == 200 else b"no_service")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def desk() -> Iterator[tuple[type[Desk], str]]:
    kind = type("OneDesk", (Desk,), {"got": []})
    server = http.server.HTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield kind, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook_gets_slacks_format(desk: tuple[type[Desk], str]) -> None:
    kind, url = desk
    Webhook(f"{url}/services/T0/B0/secret?x=1")(ALERT)
    ((path, content_type, body),) = kind.got
    assert path == "/services/T0/B0/secret?x=1"
    assert content_type == "application/json"
    assert body == {"text": "\U0001f6a8 orders: 140 dead letters of group &lt;billing&gt; &amp; more"}


def test_the_error_of_a_webhook_that_refuses_does_not_show_its_secret(desk: tuple[type[Desk], str]) -> None:
    kind, url = desk
    kind.status = 404
    hook = Webhook(f"{url}/services/secret")
    with pytest.raises(AlertError, match="404 'no_service'") as caught:
        hook(ALERT)
    assert "secret" not in str(caught.value) + hook.__name__ + repr(hook)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_a_webhook_without_a_server_is_an_error() -> None:
    with pytest.raises(AlertError, match="cannot be reached"):
        Webhook(f"http://127.0.0.1:{free_port()}/secret")(ALERT)


@pytest.mark.parametrize("url", ["hooks.example.com/x", "ftp://example.com", "https://"])
def test_a_webhook_needs_a_url(url: str) -> None:
    with pytest.raises(BadSetting, match="needs a URL"):
        Webhook(url)


class Box(MessageHandler):
    def __init__(self) -> None:
        super().__init__()
        self.got: list[Message] = []

    def handle_message(self, message: Message) -> None:
        self.got.append(message)


def authenticate(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
    assert isinstance(data, LoginPassword)
    return AuthResult(success=(data.login, data.password) == (b"onward", b"hush"), handled=False)


@pytest.fixture(params=[False, True], ids=["open", "with login"])
def post_office(request: pytest.FixtureRequest) -> Iterator[tuple[Box, int, tuple[str, str] | None]]:
    box = Box()
    login = ("onward", "hush") if request.param else None
    options = {"authenticator": authenticate, "auth_required": True, "auth_require_tls": False} if login else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Requiring AUTH while not requiring TLS")  # not needed on this machine
        controller = Controller(box, hostname="127.0.0.1", port=free_port(), **options)  # type: ignore[arg-type]
        controller.start()
        yield box, controller.port, login
        controller.stop()


def test_a_mail_arrives(post_office: tuple[Box, int, tuple[str, str] | None]) -> None:
    box, port, login = post_office
    hook = Mail("127.0.0.1", port=port, sender="onward@shop.test", to=["a@shop.test", "b@shop.test"], login=login)
    hook(ALERT)
    (message,) = box.got
    assert message["Subject"] == "[onward] high: orders/billing/depth"
    assert (message["From"], message["To"]) == ("onward@shop.test", "a@shop.test, b@shop.test")
    assert ALERT.text in str(message.get_payload())
    assert "hush" not in repr(hook) + hook.__name__


def test_a_mail_that_cannot_be_sent_is_an_error(post_office: tuple[Box, int, tuple[str, str] | None]) -> None:
    box, port, login = post_office
    bad = ("onward", "wrong") if login else None
    tls = None if login else "starttls"  # which this server does not support
    with pytest.raises(AlertError, match=r"no mail could be sent by.*(535|STARTTLS)"):
        Mail("127.0.0.1", port=port, sender="onward@shop.test", to="a@shop.test", login=bad, tls=tls)(ALERT)
    assert box.got == []


def test_a_wrong_kind_of_tls_is_refused_at_once() -> None:
    with pytest.raises(BadSetting, match="starttls"):
        Mail("localhost", sender="a@shop.test", to="b@shop.test", tls="yes")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(params=["starttls", "implicit"])
def safe_office(request: pytest.FixtureRequest, authority: trustme.CA) -> Iterator[tuple[Box, int, str]]:
    """A mail server that accepts no mail and no password without TLS."""
    context, box = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), Box()
    authority.issue_cert("127.0.0.1").configure_cert(context)
    options: dict[str, Any] = {"authenticator": authenticate, "auth_required": True}
    if request.param == "implicit":
        options |= {"ssl_context": context, "auth_require_tls": False}  # it does not notice the TLS around it
    else:
        options |= {"tls_context": context, "require_starttls": True}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Requiring AUTH while not requiring TLS")
        controller = Controller(box, hostname="127.0.0.1", port=free_port(), **options)
        controller.start()
        yield box, controller.port, request.param
        controller.stop()


def safe_mail(port: int, tls: str) -> Mail:
    login = ("onward", "hush")
    return Mail("127.0.0.1", port=port, sender="onward@shop.test", to="a@shop.test", login=login, tls=tls)


def test_a_mail_arrives_by_tls(
    safe_office: tuple[Box, int, str], authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, port, tls = safe_office
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    safe_mail(port, tls)(ALERT)
    (message,) = box.got
    assert message["Subject"] == "[onward] high: orders/billing/depth"


def test_a_server_with_an_untrusted_certificate_gets_no_mail(safe_office: tuple[Box, int, str]) -> None:
    box, port, tls = safe_office
    with pytest.raises(AlertError, match="CERTIFICATE_VERIFY_FAILED"):
        safe_mail(port, tls)(ALERT)
    assert box.got == []
