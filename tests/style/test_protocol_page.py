"""The pages of the protocol name every RPC, message, field, column and error of the wire, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor

from splitppo.batch import MAX_BATCH_ROWS, Batch
from splitppo.columns import spec_of
from splitppo.config.schema import Config
from splitppo.rpc.channel_options import MAX_MESSAGE_BYTES
from splitppo.rpc.codec import WIRE_COLUMNS, encode_messages
from splitppo.rpc.errors import WireError
from splitppo.rpc.request_id import PROTOCOL_VERSION, request_id
from splitppo.rpc.wire_format import CHUNK_BYTES, MAX_HEADER_FIELDS, MAX_MEASURED_BYTES
from splitppo.v1 import (
    actor_pb2,
    batch_pb2,
    conversation_pb2,
    critic_pb2,
    reference_pb2,
    reward_model_pb2,
    rollout_pb2,
    teacher_pb2,
    worker_pb2,
)

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("protocol*.md")))
MODULES = (
    *(actor_pb2, batch_pb2, conversation_pb2, critic_pb2, reference_pb2),
    *(reward_model_pb2, rollout_pb2, teacher_pb2, worker_pb2),
)
FILES = [module.DESCRIPTOR for module in MODULES]


def table(first_column: str) -> list[list[str]]:
    """The rows of every table whose first column is headed so, without backticks."""
    rows: list[list[str]] = []
    is_inside = False
    for line in PAGE.splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            is_inside = False
        elif cells[0] == first_column:
            is_inside = True
        elif is_inside and not line.startswith("|---"):
            rows.append(cells)
    assert rows, first_column
    return rows


def type_of(field: FieldDescriptor) -> str:
    """A field's type as the page has it."""
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        return f"map {' to '.join(type_of(one) for one in entry.fields)}"
    named = entry or field.enum_type
    scalar = {
        number: name.removeprefix("TYPE_").lower()
        for name, number in vars(FieldDescriptor).items()
        if name.startswith("TYPE_") and isinstance(number, int)
    }
    return f"{'repeated ' if field.is_repeated else ''}{named.name if named else scalar[field.type]}"


def fields() -> Iterator[tuple[str, str]]:
    for file in FILES:
        for message in file.message_types_by_name.values():
            if not message.fields:
                yield message.name, "no fields"
            for field in message.fields:
                yield f"{message.name}.{field.name}", type_of(field)


def methods() -> Iterator[tuple[str, str, str]]:
    for file in FILES:
        for service in file.services_by_name.values():
            for method in service.methods:
                request = f"{'stream ' if method.client_streaming else ''}{method.input_type.name}"
                answer = f"{'stream ' if method.server_streaming else ''}{method.output_type.name}"
                yield f"{service.name}/{method.name}", request, answer


def enums() -> list[EnumDescriptor]:
    return [enum for file in FILES for enum in file.enum_types_by_name.values()]


def test_every_rpc_is_named_with_its_messages() -> None:
    assert sorted(tuple(row[:3]) for row in table("RPC")) == sorted(methods())


def test_every_field_of_every_message_is_named_with_its_type() -> None:
    assert sorted(tuple(row[:2]) for row in table("field")) == sorted(fields())


def test_every_value_of_every_enum_is_named_with_its_number() -> None:
    numbers = {row[0]: int(row[1]) for row in table("value")}
    numbers |= {row[0]: int(row[1].partition(";")[0]) for row in table("type")}
    assert numbers == {value.name: value.number for enum in enums() for value in enum.values}


def test_every_column_is_named_with_its_type_its_kind_and_its_size() -> None:
    rows = table("column")
    sizes = {row[0]: int(row[1].split(";")[1].split(",")[0]) for row in table("type")[1:]}
    named = {row[0]: (row[1], row[2]) for row in rows}
    assert named.keys() == WIRE_COLUMNS
    for name, (dtype, kind) in named.items():
        assert kind == spec_of(name).kind
        assert dtype == f"DTYPE_{spec_of(name).dtype.name.upper()}"
        assert sizes[dtype] == spec_of(name).dtype.itemsize


def test_every_error_is_named_with_its_code_and_its_reason() -> None:
    rows = [tuple(row[:3]) for row in table("error")]
    assert sorted(rows) == sorted(
        (error.__name__, error.code.name, error.reason) for error in WireError.by_reason.values()
    )


def test_the_first_error_of_a_code_stands_for_an_unknown_reason_of_it() -> None:
    first = {code: name for name, code, _ in reversed([row[:3] for row in table("error")])}
    assert first == {code.name: error.__name__ for code, error in WireError.by_code.items()}


def test_every_key_of_the_configuration_that_it_names_is_there() -> None:
    schema: dict[str, Any] = Config.model_json_schema()
    roots = [name for name in schema["properties"] if name != "data"]
    named = set(re.findall(rf"`((?:{'|'.join(roots)})\.[a-z_.]+)`", PAGE)) - {"run.dir"}
    assert len(named) > 10
    for key in named:
        section: Any = Config
        for part in key.split("."):
            assert part in section.model_fields, key
            section = section.model_fields[part].annotation


def test_numbers_are_those_of_the_code() -> None:
    assert f"`protocol_version` {PROTOCOL_VERSION}." in PAGE
    limits = {row[0]: row[1] for row in table("what")}
    assert limits["message"] == f"{MAX_MESSAGE_BYTES >> 20} MiB"
    assert limits["bytes of MeasureUpload"] == f"{MAX_MEASURED_BYTES >> 20} MiB"
    assert limits["rows of a batch"] == f"{MAX_BATCH_ROWS:,}"
    assert limits["message with a chunk"] == f"{CHUNK_BYTES >> 20} MiB + 64 bytes"
    assert str(MAX_HEADER_FIELDS) in limits.values()


def example(name: str) -> bytes:
    """A message of the example, in hex over several lines."""
    found = re.search(rf"^    {name} +((?:[0-9a-f]{{2}}[ \n]+)+)", PAGE, re.MULTILINE)
    assert found, name
    return bytes.fromhex(found[1])


def test_the_example_of_a_batch_is_what_is_sent() -> None:
    batch = Batch.from_rows(prompts=[[5, 6], [7]], seeds=[[1, 2], [3, -1]])
    slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=1)
    header, chunks = encode_messages(batch, slot)
    opening = worker_pb2.PutBatchHeader(run_id="r", epoch=1, batch=header)
    assert worker_pb2.PutBatchRequest.FromString(example("header")) == worker_pb2.PutBatchRequest(header=opening)
    assert [example("chunk")] == list(chunks)


def test_the_example_of_a_checksum_is_right() -> None:
    assert f"`05 00 00 00` it is `0x{xxhash.xxh3_64_hexdigest(bytes([5, 0, 0, 0]))}`" in " ".join(PAGE.split())


def test_the_example_of_a_request_id_is_right() -> None:
    made = request_id("run", 1, 3, "ComputeRefLogProbs", 1, 0, batch_pb2.SLOT_KIND_EXPERIENCE, 0)
    assert f"`{made}`" in PAGE
