"""What an error of the server means for an operator. Pure."""

import re
from collections.abc import Sequence

from redis.exceptions import AuthenticationError, RedisError, ResponseError

# Nothing was done, and the same call may succeed in a moment: a fail-over, a restart, a long script, a full disk, a
# slot on its way to another node. After NOANSWER it may have been done, and the number or the token of the call tells.
_PASSING_ERRORS = frozenset({"ASK", "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "MOVED", "NOANSWER"})
_PASSING_ERRORS |= {"NOREPLICAS", "READONLY", "TRYAGAIN"}
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -([A-Z]+)\b")  # before 7.0 the text is in that of the script's own error
# Where in our script an error arose. It says nothing to an operator.
_SCRIPT_PLACE = re.compile(
    r",? ?script: [0-9a-f]{40}, on @\w+:\d+\.?|(ERR )?Error running script \(call to \w+\): |@?user_script: ?\d+: -?"
)
_KEY = re.compile(r"no permission for the key \S+")
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
_CURES_BY_TEXT = {  # these have no code
    "DB index is out of range": "it has no database with this number; use a lower one at the end of the URL",
    "cluster support disabled": "it is no cluster; write the URL as redis://",
    "knows no master with the name": "correct the name of the master in the URL, behind the slash",
    "unknown command 'SENTINEL'": "it is no Sentinel; use the port of a Sentinel, or write the URL as redis://",
}


def code_of(error: RedisError) -> str:
    """The first word of the server's own text. redis-py cuts it off some errors, whose class names it."""
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
    code, text = code_of(error), _SCRIPT_PLACE.sub("", str(error))
    if isinstance(error, AuthenticationError):
        return f"it refuses the user or the password ({text}); correct them in the URL"
    if code == "NOPERM" or "ACL failure" in text:
        if key := _KEY.search(text):
            return f"the user has {key.group()}, which another program owns; grant it with ACL SETUSER"
        command = _COMMAND.search(text)
        what = f"the command {command.group(1).upper()}" if command else "one of Onward's keys"
        cure = "grant it with ACL SETUSER, for the keys ~{* and ~onward:*"
        return f"the user has no permission for {what} ({text}); {cure}"
    if "user_script" in str(error) and code in ("", "ERR"):
        return damaged(f"a key of Onward was damaged or changed by another program ({text})")
    by_text = [cure for part, cure in _CURES_BY_TEXT.items() if part in text]
    cure = by_text[0] if by_text else _CURES.get(code, "")
    return f"{cure} ({text})" if cure else text


def unanswered(why: str, *, encrypted: bool) -> str:
    """Why there is no answer, and the cure."""
    if "certificate" in why.lower():
        cure = "name the authority of its certificate with client.ssl_ca_certs"
    elif encrypted:
        cure = "is it running, are host and port right, and does it speak TLS there? If it does not, use redis://"
    else:
        cure = "is it running, and are host and port right?"
    return f"{why.rstrip('. ')}; {cure}"


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
