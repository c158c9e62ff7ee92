"""Thirty attacks on the sandbox, as root and as an ordinary user. All are bounded, and none leaves this machine.

Attacks on the reply of a worker (23, 26 to 28 of a trusted one) are in test_workers.py.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from atroposlib.sandbox import programs, sandbox
from atroposlib.sandbox.programs import Limits
from atroposlib.sandbox.sandbox import Sandbox
from atroposlib.sandbox.workers import SandboxError

ROOT = Path(__file__).parents[2]
SYSTEM_PYTHON = Path("/usr/bin/python3")
BECOME_NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}


class AsWeAre:
    """Programs of the user who runs the tests."""

    def __init__(self):
        self.sandbox = Sandbox()

    def run(self, program, *, limits=None, keep=(), **given):
        command = ["python3", "-I", "-S", "main.py"]
        outcome = self.sandbox.run(
            command, files={"main.py": program}, keep=keep, limits=Limits(**limits or {}), **given
        )
        return SimpleNamespace(
            **{**vars(outcome), "stdout": outcome.stdout.decode("latin-1"), "stderr": outcome.stderr.decode("latin-1")}
        )

    def close(self):
        self.sandbox.close()


class AsOrdinaryUser:
    """Programs of the user nobody, where the tests run as root."""

    def __init__(self):
        self.process = subprocess.Popen(
            [*BECOME_NOBODY, SYSTEM_PYTHON, "as_user.py"],
            cwd=Path(__file__).parent,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lock = threading.Lock()

    def run(self, program, *, limits=None, keep=(), **given):
        command = ["python3", "-I", "-S", "main.py"]
        files = {"main.py": program}
        request = {"command": command, "files": files, "keep": list(keep), "limits": limits or {}, **given}
        with self.lock:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            reply = json.loads(self.process.stdout.readline())
        assert "refused" not in reply, reply
        reply["files"] = {name: content.encode("latin-1") for name, content in reply["files"].items()}
        return SimpleNamespace(**reply)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module", autouse=True)
def layers():
    """Skip where no sandbox can be set up; where one can, every layer must hold."""
    try:
        layers = sandbox.probe(programs.find_tools())
    except SandboxError as error:
        pytest.skip(str(error))
    return layers


def test_every_layer_holds(layers):
    assert [layer for layer in layers if not layer.holds] == []


@pytest.fixture(scope="module", params=["as we are", "as an ordinary user"])
def box(request):
    if request.param == "as an ordinary user" and os.geteuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    if request.param == "as an ordinary user" and not SYSTEM_PYTHON.exists():
        pytest.skip("needs a Python that an ordinary user may run, /usr/bin/python3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANTED_API_KEY", "planted-secret")
        box = AsWeAre() if request.param == "as we are" else AsOrdinaryUser()
        yield box
        box.close()


@pytest.fixture
def planted(tmp_path):
    """A file that everybody may read, and its folder, which everybody may write."""
    secret = tmp_path / "secret"
    secret.write_text("planted-secret")
    for folder in [tmp_path, *tmp_path.parents[:3]]:
        folder.chmod(folder.stat().st_mode | 0o5)
    tmp_path.chmod(0o777)
    return secret


ATTACKS = """
import ctypes, errno, os, signal, socket, sys, time
def attempt(act):
    try:
        result = act()
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
    return result
"""


def test_1_and_2_no_variable_of_anybody_is_seen(box):
    program = """
import glob, os
print(dict(os.environ))
for path in glob.glob("/proc/*/environ"):
    try:
        print(open(path, "rb").read())
    except OSError as error:
        print(error)
"""
    assert os.environ["PLANTED_API_KEY"] == "planted-secret"
    assert "planted" not in box.run(program).stdout


def test_3_to_5_and_7_no_process_of_the_host_is_there_to_read_trace_or_signal(box):
    program = f"""{ATTACKS}
host = {os.getpid()}
libc = ctypes.CDLL(None, use_errno=True)
print(len([name for name in os.listdir("/proc") if name.isdigit()]) <= 3)
print(attempt(lambda: bool(open(f"/proc/{{host}}/mem", "r+b"))))
print([libc.ptrace(16, pid, 0, 0) == 0 for pid in (1, host)])
print(attempt(lambda: os.kill(host, 0)))
attempt(lambda: os.kill(1, signal.SIGKILL))
print("alive", flush=True)
os.kill(-1, signal.SIGKILL)
"""
    outcome = box.run(program)
    seen = outcome.stdout.split()
    assert seen[0] == "True"
    assert "True" not in seen[1:]
    assert seen[-2:] == ["ESRCH", "alive"]


def test_6_a_sibling_cannot_be_killed():
    sandbox = Sandbox(at_once=2)
    killer = (
        "import os\nfor pid in range(1, 400):\n  try: pid != os.getpid() and os.kill(pid, 9)\n  except OSError: pass\n"
    )
    with_pause = ["sh", "-c", "sleep 0.7; echo unharmed"]
    sibling = threading.Thread(target=lambda: outcomes.append(sandbox.run(with_pause)))
    outcomes = []
    sibling.start()
    assert sandbox.run(["python3", "-I", "-c", killer]).verdict == "exit"
    sibling.join()
    sandbox.close()
    assert outcomes[0].stdout == b"unharmed\n"


def test_8_to_10_nothing_of_the_host_can_be_read_or_written(box, planted):
    program = f"""{ATTACKS}
for path in ({str(planted)!r}, "/proc/1/root" + {str(planted)!r}, "/proc/1/cwd/.." + {str(planted)!r}, "/etc/shadow"):
    print(attempt(lambda: open(path).read()))
for path in ({str(planted.parent / "x")!r}, "/usr/x", "/usr/bin/x", "/x", "/dev/x", "/etc/x", os.__file__):
    print(attempt(lambda: bool(open(path, "a"))))
print(os.listdir("/"), attempt(lambda: os.listdir("/root")), attempt(lambda: os.listdir("/home")))
"""
    outcome = box.run(program)
    assert outcome.exit_code == 0, outcome.stderr
    assert "planted" not in outcome.stdout
    assert "True" not in outcome.stdout
    assert os.listdir(planted.parent) == ["secret"]


def test_11_to_14_there_is_no_network(box, planted):
    listening = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0planted-{os.getpid()}")
    named = socket.socket(socket.AF_UNIX)
    named.bind(str(planted.parent / "socket"))
    for server in (abstract, named):
        server.listen()
    program = f"""{ATTACKS}
def connect(family, address):
    with socket.socket(family) as connection:
        connection.settimeout(2)
        connection.connect(address)
    return "connected"
print(attempt(lambda: connect(socket.AF_INET, ("127.0.0.1", {listening.getsockname()[1]}))))
print(attempt(lambda: connect(socket.AF_UNIX, "\\0planted-{os.getpid()}")))
print(attempt(lambda: connect(socket.AF_UNIX, {str(planted.parent / "socket")!r})))
print([line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]])
print(attempt(lambda: socket.getaddrinfo("name.invalid", 80)))
for family in (16, 17, 38, 40):
    print(attempt(lambda: bool(socket.socket(family, socket.SOCK_DGRAM))))
"""
    outcome = box.run(program)
    for server in (listening, abstract, named):
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
        server.close()
    lines = outcome.stdout.splitlines()
    assert lines[:4] == ["ECONNREFUSED", "ECONNREFUSED", "ENOENT", "['lo']"]
    assert lines[5:] == ["EAFNOSUPPORT"] * 4


def still_there(token, *, begins=b""):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
            found += [path] if token.encode() in command and command.startswith(begins) else []
        except OSError:
            pass
    return found


def test_15_a_daemon_dies_with_its_program(box):
    token = f"daemon-{os.getpid()}-{time.monotonic_ns()}"
    program = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, ["python3", "-c", "import time; time.sleep(30)", "{token}"])
    os._exit(0)
time.sleep(0.2)
print("left", flush=True)
"""
    outcome = box.run(program)
    assert (outcome.verdict, outcome.stdout) == ("exit", "left\n")
    assert not still_there(token)


@pytest.mark.parametrize("user", ["as we are", "as an ordinary user"])
def test_a_program_dies_with_a_caller_that_is_killed(user):
    if user == "as an ordinary user" and (os.geteuid() != 0 or not SYSTEM_PYTHON.exists()):
        pytest.skip("needs root and /usr/bin/python3")
    python = [sys.executable] if user == "as we are" else [*BECOME_NOBODY, str(SYSTEM_PYTHON)]
    token = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    call = (
        f"from atroposlib.sandbox.sandbox import Sandbox as S; S().run(['sh', '-c', 'echo $$ >{token}; sleep 60; :'])"
    )
    caller = subprocess.Popen([*python, "-c", call], env=environment())
    while not still_there(token, begins=b"sh\0-c\0echo $$"):  # until the program runs
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    deadline = time.monotonic() + 60
    while still_there(token) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not still_there(token)


@pytest.mark.skipif(os.geteuid() != 0, reason="programs of an ordinary user are told apart by namespaces")
def test_no_two_programs_of_root_are_one_user_in_two_sandboxes_and_two_processes():
    users = {Sandbox().run(["id", "-u"]).stdout for _ in range(2)}
    other = subprocess.run(
        [
            sys.executable,
            "-c",
            "from atroposlib.sandbox.programs import next_user; print(*(next_user() for _ in range(2500)))",
        ],
        env=environment(),
        capture_output=True,
        check=True,
    )
    theirs = set(map(int, other.stdout.split()))
    ours = {programs.next_user() for _ in range(2500)}
    assert len(users) == 2
    assert len(ours) == len(theirs) == 1000
    assert not ours & theirs


@pytest.mark.parametrize("answer", [b"", b"\n"], ids=["a caller that is gone", "a caller that is there"])
@pytest.mark.parametrize("script", [programs._RUNNING, programs._KEEPING], ids=["running", "keeping"])
def test_a_program_begins_only_when_its_caller_has_answered(script, answer, tmp_path):
    (tmp_path / ".keep").touch()
    script = script.replace("/.stdin", "/dev/null").replace("/.keep", f"{tmp_path}/.keep")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(["sh", "-c", script, "sh", "touch", tmp_path / "begun"], stdin=theirs)
        assert ours.recv(1) == b"\n"
        ours.sendall(answer)
        ours.shutdown(socket.SHUT_WR)
        assert (process.wait() == 0) is bool(answer)
    assert (tmp_path / "begun").exists() is bool(answer)


@pytest.mark.parametrize(("end", "wall_s", "verdict"), [("os._exit(0)", 60, "exit"), ("time.sleep(300)", 1, "time")])
def test_16_a_child_that_holds_the_pipes_delays_nothing(box, end, wall_s, verdict):
    program = f"import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(300)\n{end}\n"
    outcome = box.run(program, limits={"wall_s": wall_s})
    assert outcome.verdict == verdict
    assert outcome.wall_s < 60


def test_17_processes_are_counted(box):
    program = """
import os, time
made = 0
try:
    while made < 64:
        if os.fork() == 0:
            time.sleep(20); os._exit(0)
        made += 1
except OSError:
    print(made, flush=True)
    raise
"""
    outcome = box.run(program, limits={"processes": 16})
    assert int(outcome.stdout) < 16
    assert outcome.verdict == "processes"


def test_18_memory_of_children_counts(box):
    program = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = b"x" * (45 * 2**20)
        time.sleep(20); os._exit(0)
time.sleep(20)
"""
    outcome = box.run(program, limits={"memory_mb": 100, "wall_s": 20})
    assert outcome.verdict == "memory"


def test_pages_that_forks_share_count_once(box):
    program = """
import os, time
held = b"x" * (40 * 2**20)
for _ in range(4):
    if os.fork() == 0:
        time.sleep(0.5); os._exit(0)
for _ in range(4): os.wait()
"""
    assert box.run(program, limits={"memory_mb": 120, "wall_s": 30}).verdict == "exit"


def test_memory_that_no_process_maps_cannot_be_had(box):
    program = f"""{ATTACKS}
libc = ctypes.CDLL(None, use_errno=True)
print(attempt(lambda: os.memfd_create("x")), libc.shmget(0, 4096, 0o1600))
"""
    assert box.run(program).stdout.split() == ["ENOSYS", "-1"]


@pytest.mark.parametrize("folder", ["/work", "/dev/shm", "/tmp"])
def test_19_and_20_the_disk_is_sized(box, folder):
    program = f"""
written = 0
with open("{folder}/x", "wb", buffering=0) as file:
    try:
        while written < 40 * 2**20:
            written += file.write(b"x" * 2**16)
    finally:
        print(written)
"""
    outcome = box.run(program, limits={"disk_mb": 4})
    assert 3 * 2**20 < int(outcome.stdout) <= 4 * 2**20
    assert outcome.verdict == "disk"


def test_21_inodes_are_counted(box):
    program = "import time\nfor i in range(30_000): open(str(i), 'w').close()\ntime.sleep(20)"
    assert box.run(program, limits={"inodes": 1000, "wall_s": 20}).verdict == "disk"


def test_22_a_program_that_ignores_signals_is_ended(box):
    program = "import signal\nfor s in (1, 2, 15, 14, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    assert box.run(program, limits={"wall_s": 0.5}).verdict == "time"
    outcome = box.run(program, limits={"cpu_s": 0.2, "wall_s": 30})
    assert outcome.verdict == "cpu"
    assert outcome.exit_code is None


def test_23_and_24_there_is_no_descriptor_to_forge_on_and_no_frame_to_walk_to(box):
    program = f"""{ATTACKS}
print({{attempt(lambda: os.write(descriptor, b"forged")) for descriptor in (0, *range(3, 60))}} <= {{"EBADF", "EPERM"}})
print(sys._getframe().f_back, attempt(lambda: os.write(os.open("/proc/self/fd/0", os.O_RDWR), b"x")))
"""
    forged, frame, reopened = box.run(program).stdout.split()
    assert (forged, frame) == ("True", "None")
    assert reopened in ("EPERM", "EACCES")


def test_the_channel_of_kept_files_is_not_the_programs(box):
    program = f"""{ATTACKS}
print({{attempt(lambda: os.write(descriptor, b"forged")) for descriptor in (0, *range(3, 60))}} <= {{"EBADF", "EPERM"}})
print(attempt(lambda: bool(os.open("/proc/1/fd/0", os.O_RDWR))))
open("kept", "w").write("right")
"""
    outcome = box.run(program, keep=["kept"])
    assert outcome.stdout.split() == ["True", "EACCES"]
    assert outcome.files == {"kept": b"right"}


def test_the_first_process_cannot_be_taken_over_or_is_as_confined_as_the_program(box):
    program = f"""{ATTACKS}
opened = attempt(lambda: bool(open("/proc/1/mem", "r+b")))
status = dict(line.split(":", 1) for line in open("/proc/1/status").read().splitlines())
print(opened, *(status[name].strip() for name in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp")))
"""
    opened, *confined = box.run(program).stdout.split()
    assert opened == "EACCES" or confined == ["0" * 16, "0" * 16, "1", "2"]


def test_25_a_later_program_finds_nothing_of_an_earlier_one(box):
    patch = """
import builtins, json
builtins.print = json.dumps = lambda *args: "patched"
for path in ("json.py", "sitecustomize.py", "/dev/shm/x"):
    open(path, "w").write("raise SystemExit('patched')")
"""
    assert box.run(patch).exit_code == 0
    outcome = box.run("import json, os\nprint(json.dumps([os.listdir('/work'), os.listdir('/dev/shm')]))")
    assert json.loads(outcome.stdout) == [["main.py"], []]


def test_26_a_flood_is_cut_off(box):
    outcome = box.run("import os\nwhile True: os.write(1, b'\\xff' * 65536)", limits={"output_bytes": 100_000})
    assert outcome.verdict == "output"
    assert len(outcome.stdout) <= 100_000


CALLS = {  # on x86_64: number and arguments
    "unshare": (272, 0x10000000),
    "clone into a user namespace": (56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": (435, 0, 0),
    "mount": (165, 0, 0, 0, 0, 0),
    "setns": (308, 0, 0),
    "bpf": (321, 0, 0, 0),
    "io_uring_setup": (425, 8, 0),
    "keyctl": (250, 0, -3, 0),
    "add_key": (248, 0, 0, 0, 0, -3),
    "userfaultfd": (323, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "ptrace": (101, 0, 0, 0, 0),
    "pidfd_getfd": (438, 0, 0, 0),
    "TIOCSTI": (16, 0, 0x5412, 0),
    "TIOCLINUX": (16, 0, 0x541C, 0),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
def test_29_and_30_calls_into_the_corners_of_the_kernel_are_refused(box):
    program = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, (number, *arguments) in {CALLS!r}.items():
    ctypes.set_errno(0)
    result = libc.syscall(number, *map(ctypes.c_long, arguments))
    print(name, errno.errorcode.get(ctypes.get_errno()) if result == -1 else "WENT THROUGH", sep=": ", flush=True)
"""
    refused = dict(line.split(": ") for line in box.run(program).stdout.splitlines())
    assert refused.keys() == CALLS.keys()
    assert set(refused.values()) <= {"EPERM", "ENOSYS"}


def test_30_only_plain_files_come_back(box, planted):
    program = f"""{ATTACKS}
os.symlink({str(planted)!r}, "link")
os.symlink("/usr/bin", "folder")
os.mkfifo("pipe")
open("plain", "w").write("mine")
os.link("plain", "hard")
attempt(lambda: os.mknod("device", 0o20666, os.makedev(1, 3)))
os.chmod("plain", 0o4755)
with open("sparse", "wb") as file:
    file.truncate(2**20)
"""
    names = ["link", "folder", "pipe", "plain", "device", "missing"]
    outcome = box.run(program, keep=names)
    assert outcome.files == {"plain": b"mine"}


def test_files_input_and_output_go_in_and_out(box):
    program = """import sys
print(open("main.py").read()[:6], file=sys.stderr)
open("out.bin", "wb").write(bytes([0, 255]))
sys.exit(3)
"""
    outcome = box.run(program, keep=["out.bin"])
    assert (outcome.verdict, outcome.exit_code, outcome.stderr) == ("exit", 3, "import\n")
    assert outcome.files == {"out.bin": b"\x00\xff"}


async def test_a_cancelled_program_is_killed():
    sandbox = Sandbox()
    token = f"cancelled-{os.getpid()}-{time.monotonic_ns()}"
    call = asyncio.create_task(sandbox.call(["sh", "-c", f"sleep 60; : {token}"], limits=Limits(wall_s=60)))
    while not still_there(token, begins=b"sh\0-c\0sleep 60"):  # until the program runs
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not still_there(token)
    outcome = await sandbox.call(["cat"], stdin=b"fine")
    assert outcome.stdout == b"fine"
    sandbox.close()


def test_a_sandbox_that_fails_before_its_program_begins_is_no_exit_code_of_that(layers, monkeypatch):
    monkeypatch.setattr(programs, "_RUNNING", "setpriv --reuid nobody-has-this-name; exit $?")
    with pytest.raises(SandboxError, match="the sandbox did not start: setpriv"):
        programs.Program(programs.find_tools(), ["true"]).to_end()


def test_the_command_shows_every_layer():
    done = subprocess.run([sys.executable, "-m", "atroposlib.sandbox"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("holds  ") for line in done.stdout.splitlines())
    assert "holds  no network: interfaces lo" in done.stdout
