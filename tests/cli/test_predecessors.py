"""Processes that a worker has left running when it ended."""

import subprocess
import sys

import pytest

ORPHANS = """
import ctypes, os, signal, subprocess, sys
from onward.cli.predecessors import Predecessors, is_running

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become ours, as in a container
leader = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], start_new_session=True, stdout=subprocess.PIPE)
orphan = int(leader.stdout.readline())
leader.kill()
leader.wait()
slot = Predecessors("slot")
slot.ended(leader.pid, 100.0)
print(slot.are_leaving(100.1), slot.are_leaving(200.0), slot.gone(), slot.left() == [f"{orphan} (sleep)"])
os.kill(orphan, signal.SIGKILL)
while is_running(leader.pid):
    pass
print(slot.are_leaving(100.1), slot.gone() == (f"slot-{leader.pid}",), slot.left())
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no zombie")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_a_member_is_gone_with_its_last_process_and_leaves_no_zombie() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["True False () True", "False True []", "no zombie"], done.stderr


OTHER_GROUP = """
import os, signal, subprocess, sys
from onward.cli.predecessors import Predecessors, is_running

child = "import subprocess; p = subprocess.Popen(['sleep', '600'], process_group=0); print(p.pid, flush=True); p.wait()"
leader = subprocess.Popen([sys.executable, "-c", child], start_new_session=True, stdout=subprocess.PIPE)
orphan = int(leader.stdout.readline())
leader.kill()
leader.wait()
slot = Predecessors("slot")
slot.ended(leader.pid, 100.0)
print(slot.gone(), slot.left() == [f"{orphan} (sleep)"])
os.kill(orphan, signal.SIGKILL)
while is_running(leader.pid):
    pass
print(slot.gone() == (f"slot-{leader.pid}",))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the session of a process")
def test_a_program_in_its_own_process_group_is_found() -> None:
    done = subprocess.run([sys.executable, "-c", OTHER_GROUP], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["() True", "True"], done.stderr
