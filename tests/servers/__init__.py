"""Real servers for tests: each on a free loopback port, in a temporary folder. They end with the test run.

needs.py    what each server needs on this machine, and how to install it
install.py  `python -m tests.servers.install` installs it
guard.py    the process between the test run and a server, which ends the server with the run
server.py   the handle: start, kill, pause, resume, restart, stop, proxy, close
proxy.py    a TCP proxy that can cut and stall connections
others      one file per server
"""
