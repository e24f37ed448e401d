"""A foreign policy, named as a Python entry, through the verbs: observed, calibrated, exported, timed and evaluated."""

import html
import json
import re
import shlex
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from diffusers import DDIMScheduler

import blockcache as bc
from blockcache.results.rollouts import Results
from blockcache.tasks import TaskEntry, TaskSpec
from foreign_policy import ACTION, BLOCKS, EXECUTED, OBS, SEEN, STEPS, TOKENS, Policy
from toy_task import Toy
from tuned_directory import write_tuned

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")
SPEC = TaskSpec("narrow", obs_dim=OBS, action_dim=ACTION, max_steps=9, success="within 0.6 of the centre", extra="toy")
ENTRY = TaskEntry(SPEC, f"{__name__}:Narrow")
MADE = f"{__name__}:make"


class Narrow(Toy):
    """The toy as a policy with four observed numbers knows it."""

    def observe(self):
        return super().observe()[:OBS]


def make():
    """What a user writes: the policy, and the task that it was trained for."""
    policy = Policy()
    policy.task = "narrow"
    return policy


def unusual():
    """A sampler that we cannot tabulate."""
    return Policy(DDIMScheduler(STEPS * 5), use_clipped_model_output=True)


@pytest.fixture(autouse=True)
def narrow_by_name(monkeypatch):
    point = EntryPoint("narrow", f"{__name__}:ENTRY", "blockcache.tasks")
    monkeypatch.setattr("blockcache.tasks.base.entry_points", lambda group: [point])
    monkeypatch.setattr("blockcache.measure.machine.peak_gflops.__defaults__", (64, 0.05))
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)


@pytest.fixture
def seen():
    np.savez("seen.npz", obs=np.random.default_rng(0).standard_normal((6, SEEN, OBS)))
    return ["--observations", "seen.npz"]


def test_from_a_policy_object_to_a_file_for_the_robot(blockcache):
    said = blockcache("policy", "observe", MADE, "-o", "seen.npz", "--episodes", 4, "--count", 6)
    assert said == "seen.npz: 6 observations of 4 episodes\n"
    said = blockcache("calibrate", MADE, "--observations", "seen.npz", "--generations", 3)
    assert said.startswith(f"recording.safetensors: {len(BLOCKS)} blocks x {STEPS} steps from 3 generations")
    blockcache("solve", "recording.safetensors", "-S", 2)
    assert blockcache("export", MADE, "schedule.json").count("\n") == 1  # nothing to note
    runner = bc.open_export("policy.onnx", make(), threads=1)
    assert runner.header["schedule"] == {
        name: list(steps) for name, steps in bc.Schedule.load("schedule.json").updates.items()
    }


def test_an_export_says_what_its_schedule_was_not_made_for(blockcache):
    bc.Schedule(STEPS, dict.fromkeys(BLOCKS, (0, 2))).save("any.json")
    *_, note = blockcache("export", MADE, "any.json").splitlines()
    assert note == "note: the schedule was made for no weights in particular"


def test_it_is_evaluated_on_the_task_that_it_names(blockcache, refused, seen):
    amount = "--generations 3 --rollouts 4 --group 2 --first-seed 0 --workers 1 --repeats 1"
    text = blockcache("eval", MADE, *seen, "-m", "uniform:S=2", "-m", "ddim-3", *amount.split())
    found = Results.load("results.json")
    assert (found.task["name"], found.policy["source"]) == ("narrow", MADE)
    assert [method.name for method in found.methods] == ["full", "uniform:S=2", "ddim-3"]
    assert {record.seed for record in found.records} == {0, 1, 2, 3}
    assert all(record.error is None for record in found.records)
    assert len({record.score for record in found.records}) > 4
    assert "uniform:S=2" in text
    assert "does not fit task pusht" in refused("eval", MADE, *seen, "--task", "pusht", "-o", "other.json")


def test_what_was_tuned_for_it_is_evaluated(blockcache, seen):
    write_tuned(make(), Path("tuned"))
    amount = "--generations 3 --rollouts 2 --group 2 --first-seed 0 --workers 1 --repeats 0 --engine loop"
    blockcache("eval", MADE, *seen, "-m", "tuned:tuned", *amount.split())
    found = Results.load("results.json")
    assert [method.name for method in found.methods] == ["full", "tuned:tuned"]
    assert found.methods[1].sampler["num_inference_steps"] == 3


def test_the_commands_that_the_page_prints_run_again(blockcache, seen):
    """Whatever made a file, with all that was given to it: typed again they write the same files."""
    np.savez("seen.npz", obs=np.random.default_rng(0).standard_normal((60, SEEN, OBS)))
    few = "--generations 3 --rollouts 2 --group 2 --first-seed 0 --workers 1 --repeats 1 --engine loop"
    blockcache("calibrate", MADE, *seen, "--generations", 3, "-o", "own.safetensors", "--action-costs")
    blockcache("solve", "own.safetensors", "-S", 2, "--last", "-o", "own.json")
    blockcache("eval", MADE, *seen, "-m", "own.json", "-o", "runs.json", *few.split())
    blockcache("check", MADE, "ddpm-3", *seen, "--samples", 4, "--count", 8, "-o", "check.json")
    blockcache("bench", MADE, "--quick", "--threads", 1, "--json", "times.json")
    given = ["runs.json", "runs.timings.json", "own.json", "own.safetensors", "check.json", "times.json"]
    blockcache("report", *given, "-o", "page.html")
    page = Path("page.html").read_text()
    rows = re.findall(r"<tr>(.*?)</tr>", page[page.rindex("The commands that made it") :], re.DOTALL)
    cells = [
        [html.unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<td.*?>(.*?)</td>", row)] for row in rows
    ]
    made = {file: command for what, file, command in filter(None, cells) if what != "this page"}
    assert set(made) >= {"own.safetensors", "own.json", "runs.json", "runs.timings.json", "check.json", "times.json"}
    for file, command in made.items():
        before = Path(file).read_bytes()
        Path(file).unlink()
        name, *words = shlex.split(command)
        assert name == "blockcache"
        blockcache(*words)
        assert Path(file).exists(), command
        if file == "runs.json":
            assert Path(file).read_bytes() == before
    blockcache(*shlex.split(next(command for what, _, command in filter(None, cells) if what == "this page"))[1:])


def test_a_tuning_keeps_what_was_typed(refused, seen, monkeypatch):
    """Flags and units too: typed again it asks for the same."""
    asked = []

    def tune(port, observations, **settings):
        asked.append({name: value for name, value in settings.items() if name not in ("started", "backend")})
        raise bc.BlockcacheError("seen enough")

    monkeypatch.setattr("blockcache.compare.tuner.tune", tune)
    given = ["--deadline", "0.5s", "--keep-sampler", "-o", "a folder"]
    assert refused("tune", MADE, *seen, *given) == "seen enough"
    assert set(shlex.split(asked[0]["command"])) == {"blockcache", "tune", MADE, *seen, *given}
    refused(*shlex.split(asked[0]["command"])[1:])
    assert asked[1] == asked[0]
    assert asked[0]["deadline_ms"] == 500


def test_it_is_timed(blockcache):
    options = ["--threads", 1, "--batch", 2, "--json", "b.json"]
    assert "Not available" not in blockcache("bench", MADE, "--quick", *options)
    found = json.loads(Path("b.json").read_text())
    names = [row["name"] for row in found["rows"]]
    assert {"eager, 1 thread", "BAC, patched", "BAC, loop", "BAC, onnx, 1 thread"} <= set(names)
    own = {"family": "dp-t", "layers": 2, "width": 12, "horizon": TOKENS, "sampler": "ddpm", "steps": STEPS, "batch": 2}
    assert own.items() <= found["shape"].items()
    assert found["rows"][0]["action_hz"] == pytest.approx(EXECUTED * found["rows"][0]["chunk_hz"])


def test_what_cannot_be_timed_is_named_with_the_reason(blockcache, monkeypatch):
    monkeypatch.setattr("torch.compile", lambda *given, **settings: 1 / 0)
    text = blockcache("bench", f"{__name__}:unusual", "--threads", 1, "--repeats", 2, "--json", "b.json")
    found = json.loads(Path("b.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["eager, 1 thread", "BAC, patched"]
    assert list(found["unavailable"]) == ["eager + torch.compile", "fewer steps", "loop and onnx"]
    for name, reason in found["unavailable"].items():
        assert f"Not available: {name} ({reason})." in text
    assert "use_clipped_model_output" in found["unavailable"]["loop and onnx"]
    assert found["shape"]["sampler"] == "DDIMScheduler"


def test_observations_by_several_names_fit_the_policy_or_are_refused(refused, blockcache, seen, monkeypatch):
    """A camera policy tells what it looks at; the file has an array for each."""
    inputs = {"obs": (SEEN, OBS), "image": (SEEN, 3, 2, 2)}
    monkeypatch.setattr("blockcache.models.dpt.port.PublicPort.inputs", inputs)
    taken = []

    def record(port, batches, seed, action_costs):
        taken.extend(batches)
        raise bc.BlockcacheError("seen enough")

    monkeypatch.setattr("blockcache.attach.recorder.calibrate", record)
    sentence = "expected an array 'image' of shape (N, 2, 3, 2, 2), got obs"
    assert sentence in refused("calibrate", MADE, *seen)
    images = np.zeros((6, SEEN, 3, 2, 2), dtype=np.uint8)
    np.savez("seen.npz", **dict(np.load("seen.npz")), image=images, more=np.array(["unread"]))
    assert refused("calibrate", MADE, *seen, "--generations", 2) == "seen enough"
    assert [{name: (tuple(part.shape), str(part.dtype)) for name, part in batch.items()} for batch in taken] == 2 * [
        {name: ((1, *shape), "torch.float32") for name, shape in inputs.items()}
    ]
    np.savez("seen.npz", obs=np.zeros((6, SEEN, OBS)), image=images[:, :, :, :1])
    assert "the observations 'image' in seen.npz have shape (6, 2, 3, 1, 2)" in refused("calibrate", MADE, *seen)
    np.savez("seen.npz", obs=np.zeros((6, SEEN, OBS)), image=images[:3])
    assert "mixes batches of 6 and 3 samples" in refused("calibrate", MADE, *seen)
