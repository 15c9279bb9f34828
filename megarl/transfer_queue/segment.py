"""One file of the journal: a header, then frames of one record each, which are whole or not there.

A frame is the payload's length and a CRC-32 of length and payload (both 32 bits, little-endian), then the payload. The
CRC is zlib's: it finds every single flipped bit and every burst of up to 32, comes with Python, and lets other threads
run meanwhile; CRC-32C would find no more and need another package. A file that power loss filled with zeros fails it.

Plain sequential writes and fsync, since journals lie on Lustre and GPFS: no mapping, no locks, no appending to a file
that another process wrote.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from megarl.transfer_queue.records import Base, Record

_MAGIC, _FORMAT = b"megarl-j", 1
_HEADER = struct.Struct("<8sII")  # magic, format version, CRC of both
_FRAME = struct.Struct("<II")
_NAME = re.compile(r"(\d{8})\.journal")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Base | Record)


class JournalError(RuntimeError):
    """The journal cannot be written or read; the message names the file and says what to do."""


class DamagedError(Exception):
    """From `offset` on a segment holds no whole records, as far as can be told; `size` is the file's."""

    def __init__(self, why: str, offset: int, size: int) -> None:
        super().__init__(f"{why} at byte {offset}; the {size - offset} bytes from there on are left out")


class Place(NamedTuple):
    """Where a frame lies; `length` bytes are the whole frame."""

    segment: int
    offset: int
    length: int


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08d}.journal"


def segment_numbers(directory: Path) -> list[int]:
    """Numbers of the segments that exist, in order; none if the directory does not exist."""
    try:
        return sorted(int(match[1]) for name in os.listdir(directory) if (match := _NAME.fullmatch(name)))
    except FileNotFoundError:
        return []


def encode_frame(record: Base | Record) -> bytearray:
    frame = bytearray(_FRAME.size)
    _encoder.encode_into(record, frame, _FRAME.size)
    length = len(frame) - _FRAME.size
    _FRAME.pack_into(frame, 0, length, _checksum(length, memoryview(frame)[_FRAME.size :]))
    return frame


class SegmentWriter:
    """A new file; its first `size` bytes are whole."""

    def __init__(self, path: Path, base: Base) -> None:
        """Raises JournalError: the file cannot be made, or exists."""
        self.path, self.size, self.broken = path, 0, False
        with writing(path, "make the file"):
            self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            start = _HEADER.pack(_MAGIC, _FORMAT, _header_checksum(_FORMAT))
            self.write(start + encode_frame(base))
        except BaseException:
            os.close(self.fd)
            with suppress(OSError):
                path.unlink()
            raise

    def write(self, frame: bytes | bytearray) -> None:
        """All of `frame`, or nothing. Raises JournalError: it cannot be written."""
        rest = memoryview(frame)
        try:
            with writing(self.path, f"write {len(frame)} bytes"):
                while rest:
                    rest = rest[os.write(self.fd, rest) :]
        except BaseException:
            self._cut()
            raise
        self.size += len(frame)

    def _cut(self) -> None:
        """Remove what a failed write left behind; where that fails too, the file is `broken`: nothing may follow."""
        try:
            os.ftruncate(self.fd, self.size)
            os.lseek(self.fd, self.size, os.SEEK_SET)
        except OSError:
            self.broken = True


def scan(path: Path) -> Iterator[tuple[int, int, Base | Record]]:
    """Offset, length of the frame and record, in order.

    Raises DamagedError after the last whole record, if the file goes on. Raises JournalError: the file cannot be read,
    or is of another format.
    """
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise DamagedError("ends within its header", 0, size)
        magic, version, checksum = _HEADER.unpack(header)
        if magic != _MAGIC or checksum != _header_checksum(version):
            raise DamagedError("the header is damaged", 0, size)
        if version != _FORMAT:
            raise JournalError(
                f"{path}: is a journal of format {version}, expected {_FORMAT}: resume the run with the release of"
                " megarl that began it, or move the journal's directory away to generate anew what it holds"
            )
        offset = _HEADER.size
        while frame := file.read(_FRAME.size):
            length = _FRAME.unpack(frame)[0] if len(frame) == _FRAME.size else 0
            if len(frame) < _FRAME.size or offset + _FRAME.size + length > size:
                raise DamagedError("ends within a record", offset, size)
            frame += file.read(length)
            payload = _payload(frame)
            if payload is None:
                raise DamagedError("a record fails its checksum", offset, size)
            yield offset, len(frame), _decode(path, offset, payload)
            offset += len(frame)


def read_frame(file: BinaryIO, place: Place) -> bytes:
    """The whole frame. Raises JournalError: it is not there any more as it was written."""
    file.seek(place.offset)
    frame = file.read(place.length)
    if len(frame) < place.length or _payload(frame) is None:
        raise JournalError(
            f"{file.name}: the record at byte {place.offset} was whole before and is damaged now: see whether the disk"
            " is well; when the run is resumed, the journal goes on without it"
        )
    return frame


def decode_frame(frame: bytes) -> Base | Record:
    """The record of a whole frame, which was decoded before."""
    return _decoder.decode(memoryview(frame)[_FRAME.size :])


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """The file; what goes wrong meanwhile is a JournalError, since another try may well read it."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise JournalError(
            f"{path}: cannot be read: {error.strerror}; try again, or move it away to generate anew what it holds"
        ) from None


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """What goes wrong meanwhile is a JournalError."""
    try:
        yield
    except OSError as error:
        raise JournalError(
            f"{path}: cannot {what}: {error.strerror}; what was recorded before is kept: make room (space, quota,"
            " number of files) or repair the file system, then resume the run"
        ) from None


def sync_path(path: Path) -> None:
    """Bring a directory's entries to disk, or a file's content, whoever wrote it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _decode(path: Path, offset: int, payload: memoryview) -> Base | Record:
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise JournalError(
            f"{path}: the record at byte {offset} is whole but of no known kind ({error}): resume the run with the"
            " release of megarl that wrote it, or move the file away to generate anew what it holds"
        ) from None


def _payload(frame: bytes) -> memoryview | None:
    """Of a frame of the right length; None if it is damaged."""
    length, checksum = _FRAME.unpack_from(frame)
    payload = memoryview(frame)[_FRAME.size :]
    return payload if len(payload) == length and _checksum(length, payload) == checksum else None


def _checksum(length: int, payload: memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(length.to_bytes(4, "little")))


def _header_checksum(version: int) -> int:
    return zlib.crc32(_MAGIC + version.to_bytes(4, "little"))
