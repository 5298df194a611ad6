"""Request ids are a function of the work that they name; the wire has all roles."""

from typing import get_args

from splitppo.config.section import RoleName
from splitppo.rpc.request_id import request_id
from splitppo.v1 import worker_pb2


def test_the_same_command_has_the_same_id() -> None:
    assert request_id("run", 1, 5, "Generate", 1, 0) == request_id("run", 1, 5, "Generate", 1, 0)


def test_any_difference_gives_another_id() -> None:
    ids = [
        request_id("run", 1, 5, "Generate", 1, 0),
        request_id("run2", 1, 5, "Generate", 1, 0),
        request_id("run", 2, 5, "Generate", 1, 0),
        request_id("run", 1, 6, "Generate", 1, 0),
        request_id("run", 1, 5, "Update", 1, 0),
        request_id("run", 1, 5, "Generate", 2, 0),
        request_id("run", 1, 5, "Generate", 1, 1),
        request_id("run", 1, 5, "Generate", 10),
        request_id("run", 1, 5, "Generate"),
    ]

    assert len(set(ids)) == len(ids)


def test_an_id_tells_its_method_and_step_to_a_reader_of_logs() -> None:
    assert request_id("run", 1, 5, "Generate").startswith("Generate-5-")


def test_every_role_of_the_wire_can_be_served() -> None:
    assert set(worker_pb2.Role.keys()) == {"ROLE_UNSPECIFIED", *(f"ROLE_{name.upper()}" for name in get_args(RoleName))}
