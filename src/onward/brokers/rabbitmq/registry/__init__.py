"""Which topics and groups exist: a stream of entries that every process folds in memory.

registry.py       reads and writes the entries; registry_fold.py: what they mean (pure); registry_log.py: the stream
topics.py         topics as applications see them; topic_objects.py: the exchange and the streams behind one
"""
