"""What lies in the directory of a disk pool, for who looks and for who cleans up: all namespaces at once, no torch.

Nothing is made that is not there, and no directory becomes a disk pool by being looked at. Only names of ours are ever
removed. Contents are ``DiskPool.check``'s to judge.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aaflow_langgraph._directory import expanded
from aaflow_langgraph.errors import ConfigError, IntegrityError, KVMissing, RecipeMissing
from aaflow_langgraph.model import KVLayout, Recipe
from aaflow_langgraph.pool import _placed, _safetensors
from aaflow_langgraph.pool._disk_root import MARKER, claim
from aaflow_langgraph.pool._listing import FILE
from aaflow_langgraph.pool._reading import OpenFile
from aaflow_langgraph.pool._recipe_file import MAX_BYTES, decode
from aaflow_langgraph.pool._room import EXTENT, RECIPE
from aaflow_langgraph.pool._safetensors import StoredExtent

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_QUARANTINED = re.compile(r"[0-9]{20}-[0-9a-f]{8}-" + FILE.pattern)
_DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}


@dataclass(frozen=True, slots=True)
class Stock:
    """Whole files of one namespace.

    Attributes:
        extents: Size in bytes of every extent's file, by its name without suffix.
        num_tokens: Tokens of those whose headers can be read.
        num_recipes: Recipes.
        recipe_bytes: What they take.
        layout: Shape of the KV, as the first readable header has it; None where none can be read.
    """

    extents: dict[str, int]
    num_tokens: int
    num_recipes: int
    recipe_bytes: int
    layout: KVLayout | None

    @property
    def num_bytes(self) -> int:
        """What all of it takes."""
        return sum(self.extents.values()) + self.recipe_bytes


class Inventory:
    """A disk pool's directory, opened to look. A context manager.

    Raises:
        ConfigError: There is none, it is no disk pool, or it cannot be read. Way out: fail.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = expanded(directory)
        if not self.directory.is_dir():
            raise ConfigError(
                f"{self.directory} is no directory: --disk takes what was passed to KVBroker.open as disk"
            )
        if not os.path.lexists(self.directory / MARKER):
            raise ConfigError(f"{self.directory} is no disk pool (it has no {MARKER}): nothing in it was touched")
        try:
            self._root = claim(self.directory)
        except OSError as error:
            raise ConfigError(f"{self.directory} cannot be read: {error.strerror}") from error

    def __enter__(self) -> Inventory:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._root)

    def namespaces(self) -> list[str]:
        """Digests of the namespaces that have files here."""
        return sorted(name for name in _placed.names(self._root) if _NAMESPACE.fullmatch(name))

    def foreign(self) -> list[str]:
        """What lies beside our folders and is none of ours."""
        known = {MARKER, "tmp", "quarantine"}
        return sorted(
            name for name in _placed.names(self._root) if name not in known and not _NAMESPACE.fullmatch(name)
        )

    def stock(self, namespace: str) -> Stock:
        """The whole files of a namespace."""
        extents: dict[str, int] = {}
        num_tokens, num_recipes, recipe_bytes = 0, 0, 0
        layout: KVLayout | None = None
        for folder, file, size in self._files(namespace):
            if not file.endswith(EXTENT):
                num_recipes, recipe_bytes = num_recipes + 1, recipe_bytes + size
                continue
            extents[file.removesuffix(EXTENT)] = size
            with contextlib.suppress(OSError, IntegrityError, KVMissing):
                extent, layout = _described(folder, file, namespace, layout)
                num_tokens += len(extent.token_ids)
        return Stock(extents, num_tokens, num_recipes, recipe_bytes, layout)

    def heads(self, namespace: str) -> Iterator[tuple[StoredExtent, int]]:
        """What the headers of a namespace's extents say, as far as they can be read, and the bytes of their files."""
        layout: KVLayout | None = None
        for folder, file, size in self._files(namespace):
            if file.endswith(EXTENT):
                with contextlib.suppress(OSError, IntegrityError, KVMissing):
                    extent, layout = _described(folder, file, namespace, layout)
                    yield extent, size

    def recipes(self, namespace: str) -> Iterator[Recipe]:
        """Its recipes, as far as they can be read and are what their names say."""
        for folder, file, size in self._files(namespace):
            if not file.endswith(RECIPE) or size > MAX_BYTES:
                continue
            with contextlib.suppress(OSError, IntegrityError, RecipeMissing):
                fd = os.open(file, _placed.FILE_FLAGS, dir_fd=folder)
                with os.fdopen(fd, "rb") as opened:
                    recipe = decode(opened.read(MAX_BYTES + 1))
                if recipe.kv_id + RECIPE == file and recipe.namespace == namespace:
                    yield recipe

    def leftovers(self) -> dict[str, int]:
        """Unfinished files whose writers are gone, with their sizes."""
        return self._sizes("tmp", _placed.is_left)

    def quarantined(self) -> dict[str, int]:
        """Damaged files that were moved away, with their sizes."""
        return self._sizes("quarantine", lambda _, name: _QUARANTINED.fullmatch(name) is not None)

    def remove_extent(self, namespace: str, name: str) -> bool:
        """Remove a whole extent; False when there is none of that name any more.

        Raises:
            ConfigError: The system refuses it. Way out: fail.
        """
        with self._opened(self._root, namespace) as files, self._opened(files, name[:2]) as folder:
            return folder >= 0 and self._unlink_in(folder, f"{name}{EXTENT}", namespace)

    def remove_leftover(self, name: str) -> bool:
        """Remove an unfinished file whose writer is gone; False when there is none of that name any more.

        Raises:
            ConfigError: The system refuses it. Way out: fail.
        """
        return name in self.leftovers() and self._unlink("tmp", name)

    def remove_quarantined(self, name: str) -> bool:
        """Remove a damaged file for good; False when there is none of that name any more.

        Raises:
            ConfigError: The system refuses it. Way out: fail.
        """
        return name in self.quarantined() and self._unlink("quarantine", name)

    def _files(self, namespace: str) -> Iterator[tuple[int, str, int]]:
        """(descriptor of its folder, name, bytes) of each; the descriptor is open until the next one."""
        with self._opened(self._root, namespace) as files:
            for prefix in sorted(_placed.names(files)) if files >= 0 else ():
                if not re.fullmatch("[0-9a-f]{2}", prefix):
                    continue
                with self._opened(files, prefix) as folder:
                    for file in sorted(_placed.names(folder)) if folder >= 0 else ():
                        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                            status = os.stat(file, dir_fd=folder, follow_symlinks=False)
                            if FILE.fullmatch(file) and file.startswith(prefix) and stat.S_ISREG(status.st_mode):
                                yield folder, file, status.st_size

    def _sizes(self, place: str, wanted: Callable[[int, str], bool]) -> dict[str, int]:
        found = {}
        with self._opened(self._root, place) as folder:
            for name in sorted(_placed.names(folder)) if folder >= 0 else ():
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and wanted(folder, name):
                        found[name] = status.st_size
        return found

    def _unlink(self, place: str, name: str) -> bool:
        with self._opened(self._root, place) as folder:
            return self._unlink_in(folder, name, place)

    def _unlink_in(self, folder: int, name: str, place: str) -> bool:
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:  # somebody else cleans up too
            return False
        except OSError as error:
            raise ConfigError(f"{self.directory}/{place}/{name} cannot be removed: {error.strerror}") from error
        return True

    @contextlib.contextmanager
    def _opened(self, parent: int, name: str) -> Iterator[int]:
        """A folder's descriptor, or -1 where there is none (a link is none)."""
        try:
            fd = os.open(name, _placed.DIRECTORY_FLAGS, dir_fd=parent)
        except OSError:
            yield -1
            return
        try:
            yield fd
        finally:
            os.close(fd)


def _described(folder: int, file: str, namespace: str, layout: KVLayout | None) -> tuple[StoredExtent, KVLayout]:
    """The extent of a file and the shape of its KV, if its header agrees with itself."""
    fd = os.open(file, _placed.FILE_FLAGS, dir_fd=folder)
    try:
        shape = layout or _own_layout(fd)
        opened = OpenFile(fd, os.fstat(fd).st_size)
        return _safetensors.read_head(opened, namespace, shape).extent, shape
    finally:
        os.close(fd)


def _own_layout(fd: int) -> KVLayout:
    """What a header says of its KV; ``read_head`` then says whether it agrees with the rest."""
    size = int.from_bytes(os.pread(fd, 8, 0), "little")
    try:
        kv = json.loads(os.pread(fd, min(size, _safetensors.MAX_HEADER_BYTES), 8))["kv"]
        num_layers, _, num_kv_heads, _, head_dim = kv["shape"]
        dtype, itemsize = _DTYPES[kv["dtype"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IntegrityError("its header describes no KV") from error
    if not all(type(size) is int and 0 < size < 1 << 20 for size in (num_layers, num_kv_heads, head_dim)):
        raise IntegrityError("its header describes an impossible KV")
    return KVLayout(num_layers, num_kv_heads, head_dim, dtype, itemsize)
