"""The topics of a member: joining them, and joining again when their keys are gone."""

from collections.abc import Iterable

from onward.brokers.redis import figures
from onward.brokers.redis.foreign.scripts import JOIN_STREAM
from onward.brokers.redis.lease_scripts import JOIN
from onward.brokers.redis.lease_turn import Look
from onward.brokers.redis.link import Link
from onward.brokers.redis.member import RedisMember, start_text
from onward.brokers.redis.topics import RedisTopic, RedisTopics
from onward.errors import BrokerError
from onward.event import Partition

_TRIES = 3


class JoinedTopics:
    def __init__(self, catalogue: RedisTopics, member: RedisMember) -> None:
        self._catalogue = catalogue
        self._member = member
        self._topics: dict[str, RedisTopic] = {}
        self._starts: dict[str, str] = {}  # by log id: where the group starts, if it is we who created it
        self._seen: dict[Partition, str] = {}  # the incarnation of the server under which the group was there

    @property
    def partitions(self) -> list[Partition]:
        return [Partition(name, index) for name, topic in self._topics.items() for index in range(topic.partitions)]

    def join(self, link: Link) -> None:
        """Give the group an entry in each partition. `start` counts only where it has none."""
        for name in dict.fromkeys(self._member.topics):
            self._join(link, name, start_text(self._member.start))

    def rejoin(self, link: Link, names: Iterable[str]) -> None:
        """The group's keys are gone. In the same log it begins where it began; what is another log now, it reads from
        its beginning."""
        for name in names:
            self._join(link, name, "earliest")

    def forget(self, link: Link) -> None:
        """Remove a passing group that has no member left."""
        member = self._member
        for topic in member.topics if member.is_passing else ():
            (left,) = link.ask(("HLEN", member.members(topic)))
            if not left:
                figures.drop_group(link, self._catalogue, topic, member.group)

    def vanished(self, look: Look, link: Link) -> tuple[str, list[str]]:
        """A topic in which the group was dropped, or ""; and the topics whose keys were deleted, or were lost by a
        server that was restarted since."""
        dropped, deleted = "", []
        for partition, view in look.views.items():
            incarnation = link.incarnation(self._member.key(partition))
            known = self._topics[partition.topic].log_ids[partition.index]
            if view.is_there and view.current_log:
                self._seen[partition] = incarnation
            elif view.is_there or view.current_log != known or self._seen.get(partition) != incarnation:
                deleted.append(partition.topic)
            else:
                dropped = partition.topic
        return dropped, list(dict.fromkeys(deleted))

    def _join(self, link: Link, name: str, start: str) -> None:
        member = self._member
        for _ in range(_TRIES):
            topic = self._topics[name] = self._catalogue.resolve(link, name)
            join = JOIN if topic.streams is None else JOIN_STREAM
            commands = [
                join(
                    member.join_keys(keys),
                    *(
                        link.incarnation(keys.meta),
                        log_id,
                        self._starts.get(log_id, start),
                        member.group,
                        member.ttl_ms,
                        member.real_group,
                    ),
                )
                for keys, log_id in zip(topic.keys, topic.log_ids, strict=True)
            ]
            replies = link.ask(*commands)
            if b"log" not in replies:
                return self._joined(link, topic, replies)
        raise BrokerError(f"topic {name} is deleted and created again and again; stop the program that does so")

    def _joined(self, link: Link, topic: RedisTopic, replies: Iterable[bytes]) -> None:
        for index, (log_id, reply) in enumerate(zip(topic.log_ids, replies, strict=True)):
            self._seen[Partition(topic.name, index)] = link.incarnation(topic.keys[index].meta)
            if reply != b"known":
                self._starts[log_id] = reply.decode()
