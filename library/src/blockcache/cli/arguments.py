"""Arguments that several verbs share. What can be wrong with them is found when they are read, before anything heavy is
imported: nobody waits for torch to be told of a typing error."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from blockcache.cli.lazy import WORDS
from blockcache.errors import FileError, TaskError
from blockcache.files import check_writable, exists
from blockcache.models.policy_files import (
    OBSERVATIONS,
    SCHEDULE,
    TUNING,
    check_new,
    check_source,
    in_directory,
    policy_directory,
    read_config,
    shared_file,
)
from blockcache.results.rollouts import GENERATIONS, GROUP

if TYPE_CHECKING:
    from blockcache.compare.jobs import Backend
    from blockcache.compare.methods import Method
    from blockcache.models.port import Port
    from blockcache.results.rollouts import Results
    from blockcache.schedule import Schedule

Verb = TypeVar("Verb", bound=Callable[..., Any])
FAILED, INTERRUPTED = 1, 130  # exit codes


class CheckedText(click.ParamType):  # type: ignore[type-arg]
    """A text that `read` makes a value of, or refuses with one sentence."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._read(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class PolicySource:
    """A policy as somebody named it. It is loaded when its `port` is first asked for."""

    name: str

    def __post_init__(self) -> None:
        check_source(self.name)

    def __str__(self) -> str:
        return self.name

    @cached_property
    def port(self) -> Port:
        from blockcache.models.loading import open_port

        return open_port(self.name)

    def port_with(self, sampler: str | None) -> Port:
        """With the sampler of that file in place of its own, if one is named."""
        if sampler is None:
            return self.port
        from blockcache.samplers import ChosenSampler

        chosen = ChosenSampler.load(sampler)
        chosen.check_fit(self.port.fingerprint)
        return self.port.with_sampler(chosen.sampler)

    def tuned(self, directory: Path) -> tuple[Port, Schedule]:
        """With what `tune` wrote into a directory: its sampler in place of its own, and the schedule to follow."""
        from blockcache.engines.build import tuned_port
        from blockcache.schedule import Schedule

        port, schedule, _ = tuned_port(directory, self.port)
        blocks = [block.name for block in port.adapter.blocks]
        return port, schedule or Schedule.every_step(len(port.timesteps), blocks)

    def task(self, named: str | None) -> str:
        """The task that somebody named, or else the one that the policy says it was trained for."""
        said = named or (read_config(self.name).get("task") if in_directory(self.name) else self.port.task)
        if said is None:
            raise TaskError(f"the policy {self} does not say which task it was trained for; name it with --task")
        return _known_task(said)

    def schedule(self) -> Schedule | None:
        """The schedule in the policy's own directory, if there is one."""
        if not in_directory(self.name) or not exists(beside := policy_directory(self.name) / SCHEDULE):
            return None
        from blockcache.schedule import Schedule

        return Schedule.load_beside(beside)

    def observations(self, path: str | None) -> Any:
        """A batch from that file, or else from the one beside the policy: an array, or several by the policy's names.

        The file is read before the policy is loaded.
        """
        from blockcache.observations import fit_observations

        file, arrays = self._arrays(path)
        return fit_observations(arrays, self.port.inputs, self.port.cameras, file)

    def known_observations(self, path: str | None) -> Any:
        """The same; None where no file is named and none lies beside the policy: then made-up ones serve."""
        if path is None and not (in_directory(self.name) and exists(self._beside)):
            return None
        return self.observations(path)

    @property
    def _beside(self) -> Path:
        return shared_file(policy_directory(self.name), OBSERVATIONS)

    def moments(self, path: str | None) -> Any:
        """When each observation was made, (N, 2) episode and place in it, where that file says so; else None."""
        from blockcache_runtime.observation_log import MOMENTS

        return self._arrays(path)[1].get(MOMENTS)

    def _arrays(self, path: str | None) -> tuple[Path, dict[str, Any]]:
        beside = self._beside if not path and in_directory(self.name) else None
        file = Path(path) if path else beside
        if file is None or (file == beside and not exists(file)):
            from blockcache.observations import RECORDING

            raise FileError(
                f"the policy {self} brings no observations; give some with --observations FILE.npz, {RECORDING}"
            )
        from blockcache.observations import load_observations

        return file, load_observations(file)


def load_schedule(source: str) -> Schedule:
    """A schedule file, or a printed schedule by name."""
    from blockcache.schedule import Schedule
    from blockcache.solvers.presets import published_names, published_schedule

    if source in published_names() and not exists(source):
        return published_schedule(source)
    if not exists(source):
        raise FileError(f"no schedule {source!r}: neither a file nor one of {', '.join(published_names())}")
    return Schedule.load(source)


def typed(*but: str) -> str:
    """The running verb with what was given to it, as one would type it again.

    Args:
        *but: Names of options that are left out, since what is written does not depend on them.
    """
    context = click.get_current_context()
    said = context.find_root().meta[WORDS][context.command_path.count(" ") :]
    values, _, order = context.command.make_parser(context).parse_args(list(said))
    words: list[str] = []
    for option in context.command.params:
        value = values.get(option.name or "")
        items = value if isinstance(value, list | tuple) else [value]
        if isinstance(option, click.Argument):
            words += [item for item in items if isinstance(item, str)]
        elif option in order and option.name not in but:
            flag = isinstance(option, click.Option) and option.is_flag
            words += [word for item in items for word in ([option.opts[0]] if flag else [option.opts[0], str(item)])]
    return f"{context.command_path} {shlex.join(words)}"


def given(names: Iterable[str]) -> list[str]:
    """Those of the running verb's options that somebody asked for, as they are typed."""
    context = click.get_current_context()
    words = {option.name: option.opts[-1] for option in context.command.params}
    asked = click.core.ParameterSource.COMMANDLINE
    return [words[name] for name in names if context.get_parameter_source(name) is asked]


def refuse_sizes_beside_a_policy(sizes: Iterable[str]) -> None:
    """A policy brings its own shape."""
    if options := given(sorted(sizes)):
        raise click.UsageError(f"{', '.join(options)} and a policy exclude one another: a policy has its own shape")


def _known_task(name: str) -> str:
    from blockcache.tasks import task_spec

    return task_spec(name).name


def _method(text: str) -> Method:
    from blockcache.compare.methods import parse_method

    method = parse_method(text)
    method.check_files()
    return method


def _tuned_directory(name: str) -> Path:
    place = Path(name) if exists(name) else policy_directory(name)
    if not exists(place / TUNING):
        raise FileError(f"{name} has no {TUNING}; name a directory that 'blockcache tune' wrote")
    return place


def _writable_file(path: str) -> str:
    check_writable(path)
    return path


def _writable_directory(path: str) -> Path:
    check_writable(path, directory=True)
    return Path(path)


def _new_directory(path: str) -> Path:
    check_new(path)
    check_writable(path)
    return Path(path)


POLICY = CheckedText("policy", PolicySource)
POLICY_OR_EXPORT = CheckedText("policy", lambda name: name if name.endswith(".onnx") else PolicySource(name))
METHOD = CheckedText("method", _method)
TASK = CheckedText("task", _known_task)
TUNED = CheckedText("directory", _tuned_directory)
OUTPUT = CheckedText("file", _writable_file)
OUTPUT_DIRECTORY = CheckedText("directory", _writable_directory)
NEW_DIRECTORY = CheckedText("directory", _new_directory)  # made whole or not at all; what it is in exists
MOST = 1_000_000  # of anything that is counted: a number with a few digits too many is refused before it does harm
COUNT = click.IntRange(1, MOST)
CORES = click.IntRange(1, 1024)  # threads, or processes
LAYERS = click.IntRange(1, 1000)
COUNT_OR_0 = click.IntRange(0, MOST)
POSITIVE, SHARE = click.FloatRange(0, min_open=True), click.FloatRange(0, 1, min_open=True)
SIZE = click.IntRange(1, 100_000)  # widths, lengths, steps
SEED = click.IntRange(0, 2**31 - 1)  # what every random generator takes
ENGINE = click.Choice(["auto", "onnx", "loop", "patched"])


def policy_argument(**settings: Any) -> Callable[[Verb], Verb]:
    """POLICY, and in the verb's help what may stand there. `settings` are those of click.argument."""

    def add(verb: Verb) -> Verb:
        first, _, rest = str(verb.__doc__).partition("\n\n")
        kinds = (
            "POLICY is a shipped policy by name, a policy directory, a LeRobot directory, a checkpoint FILE.ckpt of the "
            "public Diffusion Policy code, or a Python entry module:function that returns one."
        )
        verb.__doc__ = f"{first}\n\n    {kinds}\n\n{rest}"
        return click.argument("policy", **{"type": POLICY, **settings})(verb)

    return add


observations_option = click.option(
    "--observations",
    metavar="FILE",
    help="A .npz with an array 'obs' (N, ...), or several by the policy's names, or the directory of a log. Default: those "
    "beside the policy.",
)
generations_option = click.option("--generations", type=COUNT, default=GENERATIONS, help="How many to calibrate on.")
sampler_file_option = click.option(
    "--sampler-file", metavar="FILE", help="A sampler file in place of the policy's own, such as 'policy fit' writes."
)
tuned_option = click.option("--tuned", type=TUNED, help="What 'tune' wrote for POLICY: its sampler and schedule.")
threads_option = click.option("--threads", type=CORES, default=1, help="Threads for torch.")
task_option = click.option("--task", type=TASK, help="Default: the one that the policy says it was trained for.")
engine_option = click.option("--engine", type=ENGINE, default="auto")
first_seed_option = click.option("--first-seed", type=SEED, default=0, help="Of the episodes; test seeds are refused.")


until_settled_option = click.option(
    "--until-settled",
    is_flag=True,
    help="Stop each method's rollouts when it is shown to be lossless or to lose; --rollouts is the most.",
)


def run_options(verb: Verb) -> Verb:
    """How rollouts are run and what is calibrated on, in the order of the help."""
    options: list[Callable[[Verb], Verb]] = [
        task_option,
        click.option("--rollouts", type=COUNT, default=50, help="Per method."),
        click.option("--group", type=COUNT, default=GROUP, help="Rollouts run as one batch."),
        engine_option,
        click.option("--workers", type=CORES, help="Processes on this machine. Default: one for each core."),
        click.option("--ray", metavar="ADDRESS", help="Use a Ray cluster instead; 'local' starts one here."),
        observations_option,
        generations_option,
    ]
    for option in reversed(options):  # as decorators are: the lowest first
        verb = option(verb)
    return verb


def chosen_backend(workers: int | None, ray: str | None) -> Backend:
    from blockcache.compare.jobs import local_workers, ray_cluster

    if ray is not None and workers is not None:
        raise click.UsageError("--ray and --workers exclude one another")
    return local_workers(workers) if ray is None else ray_cluster(ray)


@contextmanager
def resumable(state: Path) -> Iterator[None]:
    """An interrupt ends the verb with a word on where its finished work is kept."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"interrupted; what was finished is kept in {state}, the same command goes on from there", err=True)
        raise SystemExit(INTERRUPTED) from None


def exit_if_failed(results: Results, path: str | Path) -> None:
    if results.failed:
        click.echo(
            f"error: {results.failed} rollouts failed; {path} holds their errors, the same command tries them again",
            err=True,
        )
        raise SystemExit(FAILED)
