"""Implements the RPCs of a worker service: commands go to the command queue, other calls are answered at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any, cast

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from services.runtime.command import Command, Effect, Messages
from services.runtime.rpc.diagnosis import check_nonce
from services.runtime.rpc.limits import refusing_when
from services.runtime.rpc.method_adapter import Method
from services.runtime.state.batch_store import describe
from services.runtime.state.command_call import CommandCall
from services.runtime.state.worker import Worker
from splitppo import __version__
from splitppo.clock import unix_ns
from splitppo.rpc.codec import encode_messages, receive_batch
from splitppo.rpc.errors import InvalidArgument, LimitExceeded, WireError, WrongState
from splitppo.rpc.request_id import PROTOCOL_VERSION
from splitppo.rpc.software_version import why_versions_differ
from splitppo.v1 import batch_pb2, worker_pb2

_MAX_REQUEST_ID_LENGTH = 256


class WorkerServicer:
    """Implements the RPCs outside the command queue: Handshake, GetStatus, PutBatch and GetBatch."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def handshake(self, request: worker_pb2.HandshakeRequest, _: Any) -> worker_pb2.HandshakeResponse:
        """Checks that controller and worker are compatible; from then on the worker refuses older controllers."""
        worker = self._worker
        run_dir = self._worker.context.config.run.dir
        if because := why_versions_differ("this worker", "the controller", request):
            raise WrongState(because)
        if request.config_digest != worker.config_digest:
            raise WrongState(
                f"the controller's config digest is {request.config_digest}, this worker's {worker.config_digest}:"
                f" the sections that shape the {worker.context.role_name} differ;"
                " restart the worker with the controller's configuration"
            )
        check_nonce(request.nonce)
        if not (run_dir / request.nonce).is_file():
            raise WrongState(
                f"this worker does not see {request.nonce} in its run folder {run_dir};"
                " run.dir must be storage that the controller and all ranks share"
            )
        if worker.fencing.take(request.run_id, request.epoch):
            worker.command_queue.supersede("a newer controller has taken over")
        if worker.ledger is None:
            worker.slots.clear()  # else the load of a checkpoint does it
        return worker_pb2.HandshakeResponse(
            **self._identity(),
            world_size=worker.context.world_size,
            processes=worker.processes,
            num_parameters=worker.num_parameters,
            num_trainable_parameters=worker.num_trainable_parameters,
        )

    async def get_status(self, _: worker_pb2.GetStatusRequest, __: Any) -> worker_pb2.GetStatusResponse:
        """Answers at once who this worker is, its state and epoch, the running command, and how many wait."""
        worker = self._worker
        running = worker.command_queue.running
        return worker_pb2.GetStatusResponse(
            **self._identity(),
            state=worker.state,
            epoch=worker.fencing.epoch,
            running_method=running.command.method if running else "",
            progress=running.progress if running else None,
            queued_commands=worker.command_queue.num_queued,
            slots=worker.slots.slots(),
        )

    def _identity(self) -> dict[str, Any]:
        """Returns the reply fields about this worker: versions, role, instance, config digest, committed step, time."""
        worker = self._worker
        return {
            "protocol_version": PROTOCOL_VERSION,
            "software_version": __version__,
            "role": worker.role,
            "instance_id": worker.instance_id,
            "config_digest": worker.config_digest,
            "committed_step": worker.committed_step or 0,
            "unix_ns": unix_ns(),
        }

    async def put_batch(self, requests: AsyncIterator[bytes], _: Any) -> worker_pb2.PutBatchResponse:
        """Receives a batch in chunks (serialised messages) and puts it into its slot once all chunks have arrived."""
        services = self._worker.context.config.services
        slots = self._worker.slots
        caller = worker_pb2.PutBatchHeader()
        room = ExitStack()

        def open_put(header: worker_pb2.PutBatchHeader) -> batch_pb2.BatchHeader:
            """Checks the caller and slot of a batch before memory is allocated for it; returns the batch header."""
            _check_caller(self._worker, header)
            slots.check(header.batch.slot, self._worker.committed_step)
            caller.run_id = header.run_id
            caller.epoch = header.epoch
            return header.batch

        def reserve(num_bytes: int) -> None:
            room.enter_context(slots.reserved(num_bytes))

        with room:
            # Not DEADLINE_EXCEEDED: nobody hangs, and sending it again would take as long.
            late = LimitExceeded(f"the batch was not complete within {services.max_send_s:g} s (services.max_send_s)")
            async with refusing_when(asyncio.timeout(services.max_send_s), late):
                slot, batch = await receive_batch(requests, services.max_batch_bytes, open_put, reserve=reserve)
            _check_caller(self._worker, caller)  # a newer controller may have come while the chunks arrived
            slots.put(slot, batch, self._worker.committed_step)
        return worker_pb2.PutBatchResponse(received_bytes=batch.num_bytes)

    async def get_batch(
        self, request: worker_pb2.GetBatchRequest, _: Any
    ) -> AsyncIterator[worker_pb2.GetBatchResponse | bytes]:
        """Streams the requested columns of a slot: a header message, then chunks that are already serialised."""
        _check_caller(self._worker, request)
        if not request.columns:
            raise InvalidArgument("columns must name at least one column")
        rows = self._worker.slots.get(request.slot)
        if missing := [name for name in request.columns if name not in rows]:
            raise WrongState(
                f"the {describe(request.slot)} has no column {missing[0]!r}; it has {', '.join(rows.columns)}"
            )
        header, parts = encode_messages(rows.select(request.columns), request.slot)
        yield worker_pb2.GetBatchResponse(header=header)
        del header  # as large as the row lengths, and the reader may take its time
        for part in parts:
            yield part


def command_method(worker: Worker, command: Command) -> Method:
    """Returns the gRPC method of a command: it queues a call, then streams the call's events."""

    async def serve(request: Any, _: Any) -> AsyncIterator[worker_pb2.CommandEvent]:
        call = CommandCall(command, request)
        _check_request(call)
        worker.fencing.check(request.header.run_id, request.header.epoch)
        call = worker.command_queue.admit(call, worker.stored_reply)
        async for event in _events(call):
            yield event

    return serve


def message_method(worker: Worker, command: Command, messages: Messages) -> Method:
    """Returns the gRPC method by which callers send a message to a running command; it is taken whole or not at all."""

    async def serve(request: Any, _: Any) -> Message:
        _check_caller(worker, request)
        running = worker.command_queue.running
        is_addressed = running is not None and running.command is command and running.request.slot == request.slot
        if running is None or not is_addressed or running.messages is None:
            takes = f"{command.method} that takes {messages.method}"
            raise WrongState(f"no {takes} is running on the {describe(request.slot)}")
        if running.cancelled_because:
            raise WrongState(f"{command.method} was cancelled: {running.cancelled_because}")
        running.messages.from_caller(request)
        return messages.response_type()

    return serve


def _check_caller(worker: Worker, header: Any) -> None:
    """Raises a WireError unless the newest controller calls (`header` has run_id and epoch) a service that serves."""
    worker.fencing.check(header.run_id, header.epoch)
    worker.check_open()
    worker.check_clean()


def _check_request(call: CommandCall) -> None:
    """Raises InvalidArgument for a command call whose request id or slot is wrong in any state of the worker."""
    if not 0 < len(call.request_id) <= _MAX_REQUEST_ID_LENGTH:
        raise InvalidArgument(f"header.request_id must have 1 to {_MAX_REQUEST_ID_LENGTH} characters")
    effect = call.command.effect
    if effect.has_rows and call.request.slot.kind == batch_pb2.SLOT_KIND_UNSPECIFIED:
        raise InvalidArgument("slot must be given")
    if effect is Effect.TRAINS and call.request.slot.kind != batch_pb2.SLOT_KIND_EXPERIENCE:
        raise InvalidArgument(f"{call.command.method} needs an experience slot, got the {describe(call.request.slot)}")


async def _events(call: CommandCall) -> AsyncIterator[worker_pb2.CommandEvent]:
    """Yields a command call's events up to its result; of progress events that are already past, only the newest."""
    num_read = 0
    while True:
        events, more = call.read(num_read)
        num_read += len(events)
        for event in events:
            if isinstance(event, WireError):
                raise event
            if not event.HasField("progress") or event is call.newest_progress:
                yield event
            if event.HasField("result"):
                return
        await asyncio.shield(asyncio.wrap_future(more))  # others wait for it, too


def service_of(command: Command) -> ServiceDescriptor:
    """Finds the proto service that declares a command: the command's own, or one in the file of the command's request.

    Raises:
        ValueError: neither declares it.
    """
    request = command.request_type.DESCRIPTOR
    candidates = (command.service,) if command.service else request.file.services_by_name.values()
    for service in candidates:
        method = service.methods_by_name.get(command.method)
        if method is not None and method.input_type.full_name == request.full_name:
            return cast(ServiceDescriptor, service)
    raise ValueError(f"{request.file.name} declares no RPC {command.method}({request.name})")
