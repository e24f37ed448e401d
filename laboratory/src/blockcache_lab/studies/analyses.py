"""All analyses of one policy, one after the other; each finished one is kept, so what was killed goes on where it was.

Knows nothing of plots, and of policies no more than their port.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockcache.compare.candidates import digest
from blockcache.engines.accelerate import check_fit
from blockcache.errors import BlockcacheError
from blockcache.files import PathLike, exists, make_directory
from blockcache.measure import machine
from blockcache.models.registry import port_of
from blockcache.observations import batch_size, hash_observations
from blockcache.progress import progress_bar
from blockcache.results.analysis import Analysis, check_names
from blockcache.results.analysis_section import AnalysisError, Section
from blockcache.results.analysis_sections import SECTIONS, WeakerPolicy
from blockcache.schedule import Schedule
from blockcache.solvers import Recording, solve
from blockcache_lab.analysis.caching import caching_errors
from blockcache_lab.analysis.correlation import error_correlation, ffns_of
from blockcache_lab.analysis.feature_maps import feature_maps
from blockcache_lab.analysis.feed_forward import ffn_response, sublayer_errors, weight_norms
from blockcache_lab.analysis.homogeneity import homogeneity, sample_matrices, schedule_stability
from blockcache_lab.analysis.recorded import action_costs, similarity
from blockcache_lab.analysis.residuals import in_parts
from blockcache_lab.analysis.weaker import weaker_policy
from blockcache_lab.studies.ingredients import Ingredients, Sizes


def analyse(
    policy: Any,
    observations: Any,
    *,
    state: PathLike,
    recording: Recording | None = None,
    schedule: Schedule | None = None,
    weaker: tuple[str, Any] | None = None,
    only: Sequence[str] = (),
    moments: NDArray[np.int64] | None = None,
    sizes: Sizes | None = None,
    seed: int = 0,
    source: str = "",
    command: str = "",
    progress: bool = True,
) -> Analysis:
    """Every analysis of the paper that the policy allows, or those that are named.

    policy        the policy object, ours or foreign (or its port)
    observations  a batch
    state         a directory that keeps what is finished: the same call goes on from there
    recording     what `calibrate` gave of this very policy, best with action costs; made here unless given
    schedule      one of this policy, looked at beside the paper's methods
    weaker        name and policy object of a weaker policy for the same task, to see whether caching hurts it more
    only          names of sections; all unless given
    moments       (N, 2) the episode of each observation and the place in it, where that is known
    sizes         how many observations go into what
    seed          of all noise
    source        where the policy came from, for the record
    command       what somebody typed, for the record
    """
    check_names(only)
    port, sizes = port_of(policy), sizes or Sizes()
    names = [name for name in SECTIONS if name in only or (not only and (name != WeakerPolicy.name or weaker))]
    if WeakerPolicy.name in names and weaker is None:
        raise AnalysisError(
            "the section weaker compares with a weaker policy, and none was given; name it with --weaker"
        )
    if recording is not None and (odd := recording.fingerprint.differences(port.fingerprint)):
        raise AnalysisError(
            f"this recording is not of the policy, which has {'; '.join(odd)}; calibrate again with 'blockcache calibrate'"
        )
    if schedule is not None:
        check_fit(schedule.fingerprint, port)
    sizes.check(batch_size(observations), recording is not None, names)
    given = Ingredients(port, observations, recording, schedule, weaker, moments, sizes, seed, Path(state), progress)
    setting = {
        "seed": seed,
        "generations": sizes.generations if recording is None else recording.generations,
        "observations": {"count": batch_size(observations), "hash": hash_observations(observations)},
        "command": command,
        "machine": machine.describe(),
    }
    about: dict[str, Any] = {
        "source": source,
        "fingerprint": port.fingerprint,
        "blocks": port.adapter.blocks,
        "setting": setting,
    }
    found = [
        _kept(given, about, name) for name in progress_bar(names, "analyses", unit="section", disable=not progress)
    ]
    return Analysis(
        **about,
        schedules={key: value for item in found for key, value in item.schedules.items()},
        sections={key: value for item in found for key, value in item.sections.items()},
        absent={key: value for item in found for key, value in item.absent.items()},
        seconds={key: value for item in found for key, value in item.seconds.items()},
    )


def _kept(given: Ingredients, about: Mapping[str, Any], name: str) -> Analysis:
    """An analysis of one section, from the state if it is there."""
    file = given.state / f"{name}-{digest({'section': name, **given.origin})[:16]}.safetensors"
    with contextlib.suppress(BlockcacheError):  # a damaged one, or one of another state of the code, is made again
        if exists(file):
            return Analysis.load(file)
    started, sections, absent = time.perf_counter(), dict[str, Section](), dict[str, str]()
    try:
        sections[name] = _MAKERS[name](given)
    except AnalysisError as error:
        absent[name] = str(error)
    origins = {key: {"origin": dict(value.origin)} for key, value in given.schedules.items()}
    seconds = {name: round(time.perf_counter() - started, 2)}
    made = Analysis(**about, schedules=origins, sections=sections, absent=absent, seconds=seconds)
    make_directory(given.state)
    made.save(file)
    return made


def _weaker(given: Ingredients) -> Section:
    assert given.weaker is not None  # checked before anything is made
    name, other = given.weaker[0], port_of(given.weaker[1])
    weak = solve(given.calibrations(other).recording(), given.updates, method="bac")
    both = [("the policy", given.port, given.schedules["bac"]), (name, other, weak)]
    return weaker_policy(both, given.compared, given.seed, method=f"bac:S={given.updates}")


def _sublayers(given: Ingredients) -> Section:
    block, schedule = given.ffn(2), given.schedules["blockwise"]
    later = schedule.updates[block][1:]
    at = tuple(sorted({later[0], later[len(later) // 2]})) if later else (0,)
    return sublayer_errors(given.port, schedule, block, at, given.compared[0], given.seed, named="blockwise")


def _features(given: Ingredients) -> Section:
    names = ffns_of(given.port) or [block.name for block in given.port.adapter.blocks]
    blocks = list(dict.fromkeys((names[0], names[len(names) // 2], names[-1])))
    return feature_maps(
        given.port, given.schedules[given.main], blocks, given.compared[0], given.seed, named=given.main
    )


def _homogeneity(given: Ingredients) -> Section:
    batches, known = given.spread
    return homogeneity(given.port, batches, given.seed, separate=known, progress=given.said("episodes"))


def _stability(given: Ingredients) -> Section:
    batches = in_parts(given.port, given.calibrated)
    matrices = sample_matrices(given.port, batches, given.seed, given.said("each generation"))
    return schedule_stability(matrices, given.updates, given.seed)


_MAKERS: dict[str, Callable[[Ingredients], Section]] = {
    "similarity": lambda given: similarity(given.recording),
    "caching": lambda given: caching_errors(
        given.port, given.schedules, given.compared, given.seed, given.said("caching errors")
    ),
    "sublayers": _sublayers,
    "correlation": lambda given: error_correlation(
        given.port, given.compared, given.seed, progress=given.said("upstream and downstream")
    ),
    "response": lambda given: ffn_response(
        given.port, given.ffn(2), len(given.port.timesteps) // 2, given.compared[0], given.seed
    ),
    "weights": lambda given: weight_norms(given.port),
    "features": _features,
    "homogeneity": _homogeneity,
    "stability": _stability,
    "action-costs": lambda given: action_costs(given.recording),
    "weaker": _weaker,
}
