from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onward import Onward
from onward.fastapi import AsyncOutboxSession, outbox_session
from onward.outbox import Outbox

events = Onward("sqlite:///shop.db")
engine = create_async_engine("sqlite+aiosqlite:///shop.db")  # or postgresql+psycopg://, mysql+asyncmy://
outbox = Outbox(events, engine)
Database = Annotated[AsyncOutboxSession, Depends(outbox_session(outbox, async_sessionmaker(engine)))]


class Base(DeclarativeBase):
    pass


class OrderRow(Base):
    __tablename__ = "customer_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


class Order(BaseModel):
    customer: str


@events.handler("orders", group="billing")
async def bill(order: Order) -> None:
    print(f"{order.customer} pays", flush=True)


@asynccontextmanager
async def lifespan(api: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with events.running():  # the handlers; in front of another broker also the relay
        yield
    await engine.dispose()


api = FastAPI(lifespan=lifespan)


@api.post("/orders", status_code=201)
async def place(order: Order, database: Database) -> dict[str, str]:
    database.session.add(OrderRow(customer=order.customer))
    event = database.add("orders", order, key=order.customer)
    await database.commit()  # the order and its event, or neither
    return {"event": event.id}
