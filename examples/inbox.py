import asyncio

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from onward import Onward
from onward.inbox import SqlInbox

app = Onward("sqlite:///orders.db")
engine = create_async_engine("sqlite+aiosqlite:///billing.db")  # or postgresql+psycopg://, mysql+asyncmy://
inbox = SqlInbox(engine)


@app.handler("orders", group="billing", inbox=inbox)
async def bill(order: dict[str, int], connection: AsyncConnection) -> None:
    # Commits together with the mark that this event is done, or not at all.
    await connection.execute(text("INSERT INTO invoice (order_id, total) VALUES (:id, :total)"), order)
    print(f"billed order {order['id']}")


async def main() -> None:
    await inbox.create_async()
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE IF NOT EXISTS invoice (order_id INTEGER, total INTEGER)"))
    async with app:
        for n in range(10):
            await app.publish("orders", {"id": n, "total": 10 * n}, key=f"customer-{n % 3}")
        await app.run()
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
