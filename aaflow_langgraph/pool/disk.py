"""The disk tier: extents and recipes that outlive the processes that made them. Knows files and their contents; knows no
index and no broker.

Files are never locked, never rewritten and shared by every process that opens the directory (see _shelf.py for what lies
where). Nothing is served that is not proven: a file's header is compared with what it should say, its KV with its checksum
while it is copied, and what does not agree is moved to quarantine.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from aaflow_langgraph._directory import expanded
from aaflow_langgraph.errors import ConfigError, Evicted, IntegrityError, KVMissing, RecipeMissing
from aaflow_langgraph.evict.base import Policy
from aaflow_langgraph.evict.guarded import Guarded
from aaflow_langgraph.evict.lru import least_recently_used
from aaflow_langgraph.model import Finding, KVLayout, Recipe, Tier
from aaflow_langgraph.pool import _recipe_file, _safetensors
from aaflow_langgraph.pool._checked_read import checksum, read_checked
from aaflow_langgraph.pool._reading import OpenFile
from aaflow_langgraph.pool._room import EXTENT, RECIPE, Room
from aaflow_langgraph.pool._safetensors import ALIGNMENT_BYTES, DIGEST, Head, StoredExtent
from aaflow_langgraph.pool._shelf import Shelf
from aaflow_langgraph.tensors import DTYPES, tensor_bytes

__all__ = ["DiskPool", "StoredExtent"]


class DiskPool:
    """Extents of one namespace in a directory on disk.

    Safe to use from any thread, and by any number of processes at once. A process keeps its own writes within
    ``capacity_bytes`` (I10) by removing what was used least recently; processes that write within the same second may pass it
    together by what they write in it, and the next write brings it back.

    Args:
        directory: Made (0700) if it is not there, and again if it is removed while it is in use. An existing one must be
            empty or a disk pool.
        namespace: Digest of the namespace; others in the same directory are not touched.
        layout: Shape of the model's KV.
        capacity_bytes: What this namespace's files may take.
        policy: What goes first. It sees sizes and the time of the last use (``Candidate.last_used``, nanoseconds), not the
            number of uses, which nobody counts across processes. One that raises is logged once, and the default is asked.
        on_evict: Called with the name of each extent that was removed to make room, with no lock held.
        clock: Nanoseconds, for the time of the last use.

    Raises:
        ConfigError: The directory cannot be written, belongs to somebody else, holds something else or was made by a newer
            version; or an argument cannot be right. Way out: fail.
    """

    tier: Tier = "disk"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        namespace: str,
        layout: KVLayout,
        capacity_bytes: int,
        *,
        policy: Policy = least_recently_used,
        on_evict: Callable[[str], None] = lambda name: None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        if type(capacity_bytes) is not int or capacity_bytes < ALIGNMENT_BYTES:
            raise ConfigError(f"disk_bytes must be an int of at least {ALIGNMENT_BYTES}, got {capacity_bytes!r}")
        if not isinstance(namespace, str) or not DIGEST.fullmatch(namespace):
            raise ConfigError(f"a namespace is 64 lower-case hex digits, got {namespace!r:.100}")
        if layout.dtype not in DTYPES or DTYPES[layout.dtype].itemsize != layout.itemsize:
            raise ConfigError(f"the disk holds {', '.join(DTYPES)}, not {layout.dtype!r} of {layout.itemsize} bytes")
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory) or "\0" in os.fspath(directory):
            raise ConfigError(f"the directory of a disk pool is a path, got {directory!r}")
        self.namespace = namespace
        self.layout = layout
        self._dtype = DTYPES[layout.dtype]
        self._clock = clock
        self._shelf = Shelf(expanded(directory).absolute(), namespace)
        self._room = Room(self._shelf, capacity_bytes, layout.token_bytes, Guarded(policy), on_evict)

    @property
    def capacity_bytes(self) -> int:
        """What this namespace's files may take."""
        return 0 if self._shelf.closed else self._room.capacity_bytes

    def when_evicted(self, call: Callable[[str], None]) -> None:
        """Replace ``on_evict``: for who gets a pool that somebody else opened."""
        self._room.on_evict = call

    @property
    def num_evictions(self) -> int:
        """Extents that this process removed to make room."""
        return self._room.num_evictions

    @property
    def used_bytes(self) -> int:
        """What this namespace's whole files take now, those of other processes included."""
        if self._shelf.closed:
            return 0
        with self._shelf.inside():
            return self._num_used_bytes()

    def write(self, extent: StoredExtent, kv: torch.Tensor) -> bool:
        """Store an extent, on the disk and whole when this returns.

        Args:
            extent: What it is. Its ``checksum`` is taken as it is; a wrong one shows at the first read.
            kv: ``[L, 2, H, R, D]``, R = tokens rounded up to even. Contiguous and in main memory it is written from where
                it lies.

        Returns:
            True when it was written, False when a file of this name is there; that counts as a use of it.

        Raises:
            PoolExhausted: The capacity cannot give its bytes, whatever is removed. Way out: retry with a larger pool.
            CapacityError: The disk is full, or the directory cannot be written any more. Way out: retry.
            ValueError: ``kv`` is not of this extent.
        """
        self._require_kv("kv", kv, extent)
        front = _safetensors.encode(extent, self.namespace, self.layout)
        with self._shelf.inside():
            if self._has(extent):
                return False
            self._store(extent.name + EXTENT, [memoryview(front), tensor_bytes(kv), memoryview(extent.ids)])
        return True

    def read(self, extent: StoredExtent | str, into: torch.Tensor) -> StoredExtent:
        """Copy an extent's KV into ``into``, checked on the way.

        Args:
            extent: Which one, or its name. An extent's own tokens and hashes are compared with the file's. Its checksum is
                not: two writers of the same tokens may have other bits, and the file's checksum is the one that counts.
            into: ``[L, 2, H, R, D]`` of the pool's dtype. Contiguous and in main memory it is filled where it lies, and
                then may hold anything when this raises; else it is left alone.

        Returns:
            What the file says of itself; announce it with this checksum.

        Raises:
            Evicted: No such file. Way out: recompute.
            KVMissing: It cannot be read now (too many open files, missing rights), or a newer version wrote it. Way out:
                recompute.
            IntegrityError: It is damaged, and is in quarantine now. Way out: fail; recompute.
            ValueError: ``into`` is not of this extent's shape.
        """
        file = self._file(extent.name if isinstance(extent, StoredExtent) else extent, EXTENT)
        wanted = extent if isinstance(extent, StoredExtent) else None
        with self._shelf.inside(), self._shelf.reading(file, self._clock()) as opened:
            if wanted is not None:
                self._require_kv("into", into, wanted)
            in_place = into.is_cpu and into.is_contiguous()
            target = into if in_place else torch.empty(into.shape, dtype=into.dtype, device="cpu")
            if wanted is not None and self._is_as_written(opened, wanted, tensor_bytes(target)):
                found = wanted
            else:
                found, kv_offset = self._head(opened, file, extent)
                self._require_kv("into", into, found)
                if read_checked(opened.fd, kv_offset, tensor_bytes(target)) != found.checksum:
                    raise IntegrityError("its KV does not have its checksum")
            self._touch(opened.fd)
        if not in_place:
            into.copy_(target)
        return found

    def touch(self, name: str) -> None:
        """Count an extent as used now; no effect on one that is not there. ``read`` and ``write`` do it by themselves.

        Whoever uses a chain of extents touches its last one first, so that the last one is the first to go.
        """
        file = self._file(name, EXTENT)
        with self._shelf.inside(), contextlib.suppress(KVMissing, IntegrityError), self._shelf.reading(file) as opened:
            self._touch(opened.fd)

    def remove(self, name: str) -> bool:
        """Remove an extent; False when it was not there. Who is reading it reads on.

        Raises:
            CapacityError: The directory cannot be written any more. Way out: retry.
        """
        with self._shelf.inside(), self._shelf.writing():
            return self._shelf.remove(self._file(name, EXTENT))

    def scan(self, findings: list[Finding] | None = None, *, quarantine: bool = False) -> Iterator[StoredExtent]:
        """Every whole extent of the namespace, by the headers: the KV is not read. Order is arbitrary.

        Files that are damaged, foreign or of a newer version are described in ``findings`` and left where they are; with
        ``quarantine``, the damaged ones are moved there, which else only happens to those that somebody reads.
        """
        with self._shelf.inside():
            files = [file for file in self._shelf.listing.files() if file.endswith(EXTENT)]
            found = [Finding("I11", f"{name} is none of ours") for name in self._shelf.foreign()]
        for file in files:
            try:
                found_ns = self._clock() if quarantine else None
                with self._shelf.inside(), self._shelf.reading(file, found_ns) as opened:
                    extent = self._head(opened, file, file.removesuffix(EXTENT)).extent
            except Evicted:  # removed since it was listed
                continue
            except (IntegrityError, KVMissing) as error:
                found.append(Finding("I4", str(error)))
            else:
                yield extent
        if findings is not None:
            findings += found

    def write_recipe(self, recipe: Recipe) -> None:
        """Store a recipe; the first one of a ``kv_id`` stays, and this counts as a use of it. Those used least recently go
        when recipes would take more than their share of the capacity.

        Raises:
            ConfigError: Not a recipe, or of another namespace. Way out: fail.
            PoolExhausted, CapacityError: As ``write``.
        """
        text = memoryview(_recipe_file.encode(recipe))
        if recipe.namespace != self.namespace:
            raise ConfigError(f"a recipe of namespace {recipe.namespace} does not belong to {self.namespace} (I6)")
        if self.read_recipe(recipe.kv_id) is None:
            with self._shelf.inside():
                self._store(self._file(recipe.kv_id, RECIPE), [text])

    def read_recipe(self, kv_id: str) -> Recipe | None:
        """The recipe of a handle, or None: nobody stored it, it had to make room, or it was damaged and is in quarantine now.

        Reading it counts as a use.
        """
        file = self._file(kv_id, RECIPE)
        with (
            self._shelf.inside(),
            contextlib.suppress(KVMissing, RecipeMissing, IntegrityError),
            self._shelf.reading(file, self._clock()) as opened,
        ):
            recipe = self._recipe(opened, file)
            self._touch(opened.fd)
            return recipe
        return None

    def sweep(self) -> list[str]:
        """Remove unfinished files of processes that are gone, never those of living ones; their names.

        Raises:
            CapacityError: The directory cannot be written any more. Way out: retry.
        """
        with self._shelf.inside(), self._shelf.writing():
            return self._shelf.sweep()

    def check(self, *, payloads: bool = False) -> list[Finding]:
        """Violated invariants (I4, I10, I11) that can be seen from here; nothing is changed. Other namespaces are not looked at.

        Args:
            payloads: Read every extent's KV and compare its checksum, too.
        """
        found: list[Finding] = []
        for extent in self.scan(found):
            if payloads:
                found += self._check_payload(extent)
        with self._shelf.inside():
            listing = self._shelf.listing.files()
            if (used_bytes := self._num_used_bytes()) > self.capacity_bytes:
                found.append(Finding("I10", f"{used_bytes} bytes are on disk, capacity is {self.capacity_bytes}"))
            for file in listing:
                if file.endswith(RECIPE):
                    try:
                        with self._shelf.reading(file) as opened:
                            self._recipe(opened, file)
                    except Evicted:
                        continue
                    except (IntegrityError, KVMissing, RecipeMissing) as error:
                        found.append(Finding("I4", str(error)))
            for name in self._shelf.leftovers():
                found.append(Finding("I11", f"tmp/{name} was left by a process that is gone; sweep() removes it"))
            for name in self._shelf.quarantined():
                found.append(Finding("I4", f"quarantine/{name} was damaged; it is kept for a look and may be deleted"))
        return found

    def close(self) -> None:
        """Give the descriptors back once nobody uses them. Idempotent. Files stay; every other method raises ``ValueError``
        from now on.
        """
        self._shelf.close()

    def _num_used_bytes(self) -> int:
        return sum(facts.num_bytes for facts in self._shelf.listing.files().values())

    def _head(self, opened: OpenFile, file: str, wanted: StoredExtent | str) -> Head:
        """The header of a file, which is what its name says and what is wanted."""
        known = wanted if isinstance(wanted, StoredExtent) else None
        head = _safetensors.read_head(opened, self.namespace, self.layout, known)
        if head.extent is known:
            return head
        if head.extent.name + EXTENT != file:
            raise IntegrityError(f"holds extent {head.extent.name}: it was renamed, or two files were swapped")
        if known is not None and (head.extent.token_ids, head.extent.hashes) != (known.token_ids, known.hashes):
            raise IntegrityError("holds other tokens or hashes than asked for under this name")
        return head

    def _is_as_written(self, opened: OpenFile, wanted: StoredExtent, into: memoryview) -> bool:
        """Read a file in one pass, its KV into ``into``: is it, byte for byte, what ``wanted`` is written as? If not, its
        header tells why.
        """
        front = _safetensors.encode(wanted, self.namespace, self.layout)
        if opened.num_bytes != len(front) + into.nbytes + len(wanted.ids):
            return False
        around = memoryview(bytearray(len(front) + len(wanted.ids)))
        read = read_checked(opened.fd, 0, into, around[: len(front)], around[len(front) :])
        return read == wanted.checksum and around == front + wanted.ids

    def _recipe(self, opened: OpenFile, file: str) -> Recipe:
        text = bytearray(min(opened.num_bytes, _recipe_file.MAX_BYTES + 1))
        os.preadv(opened.fd, [text], 0)
        recipe = _recipe_file.decode(bytes(text))
        if recipe.kv_id + RECIPE != file or recipe.namespace != self.namespace:
            raise IntegrityError(f"holds the recipe of {recipe.kv_id} in namespace {recipe.namespace}")
        return recipe

    def _has(self, extent: StoredExtent) -> bool:
        """Is a whole file of this name there? A damaged one is moved away."""
        file = extent.name + EXTENT
        try:
            with self._shelf.reading(file, self._clock()) as opened:
                self._head(opened, file, extent)
                self._touch(opened.fd)
        except (KVMissing, IntegrityError):
            return False
        return True

    def _check_payload(self, extent: StoredExtent) -> list[Finding]:
        file = extent.name + EXTENT
        try:
            with self._shelf.inside(), self._shelf.reading(file) as opened:
                head = self._head(opened, file, extent)
                if checksum(opened.fd, head.kv_offset, self.layout.num_bytes(extent.num_rows)) == head.extent.checksum:
                    return []
        except Evicted:
            return []
        except (IntegrityError, KVMissing) as error:
            return [Finding("I4", str(error))]
        return [Finding("I4", f"{self._shelf.where(file)}: its KV does not have its checksum")]

    def _store(self, file: str, parts: list[memoryview]) -> None:
        num_bytes = sum(part.nbytes for part in parts)
        with self._shelf.writing(num_bytes), self._room.of(num_bytes, Path(file).suffix):
            self._shelf.write(file, parts, self._clock())

    def _touch(self, fd: int) -> None:
        now_ns = self._clock()
        with contextlib.suppress(OSError):  # read-only since it was opened: reading goes on, the order of eviction ages
            os.utime(fd, ns=(now_ns, now_ns))

    def _require_kv(self, what: str, kv: torch.Tensor, extent: StoredExtent) -> None:
        shape = self.layout.shape(extent.num_rows)
        if kv.shape != shape or kv.dtype != self._dtype:
            raise ValueError(
                f"{what} of {len(extent.token_ids)} tokens is {shape} of {self._dtype}, got {tuple(kv.shape)} of {kv.dtype}"
            )

    def _file(self, name: str, suffix: str) -> str:
        """S2: an id becomes part of a path only when it is one."""
        if not isinstance(name, str) or not DIGEST.fullmatch(name):
            raise ConfigError(f"a name on disk is 64 lower-case hex digits, got {name!r:.100}")
        return name + suffix
