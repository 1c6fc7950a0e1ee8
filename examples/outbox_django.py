import asyncio

import django
from django.conf import settings
from django.db import connection, models, transaction

from onward import Onward
from onward.django import DjangoOutbox

settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}})
django.setup()

app = Onward("sqlite:///shop.db")  # here the project's database is also the broker
outbox = DjangoOutbox(app)


class Order(models.Model):
    customer = models.CharField(max_length=100)

    class Meta:
        app_label = "shop"


def place(customer: str) -> None:
    with transaction.atomic():  # commits the order and its event, or neither
        Order.objects.create(customer=customer)
        outbox.add("orders", {"customer": customer}, key=customer)


@app.handler("orders", group="billing")
async def bill(order: dict[str, str]) -> None:
    print(f"{order['customer']} pays")


async def main() -> None:
    async with app:
        for customer in ("ann", "bob", "cleo"):
            await asyncio.to_thread(place, customer)
        await app.run()


if __name__ == "__main__":
    if "shop_order" not in connection.introspection.table_names():
        with connection.schema_editor() as editor:
            editor.create_model(Order)
    asyncio.run(main())
