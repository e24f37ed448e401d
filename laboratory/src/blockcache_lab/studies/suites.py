"""Comparisons as named suites: which methods, beside which printed rows, compared with what.

The paper's go one factor at a time around S = 10, n = 5, cosine, anchor and the policy's own sampler; `frontier` has what
came after it, `rdt` the paper's figure on RDT, `realtime` that on a real robot, `tables` the paper's main row beside few
steps, small enough for every task. Values only: `suite_runs` runs them and
`report` shows them. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from blockcache.compare.methods import Method, parse_method
from blockcache.compare.parts import FewerSteps, FittedSteps, TunedFiles
from blockcache.errors import ContentError, FileError, short
from blockcache.files import PathLike, read
from blockcache.results.rollouts import BASELINE, Results

BASE = "bac:S=10,n=5"
TUNED = "Tuned"  # the table of what was tuned
TIMINGS = "timings.json"  # beside the suites' files; all their methods, timed in one run
DISTANCES = "distances.json"  # beside that of the frontier
Equal: TypeAlias = Callable[[str, Method], Method]  # (kind, method) -> the method of that kind with as many FLOPs


@dataclass(frozen=True)
class Cell:
    """One method of a suite, in the table `section`."""

    section: str
    method: str
    equals: str | None = None  # the method whose FLOPs it was chosen to have
    printed: str | None = None  # its row in the paper, as "table/row" of published_results.json
    main: bool = False  # among those that get many rollouts


def _rival(section: str, equal: Equal, kind: str, method: str, printed: str | None = None, main: bool = False) -> Cell:
    """The method of that kind with as many FLOPs as another."""
    return Cell(section, equal(kind, parse_method(method)).name, method, printed, main)


@dataclass(frozen=True)
class Suite:
    """A suite whose methods are chosen: what a suite's file says of itself, under `setting.suite`."""

    name: str
    about: str
    reference: str | None  # what else, besides the full policy, each method is compared with
    cells: tuple[Cell, ...]
    quick: bool = False  # a few short rollouts to see that it works: no results

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.method for cell in self.cells))

    @property
    def sections(self) -> dict[str, list[Cell]]:
        found: dict[str, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.section, []).append(cell)
        return found

    def describe(self) -> dict[str, Any]:
        """As a suite's file has it, in JSON types."""
        return {**asdict(self), "cells": [asdict(cell) for cell in self.cells]}


def suite_by_name(name: str, equal: Equal, quick: bool = False) -> Suite:
    """The suite of that name, with every method that is chosen by its FLOPs found by `equal`."""
    return replace(KINDS[name].make(equal), quick=quick)


def suite_of(results: Results, path: PathLike) -> Suite:
    """What a results file says of the suite that it is of; strict.

    Args:
        results: The file's content.
        path: Of that file, for what is said where it does not fit.
    """
    try:
        suite: Suite = read(Suite, results.setting["suite"], "setting.suite")
        run = {method.name for method in results.methods}
        named = {*suite.methods, *(cell.equals for cell in suite.cells), suite.reference} - {None}
        if unknown := sorted(str(name) for name in named - run):
            raise ContentError(f"it speaks of {short(unknown[0])}, which is none of its methods")
        if not all(cell.section.strip() and "\n" not in cell.section for cell in suite.cells):
            raise ContentError("the title of a table is one line of text")
        return suite
    except (ContentError, KeyError) as error:
        raise FileError(
            f"the results file {path} is not a suite's ({error}); suites are run by 'blockcache paper suite'"
        ) from error


def _main(equal: Equal) -> Suite:
    first = "Full precision, and what one would try first"
    cells = [
        Cell(first, "full", printed="main/Full Precision", main=True),
        Cell(first, "ddim-10", main=True),
        Cell(first, "uniform:S=10", main=True),
        Cell(first, "uniform:S=20", printed="main/Uniform(fast)"),
        Cell(first, "bac:S=7,n=5", printed="main/BAC(S = 7)"),
    ]
    printed = {"bac": "main/BAC(S = 10)", "uniform": "main/Uniform(fastest)", "teacache": "main/Teacache(fastest)"}
    for updates, rows in {10: printed, 20: dict[str, str]()}.items():
        bac, section = f"bac:S={updates},n=5", f"At the FLOPs of BAC S = {updates}, n = 5"
        cells.append(Cell(section, bac, printed=rows.get("bac"), main=True))
        for kind in ("uniform", "ddim", "ddpm", "teacache"):
            many = kind != "teacache"  # it has to run on the slowest engine
            cells.append(_rival(section, equal, kind, bac, rows.get(kind), many))
    return Suite("main", "BAC against what else makes a policy faster, at equal FLOPs.", None, tuple(cells))


def _ablation(equal: Equal) -> Suite:
    parts, fair, objective = "The parts of the method, S = 10", "The same, at the FLOPs of BAC", "The objective"
    released = "The last step, which the released code computes in every block"
    cells = [Cell(parts, name) for name in ("uniform:S=10", "unified:S=10", "blockwise:S=10", BASE)]
    cells += [_rival(fair, equal, kind, BASE) for kind in ("uniform", "unified", "blockwise")]
    cells += [Cell(objective, BASE), Cell(objective, f"{BASE},objective=consecutive")]
    cells += [Cell(released, BASE), Cell(released, f"{BASE},last=1")]
    about = "What each part of BAC is worth, and where the paper's text and its released code differ."
    return Suite("ablation", about, BASE, tuple(cells))


def _metrics(equal: Equal) -> Suite:
    names = {"cosine": "Cosine", "mse": "MSE", "l1": "L1", "wasserstein": "Wa"}
    cells = [
        Cell(
            "The metric",
            BASE if metric == "cosine" else f"{BASE},metric={metric}",
            printed=f"metrics_s10_n5/BAC ({printed})",
        )
        for metric, printed in names.items()
    ]
    return Suite("metrics", "Which metric of similarity BAC is solved with.", BASE, tuple(cells))


def _n_and_s(equal: Equal) -> Suite:
    printed_s, printed_n = (5, 7, 10, 20), (3, 5)
    cells = [
        Cell("S, with n = 5", f"bac:S={s},n=5", printed=f"s_sweep_n3/BAC (S={s})" if s in printed_s else None)
        for s in (3, 5, 7, 10, 20)
    ]
    cells += [
        Cell("n, with S = 10", f"bac:S=10,n={n}", printed=f"n_sweep_s10/BAC (n={n})" if n in printed_n else None)
        for n in (0, 1, 3, 5, 8)
    ]
    return Suite("n-and-s", "How many updates per block, and how many blocks in the union.", BASE, tuple(cells))


def _ddim(equal: Equal) -> Suite:
    cached, fewer = "DDIM-40, and BAC on it", "Fewer DDIM steps at the same FLOPs"
    combined = {s: f"ddim-40+bac:S={s},n=3" for s in (3, 5, 10)}
    cells = [Cell(cached, "ddim-40", printed="ddim_k40/DDIM (K=40)")]
    cells += [Cell(cached, name, printed=f"ddim_k40/BAC (S={s},n=3)") for s, name in combined.items()]
    cells += [_rival(fewer, equal, "ddim", name) for name in combined.values()]
    return Suite("ddim", "BAC on a sampler that is fast already, against fewer steps of it.", "ddim-40", tuple(cells))


def _frontier(equal: Equal) -> Suite:
    own = "The policy's own sampler: the paper's schedules and action costs at equal FLOPs"
    fewer, chosen = "Fewer steps, where the samplers put them", "Few steps, placed or fitted"
    both = "Reuse on top of few steps"
    cells = [Cell(own, "full", main=True)]
    for bac in (BASE, "bac:S=20,n=5"):
        cells += [Cell(own, bac), Cell(own, f"{bac},metric=mse", equals=bac)]
        cells += [_rival(own, equal, "action", bac)]
    names = ("ddpm-16", "ddpm-10", "ddpm-8", "ddpm-6", "ddim-10", "ddim-6", "sde-dpmsolver++-10", "sde-dpmsolver++-8")
    cells += [Cell(fewer, name) for name in names]
    cells += [Cell(chosen, f"ddpm-{steps}:placed") for steps in (8, 5)]
    cells += [Cell(chosen, f"fitted-{steps}") for steps in ("5", "4", "5:spread=1")]
    cells += [Cell(both, f"ddpm-16+action:budget={share}") for share in (0.5, 0.25)]
    cells += [Cell(both, "ddpm-8:placed+action:budget=0.63"), Cell(both, "fitted-5+action:budget=0.8")]
    about = "What beats the paper's schedule: action costs, and few steps that are well placed or fitted."
    return Suite(FRONTIER, about, None, tuple(cells))


def _rdt(equal: Equal) -> Suite:
    first, uniform = "Full precision, and BAC as in the paper's figure", "Uniform"
    fewer, costs = "Fewer solver steps", "Action costs at the FLOPs of BAC"
    cells = [Cell(first, "full")]
    bacs = {updates: f"bac:S={updates},n=3" for updates in (1, 2, 3, 5)}  # n as with DDIM: the paper names none here
    cells += [Cell(first, bac) for bac in bacs.values()]
    cells += [Cell(uniform, f"uniform:S={updates}") for updates in bacs]
    cells += [Cell(fewer, f"{SOLVER}-{steps}") for steps in (10, 5, 3, 2, 1)]
    cells += [_rival(f"{fewer}, at the FLOPs of BAC", equal, SOLVER, bac) for bac in bacs.values()]
    # with one update for each block there is one schedule only: nothing is left to be split
    cells += [_rival(costs, equal, "action", bac) for updates, bac in bacs.items() if updates > 1]
    about = "The paper's figure on RDT: BAC against Uniform, fewer steps of DPM-Solver++ and action costs."
    return Suite(RDT, about, None, tuple(cells))


def _realtime(equal: Equal) -> Suite:
    bac = "bac:S=7,n=3"
    paper, fair = "Full precision, and BAC as on the paper's robot", "At the FLOPs of BAC S = 7, n = 3"
    cells = [Cell(paper, name) for name in ("full", "bac:S=5,n=3", bac)]
    cells += [_rival(fair, equal, kind, bac) for kind in ("uniform", "ddim", "ddpm")]
    about = "The paper's figure on a real robot, in simulation: time passes while the policy computes."
    return Suite(REALTIME, about, None, tuple(cells))


def _tables(equal: Equal) -> Suite:
    rows, fair = "The paper's rows", "At the FLOPs of BAC S = 10, n = 5, or fewer"
    printed = {BASELINE: "Full Precision", BASE: "BAC(S = 10)"}
    cells = [Cell(rows, method, printed=f"main/{row}", main=True) for method, row in printed.items()]
    fewer = equal("ddpm", parse_method(BASE)).sampler
    assert isinstance(fewer, FewerSteps)
    samplers = (fewer, replace(fewer, placed=True), FittedSteps(5))
    cells += [Cell(fair, Method(sampler).name, equals=BASE) for sampler in samplers]
    return Suite(TABLES, "The paper's main table on a task, beside few steps at equal FLOPs.", None, tuple(cells))


def with_tuned(suite: Suite, directory: str) -> Suite:
    """The suite with what `blockcache tune` wrote into a directory, for the same policy; a main method if any is."""
    main = any(cell.main for cell in suite.cells)
    return replace(suite, cells=(*suite.cells, Cell(TUNED, Method(TunedFiles(directory)).name, main=main)))


@dataclass(frozen=True)
class SuiteKind:
    """What is true of a suite for any policy.

    Args:
        alone: It has fresh seeds, a directory and a page of its own, and what was tuned can be in it; the others share
            theirs.
        rollouts: Of a method, unless somebody asks otherwise.
        exact: Its file says what the engines save exactly.
        clocked: It is run on the clock, once for each delay and mode, each into a file of its own.
        features: Its file says what methods do to actions at recorded observations, and the policy's dropout.
    """

    make: Callable[[Equal], Suite]
    alone: bool = False
    rollouts: int = 50
    exact: bool = False
    clocked: bool = False
    features: bool = False


FRONTIER, RDT, REALTIME, TABLES, SOLVER = "frontier", "rdt", "realtime", "tables", "dpmsolver++"
KINDS = {
    "main": SuiteKind(_main),
    "ablation": SuiteKind(_ablation),
    "metrics": SuiteKind(_metrics),
    "n-and-s": SuiteKind(_n_and_s),
    "ddim": SuiteKind(_ddim),
    FRONTIER: SuiteKind(_frontier, alone=True),
    RDT: SuiteKind(_rdt, alone=True, rollouts=100, exact=True),
    REALTIME: SuiteKind(_realtime, alone=True, rollouts=100, clocked=True),
    TABLES: SuiteKind(_tables, alone=True, features=True),
}
SUITES = tuple(name for name, kind in KINDS.items() if not kind.alone)
"""The paper's on DP-T, which share a directory."""
ALONE = tuple(name for name, kind in KINDS.items() if kind.alone)
RATE = 10.0
"""Of suite realtime: control ticks in a second, where nothing else is said."""
DELAYS = (0, 1, 2, 3, 4, 5, 6, 8)
"""In ticks. Behind the observation steps the shipped policies' chunks have nine actions: at nine ticks all are late."""
MODES: dict[str, dict[str, Any]] = {"async": {}, "rtc": {"rtc": True}, "stop": {"stop": True}}
"""Of suite realtime, with their settings of the clock. Without a delay nothing is committed, so that `rtc` is `async`."""
