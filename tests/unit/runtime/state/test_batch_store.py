"""The experience store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.runtime.state.batch_store import MAX_EVALUATION_SLOTS, MAX_PARTS, BatchStore
from services.runtime.state.command_call import StoredReply
from splitppo.batch import Batch, concatenate
from splitppo.rpc.errors import Busy, InvalidArgument, LimitExceeded, NotFound, WrongState
from splitppo.v1 import batch_pb2, worker_pb2


def experience(step: int, part: int = 0) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=step, part=part)


def evaluation(step: int, part: int = 0) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EVALUATION, step=step, part=part)


def candidates(step: int, part: int = 0) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_CANDIDATES, step=step, part=part)


def share(step: int, part: int = 0) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_SHARE, step=step, part=part)


def greedy(step: int) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_GREEDY, step=step)


MakeSlot = Callable[..., batch_pb2.Slot]
PROMPTS = Batch.from_rows(prompts=[[1, 2], [3]])


def test_columns_of_the_same_rows_are_merged_into_the_slot() -> None:
    store = BatchStore()
    store.put(experience(1), PROMPTS, 0)
    store.put(experience(1), Batch.from_rows(responses=[[4], [5, 6]]), 0)
    rows = store.get(experience(1))
    assert set(rows.columns) == {"prompts", "responses"}
    assert rows["responses"].values.tolist() == [4, 5, 6]


def test_a_put_that_does_not_fit_changes_nothing() -> None:
    store = BatchStore()
    store.put(experience(1), PROMPTS, 0)
    with pytest.raises(ValueError, match="3 rows into one of 2"):
        store.put(experience(1), Batch.from_rows(prompts=[[9]] * 3, responses=[[9]] * 3), 0)
    assert set(store.get(experience(1)).columns) == {"prompts"}


def test_columns_that_do_not_align_with_the_responses_are_refused() -> None:
    store = BatchStore()
    store.put(experience(1), Batch.from_rows(responses=[[1, 2]]), 0)
    with pytest.raises(ValueError, match="one value per response token"):
        store.put(experience(1), Batch.from_rows(values=[[0.5]]), 0)
    assert "values" not in store.get(experience(1))


@pytest.mark.parametrize("kind", [experience, share])
def test_the_next_two_steps_have_room(kind: MakeSlot) -> None:
    store = BatchStore()
    for step in (1, 2):
        store.put(kind(step), PROMPTS, 0)
    assert [store.get(kind(step)).num_rows for step in (1, 2)] == [2, 2]


@pytest.mark.parametrize("kind", [experience, share])
@pytest.mark.parametrize("step", [-1, 0, 3])
def test_other_steps_are_refused(kind: MakeSlot, step: int) -> None:
    with pytest.raises(WrongState, match="steps 1 and 2"):
        BatchStore().put(kind(step), PROMPTS, 0)


def test_slots_without_a_kind_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="unknown slot kind"):
        BatchStore().put(batch_pb2.Slot(step=1), PROMPTS, 0)


@pytest.mark.parametrize("kind", [experience, share])
@pytest.mark.parametrize("part", [-1, MAX_PARTS + 1])
def test_experience_and_shares_have_a_bounded_number_of_parts(kind: MakeSlot, part: int) -> None:
    with pytest.raises(InvalidArgument, match=f"part {part}: expected a part from 0 to {MAX_PARTS}"):
        BatchStore().put(kind(1, part), PROMPTS, 0)


def with_parts() -> BatchStore:
    """Values of two parts, which came in the other order; the second one has a column more."""
    store = BatchStore()
    store.put(experience(1, 2), Batch.from_rows(responses=[[4, 5]], values=[[0.4, 0.5]], returns=[[9.0, 9.0]]), 0)
    store.put(experience(1, 1), Batch.from_rows(responses=[[1], [2, 3]], values=[[0.1], [0.2, 0.3]]), 0)
    return store


def test_the_first_put_to_the_whole_joins_what_its_parts_have_in_common() -> None:
    store = with_parts()
    returns = Batch.from_rows(returns=[[1.0], [2.0, 3.0], [4.0, 5.0]])
    store.put(experience(1), returns, 0)
    whole = store.get(experience(1))
    assert set(whole.columns) == {"responses", "values", "returns"}
    assert whole["responses"].rows()[2].tolist() == [4, 5]
    assert whole["returns"].values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [slot.part for slot in store.slots()] == [0]


def test_the_whole_of_parts_can_be_read_before_anything_is_put_to_it_and_grows_with_them() -> None:
    store = with_parts()
    assert store.get(experience(1))["responses"].values.tolist() == [1, 2, 3, 4, 5]
    store.put(experience(1, 3), Batch.from_rows(responses=[[6]], values=[[0.6]]), 0)
    assert store.get(experience(1)).num_rows == 4


@pytest.mark.parametrize("kind", [experience, share])
def test_the_whole_has_every_row_of_its_parts_at_its_place(kind: MakeSlot) -> None:
    store = BatchStore()
    store.put(kind(1, 1), Batch.from_rows(responses=[[1], [2, 3]], places=[[1], [3]]), 0)
    store.put(kind(1, 2), Batch.from_rows(responses=[[4, 5], [6]], places=[[0], [2]]), 0)
    assert [row.tolist() for row in store.get(kind(1))["responses"].rows()] == [[4, 5], [1], [6], [2, 3]]
    store.put(kind(1), Batch.from_rows(returns=[[4.0, 5.0], [1.0], [6.0], [2.0, 3.0]]), 0)
    assert set(store.get(kind(1)).columns) == {"responses", "returns"}


@pytest.mark.parametrize("places", [[[0], [0]], [[0], [2]], [[-1], [1]], [[1], [0, 0]], [[0, 1], []]])
def test_places_that_are_not_every_row_once_are_refused_and_change_nothing(places: list[list[int]]) -> None:
    store = BatchStore()
    store.put(experience(1, 1), Batch.from_rows(responses=[[1], [2]], places=places), 0)
    with pytest.raises(ValueError, match=r"hold each of 2 rows once|one value per row"):
        store.put(experience(1), Batch.from_rows(returns=[[1.0], [2.0]]), 0)
    assert [slot.part for slot in store.slots()] == [1]


def test_a_command_on_the_whole_of_parts_keeps_its_columns_there() -> None:
    store = with_parts()
    made = Batch.from_rows(advantages=[[1.0], [2.0, 3.0], [4.0, 5.0]])
    store.absorb(experience(1), made, "request", StoredReply("", worker_pb2.CommandResult()))
    assert {"responses", "values", "advantages"} == set(store.get(experience(1)).columns)


@pytest.mark.parametrize("returns", [[[1.0], [2.0, 3.0]], [[1.0], [2.0, 3.0], [4.0]]], ids=["rows", "tokens"])
def test_a_put_to_the_whole_that_does_not_fit_its_parts_changes_nothing(returns: list[list[float]]) -> None:
    store = with_parts()
    with pytest.raises(ValueError, match=r"rows into one of 3|one value per response token"):
        store.put(experience(1), Batch.from_rows(returns=returns), 0)
    assert sorted(slot.part for slot in store.slots()) == [1, 2]


def test_a_whole_with_a_gap_between_its_parts_is_refused() -> None:
    store = with_parts()
    store.put(experience(1, 4), PROMPTS, 0)
    with pytest.raises(WrongState, match="only its parts 1, 2, 4 were put"):
        store.put(experience(1), PROMPTS, 0)


@pytest.mark.parametrize("kind", [experience, share])
def test_parts_that_a_command_has_finished_lie_beside_the_whole_until_their_step_is_committed(kind: MakeSlot) -> None:
    store = BatchStore()
    store.put(kind(1), PROMPTS, 0)
    store.add_part(kind(1), 1, Batch.from_rows(responses=[[1]]))
    store.put(kind(1), Batch.from_rows(responses=[[1], [2]]), 0)
    assert store.get(kind(1, 1))["responses"].values.tolist() == [1]
    assert store.get(kind(1)).num_rows == 2
    store.commit(1)
    assert store.slots() == []


@pytest.mark.parametrize(("kind", "other"), [(experience, share), (share, experience)])
def test_parts_of_a_command_that_was_given_up_are_dropped_and_the_whole_stays(kind: MakeSlot, other: MakeSlot) -> None:
    store = BatchStore()
    store.put(kind(1), PROMPTS, 0)
    store.put(evaluation(0, 1), PROMPTS, 0)
    store.put(other(1, 1), PROMPTS, 0)
    store.add_part(kind(1), 1, Batch.from_rows(responses=[[1]]))
    store.drop_parts(kind(1))
    assert store.slots() == [kind(1), evaluation(0, 1), other(1, 1)]


def test_a_share_and_the_experience_that_is_put_together_from_shares_are_slots_of_their_own() -> None:
    store = BatchStore()
    store.put(share(1), PROMPTS, 0)
    store.add_part(share(1), 1, Batch.from_rows(responses=[[1]]))
    store.put(experience(1), Batch.from_rows(responses=[[1], [2], [3]]), 0)
    assert store.slots() == [share(1), share(1, 1), experience(1)]
    assert set(store.get(share(1)).columns) == {"prompts"}
    with pytest.raises(NotFound, match="no share slot of step 2, part 1"):
        store.get(share(2, 1))


def test_a_part_of_a_slot_that_has_gone_is_refused() -> None:
    with pytest.raises(NotFound):
        BatchStore().add_part(experience(1), 1, PROMPTS)


@pytest.mark.parametrize("kind", [experience, share])
def test_a_commit_drops_the_slots_of_its_step_and_keeps_the_next_one(kind: MakeSlot) -> None:
    store = BatchStore()
    store.put(kind(1), PROMPTS, 0)
    store.put(kind(2), PROMPTS, 0)
    store.commit(1)
    assert [slot.step for slot in store.slots()] == [2]


def test_an_evaluation_outlives_the_commit_of_its_step_but_not_the_next() -> None:
    store = BatchStore()
    store.put(evaluation(1), PROMPTS, 0)
    store.commit(1)
    assert store.get(evaluation(1)).num_rows == 2
    store.commit(2)
    with pytest.raises(NotFound, match="evaluation slot of step 1"):
        store.get(evaluation(1))


def test_the_oldest_evaluation_makes_room() -> None:
    store = BatchStore()
    for part in range(MAX_EVALUATION_SLOTS + 1):
        store.put(evaluation(0, part), PROMPTS, 0)
    assert [slot.part for slot in store.slots()] == list(range(1, MAX_EVALUATION_SLOTS + 1))


def test_the_next_candidates_take_the_place_of_those_before_and_of_nothing_else() -> None:
    store = BatchStore()
    for slot in (experience(1), evaluation(0), greedy(1), candidates(1, 1), candidates(1, 1 << 30)):
        store.put(slot, PROMPTS, 0)
    assert store.slots() == [experience(1), evaluation(0), greedy(1), candidates(1, 1 << 30)]


@pytest.mark.parametrize("kind", [candidates, greedy])
def test_what_serves_a_step_goes_when_the_step_is_committed(kind: Callable[[int], batch_pb2.Slot]) -> None:
    store = BatchStore()
    with pytest.raises(WrongState, match="steps 1 and 2"):
        store.put(kind(0), PROMPTS, 0)
    store.put(kind(1), PROMPTS, 0)
    store.commit(1)
    assert store.slots() == []
    store.put(kind(2), PROMPTS, 1)
    assert store.slots() == [kind(2)]


def test_a_slot_of_a_kind_that_does_not_exist_is_not_found() -> None:
    with pytest.raises(NotFound, match=r"no unknown \(7\) slot of step 1"):
        BatchStore().get(batch_pb2.Slot(kind=7, step=1))  # type: ignore[arg-type]


def test_a_missing_slot_is_named_with_what_to_do() -> None:
    with pytest.raises(NotFound, match=r"experience slot of step 7.*put it again"):
        BatchStore().get(experience(7))


def test_a_multiple_of_the_rows_replaces_them() -> None:
    store = BatchStore()
    store.put(experience(1), Batch.from_rows(prompts=[[1], [2]], seeds=[[7, 8], [9, 10]]), 0)
    generated = Batch.from_rows(prompts=[[1], [1], [2], [2]], responses=[[3], [4], [5], [6]])
    store.absorb(experience(1), generated, "generate", StoredReply("", worker_pb2.CommandResult()))
    assert store.get(experience(1)).num_rows == 4
    assert "seeds" not in store.get(experience(1))


def test_replies_last_as_long_as_the_work_they_speak_of() -> None:
    store = BatchStore()
    store.put(experience(1), PROMPTS, 0)
    reply = StoredReply("", worker_pb2.CommandResult(metrics={"a": 1.0}))
    store.absorb(experience(1), Batch.from_rows(responses=[[1], [2]]), "request", reply)
    assert store.reply_of(experience(1), "request") == reply
    assert store.reply_of(experience(1), "another") is None
    store.put(experience(1), PROMPTS, 0)
    assert store.reply_of(experience(1), "request") is None


def test_what_is_held_and_what_is_coming_count_together() -> None:
    store = BatchStore(100)  # PROMPTS holds 20 bytes: 3 token ids, 2 lengths
    with store.reserved(60):
        with pytest.raises(Busy, match=r"a batch of 50 bytes: 60 of 100 bytes are taken \(services.max_held"):
            store.reserved(50).__enter__()
        store.put(experience(1), PROMPTS, 0)
    with pytest.raises(Busy, match="a batch of 81 bytes: 20 of 100"):
        store.reserved(81).__enter__()
    with pytest.raises(LimitExceeded, match=r"a batch of 101 bytes is over the limit of 100 \(services.max_held"):
        store.reserved(101).__enter__()
    with store.reserved(80):
        pass


def stored(*batches: Batch) -> int:
    """The bytes of images that batches hold."""
    parts = {part for batch in batches for part in batch["images"].store.parts}
    return sum(part.values.nbytes for part in parts)


def test_parts_that_have_images_in_common_hold_them_once() -> None:
    store = BatchStore(1000)
    first, second, third = [1] * 100, [2] * 100, [3] * 100
    store.put(experience(1, part=1), Batch.from_rows(places=[[0], [3]], images=[first, second]), 0)
    store.put(experience(1, part=2), Batch.from_rows(places=[[1], [4]], images=[first, third]), 0)
    store.put(experience(1, part=3), Batch.from_rows(places=[[5], [2]], images=[third, second]), 0)

    parts = [store.get(experience(1, part=part)) for part in (1, 2, 3)]
    whole = store.get(experience(1))

    assert stored(*parts, whole) == 300
    assert [row.tolist() for row in parts[2]["images"].rows()] == [third, second]
    assert [row.tolist() for row in whole["images"].rows()] == [first, first, second, second, third, third]
    num_numbers = 2 * 3 + 2 * 3 + 3  # of each row its place's length and its stored row; lengths of stored rows
    with pytest.raises(Busy, match=f": {300 + 4 * 6 + 4 * num_numbers} of 1000 bytes are taken"):
        store.reserved(900).__enter__()


def test_responses_have_the_images_of_the_prompts_where_those_are_stored() -> None:
    store = BatchStore()
    reply = StoredReply("", worker_pb2.CommandResult())
    prompts = Batch.from_rows(prompts=[[1], [2]], images=[[1] * 100, [2] * 100])
    store.put(experience(1), prompts, 0)
    # As they come from other ranks: the same bytes at another place.
    part = Batch.from_rows(prompts=[[2], [2]], responses=[[5], [6]], images=[[2] * 100] * 2)
    store.add_part(experience(1), 1, part)
    store.absorb(experience(1), concatenate([part, part]), "generate", reply)

    assert stored(prompts, store.get(experience(1, part=1)), store.get(experience(1))) == 200
    assert [row.tolist() for row in store.get(experience(1))["images"].rows()] == [[2] * 100] * 4


@pytest.mark.parametrize("slot", [experience(1), experience(9), evaluation(0), evaluation(3, part=7)])
def test_where_no_step_is_committed_any_step_may_come(slot: batch_pb2.Slot) -> None:
    store = BatchStore()
    store.put(slot, PROMPTS, None)
    assert store.get(slot).num_rows == 2


@pytest.mark.parametrize(("slot", "first"), [(experience(0), 1), (experience(-4), 1), (evaluation(-1), 0)])
def test_where_no_step_is_committed_steps_begin_somewhere(slot: batch_pb2.Slot, first: int) -> None:
    with pytest.raises(InvalidArgument, match=f"must be {first} or more"):
        BatchStore().put(slot, PROMPTS, None)


@pytest.mark.parametrize("other", [1, 3])
def test_where_no_step_is_committed_another_step_drops_what_was_there(other: int) -> None:
    store = BatchStore()
    for slot in (experience(2, part=1), experience(2, part=2), evaluation(2)):
        store.put(slot, PROMPTS, None)
    assert len(store.slots()) == 3
    store.put(experience(other, part=1), PROMPTS, None)
    assert store.slots() == [experience(other, part=1)]
