import asyncio
import contextlib
from typing import Any

from onward import Event, GiveUp, Onward, Retry, RetryLater, Skip
from onward.failure.alerts import Alert

app = Onward(
    "sqlite:///failing.db",
    retry=Retry(attempts=5, immediate=1, first_delay_s=0.2),  # for every handler
    dead_threshold=0,  # an alert for the first dead letter
    dead_check_s=1,
)
bank = {"open": False}


@app.handler("orders", group="billing")  # retry=Retry(...) here is for this handler only
async def bill(order: dict[str, Any], event: Event) -> None:
    if order.get("test"):
        raise Skip("a test order")  # counts as handled
    if order["total"] < 0:
        raise GiveUp("a negative total")  # no retry would help: a dead letter at once
    if order["total"] > 1000 and not bank["open"]:
        raise RetryLater(0.5, "the bank is closed")  # its key waits, nothing else does
    print(f"{event.key} pays {order['total']}", flush=True)


@app.alert  # also: app.alert(Webhook("https://hooks.slack.com/...")), app.alert(Mail("localhost", ...))
async def notify(alert: Alert) -> None:
    print("to the operator:", alert.text, flush=True)


async def main() -> None:
    async with app.running():  # the handlers run beside what follows
        for total in (5, -1, 2000, 7):
            await app.publish("orders", {"total": total}, key="c-1", expires_s=3600)
        while await app.dead.count() < 2:
            await asyncio.sleep(0.05)
        for letter in (await app.dead.list(topic="orders", limit=10)).letters:
            print("dead:", letter.event.value, letter.failure.message if letter.failure else "")
        bank["open"] = True
        print(await app.dead.replay(text="the bank is closed", rate=50))
        print(await app.dead.drop(error="GiveUp"))
        await asyncio.Event().wait()  # until Ctrl-C


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
