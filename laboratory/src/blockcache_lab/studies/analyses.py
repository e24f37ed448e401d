"""All analyses of one policy, one after the other; each finished one is kept, so what was killed goes on where it was.

Knows nothing of plots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockcache.compare.store import Store
from blockcache.files import digest
from blockcache.measure import machine
from blockcache.models.registry import port_of
from blockcache.observations import batch_size, hash_observations
from blockcache.progress import progress_bar
from blockcache.solvers import solve
from blockcache_lab.analysis.caching import caching_errors, error_correlation, feature_maps, ffns_of, weaker_policy
from blockcache_lab.analysis.feed_forward import ffn_response, sublayer_errors, weight_norms
from blockcache_lab.analysis.file import Analysis, check_names
from blockcache_lab.analysis.homogeneity import homogeneity, sample_matrices, schedule_stability
from blockcache_lab.analysis.recorded import action_costs, similarity
from blockcache_lab.analysis.residuals import in_parts
from blockcache_lab.analysis.section import AnalysisError, AnalysisSection
from blockcache_lab.analysis.sections import SECTIONS, WeakerPolicy
from blockcache_lab.studies.analysis_inputs import AnalysisInputs


def analyse(inputs: AnalysisInputs, only: Sequence[str] = (), source: str = "", command: str = "") -> Analysis:
    """Every analysis of the paper that the policy allows, or those that are named.

    Args:
        inputs: The policy, and what its analyses start from.
        only: Names of sections; all unless given, `weaker` among them if there is a weaker policy.
        source: Where the policy came from, for the record.
        command: What somebody typed, for the record.
    """
    check_names(only)
    names = [name for name in SECTIONS if name in only or (not only and (name != WeakerPolicy.name or inputs.weaker))]
    if WeakerPolicy.name in names and inputs.weaker is None:
        raise AnalysisError(
            "the section weaker compares with a weaker policy, and none was given; name it with --weaker"
        )
    inputs.check(names)
    port, recording, count = inputs.port, inputs.given_recording, batch_size(inputs.observations)
    about: dict[str, Any] = {
        "source": source,
        "fingerprint": port.fingerprint,
        "blocks": port.adapter.blocks,
        "setting": {
            "seed": inputs.seed,
            "generations": inputs.sizes.generations if recording is None else recording.generations,
            "observations": {"count": count, "hash": hash_observations(inputs.observations)},
            "command": command,
            "machine": machine.describe(),
        },
    }
    bar = progress_bar(names, "analyses", unit="section", disable=not inputs.progress)
    found = [_kept(inputs, about, name) for name in bar]
    for part in ("schedules", "sections", "absent", "seconds"):
        about[part] = {key: value for one in found for key, value in getattr(one, part).items()}
    return Analysis(**about)


def _kept(inputs: AnalysisInputs, about: Mapping[str, Any], name: str) -> Analysis:
    """An analysis of one section, from the state if it is there."""

    def make() -> Analysis:
        started, sections, absent = time.perf_counter(), dict[str, AnalysisSection](), dict[str, str]()
        try:
            sections[name] = _MAKERS[name](inputs)
        except AnalysisError as error:
            absent[name] = str(error)
        origins = {key: {"origin": dict(value.origin)} for key, value in inputs.schedules.items()}
        seconds = {name: round(time.perf_counter() - started, 2)}
        return Analysis(**about, schedules=origins, sections=sections, absent=absent, seconds=seconds)

    file = f"{name}-{digest({'section': name, **inputs.origin})[:16]}.safetensors"
    # a damaged one, or one of another state of the code, is made again
    return Store(inputs.state).value(file, Analysis.load, make, mend=True)


def _weaker(inputs: AnalysisInputs) -> AnalysisSection:
    assert inputs.weaker is not None  # checked before anything is made
    name, other = inputs.weaker[0], port_of(inputs.weaker[1])
    weak = solve(inputs.calibrations(other).recording(), inputs.updates, method="bac")
    both = [("the policy", inputs.port, inputs.schedules["bac"]), (name, other, weak)]
    return weaker_policy(both, inputs.compared, inputs.seed, method=f"bac:S={inputs.updates}")


def _sublayers(inputs: AnalysisInputs) -> AnalysisSection:
    block, schedule = inputs.ffn(2), inputs.schedules["blockwise"]
    later = schedule.updates[block][1:]
    at = tuple(sorted({later[0], later[len(later) // 2]})) if later else (0,)
    return sublayer_errors(inputs.port, schedule, block, at, inputs.compared[0], inputs.seed, named="blockwise")


def _features(inputs: AnalysisInputs) -> AnalysisSection:
    names = ffns_of(inputs.port) or [block.name for block in inputs.port.adapter.blocks]
    blocks = list(dict.fromkeys((names[0], names[len(names) // 2], names[-1])))
    return feature_maps(
        inputs.port, inputs.schedules[inputs.main], blocks, inputs.compared[0], inputs.seed, named=inputs.main
    )


def _homogeneity(inputs: AnalysisInputs) -> AnalysisSection:
    batches, known = inputs.spread
    return homogeneity(inputs.port, batches, inputs.seed, separate=known, progress=inputs.bar("episodes"))


def _stability(inputs: AnalysisInputs) -> AnalysisSection:
    batches = in_parts(inputs.port, inputs.calibrated)
    matrices = sample_matrices(inputs.port, batches, inputs.seed, inputs.bar("each generation"))
    return schedule_stability(matrices, inputs.updates, inputs.seed)


_MAKERS: dict[str, Callable[[AnalysisInputs], AnalysisSection]] = {
    "similarity": lambda inputs: similarity(inputs.recording),
    "caching": lambda inputs: caching_errors(
        inputs.port, inputs.schedules, inputs.compared, inputs.seed, inputs.bar("caching errors")
    ),
    "sublayers": _sublayers,
    "correlation": lambda inputs: error_correlation(
        inputs.port, inputs.compared, inputs.seed, progress=inputs.bar("upstream and downstream")
    ),
    "response": lambda inputs: ffn_response(
        inputs.port, inputs.ffn(2), len(inputs.port.timesteps) // 2, inputs.compared[0], inputs.seed
    ),
    "weights": lambda inputs: weight_norms(inputs.port),
    "features": _features,
    "homogeneity": _homogeneity,
    "stability": _stability,
    "action-costs": lambda inputs: action_costs(inputs.recording),
    "weaker": _weaker,
}
