"""Redis: a stream for each partition, leases and progress in hashes, every write by a script that checks the owner.

broker.py          the contract; opens what follows
address.py         what a URL says, and who is the master behind Sentinels
link.py            a connection to a server; cluster_link.py: to the nodes of a cluster
server_facts.py    what a server says of itself; server_errors.py, permissions.py: what its refusals mean (pure)
keys.py            the names of our keys; positions.py, progress.py: how positions and progress are stored (pure)
scripts.py         how scripts are called; lease_scripts.py and log_scripts.py have their text
topics.py          topics and their partition counts; joined_topics.py: those of a member
member.py          who a member is, and what it keeps with each ownership
lease_keeper.py    the thread that keeps, gains and gives up partitions; lease_turn.py: one turn of it
group_watch.py     whose leases count (pure); turn_schedule.py: when the next turn is due
reader.py          reads the log; doorbell.py: waits for news
settling.py        progress and records in one step
aside.py           records out of the flow; aside_rows.py: how they are stored (pure)
publisher.py       encodes events; courier.py: sends them; backlog.py: how much may be unfinished
trimmer.py         removes what is finished; event_count.py, stream_figures.py: what is counted
figures.py         groups and owners, for people; checkup.py, server_health.py: for `onward doctor`
subscription.py    one member's subscription
foreign/           streams of other programs
"""

from onward.brokers.base import Broker
from onward.brokers.redis.foreign.streams import Streams
from onward.settings import Settings

__all__ = ["Streams", "open_broker"]


async def open_broker(url: str, settings: Settings) -> Broker:
    """BrokerError: the server does not answer, or cannot be used. BadSetting: it is less durable than `durability`
    says."""
    from onward.brokers.redis import broker  # a program may name its streams where redis-py is not installed

    return await broker.open_broker(url, settings)
