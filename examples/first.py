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
        for n in range(30):
            await app.publish("orders", OrderPlaced(n, 9.5 * n), key=f"customer-{n % 10}")
        await app.run()  # until Ctrl-C: every customer's orders in their order, customers side by side


if __name__ == "__main__":
    asyncio.run(main())
