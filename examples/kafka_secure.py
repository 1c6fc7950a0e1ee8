import os
from urllib.parse import quote

from onward import Onward

password = quote(os.environ["KAFKA_PASSWORD"], safe="")
app = Onward(
    f"kafka://ann:{password}@broker:9093?client.security.protocol=SASL_SSL&client.sasl.mechanism=SCRAM-SHA-256",
    client={"ssl.ca.location": "/etc/ssl/ca.pem", "fetch.wait.max.ms": 50},
)


@app.handler("shop-orders", group="billing")
async def bill(order: dict[str, int]) -> None:
    print("billed", order["id"], flush=True)
