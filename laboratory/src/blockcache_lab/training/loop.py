"""Training a policy from demonstrations. A run that is killed goes on from its state file.

Every random number is a function of the run's seed and the step or epoch, so the state is only weights, moments
and a step number. With the same number of threads, a resumed run ends in the very same bits as one that was never
stopped. Knows nothing of simulators, engines or schedules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blockcache.files import PathLike, check_writable, exists, make_directory
from blockcache.models.checkpoint import check_replaceable
from blockcache.models.loading import load_policy, save_policy
from blockcache.models.registry import port_of
from blockcache.progress import progress_bar
from blockcache_lab.training.config import TrainConfig
from blockcache_lab.training.data import TrainingError, read_demonstrations
from blockcache_lab.training.run import TrainingRun
from blockcache_lab.training.state import read_state, write_state

SAVE_SECONDS = 120.0  # at most this much work is lost to a kill


def train(
    config: TrainConfig,
    data: PathLike,
    out: PathLike,
    *,
    threads: int | None = None,
    resume: bool = True,
    keep_last: int = 0,
    begin: PathLike | None = None,
    progress: bool = True,
) -> Path:
    """Train a policy from demonstrations, and return its directory.

    The state is kept beside it, in `<out>.state.safetensors`: the same call after a kill goes on from there, and
    after the end it has nothing left to do.

    Args:
        config: What is trained, and how.
        data: The demonstrations, a .npz file.
        out: The policy's directory. From the end of the first epoch on it holds the averaged weights so far.
        threads: For torch; all cores without a number.
        resume: Whether to go on from the state; else the run starts anew, over what an earlier one left.
        keep_last: Of so many last epochs the policy is kept too, in the directories `<out>.checkpoints/NUMBER`.
        begin: A policy of the same sizes whose weights and normaliser the run starts from.
        progress: Whether to show a bar.
    """
    target = Path(out)
    if config.frozen and begin is None:
        raise TrainingError("an encoder that is frozen must have learnt before: begin with a policy that has it")
    if not 0 <= keep_last <= config.epochs:
        raise TrainingError(f"of {config.epochs} epochs at most as many checkpoints can be kept, got {keep_last}")
    known = None if begin is None else load_policy(begin)
    demos = read_demonstrations(config.spec, data)
    identity = {**config.to_dict(), "data_sha256": demos.sha256}
    if begin is not None:
        identity |= {"begins_with": Path(begin).name, "begins_with_weights": port_of(known).weights}
    how: Any = {"threads": threads, "resume": resume, "keep_last": keep_last, "progress": progress}
    return carry_out(lambda: TrainingRun(config, demos, identity, Path(data).name, known), identity, target, **how)


def carry_out(
    started: Callable[[], TrainingRun],
    identity: dict[str, Any],
    target: Path,
    *,
    threads: int | None,
    resume: bool,
    keep_last: int = 0,
    progress: bool,
) -> Path:
    """Start a run, or go on with it, and leave its policy in `target`; what `train` says of files holds here."""
    state = target.with_name(f"{target.name}.state.safetensors")
    if exists(target) and not exists(target / "config.json"):
        raise TrainingError(f"{target} exists and is not a policy; give another place for the new one")
    if exists(target) and resume and not exists(state):
        raise TrainingError(
            f"{target} holds a policy, but there is no {state.name} to go on from; "
            "give another place for the new one, or start anew to replace it"
        )
    with _torch_settings(threads, identity["seed"]):
        run = started()
        if resume and exists(state):
            run.progress = read_state(state, identity, run.tensors())
        _go_on(run, target, state, keep_last, progress)
    return target


def _go_on(run: TrainingRun, target: Path, state: Path, keep_last: int, show: bool) -> None:
    """Train to the end. Only complete steps are saved: an interrupt within one must leave no trace."""
    if run.progress.step == run.total:
        if not _is_there(run, target):
            save_policy(run.result(), target)
        return
    check_replaceable(target)  # now, and not after an hour of training
    make_directory(target.parent)
    check_writable(state)
    with progress_bar(
        total=run.total,
        initial=run.progress.step,
        disable=not show,
        unit="step",
        desc=f"train {run.config.task}",
    ) as bar:
        clock = saved = time.monotonic()
        while run.progress.step < run.total:
            run.step()
            epoch_ends = run.progress.step % run.steps_per_epoch == 0
            if epoch_ends:
                run.progress = replace(run.progress, validation_loss=run.validate())
                epoch = run.progress.step // run.steps_per_epoch
                if epoch > run.config.epochs - keep_last:  # before the state: after a kill in between it is made again
                    save_policy(run.result(), checkpoints_of(target) / f"{epoch:04d}")
            now = time.monotonic()
            run.progress = replace(run.progress, seconds=run.progress.seconds + now - clock)
            clock = now
            if epoch_ends or now - saved > SAVE_SECONDS:
                write_state(state, run.identity, run.tensors(), run.progress)
                saved = now
            if epoch_ends:
                save_policy(run.result(), target)
            bar.set_postfix(_figures(run), refresh=False)
            bar.update()


def checkpoints_of(policy: Path) -> Path:
    """Where a run keeps the policies of its last epochs.

    Args:
        policy: The directory that the run writes its policy to.
    """
    return policy.with_name(f"{policy.name}.checkpoints")


def _is_there(run: TrainingRun, target: Path) -> bool:
    """Whether the policy of the last step was saved: a kill may have come between state and policy."""
    return target.exists() and (load_policy(target).config.training or {}).get("steps") == run.total


def _figures(run: TrainingRun) -> dict[str, str]:
    figures = {"epoch": f"{run.progress.step / run.steps_per_epoch:.1f}/{run.config.epochs}"}
    for name, value in (("loss", run.progress.loss), ("val", run.progress.validation_loss)):
        if value is not None:
            figures[name] = f"{value:.4f}"
    return figures


@contextmanager
def _torch_settings(threads: int | None, seed: int) -> Iterator[None]:
    """Threads and random numbers as the run needs them, and afterwards as they were."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if threads is not None:
                torch.set_num_threads(threads)
            yield
        finally:
            torch.set_num_threads(before)
