"""The results of an evaluation: a record per rollout and what made it. A frozen value with a JSON file format.

The file says nothing of when or how fast: the same evaluation gives the same bytes. Knows nothing of torch.

    format, version, made_by
    task         name, what counts as success, steps at most
    policy       where it came from, and its fingerprint
    setting      seeds, group size, calibration: what else the numbers depend on
    noise_floor  open-loop error between two runs of the full policy with different noise
    methods      name, engine, sampler, what is reused when, FLOPs, open-loop error
    records      method, seed, score, success, steps, error, jerk, jump; the last four null where there is none
    clocked      of rollouts on the clock: method, seed, stale, held, missed, first_action, action_hz; `setting` has `clock`
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, TypeAlias

from blockcache.errors import BlockcacheError
from blockcache.files import NEWER, Count, Fields, Format, JsonFile, PathLike, dict_of, exists, keys_of
from blockcache.fingerprint import Fingerprint, fingerprint_differences
from blockcache.measure.action_error import ActionError

BASELINE = "full"
PLAIN = "plain policy"  # among timings: the policy as it comes
EAGER = "eager"  # among engines: torch itself, which runs the policy as it comes
GROUP, GENERATIONS = 10, 16  # rollouts run as one batch, observations to calibrate on; unless somebody asks otherwise
FRESH_SEEDS = 50_000  # from a task's first test seed: for what was chosen on others
SETTLED = "until_settled"  # in the setting: methods have as many rollouts as their verdicts took
OBSERVATIONS, SAMPLES = 48, 16  # of a check, unless somebody asks otherwise: observations are worth more than samples


class EvaluationError(BlockcacheError):
    """An evaluation that cannot be run as asked, or that was cut short."""


PolicyOrigin: TypeAlias = Annotated[Mapping[str, Any], Fields({"source": str, "fingerprint": dict})]
Calibration: TypeAlias = Annotated[
    Mapping[str, Any], Fields({"generations": Count}, {"seed": Count, "observations": str})
]


class OfPolicy(JsonFile):
    """A file on one policy."""

    policy: PolicyOrigin

    def __post_init__(self) -> None:
        Fingerprint.from_dict(self.policy["fingerprint"])  # refused when it is read, not when it is asked for

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What the policy was."""
        return Fingerprint.from_dict(self.policy["fingerprint"])


@dataclass(frozen=True)
class MethodRun:
    """A method as it ran. `reuse` holds each block's updates, or TeaCache's coefficients and threshold, or nothing."""

    name: str
    engine: str
    sampler: Mapping[str, Any]
    reuse: Mapping[str, Any] | None
    shares_all_noise: bool  # with the full policy; otherwise the initial noise only
    flops: Count
    reused: float
    error: ActionError
    execution: Mapping[str, Any] | None = field(default=None, metadata={NEWER: True})  # what is not as the policy says

    def same(self, other: Mapping[str, Any]) -> bool:
        """Whether a candidate's description is what this ran."""
        executed = {} if self.execution is None else {"execution": self.execution}
        return {"engine": self.engine, "sampler": self.sampler, "reuse": self.reuse, **executed} == dict(other)


@dataclass(frozen=True)
class Record:
    """One rollout. Where the simulator failed there is an error, and neither score nor success."""

    method: str
    seed: Count
    score: float | None
    success: bool | None
    steps: Count
    error: str | None
    jerk: float | None  # normalised units per step cubed
    jump: float | None  # normalised units, from chunk to chunk

    def __post_init__(self) -> None:
        for value in (self.score, self.success):
            if (value is None) != (self.error is not None):
                raise ValueError(f"seed {self.seed} of {self.method} must have either a score and success or an error")


@dataclass(frozen=True)
class Clocked:
    """What one rollout on the clock was like.

    Args:
        method: Of the rollout.
        seed: Of the rollout.
        stale: The share of actions from before the newest observation that a chunk was asked for with.
        held: Ticks at which the last action was repeated, since no chunk had one.
        missed: Chunks that arrived after the one before had run out.
        first_action: Seconds until the first action; None if there was none.
        action_hz: Actions in a second that were not the last one again.
    """

    method: str
    seed: Count
    stale: float | None
    held: Count
    missed: Count
    first_action: float | None
    action_hz: float


_COUNTS = dict.fromkeys(("first_seed", "rollouts", "group", "open_loop_observations"), Count)
_TIMES = Fields({}, {"chunks": Count, "median_ms": float})  # neither where each call was timed as it was made
_CLOCK = Fields(
    {"rate": float, "replan": Count, "mode": str, "latency": dict_of(_TIMES)},
    {"rtc": bool, "overlap": Count, "hold": bool},
)
_Setting: TypeAlias = Annotated[
    Mapping[str, Any],
    Fields({**_COUNTS, "calibration": Calibration}, {"noise": str, "clock": _CLOCK, SETTLED: bool}, others=True),
]


@dataclass(frozen=True)
class Results(OfPolicy):
    """The rollouts of several methods, the full policy among them."""

    task: Annotated[Mapping[str, Any], Fields({"name": str, "success": str, "max_steps": Count})]
    policy: PolicyOrigin
    setting: _Setting
    noise_floor: ActionError
    methods: tuple[MethodRun, ...]
    records: tuple[Record, ...]
    clocked: tuple[Clocked, ...] = ()

    def content(self) -> dict[str, Any]:
        """Without what rollouts off the clock do not have."""
        content = super().content()
        return content if self.clocked else {name: value for name, value in content.items() if name != "clocked"}

    @property
    def failed(self) -> int:
        return sum(record.error is not None for record in self.records)

    @property
    def rollouts(self) -> set[tuple[str, int]]:
        """What there is a record of: method and seed."""
        return {(record.method, record.seed) for record in self.records}

    def of(self, method: str) -> dict[int, Record]:
        """A method's records by seed."""
        return {record.seed: record for record in self.records if record.method == method}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Results:
        found = cls(**content)
        names = [method.name for method in found.methods]
        rollouts = [(record.method, record.seed) for record in found.records]
        if BASELINE not in names or len(set(names)) < len(names) or {name for name, _ in rollouts} - set(names):
            raise ValueError(f"its methods are {BASELINE} and others, each once and with all that has records")
        if len(set(rollouts)) < len(rollouts):
            raise ValueError("a rollout stands there twice")
        if found.clocked and [(item.method, item.seed) for item in found.clocked] != rollouts:
            raise ValueError("the rollouts that were clocked are not those that there are records of")
        if found.clocked and set(found.setting.get("clock", {"latency": ()})["latency"]) != set(names):
            raise ValueError(
                "rollouts that were clocked go with a clock in the setting that has all methods' latencies"
            )
        return found


Results.FORMAT = Format(
    "blockcache.results", "results file", keys_of(Results), optional=("clocked",), again="run the evaluation again"
)


def check_alike(
    path: PathLike,
    task: str,
    policy: Fingerprint,
    methods: Iterable[tuple[str, Mapping[str, Any]]],
    clock: Mapping[str, Any] | None = None,
) -> None:
    """Refuse results of another task, policy or clock, or of another schedule under the same name.

    Args:
        path: A results file; one that does not exist is alike.
        task: The name of the task of the new results.
        policy: That of the new results.
        methods: Of the new results: name, and what the candidate says of itself.
        clock: What the new results say of their clock, if they ran on one.
    """
    if not exists(path):
        return
    old, reason = Results.load(path), None
    before = {method.name: method for method in old.methods}
    if old.task["name"] != task:
        reason = f"task {old.task['name']} instead of {task}"
    elif old.setting.get("clock") != clock:
        reason = "another clock, or of none"
    elif differences := fingerprint_differences(policy, old.fingerprint):
        reason = f"another policy ({'; '.join(differences)})"
    elif changed := [name for name, now in methods if name in before and not before[name].same(now)]:
        reason = f"another schedule, sampler or engine under the name {changed[0]}"
    if reason is not None:
        raise EvaluationError(f"{path} holds results of {reason}; write to another file, or move that one away")


def check_nothing_lost(path: PathLike, planned: Container[tuple[str, int]]) -> None:
    """Refuse to write over rollouts, (method, seed), that the new results will not have.

    Args:
        path: A results file; from one that does not exist nothing is lost.
        planned: Method and seed of every rollout in the new results.
    """
    if not exists(path):
        return
    lost = [record for record in Results.load(path).records if (record.method, record.seed) not in planned]
    if lost:
        methods = ", ".join(dict.fromkeys(record.method for record in lost))
        raise EvaluationError(
            f"{path} holds {len(lost)} rollouts that would be lost (of {methods}); ask for as many rollouts of these "
            "methods too, write to another file, or move that one away"
        )
