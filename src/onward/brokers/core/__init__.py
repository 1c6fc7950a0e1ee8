"""What every broker needs, written once. A broker imports the contract, this package, and no other stage.

bell.py            wakes a waiting receive, from any thread
holdings.py        the partitions that a member holds, what was read of them, what it has to report
subscription.py    the shell of a subscription: the receive loop, pause and resume, certainty, close
publishing.py      ordered publishing in windows: per key, what fails stops what follows
share.py           the fair share of partitions, and what a member should claim or give up (pure)
leasing.py         what a member does about its leases in one turn (pure); a store carries it out
lease_requests.py  what a subscription asks of the next turn of its leases
observed.py        whether another member's lease is over, by our own clock (pure)
session_clock.py   until when a group that answers requests surely counts us in (pure)
asides.py          filters, pages and cursors of an aside (pure)
folded_aside.py    an aside folded from a log of entries (pure)
topic_rules.py     partition counts: which ones a process insists on, and what is refused (pure)
partitioner.py     which partition a key belongs to (pure)
progress_codec.py  progress as a short text (pure)
cloudevents.py     an event's fields as CloudEvents attributes, and back (pure)
"""
