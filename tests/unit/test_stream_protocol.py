"""The socket protocol: exact bytes, hostile bytes, and who may connect."""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
import time
from pathlib import Path

import pytest

from gpuimg.errors import BadStreamError, ImagesDirectoryError, SocketPathError
from gpuimg.stream import protocol


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def open_fds() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_messages_have_the_documented_bytes(pair):
    ours, theirs = pair
    assert protocol.encode_request("inventory.img") == bytes.fromhex("0f0000000a0d696e76656e746f72792e696d67")
    assert protocol.encode_reply(True) == bytes.fromhex("020000000801")
    assert protocol.encode_reply(False) == bytes.fromhex("020000000800")
    theirs.sendall(bytes.fromhex("0f0000000a0d696e76656e746f72792e696d67"))
    assert protocol.receive_request(ours) == "inventory.img"
    protocol.send_reply(ours, False)
    assert theirs.recv(100) == bytes.fromhex("020000000800")


def test_a_request_may_come_byte_by_byte_and_nothing_behind_it_is_taken(pair, pipe):
    ours, theirs = pair
    message = protocol.encode_request("core-1.img")

    def send():
        for byte in message:
            theirs.sendall(bytes((byte,)))
            time.sleep(0.001)
        socket.send_fds(theirs, [b"\0"], [pipe[0]])
        theirs.sendall(protocol.encode_request("core-2.img"))

    thread = threading.Thread(target=send)
    thread.start()
    assert protocol.receive_request(ours) == "core-1.img"
    fd = protocol.receive_pipe(ours, writable=False)
    os.write(pipe[1], b"through")
    assert os.read(fd, 100) == b"through"
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert protocol.receive_request(ours) == "core-2.img"
    thread.join()


def test_the_end_of_the_connection_is_no_error_between_requests(pair):
    ours, theirs = pair
    theirs.close()
    assert protocol.receive_request(ours) is None


@pytest.mark.parametrize("sent", [b"\x0f\0", b"\x0f\0\0\0", b"\x0f\0\0\0\x0a\x0dinv"])
def test_a_request_cut_short_is_an_error(pair, sent):
    ours, theirs = pair
    theirs.sendall(sent)
    theirs.close()
    with pytest.raises(BadStreamError, match="EOF unexpectedly reached"):
        protocol.receive_request(ours)


@pytest.mark.parametrize("length", [2**32 - 1, 2**31, protocol.MAX_REQUEST + 1])
def test_a_hostile_length_allocates_nothing(pair, length):
    ours, theirs = pair
    theirs.sendall(struct.pack("<I", length))
    with pytest.raises(BadStreamError, match="no file name is that long"):
        protocol.receive_request(ours)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x0a\x00",
        b"\x0a\x01/",
        b"\x0a\x03a/b",
        b"\x0a\x01.",
        b"\x0a\x02..",
        b"\x0a\x03a\0b",
        b"\x0a\x02\xff\xfe",
        b"\x0a\x09short",
        b"\x08\x01",
        b"\x0b",
        b"\x00",
        b"\xff" * 11,
        b"\x0a\x81\x20" + b"n" * 4097,
    ],
)
def test_a_hostile_request_is_refused(body):
    with pytest.raises(BadStreamError):
        protocol.decode_request(body)


def test_unknown_fields_and_long_names_are_fine():
    assert protocol.decode_request(b"\x10\x05\x0a\x01a\x1a\x02xx\x25\0\0\0\0\x29" + bytes(8)) == "a"
    name = "n" * protocol.MAX_NAME
    assert protocol.decode_request(protocol.encode_request(name)[4:]) == name


@pytest.mark.parametrize("body", [b"", b"\x0a\x00", b"\x08", b"\x10\x01"])
def test_a_hostile_reply_is_refused(body):
    with pytest.raises(BadStreamError):
        protocol.decode_reply(body)


def test_only_one_pipe_of_the_right_direction_is_accepted(pair, pipe, tmp_path):
    ours, theirs = pair
    with (tmp_path / "file").open("wb") as file:
        before = open_fds()
        for fds in ([], [pipe[0], pipe[0]], [pipe[0]] * 5, [file.fileno()], [pipe[1]]):
            if fds:
                socket.send_fds(theirs, [b"\0"], fds)
            else:
                theirs.sendall(b"\0")
            with pytest.raises(BadStreamError):
                protocol.receive_pipe(ours, writable=False)
        assert open_fds() == before
    theirs.close()
    with pytest.raises(BadStreamError, match="EOF unexpectedly reached"):
        protocol.receive_pipe(ours, writable=False)


@pytest.fixture
def wake():
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


@pytest.fixture(params=[0, 0o777])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def connect(path):
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path))
    return client


@pytest.mark.usefixtures("umask")
def test_directory_and_socket_belong_to_their_owner_whatever_the_umask(tmp_path, wake):
    directory = tmp_path / "new"
    protocol.prepare_directory(directory)
    listener = protocol.Listener(directory / "socket")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(listener.path.stat().st_mode) == 0o600
    with connect(listener.path), listener.accept(wake) as connection:
        assert connection is not None
        assert not listener.path.exists()


def test_an_existing_directory_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    protocol.prepare_directory(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ImagesDirectoryError):
        protocol.prepare_directory(tmp_path / "file" / "below")


def test_a_stale_socket_is_replaced_and_another_file_is_not(tmp_path, wake):
    path = tmp_path / "socket"
    first = protocol.Listener(path)
    second = protocol.Listener(path)
    first.close()
    assert path.exists()
    with connect(path), second.accept(wake):
        pass
    path.write_text("precious")
    with pytest.raises(ImagesDirectoryError, match="in the way"):
        protocol.Listener(path)
    assert path.read_text() == "precious"


def test_a_path_must_fit_into_the_kernel(tmp_path):
    room = protocol.MAX_SOCKET_PATH - len(os.fsencode(tmp_path)) - 1
    protocol.Listener(tmp_path / ("x" * room)).close()
    with pytest.raises(SocketPathError, match="shorter"):
        protocol.Listener(tmp_path / ("x" * (room + 1)))


def test_waiting_for_criu_can_be_ended(tmp_path, wake):
    listener = protocol.Listener(tmp_path / "socket")
    threading.Timer(0.05, os.eventfd_write, (wake, 1)).start()
    assert listener.accept(wake) is None
    listener.close()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_other_users_are_turned_away_and_do_not_count(tmp_path, wake):
    listener = protocol.Listener(tmp_path / "socket")
    # As if somebody had opened the permissions up: the peer's credentials still decide.
    listener.path.chmod(0o777)
    tmp_path.chmod(0o777)
    folder = os.open(tmp_path, os.O_PATH)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.fchdir(folder)
            os.setresuid(65534, 65534, 65534)
            client = socket.socket(socket.AF_UNIX)
            client.connect("socket")
            status = 0 if client.recv(1) == b"" else 2
        finally:
            os._exit(status)
    os.close(folder)
    result = []
    thread = threading.Thread(target=lambda: result.append(listener.accept(wake)), daemon=True)
    thread.start()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with connect(listener.path):
        thread.join()
        assert result[0] is not None
        result[0].close()
