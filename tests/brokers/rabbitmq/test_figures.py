"""What the RabbitMQ broker counts: the names, labels and buckets of the seed, and that they move."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from onward import Onward, Retry
from onward.brokers.base import Figure
from onward.brokers.rabbitmq import Binding, Exchange, Queue
from onward.brokers.rabbitmq.amqp import Connection, Outbound, Properties, encoded_properties
from onward.brokers.rabbitmq.operate import figures as figures_
from onward.brokers.rabbitmq.operate.depth import DepthProbe
from onward.brokers.rabbitmq.operate.figures import OTHER, RabbitFigures
from onward.brokers.rabbitmq.operate.management import ManagementApi, ManagementPlace
from onward.observe.figures import of_broker
from onward.observe.metrics import Family, Registry, exposition, folded
from tests.brokers.rabbitmq.stage import played, until
from tests.servers.rabbitmq import RabbitMQServer


def exported(
    figures: RabbitFigures, prefix: str = "abs_rabbitmq", durations: Sequence[float] = ()
) -> dict[tuple[str, ...], float]:
    """By name and labels, in the order of the labels' names. `durations`: of the runs of group compare."""
    return parsed(exposition(of_broker(figures.figures(), (), [ran(durations)]), prefix=prefix))


def ran(durations: Sequence[float]) -> Family:
    """The metric of the application for these runs, and for one of another group."""
    histogram = Registry().histogram("handler_duration_seconds", "", ("topic", "group"))
    histogram.observe(("abs.comparison", "compare"), durations)
    histogram.observe(("abs.comparison", "other"), [1.0])
    return histogram.family()


def parsed(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_with_its_prefix_the_metrics_of_the_seed_have_their_exact_names() -> None:
    """A dashboard of the seed, such as rate(abs_rabbitmq_messages_processed_total{queue=…,status="failed"}[5m]), goes
    on working."""
    figures = RabbitFigures()
    figures.published("abs.comparison", "comparison.process", 3)
    figures.processed("abs.comparison.process", "success", 2)
    figures.processed("abs.comparison.process", "failed")
    figures.processed("abs.comparison.process", "retried")
    figures.depth("abs.comparison.dlq", 101)
    figures.consumes("abs.comparison", "compare", "abs.comparison.process")
    queue, found = "queue=abs.comparison.process", exported(figures, durations=[0.07, 2.0, 2.0, 2.0])
    expected = {
        ("abs_rabbitmq_messages_published_total", "exchange=abs.comparison", "routing_key=comparison.process"): 3.0,
        ("abs_rabbitmq_messages_processed_total", queue, "status=success"): 2.0,
        ("abs_rabbitmq_messages_processed_total", queue, "status=failed"): 1.0,
        ("abs_rabbitmq_messages_processed_total", queue, "status=retried"): 1.0,
        ("abs_rabbitmq_queue_depth", "queue=abs.comparison.dlq"): 101.0,
        ("abs_rabbitmq_message_process_seconds_sum", queue): 6.07,
        ("abs_rabbitmq_message_process_seconds_count", queue): 4.0,
    }
    assert {name: found[name] for name in expected} == expected
    bounds = {name[1] for name in found if name[0] == "abs_rabbitmq_message_process_seconds_bucket"}
    assert bounds == {f"le={bound}" for bound in ("0.01", "0.05", "0.1", "0.5", "1.0", "5.0", "+Inf")}
    assert found["abs_rabbitmq_message_process_seconds_bucket", "le=0.05", queue] == 0
    assert found["abs_rabbitmq_message_process_seconds_bucket", "le=0.1", queue] == 1


def test_every_count_moves() -> None:
    figures = RabbitFigures()
    moves: Sequence[Any] = (
        lambda: figures.published("e", "k", 1),
        lambda: figures.processed("q", "success", 1),
        lambda: figures.depth("q", 1),
        lambda: figures.probe_failed("q"),
    )
    for move in moves:
        move()
        before = exported(figures)
        move()
        assert exported(figures) != before or move is moves[2], "a gauge stays where it is"
    figures.depth("q", 7, 2, 3.5)
    found = exported(figures, "onward")
    assert found["onward_queue_depth", "queue=q"] == 7
    assert found["onward_queue_consumers", "queue=q"] == 2
    assert found["onward_queue_oldest_seconds", "queue=q"] == 3.5
    assert found["onward_queue_probe_failures_total", "queue=q"] == 2


def test_all_names_exist_before_anything_is_counted() -> None:
    assert [figure.name for figure in RabbitFigures().figures()] == [
        "messages_published",
        "messages_processed",
        "queue_depth",
        "queue_consumers",
        "queue_oldest_seconds",
        "queue_probe_failures",
        "message_process_seconds",
    ]


def test_an_unknown_depth_is_no_depth() -> None:
    """The last value would look healthy for ever."""
    figures = RabbitFigures()
    figures.depth("q", 5, 1)
    figures.probe_failed("q")
    found = exported(figures)
    assert ("abs_rabbitmq_queue_depth", "queue=q") not in found
    assert found["abs_rabbitmq_queue_probe_failures_total", "queue=q"] == 1


def test_made_up_types_do_not_make_endless_time_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_, "_MOST_KEYS", 3)
    figures = RabbitFigures()
    for number in range(10):
        figures.published("e", f"type-{number}")
    (published,) = [figure for figure in figures.figures() if figure.name == "messages_published"]
    assert len(published.samples) == 4
    assert {sample.labels: sample.value for sample in published.samples}["e", OTHER] == 7


def test_the_figures_of_several_workers_are_combined() -> None:
    """Counts add up; all processes see the same queue, so of its depths the largest counts."""
    parts = []
    for depth in (7, 5):
        figures = RabbitFigures()
        figures.published("e", "k", depth)
        figures.depth("q", depth)
        figures.consumes("abs.comparison", "compare", "q")
        parts.append(of_broker(figures.figures(), (), [ran([0.2])]))
    families = {family.name: family for family in folded(parts)}
    assert families["messages_published"].samples[0].value == 12
    assert families["queue_depth"].samples[0].value == 7
    assert sum(families["message_process_seconds"].samples[0].buckets) == 2


# -- depths on a server ---------------------------------------------------------------------------------------------


def depths(figures: RabbitFigures, name: str = "queue_depth") -> dict[str, float]:
    figure: Figure
    (figure,) = [each for each in figures.figures() if each.name == name]
    return {sample.labels[0]: sample.value for sample in figure.samples}


@pytest.mark.parametrize("how", ["over AMQP", "with the management API"])
def test_depths_consumers_and_failed_probes_are_seen(rabbitmq_server: RabbitMQServer, how: str) -> None:
    async def scene(vhost: str) -> None:
        connection = await Connection.open(rabbitmq_server.host, rabbitmq_server.port, vhost=vhost)
        place = ManagementPlace.of(rabbitmq_server.management_url, vhost=vhost, user="", password="")
        figures = RabbitFigures()

        async def connect() -> Connection:
            return connection

        probe = DepthProbe(connect, figures, ManagementApi(place) if "management" in how else None)
        channel = await connection.channel()
        await channel.confirm_select()
        for kind in ("quorum", "classic"):
            await channel.declare_queue(kind, arguments={"x-queue-type": kind})
        properties = encoded_properties(Properties(delivery_mode=2, timestamp=1_700_000_000))
        for kind in ("quorum", "classic"):
            assert await channel.publish([Outbound("", kind, properties, b"x")] * 3) == [None] * 3
        consumer = await connection.channel()
        await consumer.qos(1)
        await consumer.consume("quorum", lambda messages: None)
        names = ["quorum", "classic", "missing"]
        async with asyncio.timeout(30):
            while depths(figures) != {"quorum": 2, "classic": 3} or depths(figures, "queue_consumers")["quorum"] != 1:
                await probe.look(names)
                await asyncio.sleep(0.05)
            while "management" in how and "classic" not in depths(figures, "queue_oldest_seconds"):
                await probe.look(names)
                await asyncio.sleep(0.05)
        assert depths(figures, "queue_probe_failures")["missing"] >= 1
        assert set(probe.problems) == {"missing"}
        assert "no queue" in probe.problems["missing"]
        await channel.delete_queue("classic")
        await probe.look(["quorum", "classic"])
        assert set(depths(figures)) == {"quorum"}, "a deleted queue has no depth"
        assert set(probe.problems) == {"classic"}
        await probe.look([])
        assert depths(figures) == {}
        await connection.close()

    with rabbitmq_server.vhost() as vhost:
        asyncio.run(scene(vhost))


def test_a_lost_connection_is_a_failed_probe_and_the_next_look_recovers(rabbitmq_server: RabbitMQServer) -> None:
    async def scene(vhost: str) -> None:
        async def connect() -> Connection:
            return await Connection.open(rabbitmq_server.host, rabbitmq_server.port, vhost=vhost)

        connection = await connect()
        await (await connection.channel()).declare_queue("q")
        figures, links = RabbitFigures(), [connection]

        async def current() -> Connection:
            return links[-1]

        probe = DepthProbe(current, figures)
        await connection.close()
        await probe.look(["q"])
        assert "q" in probe.problems
        assert depths(figures, "queue_probe_failures") == {"q": 1}
        links.append(await connect())
        await probe.look(["q"])
        assert not probe.problems
        assert depths(figures) == {"q": 0}
        await links[-1].close()

    with rabbitmq_server.vhost() as vhost:
        asyncio.run(scene(vhost))


def test_without_the_management_api_depths_come_over_amqp(
    rabbitmq_server: RabbitMQServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(vhost: str) -> None:
        connection = await Connection.open(rabbitmq_server.host, rabbitmq_server.port, vhost=vhost)
        await (await connection.channel()).declare_queue("q")

        async def connect() -> Connection:
            return connection

        nobody = ManagementPlace.of("http://127.0.0.1:1", vhost=vhost, user="", password="")
        probe = DepthProbe(connect, figures := RabbitFigures(), ManagementApi(nobody))
        for _ in range(3):
            await probe.look(["q"])
        assert depths(figures) == {"q": 0}
        assert caplog.text.count("asking for the depth of queues over AMQP") == 1
        await connection.close()

    with rabbitmq_server.vhost() as vhost:
        asyncio.run(scene(vhost))


def test_only_a_lasting_problem_is_logged(rabbitmq_server: RabbitMQServer, caplog: pytest.LogCaptureFixture) -> None:
    """The management API has no figures of a new queue for some seconds."""

    async def scene(vhost: str) -> None:
        connection = await Connection.open(rabbitmq_server.host, rabbitmq_server.port, vhost=vhost)
        channel = await connection.channel()

        async def connect() -> Connection:
            return connection

        probe = DepthProbe(connect, RabbitFigures())
        counts: list[int] = []

        async def look() -> None:
            await probe.look(["q"])
            counts.append(caplog.text.count("the depth of queue q is unknown"))

        await look()
        await channel.declare_queue("q")
        await look()
        await channel.delete_queue("q")
        for _ in range(3):
            await look()
        assert counts == [0, 0, 0, 1, 1]
        await connection.close()

    with rabbitmq_server.vhost() as vhost:
        asyncio.run(scene(vhost))


# -- in an application ----------------------------------------------------------------------------------------------


@played
async def test_an_application_counts_what_it_publishes_and_handles(rabbitmq_server: RabbitMQServer) -> None:
    """One message succeeds, one is retried and succeeds, one becomes a dead letter."""
    with rabbitmq_server.vhost() as vhost:
        app = Onward(rabbitmq_server.url_of(vhost), metrics_prefix="abs_rabbitmq")
        app.topology(
            Exchange("abs.comparison", "direct"),
            Queue("abs.comparison.process"),
            Binding("abs.comparison", "abs.comparison.process", "comparison.process"),
        )
        tries: dict[str, int] = {}

        @app.handler(
            "abs.comparison",
            group="abs.comparison.process",
            ordering="none",
            retry=Retry(attempts=2, first_delay_s=0.1),
        )
        async def compare(task: str) -> None:
            tries[task] = tries.get(task, 0) + 1
            if task == "bad" or (task == "again" and tries[task] == 1):
                raise ValueError(task)

        queue = "queue=abs.comparison.process"
        expected = {
            ("abs_rabbitmq_messages_published_total", "exchange=abs.comparison", "routing_key=comparison.process"): 3.0,
            ("abs_rabbitmq_messages_processed_total", queue, "status=success"): 2.0,
            ("abs_rabbitmq_messages_processed_total", queue, "status=retried"): 2.0,
            ("abs_rabbitmq_messages_processed_total", queue, "status=failed"): 1.0,
            ("abs_rabbitmq_message_process_seconds_count", queue): 5.0,
            ("abs_rabbitmq_queue_depth", queue): 0.0,
        }

        def found() -> dict[tuple[str, ...], float]:
            samples = parsed(app.metrics())
            return {name: samples.get(name, -1.0) for name in expected}

        async with app.running():
            for task in ("good", "again", "bad"):
                await app.publish("abs.comparison", task, type="comparison.process")
            try:
                await until(lambda: found() == expected, within_s=30)
            except AssertionError:
                assert found() == expected
