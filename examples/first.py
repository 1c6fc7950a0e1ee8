import asyncio

import msgspec

from onward import Event, Onward, Retry

app = Onward("sqlite:///shop.db")


class OrderPlaced(msgspec.Struct):
    id: int
    total: float


@app.handler("orders", group="billing", retry=Retry(attempts=5))
async def bill(order: OrderPlaced, event: Event) -> None:
    print(f"{event.key} pays {order.total} for order {order.id}")


async def main() -> None:
    async with app:
        for n in range(6):
            await app.publish("orders", OrderPlaced(n, 9.5 * n), key=f"customer-{n % 2}")
        await app.run()  # until Ctrl-C: every customer's orders in their order, customers side by side


asyncio.run(main())
