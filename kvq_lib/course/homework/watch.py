"""Time, memory, files and sockets of a sandbox, read from /proc while it works."""

import os
from collections.abc import Sequence
from pathlib import Path

_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


def tree(pid: int, most: int) -> list[int]:
    """The process and its descendants, no more than `most`: a bomb grows faster than
    one can look.

    In a sandbox with a process namespace, children that detach stay descendants of its
    first process, so that none escapes.
    """
    found, ahead = [], [pid]
    while ahead and len(found) < most:
        one = ahead.pop()
        found.append(one)
        try:
            for thread in os.listdir(f"/proc/{one}/task"):
                ahead += map(int, _read(f"/proc/{one}/task/{thread}/children").split())
        except OSError:
            continue  # it has ended
    return found


def seconds(pids: list[int]) -> float:
    """Seconds that processes have computed, children that ended included."""
    ticks = 0
    for pid in pids:
        # The name of a program may hold spaces and brackets: count from its end.
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def memory(pids: list[int], enough: int) -> int:
    """Bytes that processes hold in memory.

    What they share counts once, if it matters: below `enough` the sum of the resident
    sizes is near enough, and cheap.
    """
    resident = sum(_resident(pid) for pid in pids)
    if resident <= enough or len(pids) == 1:
        return resident
    return sum(_share(pid) for pid in pids)


def _resident(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if len(fields) > 1 else 0


def _share(pid: int) -> int:
    """Bytes of one process, pages shared by n processes counted as an nth."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return _resident(pid)


def held(pid: int, folders: Sequence[str]) -> tuple[int, int]:
    """(files, bytes) of the file systems at some folders of the process; nothing where
    they cannot be seen."""
    count = size = 0
    for folder in folders:
        try:
            found = os.statvfs(f"/proc/{pid}/root{folder}")
        except OSError:
            continue
        count += found.f_files - found.f_ffree
        size += (found.f_blocks - found.f_bfree) * found.f_frsize
    return count, size


def sockets(pid: int) -> int:
    """How many Unix sockets the network of the process has, those included that no
    process holds: they are on their way in another one."""
    return max(0, _read(f"/proc/{pid}/net/unix").count("\n") - 1)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:  # the process has ended, or is not ours to read
        return ""
