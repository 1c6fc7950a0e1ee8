"""What an operator should know about a running server, from what INFO says. Pure."""

from collections.abc import Iterator, Mapping

from onward.brokers.base import Finding

SECTIONS = ("memory", "replication", "persistence")
_FULL = 0.8  # of the memory: time to act


def findings(info: Mapping[str, str]) -> Iterator[Finding]:
    yield _memory(int(info.get("used_memory", "0")), int(info.get("maxmemory", "0")))
    yield from _machine(int(info.get("used_memory_rss", "0")), int(info.get("total_system_memory", "0")))
    yield from _replicas(info)
    yield from _disk(info)


def _memory(used: int, limit: int) -> Finding:
    if not limit:
        cure = "set maxmemory: then a full server refuses to publish, and the system does not kill it"
        return Finding("ok", f"{used:,} bytes of memory are used; maxmemory is not set", cure)
    what = f"{used:,} of {limit:,} bytes of memory are used ({used / limit:.0%} of maxmemory)"
    if used < _FULL * limit:
        return Finding("ok", what)
    cure = "raise maxmemory, lower the retention settings or max_backlog_bytes, or start the groups that are behind"
    return Finding("error" if used >= limit else "warning", f"{what}; a full server refuses to publish", cure)


def _machine(resident: int, total: int) -> Iterator[Finding]:
    if total and resident >= _FULL * total:
        what = f"Redis uses {resident:,} of the {total:,} bytes of its machine"
        yield Finding("warning", what, "set maxmemory, and leave room for the copy that a rewrite of its file needs")


def _replicas(info: Mapping[str, str]) -> Iterator[Finding]:
    count = int(info.get("connected_slaves", "0"))
    fields = [info.get(f"slave{index}", "") for index in range(count)]
    late = [each for each in fields if "state=online" not in each]
    if late:
        yield Finding("warning", f"{len(late)} of {count} replicas are not up to date", "wait for them, or repair them")
    elif count:
        yield Finding("ok", f"{count} {'replica is' if count == 1 else 'replicas are'} up to date")
    else:
        yield Finding("ok", "no replica is connected: if this server is lost, its events are lost with it")


def _disk(info: Mapping[str, str]) -> Iterator[Finding]:
    failed = {
        "aof_last_write_status": "writing the append-only file",
        "aof_last_bgrewrite_status": "rewriting the append-only file",
        "rdb_last_bgsave_status": "saving a snapshot",
    }
    for name, what in failed.items():
        if info.get(name, "ok") != "ok":
            yield Finding("error", f"{what} failed", "free space on the server's disk; its log names the cause")
