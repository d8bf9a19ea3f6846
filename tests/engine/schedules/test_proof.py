"""The proof accepts every valid schedule and refuses every broken one, with the action and its rank."""

from __future__ import annotations

import random
import re

import pytest
from tests.engine.schedules.random_schedules import (
    BREAKS,
    broken,
    keeps_order_of_sends,
    random_schedule,
    runs_under_blocking_receives,
)

from meshweave.engine.actions import Action, Schedule
from meshweave.engine.schedules import (
    SCHEDULES,
    ActivationMemory,
    make_schedule,
    parse_schedule,
    peak_activations,
    place_stages,
    prove_schedule,
    text_of,
    with_communication,
    with_gathers,
)
from meshweave.errors import PlanError


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_schedules_by_name_are_valid_for_any_number_of_microbatches(name: str, ranks: int) -> None:
    for microbatches in (1, 2, 3, ranks, ranks + 1, 2 * ranks, 3 * ranks + 1):
        schedule = make_schedule(name, ranks, microbatches)
        proof = prove_schedule(schedule, schedule.num_stages, microbatches)
        assert proof.num_microbatches == microbatches
        assert len(proof.order) == sum(map(len, schedule.of_role))
        prove_schedule(with_gathers(with_communication(schedule)), schedule.num_stages, microbatches)


def test_random_valid_schedules_are_accepted() -> None:
    for seed in range(250):
        schedule = random_schedule(seed)
        proof = prove_schedule(schedule)
        assert runs_under_blocking_receives(schedule.of_role)
        for rank, actions in enumerate(schedule.of_role):
            assert [action for its, action in proof.order if its == rank] == list(actions)
        # The order runs on a machine that does one action at a time.
        single = Schedule("single", (tuple(action for _, action in proof.order if action.kinds[0] not in MESSAGES),))
        prove_schedule(single)


MESSAGES = ("send_forward", "receive_forward", "send_backward", "receive_backward")


def test_random_broken_schedules_are_refused() -> None:
    counts = dict.fromkeys(BREAKS, 0)
    for seed in range(60):
        schedule = random_schedule(seed)
        for how in BREAKS:
            its = broken(schedule, how, seed)
            if its is None:
                continue
            counts[how] += 1
            with pytest.raises(PlanError) as error:
                prove_schedule(its)
            text = str(error.value)
            assert re.search(r"rank \d|stage \d", error.value.where), (how, text)
            assert error.value.hint, (how, text)
    assert min(counts.values()) >= 15
    assert sum(counts.values()) >= 400


def test_random_changes_of_order_agree_with_a_second_implementation() -> None:
    """Actions moved anywhere on their rank: refused if and only if ranks would wait for ever."""
    outcomes = []
    for seed in range(300):
        chance = random.Random(seed)
        rows = [list(actions) for actions in random_schedule(seed).of_role]
        if any("unshard" in action.kinds for row in rows for action in row):
            continue
        row = chance.choice(rows)
        row.insert(chance.randrange(len(row)), row.pop(chance.randrange(len(row))))
        moved, runs = Schedule("moved", tuple(map(tuple, rows))), runs_under_blocking_receives(rows)
        if runs and keeps_order_of_sends(rows):
            prove_schedule(moved)
        else:
            with pytest.raises(PlanError):
                prove_schedule(moved)
        outcomes.append(runs)
    assert min(outcomes.count(True), outcomes.count(False)) > 40


def test_a_deadlock_names_its_cycle() -> None:
    with pytest.raises(PlanError) as error:
        prove_schedule(parse_schedule("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1"))
    assert str(error.value) == (
        "a pipeline schedule deadlocks: its ranks wait for each other\n"
        "  where: 0B0 of rank 0\n"
        "  got: 0B0 of rank 0 waits for 1B0 of rank 1, which comes there after 1F1; "
        "1F1 of rank 1 waits for 0F1 of rank 0, which comes there after 0B0\n"
        "  expected: an order of all actions in which each comes after what it needs\n"
        "  hint: move one of these actions forward on its rank"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0", "lacks an action\n  where: 1B0 of rank 1\n.*add 1B0 to rank 1"),
        ("0F0,0I0\n1F0,1B0", "lacks an action\n  where: 0W0 of rank 0"),
        ("0F0,0I0,0W0,0W0\n1F0,1B0", "twice\n  where: 0W0 of rank 0, its action number 3\n"),
        ("0F0,0I0,0W0,0B0\n1F0,1B0", "both whole and in parts\n  where: stage 0, microbatch 0, rank 0"),
        ("0F0,0B0\n2F0,2B0", "no rank of a pipeline schedule holds a stage\n  where: stage 1\n"),
        ("0F0,0B0\n0F1,0B1", "on two ranks\n  where: 0F1 of rank 1\n"),
        ("0B0,0F0\n1F0,1B0", "before one that it needs\n  where: 0B0 of rank 0\n.*move 0F0 before 0B0"),
        ("0F0,0B0,1F0,1B0\n", "before one that it needs\n  where: 0B0 of rank 0\n.*1B0 comes after"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0", "lacks a send or a receive\n  where: 1RECV_F0 of rank 1"),
        ("0F0,0B0,0SEND_F0\n1F0,1B0", "lacks a send or a receive\n  where: 0RECV_B0 of rank 0"),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n0RECV_F0,1RECV_F0,1F0,1B0,1SEND_B0",
            "does not hold its stage\n  where: 0RECV_F0 of rank 1",
        ),
        ("0F0,1F0,0SEND_F0,1B0,0B0\n", "does not hold its stage\n  where: 0SEND_F0 of rank 0"),
        ("0UNSHARD,0F0,0RESHARD,0B0\n", "without its parameters\n  where: 0B0 of rank 0"),
        ("0UNSHARD,0UNSHARD,0F0,0B0\n", "gathers parameters that are there\n  where: 0UNSHARD of rank 0"),
        ("0F0,0RESHARD,0B0\n", "frees parameters that are not gathered"),
        ("0F0,0REDUCE_GRAD,0B0\n", "would be lost\n  where: 0B0 of rank 0\n.*move 0REDUCE_GRAD behind it"),
        ("(0F0;0B0)OVERLAP_F_B", "compute on different microbatches\n  where: 0F0 of rank 0\n  got: 0F0, 0B0"),
        ("0F0,0SEND_F0,0F1,(0SEND_F1;0RECV_B0)OVERLAP_F_B,0B0\n1F0,1B0", "compute on different"),
        ("0F0,0B0\n\n1F0,1B0", "a rank of a pipeline schedule has no stage\n  where: rank 1"),
    ],
)
def test_messages_name_the_action(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){message}"):
        prove_schedule(parse_schedule(text))


def test_receives_keep_the_order_of_sends() -> None:
    text = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1"
    with pytest.raises(PlanError, match=r"(?s)another order.*1RECV_F1 of rank 1.*receive 1RECV_F0 before 1RECV_F1"):
        prove_schedule(parse_schedule(text))


def test_numbers_of_stages_and_microbatches() -> None:
    schedule = make_schedule("1f1b", 2, 3)
    with pytest.raises(PlanError, match=r"(?s)names a microbatch that there is not.*0F2 of rank 0"):
        prove_schedule(schedule, 2, 2)
    with pytest.raises(PlanError, match=r"(?s)names a stage that there is not.*1F0 of rank 1"):
        prove_schedule(schedule, 1, 3)
    with pytest.raises(PlanError, match=r"(?s)lacks an action.*0F3 of rank 0"):
        prove_schedule(schedule, 2, 4)
    with pytest.raises(PlanError, match=r"(?s)holds a stage.*stage 2"):
        prove_schedule(schedule, 3, 3)
    with pytest.raises(PlanError, match="is the last"):
        prove_schedule(Schedule("mine", ((Action(("forward",)), Action(("backward",), with_next=True)),)))
    with pytest.raises(PlanError, match=r"(?s)runs an action twice.*0F0\+0F0 of rank 0"):
        prove_schedule(Schedule("mine", ((Action(("forward", "forward")), Action(("backward",))),)))


def test_pairs_need_all_inputs_before_they_begin() -> None:
    """F of stage 1 and B of stage 0 cannot be one: between them the microbatch is on another rank."""
    good = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"
    prove_schedule(parse_schedule(good))
    with pytest.raises(PlanError, match="deadlocks"):
        prove_schedule(parse_schedule("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"))


def test_unknown_names_and_numbers() -> None:
    with pytest.raises(PlanError, match=r"(?s)unknown pipeline schedule.*did you mean zb-h2, zb-h1"):
        make_schedule("zb-h", 2, 2)
    with pytest.raises(PlanError, match=r"(?s)at least one of its microbatches.*got: 0"):
        make_schedule("1f1b", 2, 0)
    with pytest.raises(PlanError, match=r"(?s)fixed number of stages.*expected: 2"):
        make_schedule("zbv", 2, 2, 3)


def test_placements() -> None:
    assert place_stages(3, 2, "plain") == (0, 0, 1, 1, 2, 2)
    assert place_stages(3, 2, "looped") == (0, 1, 2, 0, 1, 2)
    assert place_stages(3, 3, "v") == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    with pytest.raises(PlanError, match="unknown placement"):
        place_stages(3, 2, "w")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("gpipe", lambda p, m: m), ("1f1b", lambda p, m: p), ("interleaved", lambda p, m: 3 * p - 1),
        ("zb-h1", lambda p, m: p), ("zb-h2", lambda p, m: 2 * p - 1), ("zbv", lambda p, m: 2 * p),
        ("v-half", lambda p, m: 2 * ((p + 2) // 2)), ("v-min", lambda p, m: 2 * ((p + 4) // 3)),
        ("dualpipev", lambda p, m: 2 * p + 1),
    ],
)  # fmt: skip
def test_activations_as_published(name: str, most: object) -> None:
    """In microbatches of a stage, half of a rank's where it has two (Qi et al. 2024, table 1; DualPipe's README)."""
    for ranks in (2, 3, 4, 6, 8, 12):
        schedule = make_schedule(name, ranks, 4 * ranks)
        assert max(peak_activations(schedule)) <= most(ranks, 4 * ranks)  # type: ignore[operator]


def test_activations_in_bytes_per_stage() -> None:
    schedule = parse_schedule("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1B0,1F1,1B1")
    assert peak_activations(schedule) == (2, 1)
    assert peak_activations(schedule, ActivationMemory((10, 7), (4, 7))) == (20, 7)
    assert peak_activations(parse_schedule("0F0,0I0,0F1,0I1,0W0,0W1"), ActivationMemory(10, 4)) == (14,)
    with pytest.raises(PlanError, match="activation needs a value for each stage"):
        peak_activations(schedule, ActivationMemory((1, 2, 3)))
    with pytest.raises(PlanError, match=r"(?s)frees activations.*stage 1"):
        peak_activations(schedule, ActivationMemory((1, 1), (1, 2)))


def test_text_of_actions() -> None:
    assert text_of(Action(("unshard", "forward"), 3, 2)) == "2UNSHARD+2F3"
