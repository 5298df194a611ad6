"""Carries replies to conversations from rank 0 to the ranks that sample; the mirror of streaming.py.

    rank 0, gRPC thread       rank 0, a thread per other rank            ranks 1..N-1, a thread
    Reply: check, sort ---->  send     ---- replies ------------------>  receive, for `take_replies`
                              the rank has ended (streaming.py)
                              send     ---- the end ------------------>  receive, and end

The threads live as long as the command. A rank that has ended the command goes on to receive, so that no message is
left behind. Replies and parts use one process group, in opposite directions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from queue import SimpleQueue

from services.runtime.ranks.control_channel import ControlChannel
from services.runtime.ranks.sharding import Indices
from services.runtime.ranks.parts import in_threads
from services.runtime.role import ReplyQueue
from services.runtime.state.command_call import CommandCall
from services.rollout.reply_router import OpenConversations
from splitppo.batch import Batch
from splitppo.v1 import conversation_pb2


def open_conversations(call: CommandCall, rows: Batch | None, shards: Sequence[Indices]) -> OpenConversations | None:
    """Makes the state of a command's conversations on rank 0; None if the command takes no replies."""
    if (limits := call.command.reply_limits(call.request)) is None:
        return None
    if rows is None or "places" not in rows:
        raise RuntimeError(f"{call.command.method} takes replies, but its rows have no places")
    places = rows.select(["places"])
    return OpenConversations(
        limits, [places.take(shard)["places"].values.tolist() for shard in shards], call.turns_ended
    )


def sending_replies(
    channel: ControlChannel, conversations: OpenConversations | None, on_error: Callable[[Exception], None]
) -> AbstractContextManager[None]:
    """Sends each other rank its replies in a thread during the `with` block, then until the rank has ended.

    `on_error` is called, in the thread of that rank, if a rank is lost.
    """

    def send(rank: int, replies: ReplyQueue) -> None:
        while (some := replies.get()) is not None:
            channel.send_bytes(conversation_pb2.ReplyRequest(replies=some).SerializeToString(), rank)
        channel.send_bytes(b"", rank)

    queues = enumerate(conversations.replies if conversations else ())
    return in_threads({f"replies-{rank}": partial(send, rank, replies) for rank, replies in queues if rank}, on_error)


@contextmanager
def receiving_replies(channel: ControlChannel, on_error: Callable[[Exception], None]) -> Iterator[ReplyQueue]:
    """Gives the `with` block the queue of this rank's replies, which a thread fills until rank 0 sends the end."""
    replies: ReplyQueue = SimpleQueue()

    def receive() -> None:
        while message := channel.receive_bytes(0):
            replies.put(conversation_pb2.ReplyRequest.FromString(message).replies)

    with in_threads({"replies": receive}, on_error):
        yield replies
