"""What `blockcache check` shows: the verdict, the figures behind it, and what they mean. Knows nothing of torch."""

from __future__ import annotations

from blockcache.measure.statistics import Estimate
from blockcache.report.document import Block, Bullets, Paragraph, plain, table
from blockcache.report.methods import of_full
from blockcache.results.check import ENERGIES, Check
from blockcache.results.losses import Prediction, shipped_model

_FORM = "{:.3f}"


def check_blocks(found: Check) -> tuple[Block, ...]:
    """A check, from the verdict on.

    Args:
        found: What the check found.
    """
    distances, floor, setting, features = found.distances, found.floor, found.setting, found.features
    measures: list[tuple[str, Estimate | float | None, Estimate | float | None]] = [
        ("action error", found.error.mean, found.noise_floor.mean),
        ("first action, P95", found.error.first_p95, found.noise_floor.first_p95),
        ("centre shift", distances.centre_shift, floor.centre_shift),
        ("energy distance", distances.energy, floor.energy),
        ("energy beyond spread", distances.beyond_spread, floor.beyond_spread),
        ("spread", distances.spread, floor.spread),
        ("jerk inside a chunk", found.roughness.jerk, found.full_roughness.jerk),
        ("jump between chunks", found.roughness.seam, found.full_roughness.seam),
    ]
    if features is not None:
        measures.insert(-2, ("roughness", features.own_roughness + features.rougher, features.own_roughness))
    share = of_full(found.method["flops"], found.method["full_flops"]) or "an unknown share"
    noise = "the same noise" + " at the start only (another sampler)" * (not found.method["shares_all_noise"])
    notes = [
        f"{setting['observations']} observations, {setting['samples']} chunks each, executed slice, normalised units; brackets: 95 % "
        "intervals over observations.",
        f"Action error: to the full policy with {noise}; on the right, of two full runs with different noise.",
        "Centre shift, energy distance and spread: of the method's actions from the full policy's as distributions; on the right, of "
        "one half of the full policy's from the other, which is 0, 0 and 1 but for chance.",
        _seam_note(found),
        _prediction_note(found),
    ]
    name = plain(found.name)
    clear = "" if found.clear else " The intervals reach over a threshold: more observations would tell."
    return (
        Paragraph(
            f"**{name}: {found.verdict}**, at {share} of the FLOPs ({plain(found.method['engine'])} engine). "
            f"{promise(found.prediction)}{clear}"
        ),
        table(["measure", name, "full policy"], [[what, _shown(one), _shown(other)] for what, one, other in measures]),
        Bullets(tuple(notes)),
    )


def promise(found: Prediction) -> str:
    """What can be said of a method's loss, as a sentence."""
    return f"Predicted loss {found.loss:.3f}; {plain(found.words)}."


def _prediction_note(found: Check) -> str:
    low, high = found.shift_limits
    if found.features is None:
        return (
            f"The verdict is a prediction: on Push-T methods with a centre shift up to {low:.3f} and an energy beyond spread up to "
            f"{ENERGIES[0]} lost 0.02 or less, those above {high:.3f} or {ENERGIES[1]} lost 0.07 or more (shifts scaled to the "
            f"{found.setting['features']} values of a chunk here). Only rollouts show what a method costs: `blockcache eval`."
        )
    where = f" This policy: {plain(found.prediction.where)}." * bool(found.prediction.where)
    return (
        f"The verdict is a prediction, learnt on {plain(shipped_model().about)}; on Push-T a centre shift above {low:.3f} cost score, too (scaled to the "
        f"{found.setting['features']} values of a chunk here). {plain(shipped_model().judged)}{where} Only rollouts show what a "
        "method costs: `blockcache eval`."
    )


def _seam_note(found: Check) -> str:
    if found.setting["seams"]:
        return f"Jump: from a chunk's last action to the next one's first, at {found.setting['seams']} pairs of decisions that follow each other."
    return "No jump between chunks: the observations do not say which decisions follow each other (`blockcache policy observe` does)."


def _shown(value: Estimate | float | None) -> str:
    if isinstance(value, Estimate):
        return value.text(_FORM)
    return "" if value is None else _FORM.format(value)
