"""A closed-loop comparison in the time there is: every method meets the same episodes, more of them while time is left.

The same rollouts as those of `evaluation`, only that the clock decides how many. Knows nothing of tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockcache.compare.evaluation import prepare
from blockcache.compare.jobs import Backend, Work, one_by_one
from blockcache.compare.methods import Method
from blockcache.compare.parts import FewerSteps
from blockcache.compare.reuse_parts import BAC
from blockcache.compare.store import Outcome
from blockcache.files import PathLike
from blockcache.measure.latency import Latency
from blockcache.models.port import Port
from blockcache.observations import rows
from blockcache.progress import progress_bar
from blockcache.results.rollouts import Results
from blockcache.tasks import Task

METHODS = (Method(reuse=BAC(10, 5)), Method(FewerSteps("ddpm", 16)))  # and the full policy, and what was tuned
GROUP, MOST = 5, 250  # rollouts: at a time, and at most
MARGIN = 1.1  # the next group may take this much longer than the last


@dataclass(frozen=True, eq=False)
class Showcase:
    results: Results
    speed: Mapping[str, Latency]
    repeats: int


def showcase(
    port: Port,
    task: str,
    observations: Any,
    seconds: float,
    *,
    state: PathLike,
    generations: int,
    source: str = "",
    methods: Sequence[Method] = METHODS,
    engine: str = "auto",
    repeats: int = 5,
    backend: Backend = one_by_one,
    make: Callable[[], Task] | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress: bool = True,
) -> Showcase:
    """Compare the methods with the full policy for about so many seconds, at least one group of rollouts each."""
    started = clock()
    evaluation = prepare(
        port,
        task,
        methods,
        rows(observations, 0, generations + 1),  # actions are compared elsewhere
        state=state,
        source=source,
        rollouts=MOST,
        group=GROUP,
        engine=engine,
        generations=generations,
        make=make,
        progress=progress,
    )
    speed = evaluation.speed(repeats, progress=False)
    form = "{desc}: |{bar}| {n:.0f}/{total:.0f} s{postfix}"
    with progress_bar(desc="closed loop", total=seconds, bar_format=form, disable=not progress) as bar:

        def shown(work: Work, jobs: Sequence[Any]) -> Iterator[tuple[int, Outcome]]:
            for finished in backend(work, jobs):
                bar.update(min(clock() - started, seconds) - bar.n)
                yield finished

        for count in range(GROUP, MOST + 1, GROUP):
            before = clock()
            results = replace(evaluation, seeds=evaluation.seeds[:count]).run(shown, progress=False)
            bar.set_postfix_str(f"{count} rollouts each")
            now = clock()
            if now + MARGIN * (now - before) > started + seconds:
                break
    return Showcase(results, speed, repeats)
