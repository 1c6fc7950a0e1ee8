"""Publishing: events become messages, which are sent in bursts and confirmed.

publisher.py      encodes events, in the caller's thread
courier.py        sends windows; sending.py: what became of each event (pure)
stream_watch.py   notices a stream that was deleted, and binds work queues again
"""
