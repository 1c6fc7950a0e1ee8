"""Work groups: one queue (or one for each tier) that all members consume.

work_groups.py        members join groups, operators list and drop them; work_objects.py: the queues at the server
work_member.py        a member: connects, consumes, starts again; work_session.py: what it has on its connections
route_watch.py        keeps the bindings of a group while a member runs
work_subscription.py  the contract's subscription; work_settling.py: retries and letters first, then acknowledgements
work_queue.py         the messages that were delivered; ack_ledger.py (pure), prefetch.py (pure)
retrying.py           sends messages to rungs; rungs.py: which rung (pure); work_message.py: their headers (pure)
diversions.py         messages that came back; suspects.py: events that may have killed their process
tiers.py              which queue an event goes to (pure); work_place.py: the names of the queues (pure)
mover.py              replays dead letters
"""
