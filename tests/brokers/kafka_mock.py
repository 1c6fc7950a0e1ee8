"""librdkafka's own mock cluster: a broker on loopback that answers with the errors that a test asks for."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import confluent_kafka

OFFSET_COMMIT, OFFSET_FETCH = 8, 9  # the numbers of those requests in Kafka's protocol
_PRODUCER = 0


class MockCluster:
    def __init__(self, library: ctypes.CDLL, cluster: int) -> None:
        self._library = library
        self._cluster = ctypes.c_void_p(cluster)
        library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 0)
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        self.url = f"kafka://{library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()}"

    def create(self, topic: str, partitions: int) -> None:
        assert not self._library.rd_kafka_mock_topic_create(self._cluster, topic.encode(), partitions, 1)

    def fail(self, request: int, *codes: int) -> None:
        """Answer the next requests of this kind with these errors."""
        array = (ctypes.c_int * len(codes))(*codes)
        self._library.rd_kafka_mock_push_request_errors_array(
            self._cluster, ctypes.c_int16(request), ctypes.c_size_t(len(codes)), array
        )


@contextmanager
def mock_cluster() -> Iterator[MockCluster]:
    folder = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
    library = ctypes.CDLL(str(next(folder.glob("librdkafka*"))))
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
        getattr(library, name).restype = ctypes.c_void_p
    error = ctypes.create_string_buffer(512)
    client = library.rd_kafka_new(_PRODUCER, ctypes.c_void_p(library.rd_kafka_conf_new()), error, 512)
    assert client, error.value
    cluster = library.rd_kafka_mock_cluster_new(ctypes.c_void_p(client), 1)
    try:
        yield MockCluster(library, cluster)
    finally:
        library.rd_kafka_mock_cluster_destroy(ctypes.c_void_p(cluster))
        library.rd_kafka_destroy(ctypes.c_void_p(client))
