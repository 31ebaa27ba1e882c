"""One extent as one safetensors file: the bytes around the KV. Knows the format; knows no directories and no payload.

    byte 0        8                 4096 k          4096 k + kv bytes
    | length, 8 B | JSON, spaces    | kv            | token_ids |

``kv`` is ``[L, 2, H, R, D]`` with R = the number of tokens rounded up to even, ``token_ids`` is U32 ``[T]``; everything else
is text in the file's metadata. Any safetensors reader opens it. The KV starts at a multiple of 4096, so that it can be
mapped; the token ids come last, so that its place does not depend on them.

The format itself has no integrity: a flipped byte loads silently. So the metadata carries a seal over everything but the
KV and a checksum of the KV, and a header is accepted only when it is, byte for byte, what its own fields encode to. That
one comparison covers names, shapes, offsets and padding at once; the checks before it are there to say what is wrong.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aaflow_langgraph.errors import ConfigError, IntegrityError, KVMissing
from aaflow_langgraph.hashing import digest, extent_name, token_bytes
from aaflow_langgraph.model import BLOCK_TOKENS, BlockHash, KVLayout
from aaflow_langgraph.pool._reading import OpenFile

FORMAT = "aaflow-langgraph extent"
FORMAT_VERSION = 1
ALIGNMENT_BYTES = 4096
MAX_HEADER_BYTES = 1 << 20
"""Checked before a header is parsed. Block hashes are most of it: this is enough for four million tokens."""

DIGEST = re.compile(r"[0-9a-f]{64}")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,15}")
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class StoredExtent:
    """Everything needed to announce an extent again, except its bytes.

    Attributes:
        start: First token position.
        token_ids: Its own tokens.
        end_id: ``kv_id`` of everything up to its end.
        hashes: Block hashes of the full blocks that end inside it.
        canonical_stop: As in the index: whole blocks up to here were computed alone, in canonical chunks.
        checksum: xxh3-128, in hex, of its KV ``[L, 2, H, R, D]`` with R = tokens rounded up to even.
        ids: ``token_ids`` as they lie in a file, kept because packing cold integers costs as much as copying a megabyte.

    Raises:
        ConfigError: A field cannot be right. Way out: fail.
    """

    start: int
    token_ids: tuple[int, ...] = field(repr=False)
    end_id: str
    hashes: tuple[BlockHash, ...] = field(repr=False)
    canonical_stop: int
    checksum: str
    ids: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.start) is not int or self.start < 0 or not self.token_ids:
            raise ConfigError(
                f"an extent starts at 0 or later and has tokens; got {len(self.token_ids)} at {self.start!r}"
            )
        if type(self.canonical_stop) is not int or not 0 <= self.canonical_stop <= self.stop:
            raise ConfigError(f"canonical_stop {self.canonical_stop!r} of an extent that ends at {self.stop}")
        if not all(isinstance(name, str) and DIGEST.fullmatch(name) for name in (self.end_id, *self.hashes)):
            raise ConfigError("end_id and block hashes are 64 lower-case hex digits each")
        if len(self.hashes) != self.stop // BLOCK_TOKENS - self.start // BLOCK_TOKENS:
            raise ConfigError(f"{len(self.hashes)} block hashes for tokens [{self.start}, {self.stop})")
        if not isinstance(self.checksum, str) or not _CHECKSUM.fullmatch(self.checksum):
            raise ConfigError(f"a checksum is 32 lower-case hex digits, got {self.checksum!r}")
        try:
            object.__setattr__(self, "ids", token_bytes(self.token_ids))
        except (TypeError, OverflowError) as error:
            raise ConfigError(f"token ids are integers of 32 bits: {error}") from error

    @property
    def stop(self) -> int:
        """One past its last token position."""
        return self.start + len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Rows of its KV: its tokens, rounded up to even."""
        return len(self.token_ids) + len(self.token_ids) % 2

    @property
    def name(self) -> str:
        """Name of its file; see ``hashing.extent_name``."""
        return extent_name(self.end_id, self.start, self.canonical_stop)


class Head(NamedTuple):
    """What stands in front of a file's KV, and where that begins."""

    extent: StoredExtent
    kv_offset: int


def encode(extent: StoredExtent, namespace: str, layout: KVLayout) -> bytes:
    """Length and header: the file up to its KV.

    Raises:
        ConfigError: The header would be larger than a reader accepts. Way out: fail.
    """
    kv_stop = layout.num_bytes(extent.num_rows)
    num_tokens = len(extent.token_ids)
    shape = ",".join(map(str, layout.shape(extent.num_rows)))
    # Put together here and not by a JSON library, which takes as long as all else that a small file is opened with: every
    # field is a name of ours, decimal or hex, so that nothing in it needs a backslash.
    text = (
        f'{{"__metadata__":{{"format":"{FORMAT}","version":"{FORMAT_VERSION}","namespace":"{namespace}",'
        f'"start":"{extent.start}","canonical_stop":"{extent.canonical_stop}","end_id":"{extent.end_id}",'
        f'"hashes":"{" ".join(extent.hashes)}","checksum":"{extent.checksum}","seal":"{_seal(extent, namespace)}"}},'
        f'"kv":{{"dtype":"{_DTYPES[layout.dtype]}","shape":[{shape}],"data_offsets":[0,{kv_stop}]}},'
        f'"token_ids":{{"dtype":"U32","shape":[{num_tokens}],"data_offsets":[{kv_stop},{kv_stop + 4 * num_tokens}]}}}}'
    ).encode("ascii")
    size = -(-(8 + len(text)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if size > MAX_HEADER_BYTES:
        raise ConfigError(
            f"the header of an extent of {num_tokens} tokens needs {size} bytes; at most {MAX_HEADER_BYTES}"
        )
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def read_head(opened: OpenFile, namespace: str, layout: KVLayout, wanted: StoredExtent | None = None) -> Head:
    """Read and check everything but the KV. A file that is, up to there, what ``wanted`` would be written as needs no look at
    its fields.

    Raises:
        IntegrityError: The file is damaged, cut off, or of another model. Way out: fail; whoever reads it quarantines.
        KVMissing: A newer version wrote it. Way out: recompute.
    """
    fd, file_bytes = opened
    front = os.pread(fd, ALIGNMENT_BYTES, 0)
    header_bytes = 8 + int.from_bytes(front[:8], "little")
    if len(front) < ALIGNMENT_BYTES or header_bytes % ALIGNMENT_BYTES or header_bytes > MAX_HEADER_BYTES:
        raise IntegrityError(f"{file_bytes} bytes with a header of {header_bytes}: cut off, or no extent")
    if header_bytes > ALIGNMENT_BYTES:
        front += os.pread(fd, header_bytes - ALIGNMENT_BYTES, ALIGNMENT_BYTES)
    if wanted is not None and encode(wanted, namespace, layout) == front:
        ids_offset = header_bytes + layout.num_bytes(wanted.num_rows)
        if file_bytes == ids_offset + len(wanted.ids) and os.pread(fd, len(wanted.ids), ids_offset) == wanted.ids:
            return Head(wanted, header_bytes)
    metadata, kv, num_tokens = _parse(front[8:])
    if num_tokens > file_bytes:  # also keeps what follows from counting with numbers of a thousand digits
        raise IntegrityError(f"{file_bytes} bytes cannot hold the tokens that its header names")
    kv_bytes = layout.num_bytes(num_tokens + num_tokens % 2)
    if file_bytes != header_bytes + kv_bytes + 4 * num_tokens:
        raise IntegrityError(
            f"{file_bytes} bytes; a header of {header_bytes}, {kv_bytes} of KV and {num_tokens} token ids are "
            f"{header_bytes + kv_bytes + 4 * num_tokens}"
        )
    if metadata.get("namespace") != namespace:
        raise IntegrityError(f"belongs to namespace {str(metadata.get('namespace'))[:64]!r}")
    shape = list(layout.shape(num_tokens + num_tokens % 2))
    if (kv.get("dtype"), kv.get("shape")) != (_DTYPES[layout.dtype], shape):
        raise IntegrityError(
            f"holds {kv.get('dtype')} {kv.get('shape')}, the model has {_DTYPES[layout.dtype]} {shape}"
        )
    extent = _extent(metadata, os.pread(fd, 4 * num_tokens, header_bytes + kv_bytes))
    if encode(extent, namespace, layout) != front:
        raise IntegrityError("its header does not agree with itself or with its token ids")
    return Head(extent, header_bytes)


def _parse(text: bytes) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Metadata, description of ``kv``, number of tokens; types checked as far as they are used."""
    try:
        header = json.loads(text)
        metadata, kv = header["__metadata__"], header["kv"]
        (num_tokens,) = header["token_ids"]["shape"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IntegrityError(f"its header is no description of an extent: {error!r:.200}") from error
    if not isinstance(metadata, dict) or not isinstance(kv, dict) or metadata.get("format") != FORMAT:
        raise IntegrityError("a safetensors file, but no extent of this package")
    if _number(metadata.get("version")) > FORMAT_VERSION:
        raise KVMissing(
            f"written in format {metadata['version']}, this version reads {FORMAT_VERSION}: recompute, or upgrade"
        )
    if type(num_tokens) is not int or num_tokens < 1:
        raise IntegrityError(f"names {num_tokens!r:.50} tokens")
    return metadata, kv, num_tokens


def _extent(metadata: dict[str, Any], ids: bytes) -> StoredExtent:
    try:
        return StoredExtent(
            start=_number(metadata.get("start")),
            token_ids=tuple(array("I", ids)),
            end_id=metadata["end_id"],
            hashes=tuple(BlockHash(value) for value in metadata["hashes"].split()),
            canonical_stop=_number(metadata.get("canonical_stop")),
            checksum=metadata["checksum"],
        )
    except (ConfigError, KeyError, AttributeError, ValueError) as error:
        raise IntegrityError(f"its header describes no extent: {error!r:.200}") from error


def _number(text: object) -> int:
    if not isinstance(text, str) or not _DECIMAL.fullmatch(text):
        raise IntegrityError(f"its header has {text!r:.50} where a number belongs")
    return int(text)


def _seal(extent: StoredExtent, namespace: str) -> str:
    return digest(
        "extent",
        namespace,
        str(extent.start),
        str(extent.canonical_stop),
        extent.end_id,
        extent.checksum,
        *extent.hashes,
        extent.ids,
    )
