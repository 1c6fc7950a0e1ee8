import asyncio
import contextlib
import itertools

import msgspec

from onward import Event, Onward, Retry

app = Onward("sqlite:///shop.db")


class OrderPlaced(msgspec.Struct):
    id: int
    total: float


@app.handler("orders", group="billing", retry=Retry(attempts=5))
async def bill(order: OrderPlaced, event: Event) -> None:
    print(f"{event.key} pays {order.total} for order {order.id}", flush=True)


async def main() -> None:
    async with app.running():  # handles orders while the block below publishes them
        for n in itertools.count(1):
            await app.publish("orders", OrderPlaced(n, 9.5), key=f"customer-{n % 10}")
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
