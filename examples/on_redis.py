import msgspec

from onward import Event, GiveUp, Onward

app = Onward("redis://localhost:6379", partitions=8)  # of new topics


class OrderPlaced(msgspec.Struct):
    id: int
    total: float


@app.handler("shop-orders", group="billing", concurrency=200)
async def bill(order: OrderPlaced, event: Event) -> None:
    if order.total < 0:
        raise GiveUp("a negative total")
    print(f"{event.key} pays {order.total} for order {order.id}", flush=True)
