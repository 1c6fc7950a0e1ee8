"""`onward demo --url kafka://…` removes what it created in the cluster, and nothing else."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.demo.running import ONWARD
from tests.servers.kafka import KafkaServer

THEIRS = {"orders", "onward.aside.billing..orders"}  # of another application


class Cluster:
    def __init__(self, server: KafkaServer) -> None:
        self.admin = AdminClient({"bootstrap.servers": server.bootstrap, "log_level": 0})

    def topics(self) -> set[str]:
        """The topics of the demo and of the other application, without those that other tests left behind."""
        names = self.admin.list_topics(timeout=30).topics
        return {name for name in names if name in THEIRS or "demo" in name}

    def groups(self) -> set[str]:
        return {each.group_id for each in self.admin.list_consumer_groups().result(30).valid}


@pytest.fixture
def cluster(kafka_server: KafkaServer) -> Iterator[Cluster]:
    cluster = Cluster(kafka_server)
    for future in cluster.admin.create_topics([NewTopic(name, 1) for name in THEIRS]).values():
        future.result(30)
    until(lambda: cluster.topics() >= THEIRS)
    yield cluster
    kafka_server.heal()
    for future in cluster.admin.delete_topics(list(cluster.topics())).values():
        future.result(30)
    until(lambda: not cluster.topics())


def until(done: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def start(folder: Path, url: str, *options: str) -> "subprocess.Popen[str]":
    command = [*ONWARD, "demo", "--check", "--workers", "2", "--url", url, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=os.environ | {"TMPDIR": str(folder)}, **pipes)  # type: ignore[call-overload, no-any-return]


@pytest.mark.slow
def test_the_demo_removes_what_it_created_in_the_cluster(
    kafka_server: KafkaServer, cluster: Cluster, tmp_path: Path
) -> None:
    before = cluster.groups()
    out, err = (process := start(tmp_path, kafka_server.url, "--events", "500")).communicate(timeout=100)
    assert process.returncode == 0, out + err
    assert cluster.topics() == THEIRS
    assert cluster.groups() <= before  # groups of other tests may disappear meanwhile
    assert list(tmp_path.iterdir()) == []
    assert "there" not in err


@pytest.mark.slow
def test_after_ctrl_c_the_demo_removes_what_it_created(
    kafka_server: KafkaServer, cluster: Cluster, tmp_path: Path
) -> None:
    process = start(tmp_path, kafka_server.url, "--events", "1000000")
    until(lambda: cluster.topics() > THEIRS and any("demo" in name for name in cluster.groups()))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert cluster.topics() == THEIRS
    assert not any("demo" in name for name in cluster.groups())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_demo_names_what_it_cannot_remove(kafka_server: KafkaServer, cluster: Cluster, tmp_path: Path) -> None:
    process = start(tmp_path, kafka_server.url, "--events", "1000000")
    until(lambda: cluster.topics() > THEIRS)
    (topic,) = [name for name in cluster.topics() - THEIRS if not name.startswith("onward.aside")]
    kafka_server.kill()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert re.search(rf"topic {topic} and group billing-\S+ on kafka://\S+ may still be there", err), err
    assert "Traceback" not in err
    assert not re.search(r"^%\d\||rdkafka#", err, re.MULTILINE), err
    assert err.count("; trying again") <= 4, err  # three clients, each reports a cause once


def test_keep_prints_the_topic_of_the_kept_data(kafka_server: KafkaServer, cluster: Cluster, tmp_path: Path) -> None:
    out, err = (process := start(tmp_path, kafka_server.url, "--events", "50", "--keep")).communicate(timeout=100)
    assert process.returncode == 0, out + err
    (topic,) = [name for name in cluster.topics() - THEIRS if not name.startswith("onward.aside")]
    assert f"and in topic {topic}" in err
