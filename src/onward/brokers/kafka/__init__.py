"""Apache Kafka: partitions by key, ownership by the group protocol, progress in commits and their metadata.

broker.py           implements the broker contract with the parts below
client.py           creates librdkafka's clients; client_log.py logs their lines, closing.py closes those that may hang
admin.py            requests to the cluster; topics.py, log_offsets.py and groups.py use it
cluster_facts.py    reads facts about the cluster, which diagnosis.py judges (pure)

placement.py        how many partitions a topic's keys use; key_counts.py stores this count in the cluster
publisher.py        prepares events for the publisher in core/
producer_thread.py  sends them; sending.py decides the outcome of each event (pure), also from sent_counts.py

subscription.py     implements the subscription of the contract
membership.py       the thread of the member; group_consumer.py is its client
arrivals.py         partitions that the group assigned to us, until we own them; start_points.py: where they start
ownership.py        partitions that are revoked, lost, released or handed over; recreated.py: topics created again
certainty.py        until when the member is certain to own its partitions
commits.py          sends commits; commit_queue.py: those that wait; commit_metadata.py: their text (pure)
owner_marks.py      how commits name the owner, and how long the next owner waits (pure)
reader.py           the thread that reads events; stall_check.py: whether its client still reads
hold.py, message.py what this broker stores with a partition; an event that is decoded late

aside.py            implements the aside of the contract
aside_owner.py      what the owner of partitions writes and reads there
aside_log.py        the log under both: aside_topics.py, aside_writer.py, aside_follower.py, record_bodies.py
"""

from onward.brokers.kafka.broker import open_broker

__all__ = ["open_broker"]
