"""What the actions of a device hand over to each other: each microbatch has an environment of its own.

Sums of gradients, buffers and what is prepared once go from a microbatch to the next. In a pipeline several
microbatches are in flight, and the update has an environment of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshweave.engine.actions import Action, Actions, Schedule, forms_of
from meshweave.engine.order import action_order
from meshweave.engine.pairs import PairKey, PairTurns, key_of_pair
from meshweave.engine.sections import Sections
from meshweave.runtime.executor import After, Compiled, Env, Meter, environment
from meshweave.runtime.interfaces import Executor, World

NO_PAIRS: Mapping[PairKey, PairTurns] = {}

# How many actions before its own an action's receives are posted. Gloo sends nothing before: 4 processes with links of
# 1 Gbit/s, torch 2.13, 2026-11, zbv whose messages take 17 ms and its actions 10 ms: 1.21 s with one, 1.10 s with two,
# 1.12 s with three, 1.09 s with four; 1f1b, whose actions take longer, 0.96 s with any.
POSTS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """An action of a device. `takes` are the slots that it loads from what earlier turns have handed over, with whether
    nobody takes them after it; `gives` are slots whose values it hands over, each with the slot of whoever takes it.
    `is_last`: of its microbatch."""

    action: Action
    compiled: Compiled
    takes: tuple[tuple[int, bool], ...]
    gives: tuple[tuple[int, int], ...]
    is_last: bool


def turns_of(actions: Actions, compiled: Sequence[Compiled]) -> tuple[Turn, ...]:
    """The turns of a device; `compiled` are its tasks in each microbatch."""
    takes = [_reads_of_others(action, compiled[action.microbatch]) for action in actions]
    gives: list[dict[tuple[int, int], None]] = [{} for _ in actions]
    lasts: list[set[int]] = [set() for _ in actions]
    waiting: dict[int, int] = {}  # slot -> the first later turn that takes it, from the end of the step on
    for at in reversed(range(len(actions))):
        its = compiled[actions[at].microbatch]
        targets: dict[int, list[int]] = {slot: [slot] for slot in its.makes[actions[at].key]}
        for slot, to in its.renewed:
            if slot in targets:
                targets[slot].append(to)
        for slot, reached in targets.items():
            for to in reached:
                if to in waiting and actions[waiting[to]].microbatch != actions[at].microbatch:
                    gives[at][slot, to] = None
                    del waiting[to]
        for slot in takes[at]:
            if slot not in waiting:
                lasts[at].add(slot)
            waiting[slot] = at
    last = {action.microbatch: at for at, action in enumerate(actions)}
    return tuple(
        Turn(
            action,
            compiled[action.microbatch],
            tuple((slot, slot in lasts[at]) for slot in takes[at]),
            tuple(gives[at]),
            last[action.microbatch] == at,
        )
        for at, action in enumerate(actions)
    )


def _reads_of_others(action: Action, compiled: Compiled) -> list[int]:
    """What an action reads that no action of its microbatch makes, and no input of a step is."""
    renewed = {to for _, to in compiled.renewed}
    inputs: Mapping[int, bool] = {slot: slot in renewed for slot in compiled.inputs}
    return [slot for slot in compiled.reads[action.key] if inputs.get(slot, True)]


@dataclass(slots=True)
class _Crew:
    """Local devices (`places`) that run the same actions together: all of them, or those of a stage. `executors` are by
    what a microbatch runs; `current` is the executor that has begun, and its microbatch."""

    places: tuple[int, ...]
    executors: Mapping[Actions, Executor]
    current: tuple[Executor, int] | None = None


@dataclass(slots=True)
class _CrewTurn:
    """An action of a crew: of each of its devices the turn with this number; `following`: the turn after it, whose
    receives may begin before."""

    crew: _Crew
    at: tuple[int, ...]
    form: Actions
    following: _CrewTurn | None = None


class Turns:
    """Runs the actions of a step on the local devices: in turn, each in the environment of its microbatch.

    Without a pipeline all devices run each action together. In a pipeline those of a stage do, in the order of the
    schedule, until all meet for the update.
    """

    def __init__(
        self,
        world: World,
        sections: Sequence[Sections],
        schedule: Schedule,
        compiled: Callable[[int, Actions], Compiled],
        meter: Meter | None,
        pairs: Mapping[PairKey, PairTurns] = NO_PAIRS,
    ) -> None:
        """`compiled(role, form)`: the tasks of a role in a microbatch that runs these actions. `pairs`: the turns of
        actions that run as one, where a process has a single device; others hide nothing."""
        self.world, self.schedule = world, schedule
        self.roles = [its.role for its in sections]
        self._role_of = [next(r for r, its in enumerate(self.roles) if d in its.devices) for d in world.devices]
        self._forms = [forms_of(actions) for actions in schedule.of_role]
        tasks = [[compiled(r, form) for form in self._forms[r]] for r in self._role_of]
        self.of_device = [turns_of(schedule.of_role[r], its) for r, its in zip(self._role_of, tasks, strict=True)]
        self.ranks = tuple(its[-1] for its in tasks)
        self._meter = meter
        self._runs = list[_CrewTurn]()
        if schedule.is_pipelined:
            self._make_pipeline(sections)
        else:
            crew = self._crew(range(len(world.devices)), 0, self._forms[self._role_of[0]], is_stage=False)
            self._runs = self._runs_of(crew, range(len(self.of_device[0])))
            self._update = self._runs.pop()
        self._pairs = pairs if len(world.devices) == 1 else NO_PAIRS
        self._groups = [*self._grouped()]
        self._envs: dict[int, list[Env]] = {}
        self._store: list[dict[int, Any]] = [{} for _ in world.devices]

    def _make_pipeline(self, sections: Sequence[Sections]) -> None:
        crews: dict[int, _Crew] = {}
        for role in sorted(set(self._role_of)):
            places = [i for i, r in enumerate(self._role_of) if r == role]
            crews[role] = self._crew(places, role, self._forms[role][:-1], is_stage=True)
        runs = {role: self._runs_of(crew, range(len(self.schedule.of_role[role]) - 2)) for role, crew in crews.items()}
        for its in runs.values():
            for run, following in pairwise(its):
                run.following = following
        order = action_order(self.schedule, sections)
        self._runs = [runs[role][at] for role, at in order if role in runs]
        everyone = self._crew(range(len(self.of_device)), 0, [self._forms[0][-1]], is_stage=False)
        total, self._update = self._runs_of(everyone, (-2, -1))
        self._runs.append(total)

    def _crew(self, places: Sequence[int], role: int, forms: Sequence[Actions], is_stage: bool) -> _Crew:
        """Devices with the same actions; `role` is that of the first. An update is compiled for all roles."""
        executors: dict[Actions, Executor] = {}
        for number, form in enumerate(self._forms[role]):
            if form in forms and form not in executors:
                ranks = [next(t.compiled for t in self.of_device[i] if t.action.microbatch == number) for i in places]
                executors[form] = self.world.executor(
                    self.roles, ranks, self._meter, tuple(places) if is_stage else None
                )
        return _Crew(tuple(places), executors)

    def _runs_of(self, crew: _Crew, numbers: Sequence[int]) -> list[_CrewTurn]:
        turns, forms = self.of_device[crew.places[0]], self._forms[self._role_of[crew.places[0]]]
        at = [[n % len(self.of_device[i]) for i in crew.places] for n in numbers]
        return [
            _CrewTurn(crew, tuple(each), forms[turns[n].action.microbatch]) for each, n in zip(at, numbers, strict=True)
        ]

    def _grouped(self) -> Iterator[list[_CrewTurn]]:
        """The actions in order, those together that run as one."""
        group: list[_CrewTurn] = []
        for run in self._runs:
            group.append(run)
            if not (self._first(run).action.with_next and self._pairs):
                yield group
                group = []

    @property
    def executors(self) -> list[Executor]:
        """Those of all actions."""
        return [
            executor
            for crew in {id(run.crew): run.crew for run in (*self._runs, self._update)}.values()
            for executor in crew.executors.values()
        ]

    def begin(self, fill: Callable[[list[Env], int], None], zeros: Callable[[int, int], Any]) -> None:
        """Start a step. `fill(envs, microbatch)` fills fresh environments of the local devices with the inputs of a
        microbatch, or (after the last) of the update. `zeros(i, slot)` is what a sum of gradients begins with."""
        self._fill, self._zeros = fill, zeros
        self._envs, self._store = {}, [{} for _ in self.world.devices]

    def environments(self, microbatch: int) -> list[Env]:
        """Those of the local devices; they are filled when they are needed first."""
        if microbatch not in self._envs:
            self._envs[microbatch] = [
                environment(rank, d) for rank, d in zip(self.ranks, self.world.devices, strict=True)
            ]
            self._fill(self._envs[microbatch], microbatch)
        return self._envs[microbatch]

    def run(self, done: Callable[[Action, list[Env]], None]) -> None:
        """Run all actions before the update, and make ready what that reads. `done(action, envs)` is called after each
        action of the first local device."""
        for group in self._groups:
            self._run(group)
            for run in group:
                if run.crew.places[0] == 0:
                    action = self.of_device[0][run.at[0]].action
                    done(action, self._envs[action.microbatch])
                self._release(run)
        if self.schedule.is_pipelined:
            self._executor(self._update).finish_sends(True)
        self._open(self._update)
        self._resume(self._update)

    @property
    def last(self) -> list[Env]:
        """The environments of the update, on each local device."""
        return self.environments(self._first(self._update).action.microbatch)

    def update(self, after: After | None) -> None:
        """Run the update; `after` as in `Executor.run`."""
        self._executor(self._update).run(self._first(self._update).action.key, after)
        self._close(self._update)

    def run_first(self) -> list[Env]:
        """Run the first action alone, which changes nothing, and return its environments."""
        self._run(self._runs[:1])
        return self._envs[0]

    def end(self) -> None:
        """Release the values of a step that has ended, completed or not."""
        self._envs, self._store = {}, [{} for _ in self.world.devices]
        for executor in self.executors:
            executor.end()
        for run in (*self._runs, self._update):
            run.crew.current = None

    def _first(self, run: _CrewTurn) -> Turn:
        return self.of_device[run.crew.places[0]][run.at[0]]

    def _executor(self, run: _CrewTurn) -> Executor:
        return run.crew.executors[run.form]

    def _run(self, group: Sequence[_CrewTurn]) -> None:
        """Run an action, or two as one."""
        for run in group:
            self._open(run)
        turns = self._pairs.get(self._key_of(group)) if len(group) > 1 else None
        if turns is None:
            for run in group:
                self._resume(run)
                self._executor(run).run(self._first(run).action.key)
        else:
            pieces = [0] * len(group)
            for which, _ in turns:
                stops = tuple(stop for each, stop in turns if each == which)
                self._resume(group[which])
                self._executor(group[which]).run_piece(self._first(group[which]).action.key, stops, pieces[which])
                pieces[which] += 1
        for run in group:
            self._close(run)

    def _key_of(self, group: Sequence[_CrewTurn]) -> PairKey:
        return key_of_pair(self._role_of[group[0].crew.places[0]], [self._first(run).action for run in group])

    def _resume(self, run: _CrewTurn) -> None:
        """Let the executor go on with the microbatch of an action."""
        crew, executor, microbatch = run.crew, self._executor(run), self._first(run).action.microbatch
        if crew.current != (executor, microbatch):
            envs = self.environments(microbatch)
            executor.begin([envs[i] for i in crew.places], microbatch)
            crew.current = executor, microbatch

    def _open(self, run: _CrewTurn) -> None:
        """Make ready what an action reads."""
        envs = self.environments(self._first(run).action.microbatch)
        if self.schedule.is_pipelined:
            self._post(run)
            following = run.following
            for _ in range(POSTS_AHEAD):
                if following is not None:
                    self._post(following)
                    following = following.following
        for i, at in zip(run.crew.places, run.at, strict=True):
            self._take(i, self.of_device[i][at], envs[i])

    def _close(self, run: _CrewTurn) -> None:
        """Hand over what an action has made."""
        envs = self.environments(self._first(run).action.microbatch)
        for i, at in zip(run.crew.places, run.at, strict=True):
            self._give(i, self.of_device[i][at], envs[i])
        if self.schedule.is_pipelined:
            self._executor(run).finish_sends(False)

    def _post(self, run: _CrewTurn) -> None:
        """Begin what an action receives, once."""
        turn = self._first(run)
        if turn.compiled.posts.get(turn.action.key) and not self._is_posted(run, turn):
            envs = self.environments(turn.action.microbatch)
            self._executor(run).post(turn.action.key, [envs[i] for i in run.crew.places], turn.action.microbatch)

    def _is_posted(self, run: _CrewTurn, turn: Turn) -> bool:
        envs = self.environments(turn.action.microbatch)
        return envs[run.crew.places[0]][turn.compiled.posts[turn.action.key][0].out] is not None

    def _take(self, i: int, turn: Turn, env: Env) -> None:
        store = self._store[i]
        for slot, is_last in turn.takes:
            if slot in store:
                env[slot] = store.pop(slot) if is_last else store[slot]
            elif (zeros := self._zeros(i, slot)) is not None:
                env[slot] = zeros

    def _give(self, i: int, turn: Turn, env: Env) -> None:
        for slot, to in turn.gives:
            value = self._store[i][to] = env[slot]
            if self.meter is not None and slot != to:
                nodes = turn.compiled.nodes
                self.meter.on_value(i, nodes[to], value)
                self.meter.freed(i, nodes[slot])

    def _release(self, run: _CrewTurn) -> None:
        """Drop the values of a microbatch whose last action has run."""
        turn = self._first(run)
        if not turn.is_last:
            return
        envs = self._envs[turn.action.microbatch]
        for i in run.crew.places:
            envs[i] = []
        if not self.schedule.is_pipelined:
            self._executor(run).end()
            run.crew.current = None
        if not any(envs):
            del self._envs[turn.action.microbatch]

    @property
    def meter(self) -> Meter | None:
        """Gets the values of all local devices."""
        return self._meter

    @meter.setter
    def meter(self, meter: Meter | None) -> None:
        self._meter = meter
        for executor in self.executors:
            executor.meter = meter
