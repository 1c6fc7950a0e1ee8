"""The messaging of the system "ABS" as an application declares it: its exchanges, queues, routes and limits."""

from onward.brokers.rabbitmq import Binding, Exchange, Queue

WEEK_S = 7 * 86_400.0

# What its design says, with these flaws mended: quorum queues, a full queue refuses messages instead of deleting old
# ones, a queue for each priority, and routes for comparison.retry, for critical notifications and for dead letters.
MENDED = [
    Exchange("abs.comparison", "direct"),
    Exchange("abs.notification", "topic"),
    Exchange("abs.stats", "fanout"),
    Exchange("abs.comparison.dlx", "direct"),
    Exchange("abs.notification.dlx", "topic"),
    Queue(
        "abs.comparison.process",
        ttl_s=30.0,
        max_length=100_000,
        dead_letter_exchange="abs.comparison.dlx",
        dead_letter_key="comparison.failed",
        consumers=10,
    ),
    *(
        Queue(
            f"abs.notification.{channel}",
            tiers={"critical": "notification.*.critical"},
            dead_letter_exchange="abs.notification.dlx",
            consumers=3,
        )
        for channel in ("slack", "email")
    ),
    Queue("abs.stats.aggregate", consumers=1),
    Queue("abs.comparison.dlq", ttl_s=WEEK_S, may_lose=True),
    Queue("abs.notification.dlq"),
    Binding("abs.comparison", "abs.comparison.process", "comparison.process"),
    Binding("abs.comparison", "abs.comparison.process", "comparison.retry"),
    Binding("abs.notification", "abs.notification.slack", "notification.slack.*"),
    Binding("abs.notification", "abs.notification.email", "notification.email.*"),
    Binding("abs.stats", "abs.stats.aggregate"),
    Binding("abs.comparison.dlx", "abs.comparison.dlq", "comparison.failed"),
    Binding("abs.notification.dlx", "abs.notification.dlq", "notification.#"),
]

# The queues exactly as its own programs declare them, so that both can share them.
LITERAL = [
    Exchange("abs.comparison", "direct"),
    Exchange("abs.comparison.dlx", "direct"),
    Queue(
        "abs.comparison.process",
        "classic",
        ttl_s=30.0,
        max_length=100_000,
        overflow="drop-head",
        max_priority=10,
        dead_letter_exchange="abs.comparison.dlx",
        dead_letter_key="comparison.failed",
    ),
    Queue("abs.comparison.dlq", "classic", ttl_s=WEEK_S, may_lose=True),
    Binding("abs.comparison", "abs.comparison.process", "comparison.process"),
    Binding("abs.comparison.dlx", "abs.comparison.dlq", "comparison.failed"),
]
