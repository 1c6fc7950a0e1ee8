"""MariaDB: user, password and database are all called onward."""

import pymysql

from tests.servers.needs import MARIADB, MARIADB_INSTALL
from tests.servers.server import PROBE_S, Server

INIT_SQL = """\
create database if not exists onward;
create user if not exists onward@'127.0.0.1' identified by 'onward';
grant all on *.* to onward@'127.0.0.1' with grant option;
"""


class MariaDBServer(Server):
    name = "MariaDB"
    address = "mysql://onward:onward@127.0.0.1:{port}/onward"
    account = "mysql"

    def prepare(self) -> None:
        (self.folder / "init.sql").write_text(INIT_SQL)
        self.run(
            str(MARIADB_INSTALL.path),
            "--no-defaults",
            f"--datadir={self.folder / 'data'}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        )

    def command(self) -> list[str]:
        return [
            str(MARIADB.path),
            "--no-defaults",  # it has an effect only as the first option
            f"--datadir={self.folder / 'data'}",
            f"--bind-address={self.host}",
            f"--port={self.port}",
            f"--socket={self.folder / 'sock'}",
            f"--pid-file={self.folder / 'pid'}",
            f"--init-file={self.folder / 'init.sql'}",
            "--skip-name-resolve",  # 127.0.0.1 would become localhost, and another user
        ]

    def probe(self) -> None:
        pymysql.connect(
            host=self.host,
            port=self.port,
            user="onward",
            password="onward",
            database="onward",
            connect_timeout=int(PROBE_S),
            read_timeout=PROBE_S,
        ).close()
