"""What a suite's file says of a policy's actions at recorded observations. Values only; `suite_runs` measures them."""

from __future__ import annotations

from dataclasses import dataclass

from blockcache.errors import ContentError, FileError
from blockcache.files import PathLike, read
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


def open_loop_of(results: Results, path: PathLike) -> OpenLoopFacts | None:
    """What a suite's file says of actions at recorded observations, if it does; strict.

    Args:
        results: The file's content.
        path: Of that file, for what is said where it does not fit.
    """
    if "open_loop" not in results.setting:
        return None
    try:
        found: OpenLoopFacts = read(OpenLoopFacts, results.setting["open_loop"], "setting.open_loop")
        return found
    except ContentError as error:
        raise FileError(f"the results file {path} does not fit ({error}); run the suite again") from error
