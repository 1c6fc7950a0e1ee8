import msgspec

from onward import Event, GiveUp, Onward

app = Onward("amqp://guest:guest@localhost:5672", partitions=8)  # of new topics


class OrderPlaced(msgspec.Struct):
    id: int
    total: float


@app.handler("shop-orders", group="billing", concurrency=200)  # the orders of a customer run in order
async def bill(order: OrderPlaced, event: Event) -> None:
    if order.total < 0:
        raise GiveUp("a negative total")
    print(f"{event.key} pays {order.total} for order {order.id}", flush=True)


@app.handler("shop-orders", group="mail", ordering="none", concurrency=200)  # a work queue
async def confirm(order: OrderPlaced, event: Event) -> None:
    print(f"{event.key} gets a mail about order {order.id}", flush=True)
