"""What operators ask for: topology as code, `onward doctor` and metrics.

topology.py        Exchange, Queue and Binding (pure); topology_plan.py: what to create or refuse (pure)
live_topology.py   what the server has; topology_server.py: creates what it lacks; differences.py (pure)
group_objects.py   what groups lack, and how it is created again
operations.py      all of this behind one object
checkup.py         findings (pure), from server_facts.py, known_problems.py (pure) and policies.py (pure)
expected_queues.py which queues must exist (pure); queue_troubles.py: their problems in few lines (pure)
figures.py         counters; depth.py: how many messages wait; routing.py: where exchanges route (pure)
management.py      the HTTP API, if it is on; probe_channel.py: questions that may close a channel
"""
