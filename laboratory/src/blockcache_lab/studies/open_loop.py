"""What a suite's file says besides rollouts, of actions at recorded observations. `suite_runs` measures it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockcache.errors import ContentError, FileError
from blockcache.files import Count, PathLike, read
from blockcache.measure.features import ActionFeatures
from blockcache.results.rollouts import Results


@dataclass(frozen=True)
class OpenLoopFacts:
    """What needs no rollouts, under `setting.open_loop` of a suite's file.

    Args:
        dropout: That the policy was trained with; None where its family has none.
        features: By method, what it does to the actions.
    """

    dropout: float | None
    features: dict[str, ActionFeatures]


@dataclass(frozen=True)
class ExactSavings:
    """What engines save without reusing anything from step to step, under `setting.exact` of a suite's file.

    Args:
        largest_difference: Of an action, in normalised units: the full policy in its engine to the plain policy, same
            noise.
        flops: By method, what its engine computes of one generation.
    """

    largest_difference: float
    flops: dict[str, Count]


def open_loop_of(results: Results, path: PathLike) -> OpenLoopFacts | None:
    """What a suite's file says of actions at recorded observations, if it does; strict.

    Args:
        results: The file's content.
        path: Of that file, for what is said where it does not fit.
    """
    found: OpenLoopFacts | None = _said(OpenLoopFacts, "open_loop", results, path)
    return found


def exact_of(results: Results, path: PathLike) -> ExactSavings | None:
    """What a suite's file says of exact savings, if it does; strict.

    Args:
        results: The file's content.
        path: Of that file, for what is said where it does not fit.
    """
    found: ExactSavings | None = _said(ExactSavings, "exact", results, path)
    if found is not None and {method.name for method in results.methods} != set(found.flops):
        raise _misfit(path, "its exact savings are not those of its methods")
    return found


def _said(kind: type, key: str, results: Results, path: PathLike) -> Any:
    if key not in results.setting:
        return None
    try:
        return read(kind, results.setting[key], f"setting.{key}")
    except ContentError as error:
        raise _misfit(path, error) from error


def _misfit(path: PathLike, why: object) -> FileError:
    return FileError(f"the results file {path} does not fit ({why}); run the suite again")
