"""A bare loop over the outbox's table, without order among several relays, leases or a broker: SELECT, then DELETE."""

import msgspec
import psycopg

from bench.contestants.lap import Lap
from bench.kit import Ran
from bench.workload import Order
from onward.outbox import schema
from onward.outbox.rows import COLUMNS

LIMIT = 1_000
SELECT = f"SELECT id, {', '.join(COLUMNS)} FROM {schema.TABLE} ORDER BY id LIMIT {LIMIT}"
DELETE = f"DELETE FROM {schema.TABLE} WHERE id = ANY(%s)"


def run(database: str, events: int) -> Ran:
    lap, decode = Lap(events), msgspec.json.Decoder(Order).decode
    with psycopg.connect(database) as connection, connection.cursor(binary=True) as cursor:
        while not lap.is_over and (rows := cursor.execute(SELECT).fetchall()):
            for row in rows:
                order = decode(row[-1])
                lap.saw(order.customer, order.number)
            cursor.execute(DELETE, ([row[0] for row in rows],))
            connection.commit()
    return lap.ran()
