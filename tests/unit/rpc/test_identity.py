"""Request ids are a function of what they name."""

from splitppo.rpc.identity import request_id


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
