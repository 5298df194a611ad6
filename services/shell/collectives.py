"""What ranks of a group say to each other: orders from rank 0 to all, rows from rank 0 to each rank and back.

Everything is a tensor with its sizes announced first, on a gloo group of its own; no object collectives, no pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from services.shell.commands import CommandCancelled
from splitppo.batch import COLUMN_DTYPES, Batch, Column

HEADER_BYTES = 512
_MAGIC = 0x53504F31
# magic, kind, has_rows, command, sequence number, bytes of the request, bytes of the attachment
_HEADER = struct.Struct("<IBBHQQQ")
_INLINE_BYTES = HEADER_BYTES - _HEADER.size
_COLUMN_NAMES = tuple(COLUMN_DTYPES)
# In place of the number of entries of a batch's meta.
_NO_ROWS, _CANCELLED = 0, -1


class OrderKind(IntEnum):
    """What the ranks are to do next."""

    NOTHING = 0
    COMMAND = 1
    LEAVE = 2


@dataclass(frozen=True)
class Order:
    """The next thing that every rank does.

    Attributes:
        command: index in the group's table of commands.
        has_rows: rows follow, from rank 0 to each rank.
        request: the serialised request.
        attachment: bytes of rank 0 that go with it (the state that a checkpoint stores).
    """

    kind: OrderKind
    command: int = 0
    has_rows: bool = False
    request: bytes = b""
    attachment: bytes = b""


class ControlChannel:
    """Orders and rows between the ranks of one group. Every order is made by rank 0 and heard by all other ranks."""

    def __init__(self, rank: int, world_size: int, group: ProcessGroup | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group
        self._sequence = 0

    @property
    def sequence(self) -> int:
        """The number of orders so far; the same on every rank that has heard the last one."""
        return self._sequence

    def announce(self, order: Order) -> None:
        """Rank 0: tells every rank what comes next."""
        if self.world_size == 1:
            return
        payload = order.request + order.attachment
        header = bytearray(HEADER_BYTES)
        sizes = (len(order.request), len(order.attachment))
        _HEADER.pack_into(header, 0, _MAGIC, order.kind, order.has_rows, order.command, self._sequence, *sizes)
        if len(payload) <= _INLINE_BYTES:
            header[_HEADER.size : _HEADER.size + len(payload)] = payload
        self._broadcast(torch.frombuffer(header, dtype=torch.uint8))
        if len(payload) > _INLINE_BYTES:
            self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self._sequence += 1

    def hear(self) -> Order:
        """Every other rank: waits for the next order.

        Raises:
            RuntimeError: rank 0 has gone, or the ranks have lost step with each other.
        """
        header_tensor = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._broadcast(header_tensor)
        header = header_tensor.numpy().tobytes()
        magic, kind, has_rows, command, sequence, request_bytes, attachment_bytes = _HEADER.unpack_from(header)
        if magic != _MAGIC or sequence != self._sequence:
            raise RuntimeError(f"expected order {self._sequence}, got {sequence} with mark {magic:#x}")
        self._sequence += 1
        payload_bytes = request_bytes + attachment_bytes
        payload = header[_HEADER.size : _HEADER.size + payload_bytes]
        if payload_bytes > _INLINE_BYTES:
            payload_tensor = torch.empty(payload_bytes, dtype=torch.uint8)
            self._broadcast(payload_tensor)
            payload = payload_tensor.numpy().tobytes()
        return Order(OrderKind(kind), command, bool(has_rows), payload[:request_bytes], payload[request_bytes:])

    def scatter(self, shares: Sequence[Batch]) -> None:
        """Rank 0: sends its share of the rows to every other rank; `shares[0]` stays here."""
        sent = [part for rank in range(1, self.world_size) for part in self._start_send(shares[rank], rank)]
        for work, _ in sent:
            work.wait()

    def send(self, batch: Batch | None, to_rank: int) -> None:
        """Sends rows, or the word that there are none, to a rank that receives them."""
        for work, _ in self._start_send(batch, to_rank):
            work.wait()

    def send_cancelled(self, to_rank: int) -> None:
        """Sends, in place of rows, the word that this rank has given the command up."""
        self.send_numbers((_CANCELLED, 0), to_rank)

    def receive(self, from_rank: int) -> Batch | None:
        """Receives what `send` or `scatter` sent.

        Raises:
            CommandCancelled: it was `send_cancelled`.
        """
        num_meta, num_bytes = self.receive_numbers(2, from_rank)
        if num_meta == _CANCELLED:
            raise CommandCancelled(f"rank {from_rank} has given it up")
        if num_meta == _NO_ROWS:
            return None
        meta = self._receive_tensor(torch.empty(num_meta, dtype=torch.int64), from_rank)
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            self._receive_tensor(payload, from_rank)
        return unpack(meta, payload)

    def send_numbers(self, numbers: Sequence[int], to_rank: int) -> None:
        """Sends integers to a rank that knows how many they are."""
        dist.send(torch.tensor(numbers, dtype=torch.int64), to_rank, group=self._group)

    def receive_numbers(self, count: int, from_rank: int) -> list[int]:
        """Receives what `send_numbers` sent."""
        numbers: list[int] = self._receive_tensor(torch.empty(count, dtype=torch.int64), from_rank).tolist()
        return numbers

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=0, group=self._group)

    def _start_send(self, batch: Batch | None, to_rank: int) -> list[tuple[Any, Tensor]]:
        """Starts the sends; each tensor must live until its work is done."""
        if batch is None:
            tensors = [torch.tensor([_NO_ROWS, 0])]
        else:
            meta, payload = pack(batch)
            sizes = torch.tensor([len(meta), len(payload)])
            tensors = [sizes, meta, payload] if len(payload) else [sizes, meta]
        return [(dist.isend(tensor, to_rank, group=self._group), tensor) for tensor in tensors]

    def _receive_tensor(self, tensor: Tensor, from_rank: int) -> Tensor:
        dist.recv(tensor, from_rank, group=self._group)
        return tensor


def pack(batch: Batch) -> tuple[Tensor, Tensor]:
    """A batch as two tensors: int64 meta (rows, columns, then index and row lengths of each) and uint8 values.

    Wide values come first, so that every column starts aligned.
    """
    names = sorted(batch.columns, key=lambda name: (-COLUMN_DTYPES[name].itemsize, name))
    meta = [np.array([batch.num_rows, len(names)], dtype=np.int64)]
    for name in names:
        meta += [np.array([_COLUMN_NAMES.index(name)], dtype=np.int64), batch[name].lengths.astype(np.int64)]
    values = [np.ascontiguousarray(batch[name].values).view(np.uint8) for name in names]
    payload = np.concatenate(values) if values else np.empty(0, np.uint8)
    return torch.from_numpy(np.concatenate(meta)), torch.from_numpy(payload)


def unpack(meta: Tensor, payload: Tensor) -> Batch:
    """The batch that `pack` packed; the columns are views of `payload`."""
    numbers, values = meta.numpy(), payload.numpy()
    num_rows, num_columns = int(numbers[0]), int(numbers[1])
    columns: dict[str, Column] = {}
    offset = 0
    for entry in numbers[2:].reshape(num_columns, 1 + num_rows):
        name = _COLUMN_NAMES[entry[0]]
        lengths = entry[1:].astype(np.int32)
        end = offset + int(entry[1:].sum()) * COLUMN_DTYPES[name].itemsize
        columns[name] = Column(values[offset:end].view(COLUMN_DTYPES[name]), lengths)
        offset = end
    return Batch(num_rows, columns)
