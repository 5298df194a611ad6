"""Messages between the ranks of a group: orders from rank 0 to all, rows from rank 0 to each rank and back.

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

from services.runtime.role import CommandCancelled
from splitppo.batch import COLUMN_DTYPES, Batch

_MAGIC = 0x53504F31
_COLUMN_NAMES = tuple(COLUMN_DTYPES)
# Sent in place of the number of integers in the layout of a batch.
_NO_ROWS, _CANCELLED = 0, -1


# Sent in place of the index of a command.
NOTHING, LEAVE = -1, -2


@dataclass(frozen=True)
class Order:
    """The next thing that every rank does: a command, by its index in the table of commands, or NOTHING, or LEAVE.

    `attachment` is what `Command.attach` returned.
    """

    command: int
    request: bytes = b""
    attachment: bytes = b""


class ControlChannel:
    """Sends orders and rows between the ranks of a group. Rank 0 sends every order, all other ranks receive it.

    Attributes:
        num_orders: so far; the same on every rank that has received the last one.
    """

    def __init__(self, world_size: int, group: ProcessGroup | None = None) -> None:
        self.world_size = world_size
        self.num_orders = 0
        self._group = group

    def announce(self, order: Order) -> None:
        """Sends an order to all other ranks; for rank 0."""
        if self.world_size == 1:
            return
        sizes = len(order.request), len(order.attachment)
        self._broadcast(torch.tensor([_MAGIC, self.num_orders, order.command, *sizes]))
        if any(sizes):
            self._broadcast(torch.frombuffer(bytearray(order.request + order.attachment), dtype=torch.uint8))
        self.num_orders += 1

    def next_order(self) -> Order:
        """Waits for the next order and returns it; for every other rank.

        Raises:
            RuntimeError: rank 0 has gone, or the ranks have lost step with each other.
        """
        header = self._broadcast(torch.empty(5, dtype=torch.int64))
        magic, number, command, request_bytes, attachment_bytes = header.tolist()
        if magic != _MAGIC or number != self.num_orders:
            raise RuntimeError(f"expected order {self.num_orders}, got {number} with mark {magic:#x}")
        self.num_orders += 1
        payload = b""
        if num_bytes := request_bytes + attachment_bytes:
            payload = self._broadcast(torch.empty(num_bytes, dtype=torch.uint8)).numpy().tobytes()
        return Order(command, payload[:request_bytes], payload[request_bytes:])

    def scatter(self, shares: Sequence[Batch]) -> None:
        """Sends every other rank its share of the rows, `shares[rank]`; for rank 0, which keeps `shares[0]`."""
        sent = [part for rank in range(1, self.world_size) for part in self._start_send(shares[rank], rank)]
        for work, _ in sent:
            work.wait()

    def send(self, batch: Batch | None, to_rank: int) -> None:
        """Sends rows, or None for no rows."""
        for work, _ in self._start_send(batch, to_rank):
            work.wait()

    def send_cancelled(self, to_rank: int) -> None:
        """Sends, in place of rows, that this rank has given the command up."""
        self.send_numbers((_CANCELLED,), to_rank)

    def receive(self, from_rank: int) -> Batch | None:
        """Returns the rows that `send` or `scatter` sent; CommandCancelled if `send_cancelled` was called instead."""
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
        """Returns the columns of all ranks, `columns` being those of rank 0, which calls it.

        Raises:
            CommandCancelled: a rank has given the command up; raised when all ranks have sent.
        """
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
        """Sends integers; the receiver must know their number."""
        dist.send(torch.tensor(numbers, dtype=torch.int64), to_rank, group=self._group)

    def receive_numbers(self, count: int, from_rank: int) -> list[int]:
        """Returns the integers that `send_numbers` sent."""
        numbers = torch.empty(count, dtype=torch.int64)
        dist.recv(numbers, from_rank, group=self._group)
        return [int(number) for number in numbers]

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor

    def _start_send(self, batch: Batch | None, to_rank: int) -> list[tuple[Any, Tensor]]:
        """Starts to send rows; returns each work with its tensor, which must live until the work is done."""
        tensors = [torch.tensor([_NO_ROWS])]
        if batch is not None:
            layout = layout_of(batch)
            tensors = [torch.tensor([len(layout)]), layout, *_tensors(batch)]
        return [(dist.isend(tensor, to_rank, group=self._group), tensor) for tensor in tensors]


def layout_of(batch: Batch) -> Tensor:
    """Returns what is sent before a batch, int64: the number of rows, then index and row lengths of each column."""
    columns = np.empty((len(batch.columns), 1 + batch.num_rows), np.int64)
    for numbers, (name, column) in zip(columns, batch.columns.items(), strict=True):
        numbers[0], numbers[1:] = _COLUMN_NAMES.index(name), column.lengths
    return torch.from_numpy(np.concatenate([[batch.num_rows], columns.reshape(-1)]))


def allocate(layout: Tensor) -> Batch:
    """Returns a batch with a layout of `layout_of`, into which its values can be received."""
    num_rows, numbers = int(layout[0]), layout[1:].numpy()
    columns = numbers.reshape(-1, 1 + num_rows)
    return Batch.allocate(num_rows, {_COLUMN_NAMES[of[0]]: of[1:].astype(np.int32) for of in columns})


def _tensors(batch: Batch) -> list[Tensor]:
    """Returns the values of each column that has any, in the order in which they are sent and received."""
    return [torch.from_numpy(values) for values in batch.buffers if len(values)]
