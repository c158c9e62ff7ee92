"""A seccomp filter for untrusted programs, as the bytes of a classic BPF program for `bwrap --seccomp`.

It is the second line of defence behind the namespaces: it refuses what no ordinary program needs and kernel bugs live
in, and what would hold memory that no process owns up to (memfd, System V shared memory).
"""

import errno
import platform
import struct

# Numbers on x86_64 and aarch64; None: it does not exist there. Source: the kernel's unistd_64.h, asm-generic/unistd.h.
# fmt: off
_REFUSED: dict[str, tuple[int | None, int | None]] = {  # EPERM
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_getfd": (438, 438), "perf_event_open": (298, 241),
    "bpf": (321, 280), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "syslog": (103, 116), "acct": (163, 89), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161),
    "setdomainname": (171, 162), "quotactl": (179, 60), "quotactl_fd": (443, 443), "vhangup": (153, 58),
    "personality": (135, 92), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "lookup_dcookie": (212, 18), "shmget": (29, 194), "mq_open": (240, 180), "msgget": (68, 186), "semget": (64, 190),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "mbind": (237, 235), "set_mempolicy": (238, 237),
}
_ABSENT: dict[str, tuple[int | None, int | None]] = {  # ENOSYS, at which libraries fall back to what is allowed
    "clone3": (435, 435), "memfd_create": (319, 279), "memfd_secret": (447, 447), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
}
# fmt: on
_CLONE, _IOCTL, _SOCKET = (56, 220), (16, 29), (41, 198)
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> its column above and its AUDIT_ARCH."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in struct seccomp_data; arguments: the low half
_KILL, _ALLOW, _ERROR = 0x80000000, 0x7FFF0000, 0x00050000
_X32 = 0x40000000


def filter_program(machine: str | None = None) -> bytes:
    """Return the filter for a machine (default: this one); KeyError when its numbers are not known."""
    column, architecture = ARCHITECTURES[machine or platform.machine()]
    program = [
        *(_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL)),
        *(_step(_LOAD, _NUMBER), _step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL)),
    ]
    for calls, error in ((_REFUSED, errno.EPERM), (_ABSENT, errno.ENOSYS)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                program += _if_equal(number, [_step(_RETURN, _ERROR | error)])
    refuse = _step(_RETURN, _ERROR | errno.EPERM)
    program += _if_equal(
        _CLONE[column], [_step(_LOAD, _FIRST), _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), refuse, _allow()]
    )
    terminal = [step for request in (_TIOCSTI, _TIOCLINUX) for step in _if_equal(request, [refuse])]
    program += _if_equal(_IOCTL[column], [_step(_LOAD, _SECOND), *terminal, _allow()])
    families = [step for family in _FAMILIES for step in _if_equal(family, [_allow()])]
    unknown = _step(_RETURN, _ERROR | errno.EAFNOSUPPORT)
    program += _if_equal(_SOCKET[column], [_step(_LOAD, _FIRST), *families, unknown])
    return b"".join([*program, _allow()])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction; the jumps count instructions from the next one."""
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _allow() -> bytes:
    return _step(_RETURN, _ALLOW)


def _if_equal(value: int, steps: list[bytes]) -> list[bytes]:
    return [_step(_EQUAL, value, 0, len(steps)), *steps]
