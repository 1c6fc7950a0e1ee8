"""Streams of other programs as topics of ours.

streams.py           the mapping of a topic to streams (public: Streams)
entries.py           entries as events, and back, by the field mapping (pure)
scripts.py           what the scripts of our own topics do, with a real consumer group beside our progress
shard.py             an ownership of such a partition
reading.py           from entries to deliveries; an entry that does not fit becomes a dead letter
projection.py        which entries the group's pending list must show (pure)
settling.py          progress and pending list in one step
anchors.py           whether a server that was replaced has lost entries that we had read
adoption.py          what other consumers of the group have left becomes ours, before the partition is assigned
adoption_scripts.py  its scripts
leftovers.py         from a pending list to progress (pure)
lost_entries.py      stubs of entries that were removed before they were handled
reclaim.py           rounds that look for entries of other consumers, in a thread for each topic
other_consumers.py   what is said of other consumers in our groups (pure)
groups.py            the real groups, for operators
"""
