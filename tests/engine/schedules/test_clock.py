"""The clock: closed forms, published figures, a second implementation, and the reasons of gaps."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from tests.engine.schedules.published import RANKS, RUNS, Run
from tests.engine.schedules.random_schedules import random_schedule

from meshweave.engine.actions import Action, Schedule
from meshweave.engine.schedules import (
    PipelineTimes,
    make_schedule,
    parse_schedule,
    pipeline_times,
    prove_schedule,
    stage_times,
    text_of,
    with_communication,
)
from meshweave.errors import PlanError


def times_of(run: Run, *, blocking_messages: bool = False) -> PipelineTimes:
    seconds = run.setting.seconds(run.stages_per_rank)
    times = stage_times(RANKS * run.stages_per_rank, **seconds)
    schedule = make_schedule(run.schedule, RANKS, run.setting.microbatches, run.stages_per_rank, times)
    return pipeline_times(schedule, **seconds, synchronous=False, blocking_messages=blocking_messages)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.setting.model}-{run.setting.microbatches}-{run.schedule}")
def test_published_bubble_rates(run: Run) -> None:
    """Interleaved comes out higher by p latencies, however many stages a rank has; why, is not published."""
    assert times_of(run).bubble_rate == pytest.approx(run.rate, abs=0.004 if run.schedule == "interleaved" else 0.0005)


def test_published_throughput() -> None:
    """From the stated times of F, B, W and messages alone, where ranks wait for their messages as Megatron does."""
    errors = []
    for run in RUNS:
        if run.samples is not None:
            step = times_of(run, blocking_messages=True).step_s
            errors.append(abs(run.setting.rows * run.setting.microbatches / RANKS / step / run.samples - 1))
    assert len(errors) == 24
    assert median(errors) < 0.03
    assert max(errors) < 0.07


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 5])
def test_closed_forms_without_latency(ranks: int, rounds: int) -> None:
    """Idle seconds of p ranks (Qi et al., table 1; Narayanan et al. 2021, section 2.2), B the input part."""
    F, B, W = 3.0, 3.0, 2.0
    m = rounds * ranks

    def idle(name: str, stages_per_rank: int = 1, **other: float) -> float:
        schedule = make_schedule(name, ranks, m, stages_per_rank if name == "interleaved" else None)
        times = {"F": F, "B": B, "W": W} | other
        result = pipeline_times(schedule, **{k: v / stages_per_rank for k, v in times.items()})  # type: ignore[arg-type]
        return max(result.spans_s) - m * sum(times.values())

    assert idle("gpipe") == pytest.approx((ranks - 1) * (F + B + W))
    assert idle("1f1b") == pytest.approx((ranks - 1) * (F + B + W))
    assert idle("interleaved", 2) == pytest.approx((ranks - 1) * (F + B + W) / 2)
    assert idle("zb-h1") == pytest.approx((ranks - 1) * (F + B - W))
    assert idle("zb-h2", W=3.0) == pytest.approx(0)
    assert idle("zb-2p", W=3.0) == pytest.approx(0)
    assert idle("zbv", 2, W=3.0) == pytest.approx(0)


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 5), (8, 12), (16, 48), (24, 30)])
@pytest.mark.parametrize("weight", [0.4, 0.7, 1.0])
def test_automatic_schedules_are_no_slower_than_the_handcrafted(ranks: int, microbatches: int, weight: float) -> None:
    seconds = {"F": 1.0, "B": 0.97, "W": weight, "comm": 0.03}
    for automatic, by_hand in (("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")):
        times = [
            pipeline_times(make_schedule(name, ranks, microbatches, times=stage_times(ranks, **seconds)), **seconds)
            for name in (automatic, by_hand)
        ]
        assert max(times[0].spans_s) <= max(times[1].spans_s) * (1 + 1e-9)


def test_synchronous_optimizer_waits_for_the_last_rank() -> None:
    """With equal times ZB-H2 has no bubble; ranks begin one after another, so that they end so, too (Qi et al., 4)."""
    schedule = make_schedule("zb-h2", 4, 8)
    alone = pipeline_times(schedule, F=1, B=1, W=1, synchronous=False)
    together = pipeline_times(schedule, F=1, B=1, W=1)
    assert alone.step_s == 24
    assert together.step_s == 24 + 3
    assert alone.bubble_rate == together.bubble_rate == 0


def longest_paths(schedule: Schedule, times: dict[str, list[float]]) -> dict[tuple[int, int], float]:
    """Begin of every action by repeated relaxation of all that it waits for: slow, and knows no order."""
    places = {
        (a.kinds[0], a.stage, a.microbatch): (r, i) for r, row in enumerate(schedule.of_role) for i, a in enumerate(row)
    }
    ranks = {a.stage: r for r, row in enumerate(schedule.of_role) for a in row if a.kinds == ("forward",)}
    last = max(ranks)
    work = {"forward": times["F"], "input": times["B"], "weight": times["W"]}
    work["backward"] = [b + w for b, w in zip(times["B"], times["W"], strict=True)]
    begin = {(r, i): 0.0 for r, row in enumerate(schedule.of_role) for i in range(len(row))}

    def end(place: tuple[int, int]) -> float:
        action = schedule.of_role[place[0]][place[1]]
        return begin[place] + (work[action.kinds[0]][action.stage] if action.kinds[0] in work else 0.0)

    def arrivals(action: Action) -> list[float]:
        (kind,), s, m = action.kinds, action.stage, action.microbatch
        result = []
        if kind in ("backward", "input"):
            result.append(end(places["forward", s, m]))
        if kind in ("weight", "send_forward", "send_backward"):
            sources = {"weight": ["input"], "send_forward": ["forward"], "send_backward": ["input", "backward"]}[kind]
            result += [end(places[k, s, m]) for k in sources if (k, s, m) in places]
        other = s - 1 if kind == "forward" else s + 1
        if kind in ("forward", "backward", "input") and 0 <= other <= last:
            names = ["forward"] if kind == "forward" else ["input", "backward"]
            latency = times["comm"][min(s, other)] if ranks[s] != ranks[other] else 0.0
            send = f"send_{'forward' if kind == 'forward' else 'backward'}"
            for name in [send] if (send, other, m) in places else names:
                result += [end(places[name, other, m]) + latency] if (name, other, m) in places else []
            receive = places.get((f"receive_{send.removeprefix('send_')}", s, m))
            result += [end(receive) + latency] if receive else []
        return result

    for _ in range(len(begin) + 1):
        before = dict(begin)
        for r, i in begin:
            own = [end((r, i - 1))] if i else [0.0]
            begin[r, i] = max(own + arrivals(schedule.of_role[r][i]))
        if begin == before:
            return begin
    raise AssertionError("a cycle")


def random_times(seed: int, stages: int) -> dict[str, list[float]]:
    chance = random.Random(seed)
    row = lambda number: [chance.choice([0.0, 0.5, 1.0, 1.5, 3.0]) + 0.25 for _ in range(number)]  # noqa: E731
    return {"F": row(stages), "B": row(stages), "W": row(stages), "comm": row(stages - 1)}


def test_random_schedules_take_as_long_as_their_longest_path() -> None:
    for seed in range(60):
        schedule = random_schedule(seed)
        times = random_times(seed, schedule.num_stages)
        result = pipeline_times(schedule, **times)
        begins = longest_paths(schedule, times)
        for rank, row in enumerate(result.of_rank):
            assert [timed.begin_s for timed in row] == pytest.approx([begins[rank, i] for i in range(len(row))])


@pytest.mark.parametrize("blocking_messages", [False, True])
@pytest.mark.parametrize("synchronous", [False, True])
def test_gaps_and_work_fill_the_step(blocking_messages: bool, synchronous: bool) -> None:
    for seed in range(40):
        schedule = random_schedule(seed)
        times = random_times(seed, schedule.num_stages)
        result = pipeline_times(schedule, **times, blocking_messages=blocking_messages, synchronous=synchronous)
        makespan = max(row[-1].end_s for row in result.of_rank)
        assert result.step_s == pytest.approx(makespan if synchronous else max(result.spans_s))
        for rank, row in enumerate(result.of_rank):
            gaps = [gap for gap in result.gaps if gap.rank == rank]
            assert all(gap.end_s > gap.begin_s and gap.message_s <= gap.end_s - gap.begin_s for gap in gaps)
            idle = sum(gap.end_s - gap.begin_s for gap in gaps)
            if blocking_messages:  # sends are no gaps, nor work
                assert idle + result.busy_s[rank] <= makespan * (1 + 1e-9)
            else:
                assert idle + result.busy_s[rank] == pytest.approx(makespan if synchronous else row[-1].end_s)
            assert all(first.end_s <= second.begin_s * (1 + 1e-9) for first, second in pairwise(row))


def test_the_reason_of_each_gap() -> None:
    result = pipeline_times(make_schedule("1f1b", 2, 2), F=1, B=1, W=1, comm=0.25)
    texts = [str(gap) for gap in result.gaps]
    assert texts == [
        "rank 0 waits 2.5 s before 0B0 for 1B0 of rank 1, 0.25 s of it for the message",
        "rank 0 waits 1 s before 0B1 for 1B1 of rank 1, 0.25 s of it for the message",
        "rank 1 waits 1.25 s before 1F0 for 0F0 of rank 0, 0.25 s of it for the message",
        "rank 1 waits 2.25 s at the end for 0B1 of rank 0",
    ]
    assert "rank 1: span 6 s, busy 6 s, holds 1 microbatches; longest gap: rank 1 waits 2.25 s at the end" in str(
        result
    )
    assert [(text_of(t.action), t.begin_s, t.end_s) for t in result.of_rank[1]] == [
        ("1F0", 1.25, 2.25), ("1B0", 2.25, 4.25), ("1F1", 4.25, 5.25), ("1B1", 5.25, 7.25),
    ]  # fmt: skip
    assert result.peak_activations == (2, 1)


def test_b_is_the_input_part_and_whole_backward_has_both() -> None:
    whole = pipeline_times(parse_schedule("0F0,0B0"), F=1, B=2, W=4)
    parts = pipeline_times(parse_schedule("0F0,0I0,0W0"), F=1, B=2, W=4)
    assert whole.step_s == parts.step_s == 7
    assert [timed.end_s for timed in parts.of_rank[0]] == [1, 3, 7]


def test_times_per_stage_and_hop() -> None:
    text = "0F0,0B0\n1F0,2F0,2B0,1B0"
    result = pipeline_times(parse_schedule(text), F=[1, 2, 4], B=[8, 16, 32], W=[0, 0, 0], comm=[0.5, 100])
    assert result.step_s == 1 + 0.5 + 2 + 4 + 32 + 16 + 0.5 + 8  # stages 1 and 2 are on one rank


def test_what_is_overlapped_takes_a_share() -> None:
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0B1"
    assert pipeline_times(parse_schedule(text), F=1, B=1, W=1).step_s == 6
    result = pipeline_times(parse_schedule(text), F=1, B=1, W=1, overlapped=0.75)
    assert result.step_s == 5.25
    assert [timed.begin_s for timed in result.of_rank[0]] == [0, 1, 1, 3.25]


def test_messages_that_keep_ranks_from_computing() -> None:
    schedule = parse_schedule("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    result = pipeline_times(schedule, F=1, B=1, W=0, comm=0.25, blocking_messages=True)
    assert [timed.begin_s for timed in result.of_rank[0]] == [0, 1.25, 3.5, 6.0]
    assert [timed.begin_s for timed in result.of_rank[1]] == [1.25, 2.25, 3.75, 4.75]


def test_receives_stand_as_late_as_they_cost_nothing() -> None:
    schedule = make_schedule("1f1b", 2, 3)
    its = with_communication(schedule, F=1, B=1, W=1, comm=0.5)
    assert " ".join(map(text_of, its.of_role[1])) == (
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2"
    )
    # Where nothing takes time on the way, each stands just before its action.
    its = with_communication(schedule, comm=0)
    assert [text_of(a) for a in its.of_role[1]][:3] == ["1RECV_F0", "1F0", "1B0"]
    # A receive that is posted when its rank needs it delays it by the message.
    late = parse_schedule(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
    )
    schedule = make_schedule("1f1b", 2, 2)
    alone = pipeline_times(schedule, F=1, B=1, W=1, comm=0.5)
    assert pipeline_times(late, F=1, B=1, W=1, comm=0.5).step_s == alone.step_s + 0.5
    its = with_communication(schedule, F=1, B=1, W=1, comm=0.5)
    assert pipeline_times(its, F=1, B=1, W=1, comm=0.5).step_s == alone.step_s


def test_what_a_rank_runs_together_stays_so_but_a_reduction_does_not_delay_a_send() -> None:
    first = (Action(("unshard", "forward")), Action(("backward", "reduce")), Action(("update",)))
    second = tuple(replace(action, stage=1) for action in first)
    schedule = Schedule("step", (first, second))
    prove_schedule(schedule)
    assert pipeline_times(schedule, F=1, B=1, W=1, comm=0.5).step_s == 7
    its = with_communication(schedule)
    prove_schedule(its)
    assert [text_of(action) for action in its.of_role[1]] == [
        "1RECV_F0", "1UNSHARD+1F0", "1B0", "1SEND_B0", "1REDUCE_GRAD", "1update0",
    ]  # fmt: skip


def test_receives_of_random_schedules_cost_nothing() -> None:
    for seed in range(80):
        schedule = random_schedule(seed)
        if any("send_forward" in a.kinds or "send_backward" in a.kinds for row in schedule.of_role for a in row):
            continue
        times = random_times(seed, schedule.num_stages)
        its = with_communication(schedule, **times)
        assert pipeline_times(its, **times).step_s == pytest.approx(pipeline_times(schedule, **times).step_s)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"F": [1, 2, 3]}, "F needs a value for each stage\n  got: 3 values\n  expected: 2 values"),
        ({"W": -1}, "W has to be finite and at least 0"),
        ({"comm": float("nan")}, "comm .*has to be finite"),
        ({"comm": [1, 1]}, r"comm \(a value per hop between two stages\) needs a value for each"),
        ({"F": 0, "B": 0, "W": 0}, "take no time"),
    ],
)
def test_times_that_do_not_fit(times: dict[str, float], message: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){message}"):
        pipeline_times(make_schedule("1f1b", 2, 2), **({"F": 1.0, "B": 1.0, "W": 1.0} | times))  # type: ignore[arg-type]


def test_a_schedule_is_proven_before_it_is_timed() -> None:
    with pytest.raises(PlanError, match="lacks an action"):
        pipeline_times(parse_schedule("0F0,0I0"), F=1, B=1, W=1)
    schedule = with_communication(make_schedule("1f1b", 2, 2))
    with pytest.raises(PlanError, match="of its own"):
        with_communication(schedule)


def test_gathers_and_reductions_run_beside_the_stages() -> None:
    """Of two ranks with two stages each: a stage waits for its own gather alone, which the others of its rank precede,
    and the step for the last reduction."""
    schedule = make_schedule("interleaved", 2, 4, 2)
    plain = pipeline_times(schedule, F=1.0, B=1.0, W=1.0)
    assert pipeline_times(schedule, F=1.0, B=1.0, W=1.0, gathers=0.0, reductions=0.0) == plain
    first = pipeline_times(schedule, F=1.0, B=1.0, W=1.0, gathers=[3.0, 0.0, 0.0, 0.0])
    assert first.step_s == plain.step_s + 3.0
    assert str(first.gaps[0]).endswith("for its parameters")
    hidden = pipeline_times(schedule, F=1.0, B=1.0, W=1.0, gathers=[0.0, 1.0, 2.0, 1.0])
    assert hidden.step_s == plain.step_s
    late = pipeline_times(schedule, F=1.0, B=1.0, W=1.0, gathers=[0.0, 0.0, 5.0, 0.0])
    assert plain.step_s < late.step_s <= plain.step_s + 3.0
    behind = pipeline_times(schedule, F=1.0, B=1.0, W=1.0, reductions=[2.0, 0.0, 0.0, 0.0])
    assert behind.step_s == plain.step_s + 2.0
    assert max(behind.links_s) == behind.step_s
    assert str(behind.gaps[-1]).endswith("at the end for the last reduction of gradients")
    with pytest.raises(PlanError, match="gathers needs a value for each stage"):
        pipeline_times(schedule, F=1.0, B=1.0, W=1.0, gathers=[1.0])
    with pytest.raises(PlanError, match="synchronous optimizer"):
        pipeline_times(schedule, F=1.0, B=1.0, W=1.0, gathers=1.0, synchronous=False)


def test_no_gap_is_for_parameters_unless_gathers_are_stated() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    times = pipeline_times(schedule, F=1.0, B=1.0, W=1.0, comm=0.25, blocking_messages=True)
    assert times.gaps
    assert not [gap for gap in times.gaps if gap.source is None]
