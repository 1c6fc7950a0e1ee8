from onward import Event, Onward

app = Onward("sqlite:///shop.db")


@app.handler("orders", group="billing")
async def bill(order: dict[str, float], event: Event) -> None:
    print(f"{event.key} pays {order['total']}", flush=True)
