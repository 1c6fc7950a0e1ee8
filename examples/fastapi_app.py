import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Response
from pydantic import BaseModel

from onward import Event, Onward

events = Onward("sqlite:///shop.db")


class Order(BaseModel):
    id: int
    customer: str
    total: float


@events.handler("orders", group="billing", types=["order.*"])
async def bill(order: Order, event: Event) -> None:
    print(f"{event.type}: {order.customer} pays {order.total}", flush=True)


@asynccontextmanager
async def lifespan(api: FastAPI) -> AsyncIterator[None]:
    try:
        async with events.running():  # the handlers run from here to the end of the server
            yield
    except Exception:
        os.kill(os.getpid(), signal.SIGTERM)  # else uvicorn would go on serving without handlers
        raise


api = FastAPI(lifespan=lifespan)


@api.post("/orders", status_code=202)
async def place(order: Order) -> dict[str, str]:
    event = await events.publish("orders", order, key=order.customer, type="order.placed")
    return {"event": event.id}


@api.get("/health/ready")
async def ready(response: Response) -> dict[str, object]:
    health = events.health()
    response.status_code = 200 if health.ready else 503
    return {"ready": health.ready, "troubles": health.troubles}


@api.get("/metrics")
async def metrics() -> Response:
    return Response(events.metrics(), media_type="text/plain; version=0.0.4")
