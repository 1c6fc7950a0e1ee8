"""What an error of the server means for an operator. Pure."""

import re
from collections.abc import Sequence

from redis.exceptions import AuthenticationError, RedisError, ResponseError

# Nothing was done, and the same call may succeed in a moment: a fail-over, a restart, a long script, a full disk, a
# slot on its way to another node. After NOANSWER it may have been done, and the number or the token of the call tells.
_PASSING_ERRORS = frozenset({"ASK", "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "MOVED", "NOANSWER"})
_PASSING_ERRORS |= {"NOREPLICAS", "READONLY", "TRYAGAIN"}
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -([A-Z]+)\b")  # before 7.0 the text is in that of the script's own error
_SCRIPT_PLACE = re.compile(  # where in a script; it says nothing to an operator
    r"Error running script \(call to \w+\): |@?user_script: ?\d+: |,? script: [0-9a-f]{40}, on @user_script:\d+\.?"
)
_COMMAND = re.compile(r"'([A-Za-z|]+)' command")

LOADING = "it still loads its data; wait until it has done so"
_CURES = {
    "OOM": "Redis is out of memory (maxmemory); let groups catch up so that finished events go, or raise maxmemory",
    "READONLY": "it is a read-only replica; connect to its master",
    "LOADING": LOADING,
    "NOREPLICAS": "too few replicas are connected; start them, or lower min-replicas-to-write",
    "MASTERDOWN": "it is a replica without its master; connect to the master",
    "MISCONF": "it cannot write to its disk; free some space",
    "BUSY": "it runs a script of another program that does not end (SCRIPT KILL ends it)",
    "EXECABORT": "it refused a transaction",
    "MOVED": "the slot of the key is on another node of the cluster; use redis+cluster://",
    "TRYAGAIN": "the slot of the key moves to another node of the cluster",
    "CLUSTERDOWN": "the cluster has no master for some of its slots; restart or replace the node that failed",
}


def code_of(error: RedisError) -> str:
    """The first word of the server's own text. redis-py cuts it off some errors, whose class tells it."""
    name = type(error).__name__
    known = {
        "OutOfMemoryError": "OOM",
        "ReadOnlyError": "READONLY",
        "NoPermissionError": "NOPERM",
        "NoScriptError": "NOSCRIPT",
        "BusyLoadingError": "LOADING",
        "MasterDownError": "MASTERDOWN",
        "ClusterDownError": "CLUSTERDOWN",
        "TryAgainError": "TRYAGAIN",
        "MovedError": "MOVED",
        "AskError": "ASK",
        "NoAnswer": "NOANSWER",
    }
    if name in known:
        return known[name]
    text = str(error)
    if in_script := _IN_SCRIPT.search(text):
        return in_script.group(1)
    found = re.match(r"[A-Z]+\b", text)
    return found.group() if found else ""


def is_passing(error: RedisError) -> bool:
    return code_of(error) in _PASSING_ERRORS


def explained(error: RedisError) -> str:
    """The cause, and the cure where one is known."""
    code, text = code_of(error), str(error)
    if isinstance(error, AuthenticationError):
        return f"it refuses the user or the password ({text}); correct them in the URL"
    if code == "NOPERM" or "ACL failure" in text:
        command = _COMMAND.search(text)
        what = f"the command {command.group(1).upper()}" if command else "one of Onward's keys"
        cure = "grant it with ACL SETUSER, for the keys ~{* and ~onward:*"
        return f"the user has no permission for {what} ({text}); {cure}"
    if "user_script" in text and code in ("", "ERR"):
        return damaged(f"a key of Onward was damaged or changed by another program ({_SCRIPT_PLACE.sub('', text)})")
    cure = _CURES.get(code, "")
    return f"{cure} ({text})" if cure else text


def damaged(what: str) -> str:
    return f"{what}; restore it from a backup, or drop the group or topic"


def damaged_key(key: str, why: object) -> str:
    return damaged(f"key {key} was damaged or changed by another program ({why})")


def wrong_types(found: Sequence[tuple[str, str, str]]) -> str:
    """Of keys with their types and the types that ours have: which are not ours."""
    wrong = [f"key {key} is a {type_}, not a {ours}" for key, type_, ours in found if type_ not in ("none", ours)]
    return f"{', '.join(wrong)}: another program uses our name; rename its key, or use another database or topic"


def is_wrong_type(error: object) -> bool:
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)
