"""What tests of the command line share: sizes that take no time, and processes in which only one thing is run."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from blockcache import cli

STEPS = 20  # demo solves for S = 20
SMALL = ["--width", "16", "--layers", "1", "--steps", "4", "--threads", "1"]


COLUMNS = {
    "name", "engine", "threads", "p50_ms", "p95_ms", "p99_ms", "chunk_hz", "action_hz", "speedup", "over_full", "gflop",
    "gflops", "of_peak", "max_difference", "saving", "limit", "samples_ms",
}  # fmt: skip
"""Of a row of the benchmark."""


def shell(*words, code="import sys; from blockcache.cli import main; main(sys.argv[1:])", **settings):
    """Runs a verb in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **settings)


def loads_nothing_heavy(*words):
    """The verb runs without torch and its like. Even `import blockcache` does without it until something of it is used."""
    code = (
        "import sys, blockcache, blockcache.cli\n"
        "blockcache.cli.main(sys.argv[1:])\n"
        "heavy = {'torch', 'diffusers', 'onnx', 'onnxruntime', 'matplotlib', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = shell(*words, code=code)
    assert done.returncode == 0, done.stderr


def loads_no_verb(*words):
    code = (
        "import sys, blockcache.cli\n"
        "try: blockcache.cli.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "loaded = {name for name in sys.modules if name.startswith('blockcache.')} | {'numpy', 'tqdm'} & set(sys.modules)\n"
        "known = ('_version', 'cli', 'cli.lazy', 'cli.verbs', 'errors')\n"
        "assert loaded | {'blockcache.errors'} == {'blockcache.' + name for name in known}, loaded\n"
    )
    done = shell(*words, code=code)
    assert done.returncode == 0, done.stderr


def answers(*lines):
    """What each of the lines is answered with, all in one process of its own, in which nothing heavy was imported."""
    code = """
import sys
from blockcache.cli import main
for line in sys.stdin.read().splitlines():
    try:
        main(line.split())
    except SystemExit as ended:
        assert ended.code == 2, line
    heavy = {"torch", "diffusers", "scipy", "onnx", "onnxruntime", "matplotlib"} & set(sys.modules)
    assert not heavy, (line, heavy)
"""
    done = shell(code=code, input="\n".join(lines))
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("error: ") for line in done.stderr.splitlines()]


def run_benchmark(directory, **brought):
    """What `bench` writes of one small run without torch.compile; with the rows that `brought` would add, by name."""
    points = [SimpleNamespace(name=name, load=lambda add=add: add) for name, add in brought.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKCACHE_CACHE", str(directory / "cache"))

        def compile_nothing(model):
            raise RuntimeError("no compiler here\nand more lines")

        patch.setattr("blockcache.compare.bench.entry_points", lambda group: points)
        patch.setattr("torch.compile", compile_nothing)
        patch.setattr("blockcache.measure.machine.peak_gflops.__defaults__", (64, 0.05))
        patch.setattr("blockcache.measure.latency.REST", 0.0)
        cli.main(["bench", *SMALL, "--repeats", "2", "--json", str(directory / "bench.json")])
    return json.loads((directory / "bench.json").read_text())


def check_help(text, verb):
    """What `--help` of a verb prints has an example."""
    assert text.startswith(f"Usage: blockcache {verb}")
    assert "Example" in text
    assert f"  blockcache {verb} " in text or f"  blockcache {verb}\n" in text


def check_list(text, verbs):
    """What a group prints has a line for each of its verbs."""
    assert all(f"\n  {verb} " in text and line.split(":")[0][:40] in text for verb, (_, line) in verbs.items())


def parameters(commands):
    """By a parameter's name, and by the verb that has it."""
    seen = {}
    for verb, command in commands.items():
        for parameter in command.params:
            seen.setdefault(parameter.name, {})[verb] = parameter
    return seen
