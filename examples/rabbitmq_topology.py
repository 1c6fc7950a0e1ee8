from onward import Event, Onward
from onward.brokers.rabbitmq import Binding, Exchange, Queue

app = Onward("amqp://guest:guest@localhost:5672")

app.topology(
    Exchange("shop.notifications", "topic"),
    Exchange("shop.rejected", "fanout"),
    Queue("shop.slack", max_length=100_000, consumers=2),  # a full queue refuses messages
    Queue("shop.mail", tiers={"critical": "notification.*.critical", "bulk": "notification.*.digest"}),
    Queue("shop.sms", ttl_s=3600, dead_letter_exchange="shop.rejected"),  # what is older than an hour is rejected
    Queue("shop.too-late"),
    Binding("shop.notifications", "shop.slack", "notification.slack.*"),
    Binding("shop.notifications", "shop.mail", "notification.mail.*"),
    Binding("shop.notifications", "shop.sms", "notification.sms.*"),
    Binding("shop.rejected", "shop.too-late"),
)


@app.handler("shop.notifications", group="shop.slack", ordering="none", concurrency=3)
async def slack(text: str, event: Event) -> None:
    print(f"to Slack ({event.type}): {text}", flush=True)


@app.handler("shop.notifications", group="shop.mail", ordering="none", concurrency=3)
async def mail(text: str, event: Event) -> None:
    print(f"by mail ({event.type}): {text}", flush=True)
