"""The tests of the sessions also pass on the oldest SQLAlchemy that Onward supports."""

import os
import subprocess
import sys

import pytest

from tests.servers.needs import OLD_SQLALCHEMY, PROJECT, SQLALCHEMY, Missing

PROGRAM = "import sqlalchemy, sys, pytest; print(sqlalchemy.__version__); sys.exit(pytest.main(sys.argv[1:]))"
# Each database with one sync and one async driver is enough here; the servers take most of the time.
LEFT_OUT = "not postgresql-async and not mariadb-async"


@pytest.mark.servers
def test_the_sessions_work_on_the_oldest_sqlalchemy() -> None:
    try:
        folder = SQLALCHEMY.path
    except Missing as reason:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(reason))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "-q", "-x", "tests/outbox/test_sessions.py", "-k", LEFT_OUT],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr[-2_000:]
    assert done.stdout.splitlines()[0] == OLD_SQLALCHEMY
    assert " passed" in done.stdout.splitlines()[-1]
