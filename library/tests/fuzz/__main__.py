"""As many cases as one likes, with a summary: `python -m fuzz --help`."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import caches, code, edits, interrupts
from .all_samples import SAMPLES
from .engines import compare
from .running import Outcome, Plan, Runner, damaged, prepare

ENGINES, CORES = "engines", len(os.sched_getaffinity(0))
CHECKS = {"caches": caches.check, "code": code.check, "edits": edits.check, "interrupts": interrupts.check}
"""What is no file: (seed, case, a directory) -> an outcome."""
ALL = (*SAMPLES, ENGINES, *CHECKS)
PART = 10_000  # cases of one format that a process takes at a time


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    options.add_argument("--format", action="append", choices=ALL, help="only these; may be given often")
    options.add_argument("--cases", type=int, default=100_000, help="damaged files of each format")
    options.add_argument(
        "--policies", type=int, default=2_000, help="random policies, in every engine, and of each other kind of case"
    )
    options.add_argument("--seed", type=int, default=0, help="of all that is random")
    options.add_argument("--case", type=int, help="only this one of --format, here and with its traceback")
    options.add_argument("--keep", type=Path, metavar="DIR", help="with --case: write the damaged file here")
    options.add_argument("--output", type=Path, help="write the summary here, as JSON")
    options.add_argument("--list", action="store_true", help="name the formats")
    asked = options.parse_args()
    if asked.list:
        print("\n".join(ALL))
        return
    names = asked.format or ALL
    if asked.case is not None:
        for name in names:
            repeat(name, asked.seed, asked.case, asked.keep)
        return
    started, found = time.time(), dict[str, Any]()
    findings: list[str] = []
    os.environ["OMP_NUM_THREADS"] = "1"  # a process a core: threads of their own would only wait for each other
    for part in parts(names, asked.seed, asked.cases, asked.policies):
        findings += [line for item in part.values() for line in item.pop("findings")]
        found |= part
        summary = {"seed": asked.seed, "formats": found, "findings": findings}
        if asked.output:  # after each part: what was found stays when the run is stopped
            asked.output.parent.mkdir(parents=True, exist_ok=True)
            asked.output.write_text(json.dumps(summary | {"seconds": round(time.time() - started)}, indent=1) + "\n")
    for line in findings[:200]:
        print(f"finding: {line}")
    for name, item in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in item.items()))
    print(f"{len(findings)} findings with seed {asked.seed}; repeat one with --format NAME --case NUMBER")
    raise SystemExit(bool(findings))


def parts(names: Iterable[str], seed: int, cases: int, policies: int) -> Iterator[dict[str, Any]]:
    """All that was asked for, by name; what takes minutes comes before what takes an hour."""
    for name in names:
        if name == ENGINES or name in CHECKS:
            started = time.time()
            try:
                found = engines(seed, policies) if name == ENGINES else checks(name, seed, policies)
            except BrokenProcessPool as error:  # the other parts are still worth their time
                found = {"cases": 0, "wrong": 1, "findings": [f"{name}: a case ended its process: {error}"]}
            yield {name: found | {"seconds": round(time.time() - started)}}
    if files := [name for name in names if name in SAMPLES]:
        yield all_files(files, seed, cases)


def all_files(names: list[str], seed: int, cases: int) -> dict[str, Any]:
    """A part of a format at a time on each core: formats differ so much that whole ones would leave a core idle."""
    found: dict[str, Any] = {
        name: {"cases": 0, "loaded": 0, "wrong": 0, "seconds": 0, "findings": []} for name in names
    }
    plans = [Plan(name, seed, first, min(PART, cases - first)) for name in names for first in range(0, cases, PART)]
    own = threading.local()
    runner = partial(Runner, f"{__package__}.all_samples")
    with (
        tqdm(desc="damaged files", total=cases * len(names), unit="file", disable=None) as bar,
        contextlib.ExitStack() as runners,
        ThreadPoolExecutor(CORES, initializer=lambda: setattr(own, "runner", runners.enter_context(runner()))) as pool,
    ):

        def run(plan: Plan) -> tuple[Plan, Outcome, float]:
            started = time.time()
            return plan, own.runner.run(plan, bar.update), time.time() - started

        for plan, outcome, seconds in pool.map(run, plans):
            of, lines = found[plan.format], [finding.line() for finding in outcome.findings]
            sums = {"cases": outcome.cases, "loaded": outcome.loaded, "wrong": len(lines), "seconds": round(seconds)}
            of.update({key: of[key] + value for key, value in sums.items()}, findings=of["findings"] + lines)
            bar.write("\n".join([f"{plan.format}: {of['cases']} cases, {of['wrong']} findings", *lines]))
    return found


def engines(seed: int, policies: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    gaps, findings, compared = Counter[str](), [], Counter[str]()
    with scratch() as place, ProcessPoolExecutor(CORES, context) as pool:
        answers: Iterable[Any] = pool.map(partial(compare, seed, directory=place), range(policies))
        for found in tqdm(answers, desc=ENGINES, total=policies, unit="policy", disable=None):
            compared.update(found.gaps.keys())
            for engine, gap in found.gaps.items():
                gaps[engine] = max(gaps[engine], gap)
            if not found.agrees:
                findings.append(f"{ENGINES} {found.case} ({found.about}): {found.gaps} {found.error or 'too far'}")
    largest = {f"{engine} differs by at most": f"{gap:.1e} in {compared[engine]}" for engine, gap in gaps.items()}
    return {"cases": policies, "wrong": len(findings), **largest, "findings": findings}


def checks(name: str, seed: int, cases: int) -> dict[str, Any]:
    """Cases of one of `CHECKS`."""
    kinds, findings = Counter[str](), []
    with scratch() as place, ProcessPoolExecutor(CORES, multiprocessing.get_context("spawn")) as pool:
        answers: Iterable[Any] = pool.map(partial(CHECKS[name], seed, directory=place), range(cases))
        for found in tqdm(answers, desc=name, total=cases, unit="case", disable=None):
            kinds[found.tag or "nothing"] += 1
            findings += [found.line(name)] if found.finding else []
    return {"cases": cases, "wrong": len(findings), **kinds, "findings": findings}


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory for exports, which are kept there too."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["BLOCKCACHE_CACHE"] = str(Path(place) / "cache")
        yield Path(place)


def repeat(name: str, seed: int, case: int, keep: Path | None) -> None:
    """In this process, so that a debugger sees it."""
    with scratch() as place:
        if name == ENGINES:
            print(compare(seed, case, place))
            return
        if name in CHECKS:
            print(CHECKS[name](seed, case, place))
            return
        whole = prepare(SAMPLES[name], place / name)
        file, data, note = damaged(Plan(name, seed, case, 1), case, whole)
        print(f"{name} {case}: {file}; {note}", flush=True)
        if keep:
            (keep / Path(file).name).write_bytes(data)
        (place / name / file).write_bytes(data)
        SAMPLES[name].use(place / name / file)
        print("loaded")


if __name__ == "__main__":
    main()
