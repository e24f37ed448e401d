"""The paper's protocol beside its printed figures: the best and the mean of each training run's last checkpoints.

From the files that `blockcache paper checkpoints` leaves. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockcache.compare.methods import method_named
from blockcache.errors import FileError
from blockcache.report.document import Table, plain, table
from blockcache.results.rollouts import BASELINE, Results
from blockcache_lab.pages.published import PLACES, printed_cell
from blockcache_lab.studies.checkpoints import Protocol, protocol
from blockcache_lab.studies.suites import BASE

_PRINTED = {BASELINE: "main/Full Precision", BASE: "main/BAC(S = 10)"}


@dataclass(frozen=True, eq=False)
class TrainingRuns:
    """Some training runs of one policy that differ in their seed, and how their last checkpoints do.

    Args:
        directory: Of the files: a directory for each run, a file for each checkpoint.
        results: By run, its checkpoints in the order of training.
    """

    directory: str
    results: Mapping[str, Sequence[Results]]

    @classmethod
    def load(cls, directory: str) -> TrainingRuns:
        files: dict[str, list[Path]] = {}
        for path in sorted(Path(directory).glob("*/*.json*")):
            files.setdefault(path.parent.name, []).append(path)
        files.pop("state", None)  # what 'paper checkpoints' keeps while it runs
        if not files:
            raise FileError(
                f"no results of checkpoints in {directory}; run 'blockcache paper checkpoints RUN... -o {directory}' first"
            )
        return cls(directory, {run: [Results.load(path) for path in paths] for run, paths in files.items()})

    @property
    def task(self) -> str:
        return str(next(iter(self.results.values()))[0].task["name"])

    @property
    def rows(self) -> list[list[str]]:
        """One for each method and each place of the task in the printed table."""
        made = []
        for place in PLACES.get(self.task, ()):
            for method in protocol(self.results, place.least):
                printed = _PRINTED.get(method.method)
                made.append(
                    [
                        plain(self.task),
                        place.cell.replace("_", " "),
                        plain(method_named(method.method).label),
                        " / ".join(f"{value:.2f}" for value in printed_cell(printed, place)) if printed else "",
                        ", ".join(
                            f"{max(found):.2f} / {sum(found) / len(found):.2f}" for found in method.scores.values()
                        ),
                        f"{method.best:.2f} / {method.mean:.2f}",
                        self._amount(method),
                    ]
                )
        return made

    def _amount(self, method: Protocol) -> str:
        first = next(iter(self.results.values()))[0]
        checkpoints = "/".join(dict.fromkeys(str(len(found)) for found in method.scores.values()))
        return f"{len(method.scores)} x {checkpoints} x {len(first.of(method.method))}"


def protocol_table(found: Sequence[TrainingRuns]) -> Table:
    """The protocol's figures of all tasks.

    Args:
        found: The runs of each task.
    """
    header = ["task", "cell", "method", "printed", "each run: max / mean", "all runs: max / mean"]
    rows = [row for runs in found for row in runs.rows]
    return table([*header, "runs x checkpoints x episodes"], rows, left=3)
