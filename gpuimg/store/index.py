"""The LMDB index: chunk id → place (docs/store-format.md, "Index").

A cache of what the packs say. LMDB's rules that matter here: one environment per process and file
(the store's registry sees to it), none across fork, the map must grow when it is full (while no
transaction of this process runs), and another process may have grown it.
"""

from __future__ import annotations

import functools
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lmdb

from gpuimg.errors import GpuimgError, IndexBrokenError, NoSpaceError, UsageError
from gpuimg.store.files import describe_os_error, make_folder, os_errors
from gpuimg.store.hashing import ID_SIZE
from gpuimg.store.pack import HAS_BASE, MAX_CHAIN, MAX_RAW, OBJECT_HEADER_SIZE, PackInfo

FORMAT = b"2"
_INITIAL_MAP = 1 << 30
_MAX_READERS = 1024
# More than LMDB needs for so many readers.
_LOCK_FILE_SIZE = 96 * 1024
_BATCH = 4096
_MAX_OFFSET = 1 << 62
_PLACE = struct.Struct(">IIQIIBBH")
_PACK_VALUE = struct.Struct(">32sIQ")
_NUMBER = struct.Struct(">I")
# Magic and version in the first meta page, behind LMDB's page header.
_LMDB_MAGIC = (0xBEEFC0DE).to_bytes(4, "little")

T = TypeVar("T")


class Place(NamedTuple):
    """Where a chunk lies: pack number, ordinal in the pack, payload offset and lengths, coding.

    `base` is the id of the chunk it is coded against, or empty.
    """

    pack: int
    ordinal: int
    offset: int
    stored: int
    raw: int
    codec: int
    element_size: int
    flags: int
    base: bytes = b""


class PackEntry(NamedTuple):
    """A pack the index knows: its id, number of objects and file size."""

    id: bytes
    objects: int
    size: int


class _Gate:
    """Lets transactions run side by side, and the map change its size only while none runs."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._waiting = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        with self._condition:
            while self._waiting:
                self._condition.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._condition:
            self._waiting += 1
            try:
                while self._inside:
                    self._condition.wait()
                yield
            finally:
                self._waiting -= 1
                self._condition.notify_all()


class Index:
    """The open index of one store.

    Raises
    ------
    IndexBrokenError
        By every method, when the files are unreadable or belong to another store.
    """

    def __init__(self, folder: Path, store_id: bytes, *, map_size: int = _INITIAL_MAP) -> None:
        self.folder = folder
        self._store_id = store_id
        self._map_size = map_size
        self._gate = _Gate()
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        with os_errors(f"opening the index {self.folder}"):
            # LMDB would make it, without the permission to enter it.
            make_folder(self.folder)
        self._check_file()
        umask = os.umask(0o077)
        try:
            self._env = lmdb.open(
                str(self.folder),
                map_size=self._map_size,
                max_dbs=4,
                max_readers=_MAX_READERS,
                mode=0o600,
                readahead=False,
                meminit=False,
            )
        except lmdb.Error as error:
            raise self._translate(error) from error
        finally:
            os.umask(umask)
        try:
            # As long as it is open its number is not given to another file.
            self._inode = (self.folder / "data.mdb").stat().st_ino
            self._env.reader_check()
            self._open_tables()
        except lmdb.Error as error:
            self._env.close()
            raise self._translate(error) from error
        except GpuimgError:
            self._env.close()
            raise

    def close(self) -> None:
        self._env.close()

    def remake(self) -> None:
        """Begin anew with empty files, because these cannot be used."""
        self.close()
        delete_files(self.folder)
        self._open()

    def replaced(self) -> bool:
        """Whether another process has made the index anew since it was opened here."""
        try:
            return (self.folder / "data.mdb").stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    def _check_file(self) -> None:
        """Refuse a file that LMDB would crash on rather than report."""
        self._reserve_lock_file()
        path = self.folder / "data.mdb"
        try:
            with path.open("r+b") as stream:
                head = stream.read(24)
            size = path.stat().st_size
        except FileNotFoundError:
            return
        except OSError as error:
            raise describe_os_error(error, f"reading the index {path}") from error
        if size and (size < 8192 or head[16:20] != _LMDB_MAGIC):
            raise self._broken("its file is no LMDB database")

    def _reserve_lock_file(self) -> None:
        """Give the lock file its blocks: LMDB maps it, and a full disk would end the process by a signal.

        Not while the index is open in this process: that would let LMDB's locks on the file go.
        """
        with os_errors(f"opening the index {self.folder}"):
            fd = os.open(self.folder / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(fd).st_size < _LOCK_FILE_SIZE:
                    os.fchmod(fd, 0o600)
                    os.posix_fallocate(fd, 0, _LOCK_FILE_SIZE)
            finally:
                os.close(fd)

    def _open_tables(self) -> None:
        with self._env.begin() as txn:
            info = self._env.info()
            if (info["last_pgno"] + 1) * self._env.stat()["psize"] > (
                self.folder / "data.mdb"
            ).stat().st_size and info["last_txnid"] > 0:
                raise self._broken("its file is cut short")
            del txn
        names = (b"meta", b"packs", b"pack_numbers", b"chunks")
        self._meta, self._packs, self._numbers, self._chunks = (self._env.open_db(name) for name in names)

        with self._env.begin() as txn:
            owner, version = txn.get(b"store", db=self._meta), txn.get(b"format", db=self._meta)
        if owner is None:
            self._write(self._stamp)
        elif owner != self._store_id:
            raise self._broken("it belongs to another store")
        elif version != FORMAT:
            raise self._broken("its format is not this gpuimg's")

    def _stamp(self, txn: Any) -> None:
        txn.put(b"store", self._store_id, db=self._meta)
        txn.put(b"format", FORMAT, db=self._meta)
        txn.put(b"epoch", os.urandom(16), db=self._meta)

    def _broken(self, why: str) -> IndexBrokenError:
        return IndexBrokenError(
            f"the index in {self.folder} cannot be used: {why}",
            remedy="run `gpuimg repair`, which rebuilds it from the packs",
        )

    def _translate(self, error: Exception) -> GpuimgError:
        if os.getpid() != self._pid:
            return UsageError("this store was opened before a fork", remedy="open it anew in the child")
        if isinstance(error, lmdb.DiskError) or "No space left" in str(error):
            return NoSpaceError(
                f"writing the index in {self.folder} failed: no space left on device",
                remedy="free some space (for instance with `gpuimg gc`) and try again",
            )
        if isinstance(error, lmdb.ReadersFullError):
            return IndexBrokenError(
                f"more than {_MAX_READERS} readers use the index in {self.folder} at once",
                remedy="wait until some of them have ended",
            )
        return self._broken(str(error))

    def _read(self, action: Callable[[Any], T]) -> T:
        """Run `action` in a read transaction, after another process grew the map if need be."""
        while True:
            try:
                with self._gate.inside(), self._env.begin(buffers=False) as txn:
                    return action(txn)
            except lmdb.MapResizedError:
                self._resize(0)
            except lmdb.Error as error:
                raise self._translate(error) from error

    def _write(self, action: Callable[[Any], T]) -> T:
        """Run `action` in a synced write transaction; doubles the map and repeats when it is full."""
        while True:
            try:
                with self._gate.inside(), self._env.begin(write=True) as txn:
                    return action(txn)
            except lmdb.MapFullError:
                self._resize(self._env.info()["map_size"] * 2)
            except lmdb.MapResizedError:
                self._resize(0)
            except lmdb.Error as error:
                raise self._translate(error) from error

    def _resize(self, size: int) -> None:
        with self._gate.alone():
            try:
                self._env.set_mapsize(size)
            except lmdb.Error as error:
                raise self._translate(error) from error

    def epoch(self) -> bytes:
        """A token that changes whenever entries are removed."""
        found: bytes = self._read(lambda txn: txn.get(b"epoch", db=self._meta))
        return found

    def contains(self, chunk_ids: Iterable[bytes]) -> list[bool]:
        """Whether each chunk is known."""

        def action(txn: Any) -> list[bool]:
            return [txn.get(chunk_id, db=self._chunks) is not None for chunk_id in chunk_ids]

        return self._read(action)

    def contains_whole(self, chunk_ids: Iterable[bytes]) -> list[bool]:
        """Whether each chunk is known and all that it is coded against."""
        return self._read(lambda txn: [self._is_whole(txn, chunk_id) for chunk_id in chunk_ids])

    def _is_whole(self, txn: Any, chunk_id: bytes) -> bool:
        for _ in range(MAX_CHAIN + 1):
            value = txn.get(chunk_id, db=self._chunks)
            if value is None:
                return False
            if len(value) <= _PLACE.size:
                return True
            chunk_id = value[_PLACE.size :]
        return False

    def lookup(self, chunk_ids: Iterable[bytes]) -> list[Place | None]:
        """The place of each chunk, None where it is unknown."""

        def action(txn: Any) -> list[Place | None]:
            values = [txn.get(chunk_id, db=self._chunks) for chunk_id in chunk_ids]
            return [_parse_place(value) if value is not None else None for value in values]

        try:
            return self._read(action)
        except (struct.error, ValueError):
            raise self._broken("an entry has impossible values") from None

    def pack(self, number: int) -> PackEntry | None:
        """The pack of that number."""
        value = self._read(lambda txn: txn.get(_NUMBER.pack(number), db=self._packs))
        try:
            return PackEntry._make(_PACK_VALUE.unpack(value)) if value is not None else None
        except struct.error:
            raise self._broken("an entry has the wrong size") from None

    def packs(self) -> dict[int, PackEntry]:
        """All packs by number."""

        def action(txn: Any) -> dict[int, PackEntry]:
            with txn.cursor(db=self._packs) as cursor:
                return {
                    _NUMBER.unpack(key)[0]: PackEntry._make(_PACK_VALUE.unpack(value))
                    for key, value in cursor
                }

        try:
            return self._read(action)
        except struct.error:
            raise self._broken("an entry has the wrong size") from None

    def chunk_count(self) -> int:
        """Number of chunks, recipe segments included."""
        count: int = self._read(lambda txn: txn.stat(self._chunks)["entries"])
        return count

    def places(self) -> Iterator[tuple[bytes, Place]]:
        """Every entry, in order of chunk id; what changes meanwhile may be in it or not."""
        start: bytes | None = b"\0"
        while start is not None:
            batch, start = self._read(functools.partial(self._places_from, start=start))
            yield from batch

    def _places_from(self, txn: Any, *, start: bytes) -> tuple[list[tuple[bytes, Place]], bytes | None]:
        """A number of entries from a chunk id on, and the id to go on with."""
        batch: list[tuple[bytes, Place]] = []
        with txn.cursor(db=self._chunks) as cursor:
            if cursor.set_range(start):
                try:
                    for chunk_id, value in cursor:
                        if len(batch) == _BATCH:
                            return batch, chunk_id
                        batch.append((chunk_id, _parse_place(value)))
                except (struct.error, ValueError):
                    raise self._broken("an entry has impossible values") from None
        return batch, None

    def add_pack(self, info: PackInfo, *, moves: bool = False) -> None:
        """Add a pack and its chunks; nothing happens if it is known.

        A chunk that is known elsewhere keeps its place, which marks of a collector may rest on, unless
        the pack `moves` its chunks or what the chunk is coded against there is lost.
        """
        self._write(lambda txn: self._put_pack(txn, info, moves=moves))

    def _put_pack(self, txn: Any, info: PackInfo, *, moves: bool = False) -> None:
        if txn.get(info.id, db=self._numbers) is not None:
            return
        # Numbers are never used twice: readers keep descriptors by number.
        number = _NUMBER.unpack(txn.get(b"next_pack", db=self._meta) or _NUMBER.pack(1))[0]
        txn.put(b"next_pack", _NUMBER.pack(number + 1), db=self._meta)
        key = _NUMBER.pack(number)
        txn.put(key, _PACK_VALUE.pack(info.id, len(info.toc), info.size), db=self._packs)
        txn.put(info.id, key, db=self._numbers)
        self._put_chunks(txn, number, info, moves=moves)

    def _put_chunks(self, txn: Any, number: int, info: PackInfo, *, moves: bool) -> None:
        items = []
        for ordinal, (offset, header) in enumerate(info.toc):
            chunk_id, codec, element_size, flags, raw, stored, base, _ = header
            place = _PLACE.pack(
                number, ordinal, offset + OBJECT_HEADER_SIZE, stored, raw, codec, element_size, flags
            )
            items.append((chunk_id, place + base if flags & HAS_BASE else place))
        items.sort()
        with txn.cursor(db=self._chunks) as cursor:
            _, added = cursor.putmulti(items, overwrite=moves)
        if added < len(items) and not moves:
            for chunk_id, value in items:
                if not self._is_whole(txn, chunk_id):
                    txn.put(chunk_id, value, db=self._chunks)

    def settle(self, infos: list[PackInfo]) -> None:
        """Place chunks anew whose bases are lost where they were entered, once all these packs are added.

        Of two copies of a chunk the one counts whose base is there, wherever that came in the list.
        """
        self._write(lambda txn: self._settle(txn, infos))

    def _settle(self, txn: Any, infos: list[PackInfo]) -> None:
        for info in infos:
            key = txn.get(info.id, db=self._numbers)
            if key is not None:
                self._put_chunks(txn, _NUMBER.unpack(key)[0], info, moves=False)

    def remove_packs(self, packs: dict[int, PackEntry], toc_ids: dict[int, list[bytes]]) -> None:
        """Forget packs and those chunks that lie in them (not elsewhere), and renew the epoch."""

        def action(txn: Any) -> None:
            for number, entry in packs.items():
                for chunk_id in toc_ids[number]:
                    value = txn.get(chunk_id, db=self._chunks)
                    if value is not None and _NUMBER.unpack_from(value)[0] == number:
                        txn.delete(chunk_id, db=self._chunks)
                txn.delete(_NUMBER.pack(number), db=self._packs)
                txn.delete(entry.id, db=self._numbers)
            txn.put(b"epoch", os.urandom(16), db=self._meta)

        self._write(action)

    def forget_lost(self, lost: dict[int, PackEntry], others: Iterable[PackInfo]) -> None:
        """Forget packs that are not there any more, and place their chunks where `others` have them."""
        listed = list(others)

        def action(txn: Any) -> None:
            with txn.cursor(db=self._chunks) as cursor:
                gone = [chunk_id for chunk_id, value in cursor if _NUMBER.unpack_from(value)[0] in lost]
            for chunk_id in gone:
                txn.delete(chunk_id, db=self._chunks)
            for number, entry in lost.items():
                txn.delete(_NUMBER.pack(number), db=self._packs)
                txn.delete(entry.id, db=self._numbers)
            for info in listed:
                key = txn.get(info.id, db=self._numbers)
                if key is not None:
                    self._put_chunks(txn, _NUMBER.unpack(key)[0], info, moves=False)
            txn.put(b"epoch", os.urandom(16), db=self._meta)

        try:
            self._write(action)
        except struct.error:
            raise self._broken("an entry has the wrong size") from None

    def rebuild(self, infos: Iterable[PackInfo]) -> None:
        """Replace everything by what these packs say, in one transaction."""
        listed = list(infos)

        def action(txn: Any) -> None:
            for table in (self._packs, self._numbers, self._chunks):
                txn.drop(table, delete=False)
            for info in listed:
                self._put_pack(txn, info)
            self._settle(txn, listed)
            txn.put(b"epoch", os.urandom(16), db=self._meta)

        self._write(action)


def delete_files(folder: Path) -> None:
    """Delete the files of an index that cannot be used."""
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).unlink(missing_ok=True)


def _parse_place(value: bytes) -> Place:
    """An entry of the table `chunks`; struct.error or ValueError if it cannot be one."""
    place = Place._make((*_PLACE.unpack_from(value), value[_PLACE.size :]))
    if len(place.base) != (ID_SIZE if place.flags & HAS_BASE else 0):
        raise ValueError("impossible base")
    if not 0 < place.stored <= place.raw <= MAX_RAW or place.offset >= _MAX_OFFSET:
        raise ValueError("impossible place")
    return place


def remove_unusable(folder: Path, store_id: bytes) -> None:
    """Delete the index files if they cannot be used; an index is a cache."""
    try:
        Index(folder, store_id).close()
    except IndexBrokenError:
        delete_files(folder)
