"""One program that nobody trusts, in a sandbox of its own: namespaces by bubblewrap, a seccomp filter, limits.

A program sees /usr and the interpreter, read-only, an empty /work of its own, no network, no other process and no
environment. It gives back output, an exit code and files; whether that is right is computed by the caller, outside.
Everything in an outcome was written by the program, or counted from outside.
"""

import contextlib
import fcntl
import io
import itertools
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from atroposlib.sandbox.seccomp import ARCHITECTURES, filter_program
from atroposlib.sandbox.usage import LONGEST_WAIT, Limits, ResourceUse, inodes_in, shared_out, time_left_s, usage_of
from atroposlib.sandbox.workers import SandboxError

Verdict = Literal["exit", "time", "cpu", "memory", "processes", "disk", "file size", "output", "open files"]

WORK = "/work"
PATH = "/usr/local/bin:/usr/bin:/bin"
_USER = 65534
"""The program's user in a user namespace."""
_FIRST_USER, _USERS_OF_A_PROCESS = 2_000_000_000, 1000
_numbers = itertools.count()

_FIRST_TICK_S, _LAST_TICK_S = 0.01, 0.05
"""Between two looks at what a program uses: often while it is young, as it may be quick."""
_END_TIMEOUT_S = 10.0
_CHUNK = 2**16


@dataclass(frozen=True)
class Outcome:
    """End of a program, and its output."""

    verdict: Verdict  # "exit": it ended by itself; else the limit that ended it, or that it failed at
    exit_code: int | None  # 128 + the signal that ended it; None: it was killed for a limit
    stdout: bytes
    stderr: bytes
    wall_s: float
    cpu_s: float  # where we are root as seen from outside, so up to 50 ms too low
    peak_memory_mb: float  # as seen from outside, so 0 for a program that is gone within 10 ms
    files: dict[str, bytes] = field(default_factory=dict)  # of those asked for, the regular ones


@dataclass(frozen=True)
class Tools:
    """Tools of this machine that make sandboxes."""

    bwrap: str
    is_root: bool  # programs get users of their own; otherwise a user namespace


def find_tools() -> Tools:
    """Return the tools of this machine; SandboxError names what is missing. `sandbox.probe` tries if they hold."""
    bwrap = shutil.which("bwrap", path=PATH)
    is_root = os.geteuid() == 0
    needed = ("tar", "setpriv") if is_root else ("tar",)
    absent = [name for name in needed if not os.access(f"/usr/bin/{name}", os.X_OK)]
    wrong = {
        f"this is {sys.platform}, and only Linux is known": sys.platform != "linux",
        f"the processor is {platform.machine()}, known are {', '.join(ARCHITECTURES)}": platform.machine()
        not in ARCHITECTURES,
        "bubblewrap is missing; install the package bubblewrap": bwrap is None,
        f"/usr/bin lacks {', '.join(absent)}; install util-linux and tar": bool(absent),
    }
    if reasons := [reason for reason, is_so in wrong.items() if is_so]:
        raise SandboxError(f"no untrusted program can be held here: {'; '.join(reasons)}")
    assert bwrap is not None
    return Tools(bwrap, is_root)


def next_user() -> int:
    """Return a user that no other program runs as, as the kernel counts the processes of a user, not of a sandbox."""
    return _FIRST_USER + os.getpid() % 2_000_000 * _USERS_OF_A_PROCESS + next(_numbers) % _USERS_OF_A_PROCESS


class Program:
    """One program, from its start to its outcome."""

    def __init__(
        self,
        tools: Tools,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes | str] | None = None,
        stdin: bytes | Path = b"",
        keep: Sequence[str] = (),
        limits: Limits | None = None,
        readable: Sequence[Path] = (),
    ) -> None:
        """
        Args:
            command: looked up in /usr and next to the interpreter, run in /work.
            files: contents by path below /work.
            stdin: what it may read there; a path: that file, which is not copied.
            keep: paths below /work to give back when it has ended.
            limits: default: `Limits()`.
            readable: folders it may read, at their own paths; the interpreter's is one anyway.

        Raises:
            ValueError: a path leads out of /work.
        """
        self._tools, self._limits = tools, limits or Limits()
        self._files = {inside_work(name): content for name, content in (files or {}).items()}
        self._keep = [inside_work(name) for name in keep]
        self._stdin, self._readable = stdin, [Path(sys.base_prefix), *readable]
        self._command = ["/bin/sh", "-c", _KEEPING if keep else _RUNNING, "sh", *command]
        self._wake, self._cancelled = socket.socketpair()
        self._descriptors: list[int] = []

    def cancel(self) -> None:
        """Kill the program, from any thread."""
        with contextlib.suppress(OSError):
            self._cancelled.send(b"x")

    def to_end(self) -> Outcome:
        """Start, watch, and end it."""
        try:
            return self._watched()
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._wake.close()
            self._cancelled.close()

    def _watched(self) -> Outcome:
        status_read, status_write = os.pipe()
        hold, release = os.pipe()  # until the limits are set
        channel, theirs = socket.socketpair()
        with open(status_read, "rb") as status, channel, theirs:
            seccomp = self._memory(filter_program())
            arguments = self._arguments(status_write, seccomp, hold)
            begun = time.monotonic()
            try:
                process = subprocess.Popen(
                    arguments,
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},
                    cwd="/",
                    pass_fds=(status_write, hold, *self._descriptors),
                    start_new_session=True,
                )
            finally:
                os.close(status_write)
                os.close(hold)
                self._descriptors.append(release)
            theirs.close()
            watch = _Watch(process, status, channel, self._wake, release, self._limits, begun)
            ended_by = watch.until_end()
        return self._outcome(watch, ended_by)

    def _outcome(self, watch: "_Watch", ended_by: Verdict | None) -> Outcome:
        exit_code, archive = watch.exit_code, bytes(watch.channel).removeprefix(_BEGUN)
        if ended_by is None and (exit_code is None or not watch.channel):
            said = bytes(watch.stderr[-500:]).decode(errors="replace").strip()
            raise SandboxError(f"the sandbox did not start: {said or 'bubblewrap said nothing'}")
        verdict = ended_by or (_failed_at(exit_code, bytes(watch.stderr), watch, self._limits) if exit_code else "exit")
        return Outcome(
            verdict=verdict,
            exit_code=None if ended_by else exit_code,
            stdout=bytes(watch.stdout),
            stderr=bytes(watch.stderr),
            wall_s=watch.wall_s,
            cpu_s=max(watch.cpu_s, watch.seen_cpu_s),
            peak_memory_mb=watch.peak_memory / 2**20,
            files={} if ended_by else dict(_regular_files(archive, self._keep)),
        )

    def _memory(self, content: bytes | str) -> int:
        """Return a descriptor of a file in memory that nobody can change."""
        descriptor = os.memfd_create("sandbox", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        self._descriptors.append(descriptor)
        view = memoryview(content.encode() if isinstance(content, str) else content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        return descriptor

    def _arguments(self, status: int, seccomp: int, hold: int) -> list[str]:
        """Return the command that sets up the sandbox and runs the program in it."""
        limits = self._limits
        return [
            *(self._tools.bwrap, "--json-status-fd", str(status), "--seccomp", str(seccomp), "--block-fd", str(hold)),
            *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup"),
            *("--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"),
            *self._privileges(),
            *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
            *("--setenv", "PATH", f"{sys.base_prefix}/bin:{PATH}"),
            *_system_folders(),
            *_read_only(self._readable),
            *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
            *("--size", str(limits.disk_mb * 2**20), "--perms", "0777", "--tmpfs", "/dev/shm"),
            *("--size", str(limits.disk_mb * 2**20), "--perms", "0777", "--tmpfs", WORK),
            *("--symlink", WORK, "/tmp"),
            *self._given_files(),
            *("--remount-ro", "/", "--chdir", WORK, "--"),
            *(self._drop_root() if self._tools.is_root else ()),
            *self._command,
        ]

    def _privileges(self) -> list[str]:
        """Return who the program is.

        Root's is another user, which can do nothing to bubblewrap as its first process. Otherwise both are one user,
        and bubblewrap's first process has no filter, so that a shell under the filter takes its place.
        """
        if self._tools.is_root:  # bubblewrap stays, as nobody but root may kill for it when the caller dies
            added = (word for name in ("SETUID", "SETGID", "SETPCAP") for word in ("--cap-add", f"CAP_{name}"))
            return ["--cap-drop", "ALL", *added]
        name = str(_USER)
        namespace = ["--unshare-user", "--uid", name, "--gid", name, "--disable-userns"]
        return [*namespace, "--cap-drop", "ALL", "--as-pid-1"]

    def _drop_root(self) -> list[str]:
        user = str(next_user())
        without = ["--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
        return ["/usr/bin/setpriv", "--reuid", user, "--regid", user, *without, "--"]

    def _given_files(self) -> Iterator[str]:
        for name, content in self._files.items():
            for folder in reversed(PurePosixPath(name).parents[:-1]):
                yield from ("--perms", "0777", "--dir", f"{WORK}/{folder}")
            yield from ("--perms", "0777", "--file", str(self._memory(content)), f"{WORK}/{name}")
        if isinstance(self._stdin, Path):
            yield from ("--ro-bind", str(self._stdin), "/.stdin")
        else:
            yield from ("--perms", "0444", "--file", str(self._memory(self._stdin)), "/.stdin")
        if self._keep:
            yield from ("--perms", "0444", "--file", str(self._memory("\0".join(self._keep))), "/.keep")


ENVIRONMENT = {"HOME": WORK, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_BEGUN = _HEARD = b"\n"
_BEGIN = "echo >&0 && read -r heard <&0 || exit; "
_RUNNING = _BEGIN + '"$@" </.stdin; exit $?'
_KEEPING = (
    _BEGIN + '"$@" </.stdin; code=$?; '
    "tar -cf - --ignore-failed-read --null --verbatim-files-from -T /.keep >&0 2>/dev/null; exit $code"
)
"""Says over a socket that the program has not that it begins, so that a sandbox which fails before is never taken for
a program that does; runs it once its caller has answered; sends files after it.

A caller that is killed while bubblewrap starts it does not answer, and bubblewrap, which only then watches over the
program on both of its sides, need not have ended it."""


class _Watch:
    """Reads what a running program writes, counts what it uses, and kills it at a limit."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        status: io.BufferedReader,
        channel: socket.socket,
        wake: socket.socket,
        release: int,
        limits: Limits,
        begun: float,
    ) -> None:
        self._process, self._limits, self._begun, self._wake, self._release = process, limits, begun, wake, release
        self._first_fd: int | None = None
        self._unanswered: socket.socket | None = channel
        self.stdout, self.stderr, self.channel, self._status = bytearray(), bytearray(), bytearray(), bytearray()
        self._init: int | None = None  # the sandbox's first process; all others die with it
        self.exit_code: int | None = None
        self.wall_s = self.cpu_s = self.seen_cpu_s = 0.0
        self.peak_memory = self.peak_processes = 0
        self._sources = {status.fileno(): self._status}
        for stream, buffer in ((process.stdout, self.stdout), (process.stderr, self.stderr), (channel, self.channel)):
            assert stream is not None
            self._sources[stream.fileno()] = buffer
        for source in self._sources:
            os.set_blocking(source, False)

    def until_end(self) -> Verdict | None:
        """Return the limit that ended the program, None when it ended by itself. It is gone in any case."""
        pidfd = os.pidfd_open(self._process.pid)
        ended_by: Verdict | None = None
        try:
            ended_by = self._follow(pidfd)
        finally:
            self._kill()
            self._reap(pidfd)
            os.close(pidfd)
            self._read_all()  # what is there; nobody waits for a pipe to close
        for line in bytes(self._status).splitlines():
            self.exit_code = json.loads(line).get("exit-code", self.exit_code)
        return ended_by

    def _follow(self, pidfd: int) -> Verdict | None:
        poll = select.poll()
        for descriptor in (*self._sources, pidfd, self._wake.fileno()):
            poll.register(descriptor, select.POLLIN)
        deadline, tick = self._begun + self._limits.wall_s, _FIRST_TICK_S
        next_look = self._begun + tick
        while True:
            now = time.monotonic()
            if now >= deadline:
                if (left_s := self._time_left_s(now)) == 0:
                    return "time"
                deadline = now + left_s
            ready = {descriptor for descriptor, _ in poll.poll(max(0, min(deadline, next_look) - now) * 1000)}
            for descriptor in ready & self._sources.keys():
                if not self._read(descriptor):
                    poll.unregister(descriptor)
            if self._first_fd is None and (first := self._first_process()) is not None:
                self._limit(first)
            if self._unanswered is not None and self.channel:
                with contextlib.suppress(OSError):  # it is gone already
                    self._unanswered.send(_HEARD)
                self._unanswered = None
            if self._wake.fileno() in ready:
                raise SandboxError("the program was cancelled")
            written = len(self.stdout) + len(self.stderr)
            if written > self._limits.output_bytes or len(self.channel) > self._limits.kept_bytes:
                return "output"
            if pidfd in ready:
                return None
            if time.monotonic() >= next_look:
                if (exceeded := self._look()) is not None:
                    return exceeded
                tick = min(tick * 1.5, _LAST_TICK_S)
                next_look = time.monotonic() + tick

    def _time_left_s(self, now: float) -> float:
        """Return how much longer a program may take whose time is over; SandboxError where it never got its share."""
        limit_s, lasted_s = self._limits.wall_s, now - self._begun
        first = self._first_process()
        has_begun = first is not None and bool(self.channel)
        usage = usage_of(first) if first is not None else ResourceUse(0, 0, 0.0, True)
        left_s = time_left_s(limit_s, lasted_s, usage.cpu_s, is_runnable=usage.is_runnable or not has_begun)
        if left_s == 0 and usage.cpu_s < limit_s and (usage.is_runnable or not has_begun):
            raise SandboxError(
                f"the machine is too busy: a program had {usage.cpu_s:.1f} s of a processor in {lasted_s:.0f} s, "
                f"{LONGEST_WAIT} times its limit; run fewer at once"
            )
        return left_s

    def _read(self, descriptor: int) -> bool:
        """Read what is there; False at the end."""
        with contextlib.suppress(BlockingIOError):
            part = os.read(descriptor, _CHUNK)
            self._sources[descriptor] += part
            return bool(part)
        return True

    def _read_all(self) -> None:
        limit = self._limits.output_bytes + self._limits.kept_bytes
        for descriptor, buffer in self._sources.items():
            before = -1
            while before != len(buffer) <= limit:
                before = len(buffer)
                with contextlib.suppress(OSError):
                    self._read(descriptor)
        del self.stdout[self._limits.output_bytes :], self.stderr[self._limits.output_bytes :]
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _look(self) -> Verdict | None:
        """Return the limit that is exceeded."""
        if (first := self._first_process()) is None:
            return None
        usage = usage_of(first)
        self.peak_memory = max(self.peak_memory, usage.memory)
        self.peak_processes = max(self.peak_processes, usage.processes)
        self.seen_cpu_s = max(self.seen_cpu_s, usage.cpu_s)
        if usage.memory > self._limits.memory_mb * 2**20 and shared_out(first) > self._limits.memory_mb * 2**20:
            return "memory"
        if usage.cpu_s > self._limits.cpu_s:
            return "cpu"
        made = inodes_in(first, (WORK, "/dev/shm"), self._limits.disk_mb * 2**20)
        return "disk" if made > self._limits.inodes else None

    def _first_process(self) -> int | None:
        if self._init is None and b"\n" in self._status:
            self._init = json.loads(self._status.partition(b"\n")[0]).get("child-pid")
        return self._init

    def _limit(self, first: int) -> None:
        """Set the kernel's limits on the first process, whose children inherit them, and let it begin."""
        self._first_fd = os.pidfd_open(first)
        for name, value in self._limits.of_kernel().items():
            resource.prlimit(first, name, (value, value))
        os.write(self._release, b"x")

    def _kill(self) -> None:
        """Kill the sandbox's first process, with which its namespace ends."""
        with contextlib.suppress(ProcessLookupError):
            if self._first_fd is not None:
                signal.pidfd_send_signal(self._first_fd, signal.SIGKILL)
            elif self._process.returncode is None:
                os.kill(self._process.pid, signal.SIGKILL)

    def _reap(self, pidfd: int) -> None:
        """Return when the first process and bubblewrap are gone, and with them everything in the sandbox."""
        for descriptor in (self._first_fd, pidfd):
            if descriptor is not None:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                if not poll.poll(_END_TIMEOUT_S * 1000):
                    raise SandboxError(f"the sandbox did not end within {_END_TIMEOUT_S:g} s of being killed")
        if self._first_fd is not None:
            os.close(self._first_fd)
        _, ending, used = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(ending)
        self.wall_s = time.monotonic() - self._begun
        self.cpu_s = used.ru_utime + used.ru_stime


# ---------------------------------------------------------------- in and out

_LAST_WORDS: dict[bytes, Verdict] = {
    b"MemoryError": "memory",
    b"Cannot allocate memory": "memory",
    b"Resource temporarily unavailable": "processes",
    b"Cannot fork": "processes",
    b"No space left on device": "disk",
    b"File too large": "file size",
    b"Too many open files": "open files",
}
_SIGNALS: dict[int, Verdict] = {128 + signal.SIGXCPU: "cpu", 128 + signal.SIGXFSZ: "file size"}


def _failed_at(exit_code: int, stderr: bytes, watch: _Watch, limits: Limits) -> Verdict:
    """Return the limit at which a program failed, by its signal or, as far as it tells, by its last words."""
    if exit_code in _SIGNALS:
        return _SIGNALS[exit_code]
    last = stderr[-2000:].strip().rpartition(b"\n")[2]
    told: Verdict | None = next((verdict for words, verdict in _LAST_WORDS.items() if words in last), None)
    if told is not None:
        return told
    return "processes" if watch.peak_processes >= limits.processes else "exit"


def _regular_files(archive: bytes, wanted: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the plain files of a tar that a stranger wrote: no link, device, pipe or sparse file."""
    with (
        contextlib.suppress(tarfile.TarError, ValueError, EOFError, OverflowError),
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as members,
    ):
        for member in members:
            is_plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and 0 <= member.size <= len(archive)
            content = members.extractfile(member) if is_plain and member.name in wanted else None
            if content is not None:
                yield member.name, content.read(member.size)


def inside_work(name: str) -> str:
    """Return a path below /work in its shortest form; ValueError when it leads elsewhere."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or "\n" in name:
        raise ValueError(f"{name!r} is no path below {WORK}")
    return str(path)


def _system_folders() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for folder in ("/bin", "/sbin", "/lib", "/lib64", "/lib32"):
        if os.path.islink(folder):
            yield from ("--symlink", os.readlink(folder), folder)
        elif os.path.isdir(folder):
            yield from ("--ro-bind", folder, folder)
    yield from ("--perms", "0755", "--dir", "/etc")  # else root's alone, and links such as awk lead nowhere
    for path in ("/etc/alternatives", "/etc/ld.so.cache"):
        yield from ("--ro-bind-try", path, path)


def _read_only(folders: Sequence[Path]) -> Iterator[str]:
    """Bind folders at their own paths, below parents that anybody may pass."""
    for folder in folders:
        if not folder.is_relative_to("/usr"):
            for parent in reversed(folder.parents[:-1]):
                yield from ("--perms", "0755", "--dir", str(parent))
            yield from ("--ro-bind", str(folder), str(folder))
