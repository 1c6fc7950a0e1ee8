"""TLS and SASL, on a listener that needs both."""

import asyncio
import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onward import settings
from onward.brokers import open_broker
from onward.errors import BrokerError
from onward.testing.scenario import Member, event
from tests.servers.kafka import KafkaServer
from tests.servers.needs import JAVA
from tests.servers.server import free_port

SECRET = "s3/cret@p?a#ss"  # with every character that has a meaning in a URL
_JAAS = "org.apache.kafka.common.security"
SECURE = """
listener.name.secure.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,OAUTHBEARER
listener.name.secure.ssl.keystore.location={folder}/keys.p12
listener.name.secure.ssl.keystore.type=PKCS12
listener.name.secure.ssl.keystore.password=changeit
listener.name.secure.plain.sasl.jaas.config={jaas}.plain.PlainLoginModule required user_ann="{secret}";
listener.name.secure.scram-sha-256.sasl.jaas.config={jaas}.scram.ScramLoginModule required;
listener.name.secure.oauthbearer.sasl.jaas.config={jaas}.oauthbearer.OAuthBearerLoginModule required \
unsecuredLoginStringClaim_sub="ann";
"""


class SecureKafka(KafkaServer):
    """A Kafka with one more listener, which needs a login."""

    def __init__(self) -> None:
        super().__init__()
        self.secure_port = free_port()

    @property
    def secure(self) -> str:
        return f"kafka://127.0.0.1:{self.secure_port}"

    @property
    def authority(self) -> Path:
        return self.folder / "ca.pem"

    def properties(self) -> str:
        address = f"SECURE://127.0.0.1:{self.secure_port}"
        text = super().properties().replace("listeners=PLAINTEXT", f"listeners={address},PLAINTEXT")
        text = text.replace("=CONTROLLER:PLAINTEXT,", "=SECURE:SASL_SSL,CONTROLLER:PLAINTEXT,")
        return text + SECURE.format(folder=self.folder, jaas=_JAAS, secret=SECRET)

    def prepare(self, *options: str) -> None:
        self._make_keys()
        super().prepare(*options, "--add-scram", f"SCRAM-SHA-256=[name=ann,password={SECRET}]")

    def _make_keys(self) -> None:
        keytool = shutil.which("keytool") or str(JAVA.path.resolve().parent / "keytool")
        common = ["-keystore", "keys.p12", "-storetype", "PKCS12", "-storepass", "changeit", "-alias", "kafka"]
        name = ["-dname", "CN=localhost", "-ext", "SAN=ip:127.0.0.1,dns:localhost", "-validity", "2"]
        steps = [
            [keytool, "-genkeypair", "-keyalg", "RSA", "-keysize", "2048", *name, *common],
            [keytool, "-exportcert", "-rfc", "-file", "ca.pem", *common],
        ]
        for step in steps:
            subprocess.run(step, cwd=self.folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def secured(kafka_server: KafkaServer) -> Iterator[SecureKafka]:  # kafka_server skips the test if there is no Kafka
    server = SecureKafka()
    try:
        server.start()
        yield server
    finally:
        server.close()


def token(_: str) -> tuple[str, float]:
    """An unsigned token. A broker that has no key to check signatures accepts it."""
    end = time.time() + 3600
    parts = [{"alg": "none"}, {"sub": "ann", "iat": time.time() - 10, "exp": end}]
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return f"{encoded[0]}.{encoded[1]}.", end


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"sasl.mechanism": "PLAIN", "sasl.username": "ann", "sasl.password": SECRET},
    "scram": {"sasl.mechanism": "SCRAM-SHA-256", "sasl.username": "ann", "sasl.password": SECRET},
    "oauth": {"sasl.mechanism": "OAUTHBEARER", "oauth_cb": token},
}


@pytest.mark.parametrize("way", WAYS)
def test_events_go_through_tls_and_sasl(secured: SecureKafka, way: str) -> None:
    async def scene() -> None:
        tls = {"security.protocol": "SASL_SSL", "ssl.ca.location": str(secured.authority)}
        loaded = settings.load(secured.secure, partitions=1, lease_s=3.0, client=tls | WAYS[way])
        broker = await open_broker(loaded)
        topic = f"secure-{way}"
        async with asyncio.timeout(60):
            await broker.publish([event(topic, "k", n) for n in range(5)])
            member = await Member.join(broker, topic, f"group-{way}")
            await member.take(5)
            assert not await member.settle()
        await broker.close()

    asyncio.run(scene())


def test_a_wrong_password_is_an_error_that_does_not_print_it(
    secured: SecureKafka, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.brokers.kafka.admin.REQUEST_S", 80.0)

    async def scene() -> None:
        options = {"security.protocol": "SASL_SSL", "ssl.ca.location": str(secured.authority)}
        url = secured.secure.replace("kafka://", "kafka://ann:wr0ng-pass@") + "?client.sasl.mechanism=PLAIN"
        broker = await open_broker(settings.load(url, client=options))
        started = time.monotonic()
        with pytest.raises(BrokerError, match=r"(?i)authentication") as raised:
            await broker.publish([event("secure-no", "k", 1)])
        assert time.monotonic() - started < 40, "it waited although the login was refused"
        assert "wr0ng-pass" not in str(raised.value)
        await broker.close()

    asyncio.run(scene())
    assert "wr0ng-pass" not in caplog.text
