"""The shard stream: one ordered sequence of markers spread over several pipes.

Byte-compatible with criu-image-streamer in both directions. The writer is a `CaptureSink`; the reader feeds a
`StreamConsumer` and raises BadStreamError for everything that is not a whole image.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence

from gpuimg.errors import BadStreamError, InputOutputError
from gpuimg.stream import markers, pipes
from gpuimg.stream.markers import Kind, Marker
from gpuimg.stream.seams import StreamConsumer, StreamFile

WRITE_CAPACITY = pipes.MIB
READ_CAPACITY = pipes.MIB // 2
COPY_LIMIT = 16 * 1024
"""Up to this many bytes copying is cheaper than a system call more for splice."""
READ_AHEAD = 4096
"""Bytes read at once while looking for markers; what is read here is copied instead of spliced."""
NOT_PIPES = "Image shards (input/output) must be pipes. You may use `cat` or `pv` (faster) to create one."


def require_shards(fds: Sequence[int]) -> None:
    """BadStreamError unless all are pipes, each named once."""
    for fd in fds:
        if not pipes.is_pipe(fd):
            raise BadStreamError(f"{NOT_PIPES}: fd {fd} is not a pipe")
    if len(set(fds)) != len(fds):
        raise BadStreamError("a shard is named twice")


class ShardWriter:
    """Writes files into shards, each chunk to the shard with the most room, so that a slow one delays nobody.

    Parameters
    ----------
    fds
        The write ends. They stay the caller's to close.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        require_shards(fds)
        self._fds = list(fds)
        self._capacity = pipes.equal_capacity(self._fds, WRITE_CAPACITY)
        self._chunk = max(self._capacity // 4 - pipes.PAGE, pipes.PAGE)
        self._free = [self._capacity] * len(self._fds)
        self._seq = 0
        self._current: ShardFile | None = None
        self.sizes = [0] * len(self._fds)
        """Bytes written to each shard, markers included."""

    def open(self, name: str) -> ShardFile:
        """Begin a file."""
        return ShardFile(self, name)

    def finish(self) -> None:
        """Say that the image is complete."""
        self._write(self._choose(0), self._marker(Kind.IMAGE_EOF))

    def _marker(self, kind: Kind, *, name: str = "", size: int = 0) -> bytes:
        encoded = markers.encode(Marker(self._seq, kind, name, size))
        self._seq += 1
        return encoded

    def _select(self, file: ShardFile) -> bytes:
        """The filename marker, if the stream is not at this file already."""
        if self._current is file:
            return b""
        self._current = file
        return self._marker(Kind.FILENAME, name=file.name)

    def _choose(self, size: int) -> int:
        """Index of the shard for `size` bytes of data and a page of markers."""
        if len(self._fds) == 1:
            return 0
        best = self._best()
        if self._free[best] < size + pipes.PAGE:
            # A pipe that somebody has enlarged holds more than we count on: never below zero.
            self._free = [max(0, self._capacity - pipes.readable_bytes(fd)) for fd in self._fds]
            best = self._best()
        return best

    def _best(self) -> int:
        return max(range(len(self._fds)), key=lambda index: (self._free[index], self._fds[index]))

    def _account(self, index: int, count: int) -> None:
        self._free[index] -= count
        self.sizes[index] += count

    def _failed(self, index: int, error: OSError) -> InputOutputError:
        return InputOutputError(
            f"cannot write to shard fd {self._fds[index]}: {error.strerror}",
            remedy="see why the program that reads this shard ended",
        )

    def _write(self, index: int, data: bytes | memoryview) -> None:
        try:
            pipes.write_all(self._fds[index], data)
        except OSError as error:
            raise self._failed(index, error) from error
        self._account(index, len(data))

    def put(self, file: ShardFile, data: bytes | memoryview) -> None:
        """Write a chunk of `file`, copying."""
        index = self._choose(len(data))
        header = self._select(file) + self._marker(Kind.FILE_DATA, size=len(data))
        if len(data) <= COPY_LIMIT:
            self._write(index, header + data)
        else:
            self._write(index, header)
            self._write(index, data)

    def put_all(self, file: ShardFile, data: bytes | memoryview) -> None:
        """Write any amount of data in chunks, copying."""
        for begin in range(0, len(data), self._chunk):
            self.put(file, data[begin : begin + self._chunk])

    def splice(self, file: ShardFile, fd: int, count: int) -> None:
        """Move `count` bytes, which must lie in the pipe `fd`, without copying."""
        while count:
            size = min(count, self._chunk)
            index = self._choose(size)
            self._write(index, self._select(file) + self._marker(Kind.FILE_DATA, size=size))
            left = size
            while left:
                try:
                    moved = pipes.splice_pipes(fd, self._fds[index], left)
                except OSError as error:
                    raise self._failed(index, error) from error
                if moved == 0:
                    raise InputOutputError(f"a pipe lost bytes of {file.name} that it held")
                left -= moved
            self._account(index, size)
            count -= size

    def end(self, file: ShardFile) -> None:
        """Say that `file` is complete."""
        self._write(self._choose(0), self._select(file) + self._marker(Kind.FILE_EOF))
        # A later file of the same name must be announced again: readers forget the name here.
        self._current = None


class ShardFile:
    """One file on its way into the shards; a `FileSink`."""

    __slots__ = ("_writer", "name")

    def __init__(self, writer: ShardWriter, name: str) -> None:
        self._writer = writer
        self.name = name

    def pump(self, fd: int) -> int:
        """Move what lies in the pipe; call only when poll has reported the pipe."""
        count = pipes.readable_bytes(fd)
        if count == 0:
            return 0
        if count <= COPY_LIMIT:
            data = os.read(fd, count)
            self._writer.put(self, data)
            return len(data)
        self._writer.splice(self, fd, count)
        return count

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes from memory."""
        self._writer.put_all(self, data)

    def close(self) -> None:
        """The file is complete."""
        self._writer.end(self)


class _Shard:
    """One input pipe and the little that was read ahead of it."""

    __slots__ = ("buffer", "duration", "eof", "fd", "position", "size")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.buffer = b""
        self.position = 0
        self.eof = False
        self.size = 0
        self.duration = 0.0

    def read_ahead(self, started: float) -> bool:
        """Read a little more; False at end of file."""
        try:
            data = pipes.read_some(self.fd, READ_AHEAD)
        except OSError as error:
            raise InputOutputError(f"cannot read shard fd {self.fd}: {error.strerror}") from error
        if not data:
            self.eof = True
            self.duration = time.monotonic() - started
            return False
        self.size += len(data)
        self.buffer = self.buffer[self.position :] + data if self.position < len(self.buffer) else data
        self.position = 0
        return True

    @property
    def buffered(self) -> int:
        return len(self.buffer) - self.position

    def take_marker(self) -> Marker | None:
        """The next marker if all of it was read ahead."""
        begin = self.position + markers.LENGTH.size
        if begin > len(self.buffer):
            return None
        (length,) = markers.LENGTH.unpack_from(self.buffer, self.position)
        if not 0 < length < markers.MAX_MARKER:
            raise BadStreamError(f"Malformed image marker: a length of {length} bytes")
        if begin + length > len(self.buffer):
            return None
        self.position = begin + length
        return markers.decode(self.buffer[begin : begin + length])

    def take(self, limit: int) -> memoryview:
        """At most `limit` bytes of what was read ahead."""
        end = min(self.position + limit, len(self.buffer))
        view = memoryview(self.buffer)[self.position : end]
        self.position = end
        return view


class ShardReader:
    """Reads shards to their end and hands their files to a consumer.

    Parameters
    ----------
    fds
        The read ends. They stay the caller's to close.
    consumer
        Takes the files; its errors pass through.
    """

    def __init__(self, fds: Sequence[int], consumer: StreamConsumer) -> None:
        require_shards(fds)
        self._shards = [_Shard(fd) for fd in fds]
        for fd in fds:
            pipes.try_capacity(fd, READ_CAPACITY)
        self._consumer = consumer
        self._pending: dict[int, tuple[_Shard, Marker]] = {}
        self._waiting = list(self._shards)
        self._seq = 0
        self._open: dict[str, StreamFile] = {}
        self._name: str | None = None
        self._file: StreamFile | None = None
        self._started = time.monotonic()

    @property
    def sizes(self) -> list[int]:
        """Bytes read from each shard, markers included."""
        return [shard.size for shard in self._shards]

    @property
    def durations(self) -> list[float]:
        """Seconds from the start to the end of each shard."""
        return [shard.duration for shard in self._shards]

    def run(self) -> None:
        """Read everything; returns only if the image was whole."""
        self._started = time.monotonic()
        while True:
            shard, marker = self._next()
            if marker.kind is Kind.IMAGE_EOF:
                break
            self._process(shard, marker)
            self._waiting.append(shard)
        if self._open or self._pending:
            raise BadStreamError(f"Image EOF marker came unexpectedly{self._unfinished()}")
        for each in self._shards:
            if each.buffered or (not each.eof and each.read_ahead(self._started)):
                raise BadStreamError(f"Unexpected data after image EOF on shard fd {each.fd}")

    def _unfinished(self) -> str:
        if not self._open:
            return ""
        return f": {next(iter(self._open))} is not finished"

    def _next(self) -> tuple[_Shard, Marker]:
        """The marker whose turn it is, and its shard."""
        while self._seq not in self._pending:
            self._waiting = [shard for shard in self._waiting if not self._take_pending(shard)]
            if self._seq in self._pending:
                break
            self._waiting = [shard for shard in self._waiting if not shard.eof]
            if not self._waiting:
                raise BadStreamError(
                    f"No shards to read from: they ended before marker {self._seq}, the image is incomplete",
                    remedy="give all shards of one capture that ended well",
                )
            for shard in self._readable():
                if not shard.read_ahead(self._started) and shard.buffered:
                    raise BadStreamError(f"EOF unexpectedly reached within a marker on shard fd {shard.fd}")
        found = self._pending.pop(self._seq)
        self._seq += 1
        return found

    def _take_pending(self, shard: _Shard) -> bool:
        marker = shard.take_marker()
        if marker is None:
            return False
        if marker.seq < self._seq or marker.seq in self._pending:
            raise BadStreamError(f"marker {marker.seq} comes twice; are these the shards of one capture?")
        self._pending[marker.seq] = (shard, marker)
        return True

    def _readable(self) -> list[_Shard]:
        """Shards that have something, of those that are waited for.

        Others must not be read: with capture at the other end, what they hold comes later.
        """
        if len(self._waiting) == 1:
            return self._waiting
        poll = select.poll()
        for shard in self._waiting:
            poll.register(shard.fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        return [shard for shard in self._waiting if shard.fd in ready]

    def _process(self, shard: _Shard, marker: Marker) -> None:
        if marker.kind is Kind.FILENAME:
            self._select(marker.name)
            return
        if self._file is None or self._name is None:
            which = "FileData" if marker.kind is Kind.FILE_DATA else "FileEof"
            raise BadStreamError(f"Unexpected {which} marker")
        if marker.kind is Kind.FILE_DATA:
            self._copy(shard, self._file, marker.size)
            return
        self._file.close()
        del self._open[self._name]
        self._name = self._file = None

    def _select(self, name: str) -> None:
        file = self._open.get(name)
        if file is None:
            file = self._open[name] = self._consumer.open(name)
        self._name, self._file = name, file

    def _copy(self, shard: _Shard, file: StreamFile, size: int) -> None:
        """Hand over the data behind a marker, all of it."""
        while size:
            if not shard.buffered and size >= READ_AHEAD:
                size -= self._fill(shard, file, size)
                continue
            if not shard.buffered and not shard.read_ahead(self._started):
                raise self._cut_short(shard)
            view = shard.take(size)
            file.write(view)
            size -= len(view)

    def _fill(self, shard: _Shard, file: StreamFile, limit: int) -> int:
        while True:
            try:
                count = file.fill(shard.fd, limit)
            except BlockingIOError:
                pipes.wait_for(shard.fd, select.POLLIN)
                continue
            if count == 0:
                raise self._cut_short(shard)
            shard.size += count
            return count

    def _cut_short(self, shard: _Shard) -> BadStreamError:
        return BadStreamError(f"EOF unexpectedly reached within {self._name} on shard fd {shard.fd}")
