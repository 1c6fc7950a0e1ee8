import asyncio

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from onward import Onward
from onward.outbox import Outbox

app = Onward("sqlite:///shop.db")
engine = create_engine("sqlite:///shop.db")  # your tables and the events are in one file
outbox = Outbox(app, engine)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "customer_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


@app.handler("orders", group="billing")
async def bill(order: dict[str, str]) -> None:
    print(f"{order['customer']} pays")


async def main() -> None:
    Base.metadata.create_all(engine)
    async with app:
        for customer in ("ann", "bob", "cleo"):
            with Session(engine) as session, session.begin():  # commits the order and its event, or neither
                session.add(Order(customer=customer))
                outbox.add(session, "orders", {"customer": customer}, key=customer)
        await app.run()


if __name__ == "__main__":
    asyncio.run(main())
