"""The executable that takes the place of criu-image-streamer: same options, sockets, progress lines and
format.

Only what it needs is imported: zdtm starts it three times for every test.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence

from gpuimg.errors import BadStreamError, GpuimgError, InputOutputError, UsageError
from gpuimg.stream import options as command_line
from gpuimg.stream import pipes
from gpuimg.stream.options import Options
from gpuimg.stream.progress import Progress
from gpuimg.stream.seams import ImageSource, StreamConsumer, StreamFile

PROGRAM = "criu-image-streamer"
UPSTREAM_VERSION = "1.0.0"
EXT_CAPACITY = pipes.MIB
TAR_BLOCK = 512
COPY_SIZE = 256 * 1024


def version() -> str:
    """The line that --version prints."""
    from gpuimg import __version__

    return f"{PROGRAM} {UPSTREAM_VERSION} (gpuimg {__version__})\n"


class _ExtFile:
    """A file of the stream that goes straight to a pipe that was given for it.

    Its bytes go out in whole blocks: tar, which reads such a pipe most often, takes a read that ends within
    a block for a broken archive.
    """

    def __init__(self, name: str, fd: int) -> None:
        self._name = name
        self._fd = fd
        self._held = b""
        self._gone = False

    def write(self, data: bytes | memoryview) -> None:
        if self._held:
            data = self._held + data
        whole = len(data) & -TAR_BLOCK
        self._held = bytes(data[whole:])
        self._put(data[:whole])

    def fill(self, fd: int, limit: int) -> int:
        data = pipes.read_some(fd, min(limit, COPY_SIZE))
        self.write(data)
        return len(data)

    def close(self) -> None:
        self._put(self._held)
        os.close(self._fd)

    def _put(self, data: bytes | memoryview) -> None:
        if self._gone or not data:
            return
        try:
            pipes.write_all(self._fd, data)
        except BrokenPipeError:
            # The rest is dropped: like tar, a reader may know where its data end.
            self._gone = True
            print(f"{PROGRAM} Warn: {self._name} was not read to its end", file=sys.stderr)


class _WithExtFiles:
    """A `StreamConsumer` that sends some files to pipes and the rest to another consumer."""

    def __init__(self, consumer: StreamConsumer, ext_files: Sequence[tuple[str, int]]) -> None:
        self._consumer = consumer
        self._fds = dict(ext_files)
        self._sent: set[str] = set()

    def open(self, name: str) -> StreamFile:
        if name in self._sent:
            raise BadStreamError(f"{name} is in the stream twice")
        fd = self._fds.pop(name, None)
        if fd is None:
            return self._consumer.open(name)
        self._sent.add(name)
        return _ExtFile(name, fd)

    def close_unused(self) -> None:
        """Close the pipes whose file is not in the stream."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def capture(options: Options, shard_fds: list[int], progress: Progress) -> None:
    """From criu to the shards."""
    from gpuimg.stream.capture import Capture
    from gpuimg.stream.shards import ShardWriter

    started = time.monotonic()

    def on_start() -> None:
        nonlocal started
        started = time.monotonic()
        progress.line("checkpoint-start")

    writer = ShardWriter(shard_fds)
    session = Capture(options.images_dir, writer, ext_files=options.ext_file_fds, on_start=on_start)
    progress.line("socket-init")
    session.run()
    writer.finish()
    elapsed = time.monotonic() - started
    progress.shards(writer.sizes, [elapsed] * len(shard_fds))
    session.require_sound()


def _read(consumer: StreamConsumer, options: Options, shard_fds: list[int], progress: Progress) -> None:
    """From the shards to a consumer and the pipes of external files."""
    from gpuimg.stream.shards import ShardReader

    for _, fd in options.ext_file_fds:
        pipes.try_capacity(fd, EXT_CAPACITY)
    with_ext_files = _WithExtFiles(consumer, options.ext_file_fds)
    reader = ShardReader(shard_fds, with_ext_files)
    reader.run()
    with_ext_files.close_unused()
    progress.shards(reader.sizes, reader.durations)


def serve(options: Options, shard_fds: list[int], progress: Progress) -> None:
    """From the shards to criu."""
    from gpuimg.stream.protocol import prepare_directory
    from gpuimg.stream.serve import Serve
    from gpuimg.stream.spool import Spool

    prepare_directory(options.images_dir)
    with contextlib.closing(Spool(options.images_dir)) as spool:
        _read(spool, options, shard_fds, progress)
        source: ImageSource = spool
        if options.tcp_listen_remap:
            from gpuimg.stream.remap import FILES_IMAGE, RemappedSource

            source = RemappedSource(spool, spool.read(FILES_IMAGE), options.tcp_listen_remap)
        session = Serve(options.images_dir, source)
        progress.line("socket-init")
        session.run()


def extract(options: Options, shard_fds: list[int], progress: Progress) -> None:
    """From the shards to files."""
    from gpuimg.stream.directory import DirectoryConsumer
    from gpuimg.stream.protocol import prepare_directory

    prepare_directory(options.images_dir)
    with contextlib.closing(DirectoryConsumer(options.images_dir)) as directory:
        _read(directory, options, shard_fds, progress)


_OPERATIONS = {"capture": capture, "serve": serve, "extract": extract}


def _run(options: Options) -> None:
    if options.tcp_listen_remap and options.operation != "serve":
        raise UsageError("--tcp-listen-remap is only supported when serving the image")
    for name, fd in options.ext_file_fds:
        if not pipes.is_pipe(fd):
            raise BadStreamError(f"external file {name} must be a pipe: fd {fd} is not a pipe")
    progress_fd = 2 if options.progress_fd is None else options.progress_fd
    try:
        os.fstat(progress_fd)
    except OSError as error:
        raise InputOutputError(f"the progress fd is not open: {error.strerror}") from error
    shard_fds = options.shard_fds or [1 if options.operation == "capture" else 0]
    _OPERATIONS[options.operation](options, shard_fds, Progress(progress_fd))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status: 0, 1 for usage, otherwise the error's own."""
    try:
        options = command_line.parse(sys.argv[1:] if arguments is None else arguments, PROGRAM, version)
    except command_line.HelpRequested as help_text:
        with contextlib.suppress(OSError):
            pipes.write_all(1, str(help_text).encode())
        return 0
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        _run(options)
    except GpuimgError as error:
        with contextlib.suppress(OSError):
            print(f"{PROGRAM} Error: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
