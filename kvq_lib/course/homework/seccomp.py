"""A seccomp program: system calls that no homework needs, and that undo limits.

The kernel refuses them with "operation not permitted".  Nested user namespaces would
allow mounts of unlimited size; memfd and System V memory belong to no process, so that
nobody counts it; sockets other than Unix's reach the network, or the host of a virtual
machine, and hold megabytes in the kernel.  The program is classic BPF, eight bytes an
instruction, as in
https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html.
"""

import platform
import struct

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16  # offsets in the kernel's struct seccomp_data
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWTIME, NS, CGROUP, UTS, IPC, USER, PID, NET
_UNIX, _SO_SNDBUF = 1, 7  # a family of sockets, an option

# Name of the machine: (AUDIT_ARCH, numbers of the calls).
_X86 = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "mount": 165,
    "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
    "bpf": 321, "perf_event_open": 298, "add_key": 248, "request_key": 249,
    "keyctl": 250, "io_uring_setup": 425, "userfaultfd": 323, "memfd_create": 319,
    "memfd_secret": 447, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240,
    "open_by_handle_at": 304, "kexec_load": 246, "init_module": 175,
    "finit_module": 313, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsmount": 432, "mount_setattr": 442, "personality": 135,
    "socket": 41, "setsockopt": 54, "clone": 56, "clone3": 435, "kill": 62,
}  # fmt: skip
_ARM = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "mount": 40,
    "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268,
    "bpf": 280, "perf_event_open": 241, "add_key": 217, "request_key": 218,
    "keyctl": 219, "io_uring_setup": 425, "userfaultfd": 282, "memfd_create": 279,
    "memfd_secret": 447, "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180,
    "open_by_handle_at": 265, "kexec_load": 104, "init_module": 105,
    "finit_module": 273, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsmount": 432, "mount_setattr": 442, "personality": 92,
    "socket": 198, "setsockopt": 208, "clone": 220, "clone3": 435, "kill": 129,
}  # fmt: skip
_MACHINES = {"x86_64": (0xC000003E, _X86), "aarch64": (0xC00000B7, _ARM)}
_WITH_RULES = ("socket", "setsockopt", "clone", "clone3", "kill")


def program() -> bytes:
    """The program for this machine; empty where its numbers are not known."""
    if platform.machine() not in _MACHINES:
        return b""
    machine, calls = _MACHINES[platform.machine()]
    refuse = _line(_RETURN, _ERRNO | _EPERM)
    allow = _line(_RETURN, _ALLOW)
    # Another instruction set has other numbers: it ends the process.
    code = [_line(_LOAD, _MACHINE), _line(_EQUAL, machine, 1, 0)]
    code += [_line(_RETURN, _KILL), _line(_LOAD, _NUMBER)]
    if platform.machine() == "x86_64":  # so does its x32 form
        code += [_line(_ANY_BIT, 0x40000000, 0, 1), _line(_RETURN, _KILL)]
    for name, number in calls.items():
        if name not in _WITH_RULES:
            code += [_line(_EQUAL, number, 0, 1), refuse]
    # clone3 passes its flags in memory, where no filter sees them: libc goes back to
    # clone where the kernel does not know it.
    code += [_line(_EQUAL, calls["clone3"], 0, 1), _line(_RETURN, _ERRNO | _ENOSYS)]
    code += _rule(calls["clone"], [_line(_ANY_BIT, _NEW_NAMESPACES, 0, 1), refuse])
    # kill(-1) would end every process of the user.
    code += _rule(calls["kill"], [_line(_EQUAL, 0xFFFFFFFF, 0, 1), refuse])
    code += _rule(calls["socket"], [_line(_EQUAL, _UNIX, 1, 0), refuse])
    # Sockets are counted, so that none may hold more than usual.
    larger = [_line(_EQUAL, _SO_SNDBUF, 0, 1), refuse]
    code += _rule(calls["setsockopt"], larger, argument=2)
    return b"".join([*code, allow])


def _rule(call: int, body: list[bytes], argument: int = 0) -> list[bytes]:
    """For one system call: load an argument, from 0, then `body`, then allow."""
    body = [_line(_LOAD, _ARGUMENT + 8 * argument), *body, _line(_RETURN, _ALLOW)]
    return [_line(_EQUAL, call, 0, len(body)), *body]


def _line(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, true, false, value)
