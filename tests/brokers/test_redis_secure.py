"""TLS and passwords."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import trustme

from onward import settings
from onward.brokers import open_broker
from onward.errors import BrokerError
from tests.brokers.redis_stage import own_server, play, staged
from tests.servers.redis import RedisServer
from tests.servers.server import free_port

pytestmark = pytest.mark.servers

SECRET = "s3/cret@p?a#ss"  # with every character that has a meaning in a URL


class SecureRedis:
    """A server that has a port with TLS, and the certificate to check it by."""

    def __init__(self, server: RedisServer, port: int, authority: Path) -> None:
        self.server = server
        self.authority = authority
        self.url = f"rediss://:{quote(SECRET, safe='')}@127.0.0.1:{port}/0"


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[SecureRedis]:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    ca, key, cert = (tmp_path / name for name in ("ca.pem", "key.pem", "cert.pem"))
    authority.cert_pem.write_to_path(ca)
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(cert)
    port = free_port()
    files = ("--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(ca))
    with own_server("--tls-port", str(port), "--tls-auth-clients", "no", *files, password=SECRET) as server:
        yield SecureRedis(server, port, ca)


def test_events_travel_over_tls(secure: SecureRedis) -> None:
    async def scene() -> None:
        url = f"{secure.url}?client.ssl_ca_certs={quote(str(secure.authority), safe='')}"
        async with staged(secure.server, url=url, partitions=2) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(2)
            await broker.publish(stage.events(10, keys=5))
            await member.take(10)
            assert not await member.settle()

    play(scene())


def test_a_certificate_that_is_not_known_is_refused_and_the_password_is_not_shown(
    secure: SecureRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.brokers.redis.broker._OPEN_S", 0.3)
    with pytest.raises(BrokerError, match=r"does not answer.*(certificate|CERTIFICATE)") as raised:
        asyncio.run(open_broker(settings.load(secure.url)))
    assert "cret" not in str(raised.value)
