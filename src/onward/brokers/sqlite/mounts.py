"""Detects network file systems, where file locks and shared memory are not reliable."""

from pathlib import Path, PurePath

# fmt: off
_NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "glusterfs", "gpfs", "lustre", "ncpfs",
    "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "vboxsf",
    "fuse.ceph", "fuse.davfs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.rclone",
    "fuse.s3fs", "fuse.smbnetfs", "fuse.sshfs",
})
# fmt: on


def network_type(path: PurePath, mounts: str) -> str | None:
    """The type of the network file system that an absolute path is on, according to the text of /proc/mounts. None if
    the path is on a local file system."""
    best, found = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = PurePath(_unescaped(fields[1]))
        # A later line with the same mount point hides the earlier one.
        if (path == point or point in path.parents) and len(point.parts) >= best:
            best, found = len(point.parts), fields[2]
    return found if found in _NETWORK else None


def mounted(path: Path) -> str | None:
    """`network_type` with the mounts of this machine. None if the system has no /proc/mounts."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    return network_type(path.resolve(), mounts)


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
