"""Ordered groups. Each group has a token queue for each partition; its newest token is the group's progress.

ordered.py         the subscription of a member, and the groups of a broker; ordered_settle.py: one settle
membership.py      keeps a member in its group; session_tasks.py: its tasks; fair_share.py: its share
seat.py            a member at one token queue: stands by, takes over, owns; tenancy.py: one ownership
seat_trouble.py    why a seat delivers nothing
token.py           tokens and how long a new owner waits (pure); takeover.py: which token counts (pure)
token_channel.py   consumes a token queue; token_search.py: finds out that a token is missing
log_reader.py      reads a stream; log_start.py and log_anchors.py: where, and whether it is still the same log
log_lag.py         what was not delivered; ordered_groups.py: what operators ask; group_start.py: new groups
passing.py         temporary groups, such as those of `onward tail`
"""
