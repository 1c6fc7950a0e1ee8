import asyncio
import contextlib
from dataclasses import dataclass

from onward import Onward

app = Onward("sqlite:///shop.db")


@dataclass
class OrderPlaced:
    id: int
    customer: str


@app.handler("orders", group="billing")
async def bill(order: OrderPlaced) -> None:
    print(f"{order.customer} pays for order {order.id}", flush=True)


async def main() -> None:
    async with app.running():  # handles orders while this block publishes them
        for n in range(1, 100_000):
            order = OrderPlaced(n, f"customer-{n % 10}")
            await app.publish("orders", order, key=order.customer)
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
