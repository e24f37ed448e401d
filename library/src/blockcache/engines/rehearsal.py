"""Compares a policy's own actions with those of an engine's program at full precision, with the same noise.

A foreign policy is known by its parts alone, so the two are compared before a whole-loop engine takes its place, and again
by `verify()`. A `predict_action` that does more than the public code's, such as turning differences into positions,
remembering its last chunk or dropping a batch of one, is found out here and not on the robot. Nothing is remembered:
whatever decides a policy's actions (its code, files, the environment) may be another thing at the next start.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import is_
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from blockcache.engines.build import Build, Comparison, build
from blockcache.engines.loop import Loop
from blockcache.errors import BlockcacheError, EngineError, NonFiniteError, ObservationError, in_one_line
from blockcache.models.port import Port
from blockcache.models.program import Program
from blockcache.models.sampling import draw_all
from blockcache.progress import progress_bar
from blockcache.schedule import Schedule, compile_plan

_CONTAINERS = (dict, OrderedDict, list, set, deque)
_logger = logging.getLogger("blockcache")
Runner: TypeAlias = Callable[[Mapping[str, Tensor], Tensor], dict[str, Tensor]]
"""obs by name in robot units, noise (1 + draws, B, horizon, D) -> what `predict_action` returns."""
SECOND_CALL, TWO_AT_ONCE = " in the second of two calls", " with two observations at once"
_DEPTH = 3  # objects within objects that a policy's own code may write something down in


@dataclass(frozen=True, eq=False)
class Trial:
    """One call in which policy and program are compared.

    Args:
        obs: As the policy's entry takes it.
        read: Gives what the program takes of it, and the start of the noise where the policy's own code drew that.
        what: Which call it is, for the sentence that tells of a difference.
        otherwise: The call to compare if the policy refuses this one, whose history is longer than `n_obs_steps`.
    """

    obs: Any
    read: Callable[[Any], tuple[dict[str, Tensor], Tensor | None]]
    what: str = ""
    otherwise: Trial | None = None


class RehearsalError(EngineError):
    """A policy does not act as its program, which loop and onnx both run."""

    def __init__(self, port: Port, engine: str, reason: str) -> None:
        self.port, self.reason = port, reason
        super().__init__(
            f'the {engine} engine cannot stand in for this policy\'s own {port.entry}, {reason}; use engine="patched"'
        )

    def of(self, engine: str) -> RehearsalError:
        """The same of another engine."""
        return RehearsalError(self.port, engine, self.reason)


def rehearsed_build(port: Port, schedule: Schedule, engine: str, trust: bool = False) -> Build:
    """Fold a policy for an engine that is about to take its place; a foreign one must act as its program does.

    Args:
        port: The policy.
        schedule: What the engine follows.
        engine: Its name, for the sentences that refuse a policy.
        trust: Whether to leave the comparison out.
    """
    try:
        whole = build(port, schedule, engine)
        # behind an encoder, the first observation is needed to compare
        if not (trust or port.trusted or port.begins_after_encoder):
            whole = _rehearsed(port, whole, engine)
    except BlockcacheError:
        raise
    except Exception as error:
        if port.trusted:
            raise
        reason = in_one_line(error)  # a foreign policy may differ in more ways than can be listed
        raise EngineError(f'the {engine} engine cannot run this policy ({reason}); use engine="patched"') from error
    return whole


def build_for_file(port: Port, schedule: Schedule, trust: bool, fixed: Mapping[str, Any]) -> Build:
    """The same for a file, which has to hold a policy's encoders too.

    Args:
        port: The policy.
        schedule: What the file follows.
        trust: Whether to leave the comparison with the policy's own actions out.
        fixed: Inputs that never change, by name; they become constants.
    """
    if not port.begins_after_encoder and not fixed:
        return rehearsed_build(port, schedule, "onnx", trust)
    whole = build(port, schedule, "onnx", lambda: port.file_program(fixed))
    if not trust:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = port.synthetic_observations(2)
        constant = {name: torch.as_tensor(value).expand_as(made[name]) for name, value in fixed.items()}

        def read(obs: Any) -> tuple[dict[str, Tensor], None]:
            given = port.file_inputs(obs)
            return {name: given[name] for name in whole.program.inputs}, None

        trial = Trial(port.prepare_observation(made | constant), read)
        found = compare(port, whole, getattr(port.policy, port.entry), [trial])
        if found.reason is not None:
            raise EngineError(f"a file cannot stand in for this policy's own {port.entry}, {found.reason}")
    return whole


def _rehearsed(port: Port, whole: Build, engine: str) -> Build:
    started = time.perf_counter()
    found = compare(port, whole, getattr(port.policy, port.entry))
    if found.reason is not None:
        raise RehearsalError(port, engine, found.reason)
    seconds = time.perf_counter() - started
    _logger.info("comparing with the policy's own actions took %.1f s; trust=True would leave it out", seconds)
    return replace(whole, compared=replace(found, seconds=seconds))


def compare(port: Port, built: Build, own: Callable[..., Any], trials: Sequence[Trial] = ()) -> Comparison:
    """Whether a policy's actions are those of its program at full precision; leaves it and torch's generators as they were.

    Args:
        port: The policy.
        built: What an engine runs in its place, with its schedule, which does not count here.
        own: The policy's entry as it was before an engine replaced it.
        trials: Where they are compared, call by call. Without them at made-up observations: a first call, a second one that
            shows what the policy remembers, and two observations at once, with a longer history if both take one.
    """
    program, sampler = built.program, built.sampler
    everything = Schedule.every_step(sampler.steps, [block.name for block in program.blocks])
    loop = Loop(program, compile_plan(everything), sampler)
    longer_history, more, seed = False, dict[str, None](), 0
    title = "comparing with the policy's own loop"
    bar = progress_bar(desc=title, total=len(trials) or 3, unit="call", leave=False, delay=1.0)
    with bar, torch.random.fork_rng(), torch.no_grad(), _put_back(port):
        torch.manual_seed(seed)
        waiting = deque(trials or _made_up(port, program))
        while waiting:
            one, seed = waiting.popleft(), seed + 1
            torch.manual_seed(seed)
            try:
                expected, others = _own_answer(port, own, one.obs)
            except Exception as error:  # foreign code may raise anything
                if one.otherwise is not None:
                    waiting.append(one.otherwise)
                    continue
                if trials and (explained := port.explain(error, one.obs)) is not None:
                    raise explained from error
                inputs = " and ".join(map(repr, one.obs)) if isinstance(one.obs, Mapping) else type(one.obs).__name__
                return Comparison(f"it fails with an observation under {inputs}{one.what}: {in_one_line(error)}")
            torch.manual_seed(seed)
            observed, start = one.read(one.obs)
            chunk = (len(next(iter(observed.values()))), *program.chunk)
            try:
                found = loop(observed, draw_all(sampler, chunk, program.like, None, start))
            except NonFiniteError as error:
                return Comparison(f"since the engine finds no finite answer to a typical observation ({error})")
            for name, value in found.items():
                if name in expected and (reason := difference(port, expected[name], value, name)) is not None:
                    return Comparison(reason + one.what)
            more |= dict.fromkeys(others)
            longer_history |= one.otherwise is not None
            bar.update()
    return Comparison(None, longer_history, tuple(more))


def runner_difference(port: Port, built: Build, runner: Runner, trials: Sequence[Trial] = ()) -> str | None:
    """How the answer of an engine's runner is not what it was built to give; None if it is."""
    program, sampler = built.program, built.sampler
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        one = trials[0] if trials else next(_made_up(port, program))
        observed, start = one.read(one.obs)
        noise = draw_all(sampler, (len(next(iter(observed.values()))), *program.chunk), program.like, None, start)
        expected = Loop(program, built.plan, sampler)(observed, noise)["action"]
        return difference(port, expected, runner(observed, noise)["action"])


def difference(port: Port, expected: Tensor, found: Tensor, name: str = "action") -> str | None:
    """How an engine's actions (or the whole chunk) are not those that were expected, as a clause; None if they are."""
    what = "actions" if name == "action" else name
    if expected.shape != found.shape:
        return f"its {what} have shape {tuple(expected.shape)}, the engine's {tuple(found.shape)}"
    scale, offset = torch.as_tensor(port.action_scale).to(found), torch.as_tensor(port.action_offset).to(found)
    gap, normalised = (expected.to(found) - found) * scale, expected.to(found) * scale + offset
    share = float(gap.abs().max() / normalised.abs().max().clamp(min=1.0))
    # 2e-3 in float32, ten times that where nothing is executed, towards whose end rounding grows; NaN is refused as well
    if not share <= torch.finfo(found.dtype).eps ** 0.4 * (1 if name == "action" else 10):
        return f"its {what} differ from the engine's by up to {share:.1g} with the same noise"
    return None


def _made_up(port: Port, program: Program) -> Iterator[Trial]:
    def made(count: int) -> dict[str, Tensor]:
        return {name: value.to(program.like) for name, value in port.synthetic_observations(count).items()}

    def trial(inputs: dict[str, Tensor], what: str) -> Trial:
        return Trial(port.prepare_observation(inputs), lambda _: (inputs, None), what)

    yield trial(made(1), "")
    yield trial(made(1), SECOND_CALL)
    both, later = made(2), made(2)
    two = trial(both, TWO_AT_ONCE)
    longer = port.prepare_observation({name: torch.cat([both[name], later[name]], dim=1) for name in both})
    try:
        read = port.read_observation(longer, program.like)
    except ObservationError:  # the engine takes no longer history
        yield two
        return
    yield Trial(longer, lambda _: (read, None), " with two observations of a history longer than n_obs_steps", two)


def _own_answer(port: Port, own: Callable[..., Any], obs: Any) -> tuple[dict[str, Tensor], list[str]]:
    """What a policy returns: its actions and the whole chunk, if it tells that, and the names of all else."""
    returned = own(obs)
    answer = {"action": port.action_of(returned)}
    if not isinstance(returned, Mapping):
        return answer, []
    if isinstance(chunk := returned.get("action_pred"), Tensor):
        answer["action_pred"] = chunk
    return answer, [str(name) for name in returned if name not in ("action", "action_pred")]


@contextmanager
def _put_back(port: Port) -> Iterator[None]:
    """What a policy writes down inside, such as its last chunk, is afterwards as it was: attributes, buffers and plain
    containers of the policy and its modules, and of objects that these hold."""
    held: dict[int, tuple[Any, Any]] = {}  # by id: a container or tensor, and what was in it
    waiting = [(part, 0) for part in (port.policy, *port.module.modules())]
    while waiting:
        value, depth = waiting.pop()
        if id(value) in held or isinstance(value, nn.Parameter | type | ModuleType):
            continue
        if type(value) in _CONTAINERS:
            held[id(value)] = value, value.copy()
            waiting += [(item, depth) for item in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, Tensor):
            if not value.is_inference():
                held[id(value)] = value, (value._version, value.detach().clone())
        elif depth < _DEPTH and isinstance(getattr(value, "__dict__", None), dict):
            waiting.append((vars(value), depth + 1))
    try:
        try:
            yield
        finally:
            _restore(held.values())
    finally:
        _restore(held.values())  # should Ctrl-C have hit the first


def _restore(held: Iterable[tuple[Any, Any]]) -> None:
    for value, before in held:
        if isinstance(value, Tensor):
            if value._version != before[0]:
                value.data.copy_(before[1])
        elif value != before if isinstance(value, set) else not _holds_the_same(value, before):
            value.clear()
            (value.update if isinstance(value, dict | set) else value.extend)(before)


def _holds_the_same(value: Any, before: Any) -> bool:
    if isinstance(value, dict):
        return [*value] == [*before] and all(map(is_, value.values(), before.values()))
    return len(value) == len(before) and all(map(is_, value, before))
