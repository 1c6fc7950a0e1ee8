"""The commands on Kafka: an error is reported within seconds, once, and without a traceback."""

import json
import re
import signal
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from tests.brokers.test_kafka_secure import SecureKafka, secured
from tests.cli.shell import Running, Shell, until
from tests.servers.kafka import KafkaServer
from tests.servers.server import free_port

__all__ = ["secured"]

ALLOW, DENY, LITERAL = AclPermissionType.ALLOW, AclPermissionType.DENY, ResourcePatternType.LITERAL
SHOP = """
from onward import Onward

app = Onward("{url}", lease_s=3.0, takeover_grace_s=0.1, {settings})


@app.handler("orders", group="billing")
async def bill(order: dict) -> None:
    print("billed", order["id"], flush=True)
"""
RAW = r"^%\d\||rdkafka#"
NO_SERVER = "kafka://127.0.0.1:{port}"
COMMANDS = [
    "publish orders 1 --url {url}",
    "tail orders --url {url}",
    "dead list --group billing --url {url}",
    "dead list --topic orders --url {url}",
    "demo --check --url {url}",
    "groups list --url {url}",
    "topology plan --app shop:app",
    "doctor {url}",
    "run shop:app",
]


@pytest.fixture
def shop(kafka_server: KafkaServer, shell: Shell) -> Iterator[Shell]:
    shell.write("shop.py", SHOP.format(url=kafka_server.url, settings=""))
    yield shell
    shell.close()
    kafka_server.heal()
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap, "log_level": 0})
    names = [name for name in admin.list_topics(timeout=30).topics if not name.startswith("__")]
    for future in admin.delete_topics(names).values() if names else ():
        future.result(30)


def is_clean(err: str) -> bool:
    """No traceback, and no line that librdkafka printed by itself."""
    return "Traceback" not in err and not re.search(RAW, err, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_that_is_not_running_is_reported_once_and_soon(shell: Shell, command: str) -> None:
    url = NO_SERVER.format(port=free_port())
    shell.write("shop.py", SHOP.format(url=url, settings=""))
    done = shell.run(*command.format(url=url).split())
    assert done.returncode == 3, done.stderr
    pattern = r"error: Kafka at \S+ cannot be reached: Connection refused \(\w+ing .*\); is it running"
    assert re.search(pattern, done.stderr), done.stderr
    logged = 0 if command.startswith("doctor") else 1  # the findings of doctor are enough
    assert done.stderr.count("Connection refused") == 1 + logged, done.stderr
    assert is_clean(done.stderr), done.stderr


def test_a_demo_that_created_nothing_reports_no_leftovers(shell: Shell) -> None:
    for url, code in (
        (NO_SERVER.format(port=free_port()), 3),
        ("kafka://ann:pass@127.0.0.1:1", 2),
        ("unknown://there", 2),
    ):
        for options in (["--check"], ["--port", "0"]):
            done = shell.run("demo", *options, "--url", url)
            assert done.returncode == code, done.stderr
            assert "error: " in done.stderr
            assert "may still be there" not in done.stderr, done.stderr
            assert is_clean(done.stderr), done.stderr


def test_topology_groups_doctor_and_the_dead_letters_of_every_topic(kafka_server: KafkaServer, shop: Shell) -> None:
    def onward(*arguments: str, code: int = 0) -> str:
        done = shop.run(*arguments)
        assert done.returncode == code, done.stderr
        assert is_clean(done.stderr), done.stderr
        return done.stdout

    url = ("--url", kafka_server.url)
    shop.write("shop.py", SHOP.format(url=kafka_server.url, settings="auto_declare=False"))
    created = "+ create topic orders with 8 partitions\n"
    assert onward("topology", "plan", "--app", "shop:app") == created
    assert onward("topology", "apply", "--app", "shop:app") == created
    until(lambda: "has everything" in onward("topology", "plan", "--app", "shop:app"), "every node knows the topic")
    shop.write("shop.py", SHOP.format(url=kafka_server.url, settings="partitions=5"))
    assert "! topic orders has 8 partitions" in onward("topology", "plan", "--app", "shop:app", code=1)
    shop.write("shop.py", SHOP.format(url=kafka_server.url, settings=""))
    running = shop.start("run", "shop:app")
    onward("publish", "orders", '{"id": 1}', "--key", "c-1", *url)
    onward("publish", "orders", '{"id": "x"}', "--key", "c-2", *url)
    running.saw("billed 1")
    running.saw("billed x")

    def settled() -> bool:
        (info,) = json.loads(onward("groups", "list", "--topic", "orders", "--json", *url))  # others share the server
        places = info["partitions"].values()
        return any(place["end"] for place in places) and all(place["watermark"] == place["end"] for place in places)

    until(settled, "both events are settled")
    (info,) = json.loads(onward("groups", "show", "billing", "--topic", "orders", "--json", *url))
    (member,) = info["members"]
    assert {place["owner"] for place in info["partitions"].values()} == {member["name"]}
    assert "is running" in shop.run("groups", "drop", "billing", "--topic", "orders", "--yes", *url).stderr
    assert " orders " not in onward("dead", "list", *url)
    assert re.search(r"^ok ", onward("doctor", kafka_server.url), re.MULTILINE)
    running.send(signal.SIGTERM)
    assert running.ended() == 0
    until(
        lambda: shop.run("groups", "drop", "billing", "--topic", "orders", "--yes", *url).returncode == 0,
        "the group has no member",
    )
    assert onward("groups", "list", "--topic", "orders", *url) == "no groups\n"


@pytest.mark.slow
def test_every_command_works_with_times_at_the_edge_of_the_calendar(kafka_server: KafkaServer, shop: Shell) -> None:
    stamps = [
        "9999-12-31T23:59:59.999999999Z",
        "9999-12-31T23:59:59-14:00",
        "0001-01-01T00:00:00+14:00",
        "0001-01-01T00:00:00Z",
    ]
    producer = Producer({"bootstrap.servers": kafka_server.bootstrap, "log_level": 0})
    for number, stamp in enumerate([*stamps, "nan", "inf", "-1", "2025-01-31T12:00:00Z"]):
        producer.produce(
            "orders",
            b"no json",
            f"c-{number}",
            headers=[("ce_id", f"e-{number}".encode()), ("ce_time", stamp.encode())],
        )
    producer.flush(30)
    url, ids = ("--url", kafka_server.url), [f'"e-{number}"' for number in range(8)]
    with_topic = ("--topic", "orders", "--group", "billing", *url)
    running = shop.start("run", "shop:app")
    until(lambda: len(shop.run("dead", "export", *with_topic).stdout.splitlines()) == 8, "all are dead and exported")
    listed = shop.run("dead", "list", "--json", *with_topic)
    assert all(name in listed.stdout for name in ids), listed.stderr
    for options in ((), ("--json",)):
        shown = shop.run("tail", "orders", "--from", "earliest", "--limit", "8", *url, *options)
        assert (shown.returncode, len(shown.stdout.splitlines())) == (0, 8), shown.stderr
    sent = shop.run("dead", "send", "--topic", "sick", "--from", "orders", "--group", "billing", *url)
    assert sent.returncode == 0, sent.stderr
    assert shop.run("tail", "sick", "--from", "earliest", "--limit", "8", *url).returncode == 0
    running.send(signal.SIGTERM)
    assert running.ended() == 0


def test_a_server_killed_in_the_middle_is_reported_once_and_waited_for(kafka_server: KafkaServer, shop: Shell) -> None:
    running = shop.start("run", "shop:app")
    assert shop.run("publish", "orders", '{"id": 1}', "--url", kafka_server.url).returncode == 0
    running.saw("billed 1")
    kafka_server.kill()
    running.saw(f"Kafka at {kafka_server.bootstrap}: Connection refused; trying again")
    kafka_server.start()
    assert shop.run("publish", "orders", '{"id": 2}', "--url", kafka_server.url).returncode == 0
    running.saw("billed 2")
    running.send(signal.SIGTERM)
    assert running.ended() == 0
    assert running.err.count("Connection refused; trying again") == 1, running.err
    assert "Leader epoch" not in running.err, "a client asked the restarted leader with the epoch of the former one"
    assert not re.search(RAW, running.err, re.MULTILINE), running.err


def test_ctrl_c_ends_a_run_that_waits_for_the_server(shell: Shell) -> None:
    shell.write("shop.py", SHOP.format(url=NO_SERVER.format(port=free_port()), settings=""))
    running = shell.start("run", "shop:app")
    running.saw("Connection refused")
    running.send(signal.SIGINT)
    assert running.ended() == 3
    assert is_clean(running.err), running.err


def failed_start(shop: Shell, url: str, settings: str) -> tuple[int, str]:
    """The exit code and the messages of a start that fails."""
    shop.write("shop.py", SHOP.format(url=url, settings=settings))
    running: Running = shop.start("run", "shop:app")
    code = running.ended()
    assert is_clean(running.err), running.err
    return code, running.err


def test_a_partition_count_that_differs_from_the_topic_is_reported(kafka_server: KafkaServer, shop: Shell) -> None:
    assert shop.run("publish", "orders", "1", "--url", kafka_server.url).returncode == 0
    code, err = failed_start(shop, kafka_server.url, "partitions=5")
    assert code == 2
    assert "topic orders has 8 partitions, this process expects 5" in err
    assert "Set partitions=8" in err


def test_a_topic_that_may_not_be_created_is_reported(kafka_server: KafkaServer, shop: Shell) -> None:
    code, err = failed_start(shop, kafka_server.url, "auto_declare=False")
    assert code == 3
    assert "topic orders does not exist and auto_declare is off" in err


def test_a_misspelt_setting_of_the_client_is_reported(shop: Shell) -> None:
    code, err = failed_start(shop, "kafka://127.0.0.1:1?client.lingre.ms=5", "")
    assert code == 2
    assert 'No such configuration property: "lingre.ms"' in err


@pytest.mark.slow
def test_a_wrong_password_is_reported_at_once_and_not_printed(secured: SecureKafka, shop: Shell) -> None:
    how = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "ssl.ca.location": secured.authority}
    query = "&".join(f"client.{name}={value}" for name, value in how.items())
    url = f"{secured.secure.replace('//', '//ann:wr0ng-pass@')}?{query}"
    for command in ("publish orders 1", "tail orders", "dead list --group billing"):
        done = shop.run(*command.split(), "--url", url)
        assert done.returncode == 3, done.stderr
        assert "uthentication" in done.stderr
        assert "check the user, password" in done.stderr
        assert "wr0ng" not in done.stdout + done.stderr
        assert is_clean(done.stderr), done.stderr


class Guarded(KafkaServer):
    """No user may create the topic `orders`."""

    def properties(self) -> str:
        return super().properties() + (
            "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\n"
            "allow.everyone.if.no.acl.found=true\n"
        )

    def forbid(self) -> None:
        everyone = ("User:*", "*")
        rules = [
            AclBinding(ResourceType.BROKER, "kafka-cluster", LITERAL, *everyone, AclOperation.ALL, ALLOW),
            AclBinding(ResourceType.BROKER, "kafka-cluster", LITERAL, *everyone, AclOperation.CREATE, DENY),
            AclBinding(ResourceType.TOPIC, "orders", LITERAL, *everyone, AclOperation.ALL, ALLOW),
            AclBinding(ResourceType.TOPIC, "orders", LITERAL, *everyone, AclOperation.CREATE, DENY),
        ]
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        for future in admin.create_acls(rules).values():
            future.result(30)


@pytest.mark.slow
def test_a_user_without_the_right_to_create_a_topic_gets_a_clear_error(kafka_server: KafkaServer, shop: Shell) -> None:
    server = Guarded()
    try:
        server.start()
        server.forbid()
        code, err = failed_start(shop, server.url, "")
    finally:
        server.close()
    assert code == 3
    assert "creating topic orders" in err
    assert "allow this user" in err
