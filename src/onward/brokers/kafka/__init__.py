"""Apache Kafka: partitions by key, ownership by the group protocol, progress in commits and their metadata.

broker.py           the contract; puts the parts together
client.py           makes librdkafka's clients; client_log.py logs their lines, closing.py closes those that hang
admin.py            requests to the cluster; topics.py, log_offsets.py and groups.py are about what it has
cluster_facts.py    what diagnosis.py judges (pure)

placement.py        among how many partitions keys are distributed; key_counts.py stores it in the cluster
publisher.py        packs events for the core's publisher
producer_thread.py  sends them; sending.py decides what became of each (pure), by sent_counts.py too

subscription.py     a member as the contract has it
membership.py       the thread of the member: group_consumer.py is its client
arrivals.py         partitions that the group assigned to us, until they are ours; start_points.py: where they start
ownership.py        partitions that are revoked, lost, released or handed over; recreated.py: whose topic is another one
certainty.py        until when the member is sure
commits.py          sends commits; commit_queue.py: what waits; commit_metadata.py: their text (pure)
owner_marks.py      how they name the owner, and how long the next one waits for it (pure)
reader.py           the thread that reads events; stall_check.py: whether its client still reads
hold.py, message.py what this broker keeps with a partition; an event that is decoded late

aside.py            the aside as the contract has it
aside_owner.py      what the owner of partitions writes and reads there
aside_log.py        the log under both: aside_topics.py, aside_writer.py, aside_follower.py, record_bodies.py
"""

from onward.brokers.kafka.broker import open_broker

__all__ = ["open_broker"]
