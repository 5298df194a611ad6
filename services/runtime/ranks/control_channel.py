"""Sends messages between the ranks of a group: orders of rank 0 to all ranks, batch rows to each rank and back.

Every message is a tensor whose size is sent first, on a gloo group of its own; no object collectives, no pickle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from services.runtime.command import CommandCancelled
from splitppo.batch import Array, Batch, SharedColumn
from splitppo.columns import COLUMNS

_MAGIC = 0x53504F31
_COLUMN_NAMES = tuple(COLUMNS)
# Sent in place of the number of integers in the layout of a batch.
_NO_ROWS = 0
_CANCELLED = -1


# Sent in place of the index of a command.
NOTHING = -1
LEAVE = -2


@dataclass(frozen=True)
class Order:
    """The next order of rank 0 to every rank: a command (its index in the table of commands), NOTHING, or LEAVE."""

    command: int
    request: bytes = b""


class ControlChannel:
    """Sends orders and batch rows between the ranks of a group. Rank 0 sends every order to all other ranks.

    Attributes:
        num_orders: number of orders so far; the same on every rank that has received the last order.
    """

    def __init__(self, world_size: int, group: ProcessGroup | None = None) -> None:
        self.world_size = world_size
        self.num_orders = 0
        self._group = group

    def announce(self, order: Order) -> None:
        """Broadcasts an order to all other ranks; called on rank 0 alone."""
        if self.world_size == 1:
            return
        self._broadcast(torch.tensor([_MAGIC, self.num_orders, order.command, len(order.request)]))
        if order.request:
            self._broadcast(torch.frombuffer(bytearray(order.request), dtype=torch.uint8))
        self.num_orders += 1

    def next_order(self) -> Order:
        """Waits for the next order of rank 0 and returns the order; called on every rank but rank 0.

        Raises:
            RuntimeError: rank 0 has gone, or the ranks have lost step with each other.
        """
        header = self._broadcast(torch.empty(4, dtype=torch.int64))
        magic, number, command, num_bytes = header.tolist()
        if magic != _MAGIC or number != self.num_orders:
            raise RuntimeError(f"expected order {self.num_orders}, got {number} with mark {magic:#x}")
        self.num_orders += 1
        if not num_bytes:
            return Order(command)
        return Order(command, self._broadcast(torch.empty(num_bytes, dtype=torch.uint8)).numpy().tobytes())

    def scatter(self, shares: Sequence[Batch]) -> None:
        """Sends every other rank its share of a batch, `shares[rank]`; called on rank 0, which keeps `shares[0]`."""
        sent = [part for rank in range(1, self.world_size) for part in self._start_send(shares[rank], rank)]
        for work, _ in sent:
            work.wait()

    def send(self, batch: Batch | None, to_rank: int) -> None:
        """Sends the rows of a batch to one rank; None tells that rank that there are no rows."""
        for work, _ in self._start_send(batch, to_rank):
            work.wait()

    def send_cancelled(self, to_rank: int) -> None:
        """Tells one rank, in place of rows, that this rank has stopped the cancelled command."""
        self.send_numbers((_CANCELLED,), to_rank)

    def receive(self, from_rank: int) -> Batch | None:
        """Receives the batch that a rank sent (`send`, `scatter`); CommandCancelled if it called `send_cancelled`."""
        (count,) = self.receive_numbers(1, from_rank)
        if count == _CANCELLED:
            raise CommandCancelled(f"rank {from_rank} has given it up")
        if count == _NO_ROWS:
            return None
        layout = torch.empty(count, dtype=torch.int64)
        dist.recv(layout, from_rank, group=self._group)
        batch = allocate(layout)
        for values in _tensors(batch):
            dist.recv(values, from_rank, group=self._group)
        return batch

    def gather(self, columns: Batch | None) -> list[Batch | None]:
        """Collects the result columns of all ranks on rank 0, by rank; `columns` are those of rank 0 itself.

        Raises:
            CommandCancelled: a rank has stopped the cancelled command; raised when all ranks have sent.
        """
        gathered = [columns]
        given_up = None
        for rank in range(1, self.world_size):
            try:
                gathered.append(self.receive(rank))
            except CommandCancelled as error:
                given_up = error
        if given_up is not None:
            raise given_up
        return gathered

    def send_numbers(self, numbers: Sequence[int], to_rank: int) -> None:
        """Sends integers to one rank; the receiver must know how many."""
        dist.send(torch.tensor(numbers, dtype=torch.int64), to_rank, group=self._group)

    def receive_numbers(self, count: int, from_rank: int) -> list[int]:
        """Receives `count` integers that a rank sent with `send_numbers`."""
        numbers = torch.empty(count, dtype=torch.int64)
        dist.recv(numbers, from_rank, group=self._group)
        return [int(number) for number in numbers]

    def send_bytes(self, message: bytes, to_rank: int) -> None:
        """Sends bytes, perhaps none, to one rank."""
        self.send_numbers((len(message),), to_rank)
        if message:
            dist.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), to_rank, group=self._group)

    def receive_bytes(self, from_rank: int) -> bytes:
        """Receives the bytes that a rank sent with `send_bytes`."""
        (count,) = self.receive_numbers(1, from_rank)
        message = torch.empty(count, dtype=torch.uint8)
        if count:
            dist.recv(message, from_rank, group=self._group)
        return message.numpy().tobytes()

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor

    def _start_send(self, batch: Batch | None, to_rank: int) -> list[tuple[Any, Tensor]]:
        """Starts to send a batch; returns (work, tensor) pairs; each tensor must live until its send is done."""
        tensors = [torch.tensor([_NO_ROWS])]
        if batch is not None:
            layout = layout_of(batch)
            tensors = [torch.tensor([len(layout)]), layout, *_tensors(batch)]
        return [(dist.isend(tensor, to_rank, group=self._group), tensor) for tensor in tensors]


def layout_of(batch: Batch) -> Tensor:
    """Returns a batch's shape, which is sent before its values, int64: the number of rows, then that of each column.

    A column has its index among all columns, then its row lengths. A shared one has its index, the number of stored
    rows in use, the place of each row among them, and their lengths.
    """
    numbers: list[Array | list[int]] = [[batch.num_rows]]
    for name, column in batch.columns.items():
        numbers.append([_COLUMN_NAMES.index(name)])
        if isinstance(column, SharedColumn):
            numbers += [[len(column.rows_in_use)], column.places_in_use, column.store.lengths[column.rows_in_use]]
        else:
            numbers.append(column.lengths)
    return torch.from_numpy(np.concatenate(numbers).astype(np.int64))


def allocate(layout: Tensor) -> Batch:
    """Allocates an empty batch with the shape in `layout` (from `layout_of`), to receive column values into."""
    numbers = layout.numpy()
    num_rows = int(numbers[0])
    lengths = {}
    stored_rows = {}
    position = 1
    while position < len(numbers):
        name = _COLUMN_NAMES[numbers[position]]
        position += 1
        num_lengths = num_rows
        if COLUMNS[name].is_shared:
            num_lengths = int(numbers[position])
            position += 1
            stored_rows[name] = numbers[position : position + num_rows].astype(np.int32)
            position += num_rows
        lengths[name] = numbers[position : position + num_lengths].astype(np.int32)
        position += num_lengths
    return Batch.allocate(num_rows, lengths, stored_rows)


def _tensors(batch: Batch) -> list[Tensor]:
    """Returns the value tensors of a batch that are not empty, in the order in which they are sent and received."""
    return [torch.from_numpy(values) for values in batch.buffers if len(values)]
