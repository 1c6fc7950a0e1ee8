"""Events out of the flow, in a stream for each partition of a group, and one for a work group.

aside.py           the asides of a broker: those that its members own, and those that operators read
aside_log.py       one aside; aside_reader.py follows its stream, aside_writing.py writes to it
aside_fold.py      what the entries of all generations mean (pure); aside_entries.py: how they are encoded (pure)
aside_bodies.py    reads large records again
passing_aside.py   of temporary groups, in memory only
"""
