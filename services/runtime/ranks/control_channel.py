"""What ranks of a group say to each other: orders from rank 0 to all, rows from rank 0 to each rank and back.

Everything is a tensor with its sizes announced first, on a gloo group of its own; no object collectives, no pickle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from services.runtime.role import CommandCancelled
from splitppo.batch import COLUMN_DTYPES, Batch, Column

_MAGIC = 0x53504F31
_COLUMN_NAMES = tuple(COLUMN_DTYPES)
# In place of the number of bytes of a batch.
_NO_ROWS, _CANCELLED = 0, -1


class OrderKind(IntEnum):
    """What the ranks are to do next."""

    NOTHING = 0
    COMMAND = 1
    LEAVE = 2


@dataclass(frozen=True)
class Order:
    """The next thing that every rank does: a command, by its index in their table, its request and `Command.attach`."""

    kind: OrderKind
    command: int = 0
    request: bytes = b""
    attachment: bytes = b""


class ControlChannel:
    """Orders and rows between the ranks of one group. Every order is made by rank 0 and received by all other ranks.

    Attributes:
        num_orders: so far; the same on every rank that has received the last one.
    """

    def __init__(self, rank: int, world_size: int, group: ProcessGroup | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.num_orders = 0
        self._group = group

    def announce(self, order: Order) -> None:
        """Rank 0: tells every rank what comes next."""
        if self.world_size == 1:
            return
        sizes = len(order.request), len(order.attachment)
        self._broadcast(torch.tensor([_MAGIC, self.num_orders, order.kind, order.command, *sizes]))
        if any(sizes):
            self._broadcast(torch.frombuffer(bytearray(order.request + order.attachment), dtype=torch.uint8))
        self.num_orders += 1

    def next_order(self) -> Order:
        """Every other rank: waits for the next order.

        Raises:
            RuntimeError: rank 0 has gone, or the ranks have lost step with each other.
        """
        header = self._broadcast(torch.empty(6, dtype=torch.int64))
        magic, number, kind, command, request_bytes, attachment_bytes = header.tolist()
        if magic != _MAGIC or number != self.num_orders:
            raise RuntimeError(f"expected order {self.num_orders}, got {number} with mark {magic:#x}")
        self.num_orders += 1
        payload = b""
        if num_bytes := request_bytes + attachment_bytes:
            payload = self._broadcast(torch.empty(num_bytes, dtype=torch.uint8)).numpy().tobytes()
        return Order(OrderKind(kind), command, payload[:request_bytes], payload[request_bytes:])

    def scatter(self, shares: Sequence[Batch]) -> None:
        """Rank 0: sends its share of the rows to every other rank; `shares[0]` stays here."""
        sent = [part for rank in range(1, self.world_size) for part in self._start_send(shares[rank], rank)]
        for work, _ in sent:
            work.wait()

    def send(self, batch: Batch | None, to_rank: int) -> None:
        """Sends rows, or the word that there are none."""
        for work, _ in self._start_send(batch, to_rank):
            work.wait()

    def send_cancelled(self, to_rank: int) -> None:
        """Sends, in place of rows, the word that this rank has given the command up."""
        self.send_numbers((_CANCELLED,), to_rank)

    def receive(self, from_rank: int) -> Batch | None:
        """Receives what `send` or `scatter` sent; CommandCancelled if it was `send_cancelled`."""
        (num_bytes,) = self.receive_numbers(1, from_rank)
        if num_bytes == _CANCELLED:
            raise CommandCancelled(f"rank {from_rank} has given it up")
        if num_bytes == _NO_ROWS:
            return None
        packed = torch.empty(num_bytes, dtype=torch.uint8)
        dist.recv(packed, from_rank, group=self._group)
        return unpack(packed)

    def gather(self, columns: Batch | None) -> list[Batch | None]:
        """Rank 0: its own columns and every other rank's; CommandCancelled, once all have sent, if one gave up."""
        gathered, given_up = [columns], None
        for rank in range(1, self.world_size):
            try:
                gathered.append(self.receive(rank))
            except CommandCancelled as error:
                given_up = error
        if given_up is not None:
            raise given_up
        return gathered

    def send_numbers(self, numbers: Sequence[int], to_rank: int) -> None:
        """Sends integers; who receives them knows how many they are."""
        dist.send(torch.tensor(numbers, dtype=torch.int64), to_rank, group=self._group)

    def receive_numbers(self, count: int, from_rank: int) -> list[int]:
        """Receives what `send_numbers` sent."""
        numbers = torch.empty(count, dtype=torch.int64)
        dist.recv(numbers, from_rank, group=self._group)
        return [int(number) for number in numbers]

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor

    def _start_send(self, batch: Batch | None, to_rank: int) -> list[tuple[Any, Tensor]]:
        """Starts the sends; each tensor must live until its work is done."""
        packed = [] if batch is None else [pack(batch)]
        num_bytes = torch.tensor([len(packed[0]) if packed else _NO_ROWS])
        return [(dist.isend(tensor, to_rank, group=self._group), tensor) for tensor in (num_bytes, *packed)]


def pack(batch: Batch) -> Tensor:
    """A batch as bytes: int64 numbers (rows, columns, then index and row lengths of each column), then the values.

    Wide values come first, so that every column starts aligned.
    """
    names = sorted(batch.columns, key=lambda name: (-COLUMN_DTYPES[name].itemsize, name))
    parts: list[NDArray[Any]] = [np.array([batch.num_rows, len(names)])]
    for name in names:
        parts += [np.array([_COLUMN_NAMES.index(name)]), batch[name].lengths.astype(np.int64)]
    parts += [np.ascontiguousarray(batch[name].values) for name in names]
    return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts]))


def unpack(packed: Tensor) -> Batch:
    """The batch that `pack` packed; the columns are views of it."""
    content = packed.numpy()
    num_rows, num_columns = (int(number) for number in content[:16].view(np.int64))
    offset = 16 + 8 * num_columns * (1 + num_rows)
    columns: dict[str, Column] = {}
    for entry in content[16:offset].view(np.int64).reshape(num_columns, 1 + num_rows):
        name, lengths = _COLUMN_NAMES[entry[0]], entry[1:].astype(np.int32)
        end = offset + int(entry[1:].sum()) * COLUMN_DTYPES[name].itemsize
        columns[name] = Column(content[offset:end].view(COLUMN_DTYPES[name]), lengths)
        offset = end
    return Batch(num_rows, columns, trusted=True)
