"""The demo: a small shop on one SQLite file, worker processes, and a judge that trusts neither.

shop.py       the application: places, publishes and bills orders
worker.py     one worker process
fleet.py      starts the workers, replaces those that die, ends all of them
effects.py    what the workers did, in a table of its own
judge.py      the balance, from the orders, the effects and the dead letters alone
check.py      `onward demo --check`: a number of orders, one worker killed, a verdict
sweep.py      removes what a run created on a broker that other applications use too
live.py       `onward demo`: the shop runs until you stop it, on a page (follow.py, view.py, page.py, static/)
"""
