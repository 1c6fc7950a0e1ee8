"""The demo: a small shop on one SQLite file, worker processes, and a judge that trusts neither.

shop.py       the application: orders are placed, published and billed
worker.py     one worker process
fleet.py      starts the workers, replaces those that die, ends them all
effects.py    what the workers did, in a table of its own
judge.py      the balance, from the orders and the effects alone
check.py      `onward demo --check`: so many orders, one worker killed, a verdict
sweep.py      removes what a run made on a broker that is not its own file
live.py       `onward demo`: the same, without end, on a page (view.py, page.py, static/)
"""
