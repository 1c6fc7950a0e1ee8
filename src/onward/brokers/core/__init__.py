"""The code that brokers share. A broker imports the contract, this package, and no other stage.

A module marked as pure does no I/O and reads no clock.

bell.py            wakes a waiting receive, from any thread
holdings.py        the partitions that a member owns, the events that were read ahead, the messages to receive
subscription.py    the base of a subscription: the receive loop, pause and resume, sure_until, close
publishing.py      ordered publishing in windows: a failed event stops the later events of its key
share.py           the fair share of partitions: which ones a member should claim or give back (pure)
leasing.py         what a member should do about its leases in one turn (pure); a store does it
lease_requests.py  what a subscription asks of the next turn of its leases
observed.py        whether another member's lease has ended, by our own clock (pure)
session_clock.py   how long we are surely members of a group whose client library keeps the session (pure)
asides.py          filters and cursors of an aside (pure)
folded_aside.py    an aside whose records are rebuilt from a log of entries (pure)
topic_rules.py     partition counts: which count a process expects, and what is refused (pure)
partitioner.py     which partition a key belongs to (pure)
progress_codec.py  progress as a short text (pure)
cloudevents.py     an event's fields as CloudEvents attributes, and back (pure)
late_event.py      an event whose fields are decoded when they are first read (pure)
"""
