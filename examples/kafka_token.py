import os
import time

from onward import Onward


def token(config: str) -> tuple[str, float]:
    """Return a token and the Unix time at which it expires. The client calls this again shortly before that."""
    return os.environ["KAFKA_TOKEN"], time.time() + 300


app = Onward(
    "kafka://broker:9093?client.security.protocol=SASL_SSL&client.sasl.mechanism=OAUTHBEARER",
    client={"ssl.ca.location": "/etc/ssl/ca.pem", "oauth_cb": token},
)
