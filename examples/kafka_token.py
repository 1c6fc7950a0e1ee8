import os
import time

from onward import Onward


def token(config: str) -> tuple[str, float]:
    """Called by the client when it needs a token, also when the last one is about to end: token and Unix time."""
    return os.environ["KAFKA_TOKEN"], time.time() + 300


app = Onward(
    "kafka://broker:9093?client.security.protocol=SASL_SSL&client.sasl.mechanism=OAUTHBEARER",
    client={"ssl.ca.location": "/etc/ssl/ca.pem", "oauth_cb": token},
)
