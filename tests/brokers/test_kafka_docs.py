"""The page about Kafka is true: its examples are those in examples/, and its commands work on a real server."""

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from tests.brokers.test_kafka_secure import SECRET, SecureKafka, secured, token
from tests.cli.shell import Shell
from tests.examples import ROOT, source
from tests.servers.kafka import KafkaServer

__all__ = ["secured"]

PAGE = (ROOT / "docs/kafka.md").read_text(encoding="utf-8")
EXAMPLES = ["on_kafka.py", "kafka_secure.py", "kafka_token.py"]
SAYS = {  # what each line of the page's shell block prints
    "publish": r"^[0-9a-f-]{36}$",
    "tail": r'"total":\s*-1',
    "dead list": r"GiveUp",
    "dead replay": r"1 ",
    "demo": r"verdict: OK published=2000 handled=2000 dead=0 lost=0 inverted=0",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_are_those_in_examples() -> None:
    assert blocks("python") == [source(name) for name in EXAMPLES]


@pytest.fixture
def shell(kafka_server: KafkaServer, tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap, "log_level": 0})
    for future in admin.delete_topics(["orders", "shop-orders", "onward.aside.billing..shop-orders"]).values():
        future.exception(30)


@pytest.mark.slow
def test_the_commands_of_the_page_print_what_is_expected(kafka_server: KafkaServer, shell: Shell) -> None:
    url = "kafka://localhost:9092"
    shell.write("on_kafka.py", source("on_kafka.py").replace(url, kafka_server.url))
    shell.write("first.py", source("first.py").replace("sqlite:///shop.db", kafka_server.url))
    assert shell.run("publish", "orders", '{"id": 1, "total": 2}', "--app", "first:app").returncode == 0  # the README's
    (block,) = blocks("sh")
    first, *rest = [shlex.split(line.replace(url, kafka_server.url))[1:] for line in block.splitlines()]
    running = shell.start(*first)
    for words in rest:
        if words[0] == "dead":
            running.saw("pays 9.5 for order 1")
        done = shell.run(*words)
        assert done.returncode == 0, done.stderr
        pattern = next(each for name, each in SAYS.items() if " ".join(words).startswith(name))
        assert re.search(pattern, done.stdout + done.stderr, re.MULTILINE), done.stdout + done.stderr
    running.send(signal.SIGTERM)
    assert running.ended() == 0


@pytest.mark.slow
def test_the_secured_examples_can_log_in(secured: SecureKafka, shell: Shell) -> None:
    shell.environment |= {"KAFKA_PASSWORD": SECRET, "KAFKA_TOKEN": token("")[0]}
    for name in ("kafka_secure.py", "kafka_token.py"):
        code = source(name).replace("broker:9093", f"127.0.0.1:{secured.secure_port}")
        shell.write(name, code.replace("/etc/ssl/ca.pem", str(secured.authority)))
    running = shell.start("run", "kafka_secure:app")
    done = shell.run("publish", "shop-orders", '{"id": 7}', "--app", "kafka_token:app")
    assert done.returncode == 0, done.stderr
    running.saw("billed 7")
    running.send(signal.SIGTERM)
    assert running.ended() == 0
    assert SECRET not in running.err
