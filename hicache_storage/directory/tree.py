"""Where pages are: the directory tree, its descriptors and the way from a key to a file.

::

    root/
      <namespace digest>/
        namespace.json           the identity behind the digest, for people
        00/ .. ff/               by CRC-32 of the page name: 10 million pages make 39,000 a directory
          <page name>            one object, complete from the moment it has this name
      .hicache/                  bookkeeping; no namespace can have this name
        usage  *.lock  tmp/

Pages hold users' prompts: directories are 0700, files 0600. Every step below root is taken from
an open directory without following symlinks, so nothing planted in the tree leads out of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import string
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hicache_storage.directory.oserrors import NO_DESCRIPTORS, NOT_A_PAGE
from hicache_storage.errors import InvalidKeyError
from hicache_storage.namespace import MAX_NAME_LENGTH, Namespace, check_name

SHARDS = 256
BOOKKEEPING = ".hicache"
IDENTITY = "namespace.json"

_NAME_BYTES = f"{string.ascii_letters}{string.digits}._-".encode()
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


class Handle:
    """A descriptor that is closed when its last user lets go of it.

    That is what makes it safe to forget a directory, or close a storage, while other threads are
    at work in it.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """For use while the handle itself is held in a variable."""

    def __del__(self, close: object = os.close) -> None:
        close(self.fd)  # type: ignore[operator]


class Directory(Handle):
    """An open directory; every path given to it is one name."""

    __slots__ = ()

    @classmethod
    def at(cls, path: Path) -> Directory:
        """The directory an operator named; symlinks on the way to it are his."""
        return cls(os.open(path, _DIRECTORY))

    def open(self, name: str, flags: int) -> Handle:
        """A file in here, mode 0600 if it is created."""
        return Handle(os.open(name, flags | _NO_LINK, 0o600, dir_fd=self.fd))

    def directory(self, name: str, create: bool = False) -> Directory | None:
        """A directory in here, or None when it is missing or is no directory.

        With ``create`` it is made, mode 0700 whatever the umask, and never None.
        """
        try:
            return Directory(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.fd))
        except OSError as error:
            if error.errno not in (errno.ENOENT, *NOT_A_PAGE) or (create and error.errno != errno.ENOENT):
                raise
            if not create:
                return None
        try:
            os.mkdir(name, 0o700, dir_fd=self.fd)
            os.chmod(name, 0o700, dir_fd=self.fd)
        except FileExistsError:
            pass  # another process was faster
        return Directory(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.fd))

    @property
    def removed(self) -> bool:
        """Whether somebody has removed this directory; what is put into it now is lost."""
        return os.fstat(self.fd).st_nlink == 0

    def names(self) -> list[str]:
        """What is in here. A fresh descriptor, since a scan moves the position of the one it uses."""
        fd = os.open(".", _DIRECTORY, dir_fd=self.fd)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)


class Entry(NamedTuple):
    """A stored page as a scan finds it."""

    namespace: str
    shard: int
    name: str
    nbytes: int
    used_ns: int
    """When it was last written or read (the file's mtime), in ns since the epoch."""


class Place(NamedTuple):
    """Where the object of a key belongs, whether or not it is there."""

    namespace: str
    shard: int
    name: str


class Tree:
    """The directories under ``root``. Thread-safe."""

    def __init__(self, root: Path, create: bool = True) -> None:
        """Raises OSError when ``root`` cannot be opened (or, with ``create``, made)."""
        self.root = root
        self._create = create
        self._lock = threading.RLock()
        self._shards: dict[str, list[Directory | None]] = {}
        self._budget = _spare_descriptors()
        self._open_root()

    @property
    def base(self) -> Directory:
        """The root directory itself."""
        return self._base

    def bookkeeping(self) -> Directory:
        """``.hicache``, made when it is missing."""
        found = self.base.directory(BOOKKEEPING, create=True)
        assert found is not None
        return found

    def locate(self, key: str) -> Place:
        """The place of ``key``. Raises InvalidKeyError unless it is ``<namespace>/<name>``."""
        namespace, slash, name = key.partition("/")
        if namespace not in self._shards:
            if not slash:
                raise InvalidKeyError(f"key {key[:80]!r} is not of the form <namespace>/<page name>")
            check_name(namespace)
        check_name(name)
        return Place(namespace, zlib.crc32(name.encode()) & 0xFF, name)

    def shard(self, place: Place) -> Directory | None:
        """The directory that holds ``place``; None while nothing was ever stored there."""
        shards = self._shards.get(place.namespace)
        found = shards[place.shard] if shards is not None else None
        return found if found is not None else self._open_shard(place, create=False)

    def make_shard(self, place: Place) -> Directory:
        """The directory that holds ``place``, made when it is missing."""
        found = self.shard(place) or self._open_shard(place, create=True)
        assert found is not None
        return found

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Whether there is something under each key. Raises InvalidKeyError.

        Whatever hinders a lookup counts as absent. This is what a miss costs, so the usual case, keys
        of one namespace whose directories are open, takes one loop with one system call a key.
        """
        namespace = keys[0].partition("/")[0] if keys else ""
        shards = self._shards.get(namespace)
        names = _names(keys, namespace) if shards is not None else None
        access, there, crc32 = os.access, os.F_OK, zlib.crc32
        if shards is not None and names is not None:
            with contextlib.suppress(AttributeError):  # a directory that is not open
                return [
                    access(name, there, dir_fd=shards[crc32(name) & 0xFF].fd, follow_symlinks=False)  # type: ignore[union-attr]
                    for name in names
                ]
        found = []
        for place in [self.locate(key) for key in keys]:
            directory = self.shard(place)
            found.append(
                directory is not None
                and access(place.name, there, dir_fd=directory.fd, follow_symlinks=False)
            )
        return found

    def introduce(self, namespace: Namespace) -> None:
        """Make the namespace's directory and write down what its digest stands for."""
        directory = self.base.directory(namespace.digest, create=True)
        assert directory is not None
        try:
            handle = directory.open(IDENTITY, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        os.write(handle.fd, namespace.canonical().encode() + b"\n")

    def identity(self, namespace: str) -> bytes:
        """What ``introduce`` wrote down, at most 64 KiB of it; empty when there is nothing."""
        directory = self.base.directory(namespace)
        try:
            handle = directory.open(IDENTITY, os.O_RDONLY) if directory is not None else None
            return os.read(handle.fd, 1 << 16) if handle is not None else b""
        except OSError:
            return b""

    def namespaces(self) -> list[str]:
        """Names of all namespaces under root, in order."""
        return sorted(name for name in self.base.names() if _is_name(name))

    def entries(self, shard: int, namespaces: list[str] | None = None) -> Iterator[Entry]:
        """Pages in directory number ``shard`` of these namespaces (default: all), in no order.

        Pages that come or go during the scan may or may not be seen. What is no page is passed over.
        """
        for namespace in self.namespaces() if namespaces is None else namespaces:
            above = self.base.directory(namespace)
            directory = above.directory(f"{shard:02x}") if above is not None else None
            if directory is None:
                continue
            with os.scandir(directory.fd) as scan:
                for found in scan:
                    try:
                        status = found.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISREG(status.st_mode) and _is_name(found.name):
                        yield Entry(namespace, shard, found.name, status.st_size, status.st_mtime_ns)

    def remove(self, entry: Entry) -> bool:
        """Unlink a page; False when it is gone already. Raises OSError when it cannot be removed."""
        directory = self.shard(Place(entry.namespace, entry.shard, entry.name))
        if directory is None:
            return False
        try:
            os.unlink(entry.name, dir_fd=directory.fd)
        except FileNotFoundError:
            return False
        return True

    def forget_removed(self) -> bool:
        """Let go of directories that somebody removed; True when root itself is a new one."""
        with self._lock:
            for shards in self._shards.values():
                for i, directory in enumerate(shards):
                    if directory is not None and directory.removed:
                        shards[i] = None
                        self._budget += 1
            try:
                same = os.path.samestat(os.fstat(self.base.fd), os.stat(self.root))
            except FileNotFoundError:
                same = False
            if not same:
                self._shards.clear()
                self._open_root()
            return not same

    def shed(self) -> None:
        """Give all cached descriptors back, and keep none from now on: the process runs out of them."""
        with self._lock:
            self._shards.clear()
            self._budget = 0

    def _open_root(self) -> None:
        if self._create and not self.root.is_dir():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.root.chmod(0o700)
        self._base = Directory.at(self.root)

    def _open_shard(self, place: Place, create: bool) -> Directory | None:
        try:
            above = self.base.directory(place.namespace, create)
            found = above.directory(f"{place.shard:02x}", create) if above is not None else None
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS or not self._shards:
                raise
            self.shed()
            return self._open_shard(place, create)
        with self._lock:
            if found is not None and self._budget > 0:
                shards = self._shards.setdefault(place.namespace, [None] * SHARDS)
                self._budget -= shards[place.shard] is None
                shards[place.shard] = found
        return found


def _names(keys: Sequence[str], namespace: str) -> list[bytes] | None:
    """Page names of keys that are all of this namespace and all pass ``check_name``; else None.

    The rule is that of ``check_name``, applied to the whole batch in a few passes over its bytes.
    """
    names = "\n".join(["", *keys]).encode(errors="replace").split(f"\n{namespace}/".encode())[1:]
    joined = b"/".join(names)
    if (
        len(names) != len(keys)
        or joined.translate(None, _NAME_BYTES) != b"/" * (len(names) - 1)
        or b"/." in joined
        or joined.startswith(b".")
        or not 0 < min(map(len, names)) <= max(map(len, names)) <= MAX_NAME_LENGTH
    ):
        return None
    return names


def _is_name(name: str) -> bool:
    try:
        check_name(name)
    except InvalidKeyError:
        return False
    return True


def _spare_descriptors() -> int:
    """How many descriptors may be kept: half of what the process has left."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 16
    return max(0, (soft - len(os.listdir("/proc/self/fd"))) // 2)
