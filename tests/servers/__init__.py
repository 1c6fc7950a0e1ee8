"""Real servers for tests: each on a free loopback port, in a temporary folder, gone when the test run is.

needs.py    what each server needs on this machine, and how to get it
install.py  `python -m tests.servers.install` gets it
guard.py    the process between the test run and a server, which ends the server with the run
server.py   the handle: start, kill, pause, resume, restart, stop, proxy, close
proxy.py    a TCP proxy that can cut and stall connections
others      one file per server
"""
