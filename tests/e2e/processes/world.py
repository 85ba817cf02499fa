"""One of everything that a process tree can hold: world.py FOLDER.

`FOLDER/count` holds how far it is. When `FOLDER/check` appears all processes look once whether everything is
as it was put there, pipes and queues by emptying them, and `FOLDER/checked` says "good", or "bad" and what.
"""

import ctypes
import fcntl
import hashlib
import mmap
import os
import pty
import resource
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)

Check = Callable[[], None]

SIGNAL_VALUES = (11, 22, 33)
LIMIT = 4321
PR_SET_PDEATHSIG = 1
PR_GET_PDEATHSIG = 2


def put(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.rename(path)


def same(found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"{str(found)[:60]} instead of {str(expected)[:60]}")


# What one process holds. Each function sets something up and returns what looks after it later.


def pipe(_: Path) -> Check:
    reader, writer = os.pipe()
    data = os.urandom(40_000)
    os.write(writer, data)

    def check() -> None:
        same(os.read(reader, 65536), data)
        os.write(writer, b"more")
        same(os.read(reader, 65536), b"more")

    return check


def fifo(folder: Path) -> Check:
    os.mkfifo(folder / "fifo")
    end = os.open(folder / "fifo", os.O_RDWR)
    os.write(end, b"in the fifo")
    return lambda: same(os.read(end, 100), b"in the fifo")


def stream_sockets(_: Path) -> Check:
    left, right = socket.socketpair()
    data = os.urandom(30_000)
    left.sendall(data)
    right.sendall(b"the other way")

    def check() -> None:
        same(right.recv(len(data), socket.MSG_WAITALL), data)
        same(left.recv(100), b"the other way")
        left.sendall(b"more")
        same(right.recv(100), b"more")

    return check


def datagram_sockets(_: Path) -> Check:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    messages = [b"one", b"two" * 1000, b"three"]
    for message in messages:
        left.send(message)

    def check() -> None:
        same([right.recv(65536) for _ in messages], messages)
        left.send(b"four")
        same(right.recv(65536), b"four")

    return check


def packet_sockets(_: Path) -> Check:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    messages = [b"first", b"second" * 100]
    for message in messages:
        left.send(message)

    def check() -> None:
        same([right.recv(65536) for _ in messages], messages)
        right.send(b"back")
        same(left.recv(65536), b"back")

    return check


def descriptor_in_a_socket(folder: Path) -> Check:
    left, right = socket.socketpair()
    (folder / "sent").write_text("0123456789")
    file = os.open(folder / "sent", os.O_RDONLY)
    os.lseek(file, 4, os.SEEK_SET)
    socket.send_fds(left, [b"!"], [file])
    os.close(file)

    def check() -> None:
        _, (received,), _, _ = socket.recv_fds(right, 1, 1)
        same(os.read(received, 100), b"456789")

    return check


def listening_socket(folder: Path) -> Check:
    listener = socket.socket(socket.AF_UNIX)
    # A path of a hundred bytes is all that fits.
    here = Path.cwd()
    os.chdir(folder)
    listener.bind("listener")
    os.chdir(here)
    listener.listen(3)

    def check() -> None:
        client = socket.socket(socket.AF_UNIX)
        # attributes() has made the folder the current one.
        client.connect("listener")
        server, _ = listener.accept()
        server.sendall(b"welcome")
        same(client.recv(100), b"welcome")

    return check


def files(folder: Path) -> Check:
    path = folder / "file"
    path.write_text("abcdefghij")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.lseek(reader, 3, os.SEEK_SET)
    twin = os.dup(reader)
    other = os.open(path, os.O_RDONLY)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(log, b"before ")
    flags = fcntl.fcntl(reader, fcntl.F_GETFL)

    def check() -> None:
        same(os.read(reader, 2), b"de")
        same(os.read(twin, 2), b"fg")
        same(os.read(other, 2), b"ab")
        same(fcntl.fcntl(reader, fcntl.F_GETFL), flags)
        os.lseek(log, 0, os.SEEK_SET)
        os.write(log, b"after")
        same((folder / "log").read_bytes()[-5:], b"after")

    return check


def deleted_file(folder: Path) -> Check:
    path = folder / "deleted"
    data = os.urandom(300_000)
    path.write_bytes(data)
    file = os.open(path, os.O_RDWR)
    mapped = mmap.mmap(file, 0)
    os.lseek(file, 1000, os.SEEK_SET)
    path.unlink()

    def check() -> None:
        same(os.read(file, 300_000), data[1000:])
        mapped[:5] = b"still"
        same(os.pread(file, 5, 0), b"still")
        same(path.exists(), False)

    return check


def changed_private_mapping(folder: Path) -> Check:
    path = folder / "mapped"
    path.write_bytes(b"x" * 16384)
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    memory[5000:5007] = b"changed"

    def check() -> None:
        same(memory[4999:5008], b"xchangedx")
        same(path.read_bytes(), b"x" * 16384)

    return check


def queued_signals(_: Path) -> Check:
    signals = {signal.SIGRTMIN + 3, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    for value in SIGNAL_VALUES:
        libc.sigqueue(os.getpid(), signal.SIGRTMIN + 3, ctypes.c_void_p(value))
    os.kill(os.getpid(), signal.SIGUSR1)

    def check() -> None:
        mask = ctypes.create_string_buffer(128)
        libc.sigaddset(mask, signal.SIGRTMIN + 3)
        values = []
        for _ in SIGNAL_VALUES:
            info = ctypes.create_string_buffer(128)
            same(libc.sigtimedwait(mask, info, ctypes.create_string_buffer(16)), signal.SIGRTMIN + 3)
            values.append(struct.unpack_from("<Q", info, 24)[0])
        same(tuple(values), SIGNAL_VALUES)
        same(signal.sigpending(), {signal.SIGUSR1})

    return check


def signal_handler(_: Path) -> Check:
    got = []
    signal.signal(signal.SIGUSR2, lambda number, _: got.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def check() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR2)
        same(got, [signal.SIGUSR2])

    return check


def threads(_: Path) -> Check:
    """Each has a name, a mask and a signal of its own."""
    gates = [threading.Semaphore(0) for _ in range(3)]
    ready = threading.Semaphore(0)
    done = threading.Semaphore(0)
    failures: list[str] = []

    def body(number: int) -> None:
        local = hashlib.sha256(str(number).encode()).digest()
        own = threading.get_native_id()
        comm = Path(f"/proc/self/task/{own}/comm")
        comm.write_text(f"thread {number}")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN + 5 + number})
        signal.pthread_kill(threading.get_ident(), signal.SIGRTMIN + 5 + number)
        ready.release()
        gates[number].acquire()
        try:
            same(threading.get_native_id(), own)
            same(local, hashlib.sha256(str(number).encode()).digest())
            same(comm.read_text(), f"thread {number}\n")
            got = signal.sigtimedwait({signal.SIGRTMIN + 5 + number}, 0)
            same(got and got.si_signo, signal.SIGRTMIN + 5 + number)
        except BaseException as error:
            failures.append(f"thread {number}: {error}")
        done.release()

    for number in range(3):
        threading.Thread(target=body, args=(number,), daemon=True).start()
        ready.acquire()

    def check() -> None:
        for gate in gates:
            gate.release()
            done.acquire()
        same(failures, [])

    return check


def timers(_: Path) -> Check:
    signal.setitimer(signal.ITIMER_REAL, 5000, 7)
    timer = libc.timerfd_create(1, 0)
    libc.timerfd_settime(timer, 0, struct.pack("<4q", 3, 0, 4000, 0), None)

    def check() -> None:
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        same((4000 < left < 5000, interval), (True, 7.0))
        now = ctypes.create_string_buffer(32)
        libc.timerfd_gettime(timer, now)
        every, _, remaining, _ = struct.unpack("<4q", now.raw)
        same((every, 3000 < remaining < 4000), (3, True))

    return check


def event_descriptors(_: Path) -> Check:
    event = os.eventfd(7, os.EFD_NONBLOCK)
    epoll = select.epoll()
    epoll.register(event, select.EPOLLIN)
    mask = ctypes.create_string_buffer(128)
    libc.sigaddset(mask, signal.SIGUSR1)
    signals = libc.signalfd(-1, mask, 0)

    def check() -> None:
        same(epoll.poll(1), [(event, select.EPOLLIN)])
        same(os.eventfd_read(event), 7)
        # SIGUSR1 is blocked and waits: see queued_signals.
        same(struct.unpack_from("<I", os.read(signals, 128))[0], signal.SIGUSR1)

    return check


def terminal(_: Path) -> Check:
    leader, follower = pty.openpty()
    termios.tcsetwinsize(leader, (33, 77))

    def check() -> None:
        same(termios.tcgetwinsize(follower), (33, 77))
        os.write(follower, b"shown")
        same(os.read(leader, 100), b"shown")

    return check


def locks(folder: Path) -> Check:
    whole = (folder / "lock").open("w")
    fcntl.flock(whole, fcntl.LOCK_EX)

    def check() -> None:
        with (folder / "lock").open("w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                same(whole.closed, False)
                return
        raise AssertionError("the lock is not held")

    return check


def memory_kinds(_: Path) -> Check:
    size = 1 << 20
    data = os.urandom(size)
    written = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    written[:] = data
    address = ctypes.addressof(ctypes.c_char.from_buffer(written))
    # One page that may not be touched, one that may only be read, the rest locked.
    libc.mprotect(ctypes.c_void_p(address + 8192), 4096, 0)
    libc.mprotect(ctypes.c_void_p(address + 16384), 4096, mmap.PROT_READ)
    libc.mlock(ctypes.c_void_p(address + 65536), 65536)

    def protection(at: int) -> str:
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= at < end:
                return line.split()[1]
        return ""

    def check() -> None:
        same(protection(address + 8192), "---p")
        same(protection(address + 16384), "r--p")
        same("VmLck:\t      64 kB" in Path("/proc/self/status").read_text(), True)
        libc.mprotect(ctypes.c_void_p(address + 8192), 4096, mmap.PROT_READ)
        same(hashlib.sha256(written).digest(), hashlib.sha256(data).digest())

    return check


def attributes(folder: Path) -> Check:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    os.umask(0o027)
    os.chdir(folder)
    Path("/proc/self/comm").write_text("w\u00f6rld (a) 1")
    Path("/proc/self/oom_score_adj").write_text("77")
    os.setpriority(os.PRIO_PROCESS, 0, 3)

    def check() -> None:
        same(resource.getrlimit(resource.RLIMIT_NOFILE), (LIMIT, LIMIT))
        same(os.umask(0o027), 0o027)
        same(Path.cwd(), folder)
        same(Path("/proc/self/comm").read_text(), "w\u00f6rld (a) 1\n")
        same(Path("/proc/self/oom_score_adj").read_text(), "77\n")
        same(os.getpriority(os.PRIO_PROCESS, 0), 3)

    return check


HOLDINGS = (
    pipe,
    fifo,
    stream_sockets,
    datagram_sockets,
    packet_sockets,
    descriptor_in_a_socket,
    listening_socket,
    files,
    deleted_file,
    changed_private_mapping,
    queued_signals,
    signal_handler,
    threads,
    timers,
    event_descriptors,
    terminal,
    locks,
    memory_kinds,
    attributes,
)


def look(checks: dict[str, Check]) -> list[str]:
    """What is not as it was."""
    bad = []
    for name, check in checks.items():
        try:
            check()
        except BaseException as error:
            bad.append(f"{name}: {type(error).__name__} {error}")
    return bad


# What several processes hold together.


class Common:
    """Memory, a file offset and a queue that parent and worker share; memory that they only had in common."""

    def __init__(self, folder: Path) -> None:
        self.anonymous = mmap.mmap(-1, 2 << 20)
        self.data = os.urandom(1 << 20)
        self.anonymous[: 1 << 20] = self.data
        self.memfd = os.memfd_create("world", os.MFD_CLOEXEC)
        os.ftruncate(self.memfd, 1 << 20)
        self.in_memfd = mmap.mmap(self.memfd, 1 << 20)
        self.in_memfd[4096:8192] = self.data[:4096]
        self.copied = bytearray(b"parent" * 100_000)
        (folder / "offset").write_text("0123456789")
        self.file = os.open(folder / "offset", os.O_RDONLY)
        self.here, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def worker(common: Common, root: int) -> None:
    """Lives in a session of its own; has a child of its own and memory that it changed after the fork."""
    os.setsid()
    common.here.close()
    common.copied[:6] = b"worker"
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    grandchild = os.fork()
    if grandchild == 0:
        while True:
            signal.pause()

    def signal_of_death() -> None:
        found = ctypes.c_int()
        libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(found))
        same(found.value, signal.SIGTERM)

    checks: dict[str, Check] = {
        "signal of death": signal_of_death,
        "parent": lambda: same(os.getppid(), root),
        "session": lambda: same(os.getsid(0), os.getpid()),
        "copy in the worker": lambda: same(bytes(common.copied), b"worker" + b"parent" * 99_999),
        "shared memory in the worker": lambda: same(common.anonymous[: 1 << 20], common.data),
        "word of the parent": lambda: same(common.anonymous[-5:], b"hello"),
        "word in the memfd": lambda: same(common.in_memfd[-5:], b"hello"),
        "shared offset": lambda: same(os.read(common.file, 2), b"56"),
        "grandchild": lambda: same(os.waitpid(grandchild, os.WNOHANG), (0, 0)),
    }
    common.there.send(b"ready")
    while common.there.recv(1):
        common.there.send("; ".join(look(checks)).encode() or b"good")
    os.kill(grandchild, signal.SIGKILL)
    os._exit(0)


def child(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(1)
    return pid


def relatives(folder: Path) -> dict[str, Check]:
    common = Common(folder)
    root = os.getpid()
    working = child(lambda: worker(common, root))
    exited = child(lambda: os._exit(42))
    killed = child(lambda: os.kill(os.getpid(), signal.SIGKILL))
    stopped = child(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    common.there.close()
    same(common.here.recv(10), b"ready")
    same(os.read(common.file, 3), b"012")
    for pid in (exited, killed):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.waitid(os.P_PID, stopped, os.WSTOPPED)
    put(folder / "pids", " ".join(map(str, (working, exited, killed, stopped))))

    def ask_the_worker() -> None:
        os.read(common.file, 2)
        common.anonymous[-5:] = b"hello"
        common.in_memfd[-5:] = b"hello"
        common.here.send(b"?")
        same(common.here.recv(10_000), b"good")

    def still_stopped() -> None:
        text = Path(f"/proc/{stopped}/stat").read_text()
        same(text[text.rindex(")") + 2], "T")

    return {
        "worker": ask_the_worker,
        "copy in the parent": lambda: same(bytes(common.copied), b"parent" * 100_000),
        "shared offset in the parent": lambda: same(os.read(common.file, 10), b"789"),
        "memfd": lambda: same(os.pread(common.memfd, 4096, 4096), common.data[:4096]),
        "exited child": lambda: same(os.waitpid(exited, 0), (exited, 42 << 8)),
        "killed child": lambda: same(os.waitpid(killed, 0), (killed, int(signal.SIGKILL))),
        "stopped child": still_stopped,
    }


def main(folder: Path) -> None:
    checks = relatives(folder)
    for holding in HOLDINGS:
        checks[holding.__name__] = holding(folder)
    count = 0
    # Always open, always of one size: a checkpoint of any moment can be restored more than once.
    counter = os.open(folder / "count", os.O_RDWR | os.O_CREAT, 0o600)
    while True:
        count += 1
        os.pwrite(counter, b"%020d" % count, 0)
        if (folder / "check").exists():
            (folder / "check").unlink()
            bad = look(checks)
            put(folder / "checked", f"bad {'; '.join(bad)}" if bad else "good")
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
