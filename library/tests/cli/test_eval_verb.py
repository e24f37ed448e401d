"""The verb eval on the toy task: its files, table, exit codes and refusals; and the video."""

import json
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from blockcache.models.loading import save_policy
from blockcache.results.rollouts import Results
from blockcache.tasks.video import write_video
from listener import rows_of
from toy_evaluation import ready
from toy_task import Toy, observations

# ---- the verb


@pytest.fixture
def shell(make_policy, tmp_path, monkeypatch, toy_by_name, command):
    """Runs `blockcache eval` on the toy task."""
    save_policy(make_policy(), tmp_path / "policy")
    np.savez(tmp_path / "obs.npz", obs=observations().numpy())
    monkeypatch.chdir(tmp_path)
    fixed = "--observations obs.npz --generations 4 --rollouts 2 --group 2 --first-seed 0 --workers 1 --repeats 1"
    return lambda *arguments, task="toy": command("eval", "policy", "--task", task, *fixed.split(), *arguments)


def test_the_verb_writes_results_timings_and_a_table(shell, tmp_path):
    code, out, _ = shell("-m", "uniform:S=3", "-m", "ddim-3", "--engine", "patched", "-o", "found.json")
    assert code == 0
    found = Results.load(tmp_path / "found.json")
    assert [method.engine for method in found.methods] == ["patched"] * 3
    timings = json.loads((tmp_path / "found.timings.json").read_text())
    assert set(timings["methods"]) == {"plain policy", "full", "uniform:S=3", "ddim-3"}
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row and row[0] in ("full", "uniform:S=3", "ddim-3")] == 2 * [
        "full",
        "uniform:S=3",
        "ddim-3",
    ]
    (ddim,) = [line for line in out.splitlines() if line.startswith("ddim-3") and "start only" in line]
    assert f"{np.mean([record.score for record in found.of('ddim-3').values()]):.3f}" in ddim
    assert "batch 1" in out
    assert "two full runs with different noise differ by" in out


def test_a_failed_rollout_gives_an_exit_code(shell, monkeypatch):
    monkeypatch.setattr("toy_task.Toy", partial(Toy, fails={1: 3}))
    code, out, err = shell("-m", "uniform:S=3")
    assert code == 1
    assert "error: 2 rollouts failed" in err
    assert "1 (1 failed)" in out


def test_an_interrupt_keeps_what_is_finished_and_says_so(shell, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr("toy_task.Toy", partial(Toy, interrupt=2))
        code, _, err = shell("-m", "uniform:S=3", "--rollouts", 4)
        assert code == 130
        assert "interrupted; what was finished is kept in results.state, the same command goes on" in err
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "results.state").glob("*.json")}
    assert len(kept) == 6  # four open loop, two groups
    assert not (tmp_path / "results.json").exists()
    assert shell("-m", "uniform:S=3", "--rollouts", 4)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "bca"), "error: unknown method 'bca'"),
        (("--rollouts", "0"), "0 is not in the range"),
        (("--ray", "auto", "--workers", "2"), "exclude one another"),
        (("--video", "x.avi"), "a video is a .gif or a .mp4 file"),
        (("--rerun", "x.txt"), "a recording for Rerun is a .rrd file"),
        (("-m", "nowhere.json"), "error: no schedule at nowhere.json"),
    ],
)
def test_the_verb_refuses_with_one_line(shell, arguments, message):
    code, out, err = shell(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_the_task_is_the_policy_s_own_unless_somebody_says_otherwise(make_policy, shell, command, tmp_path):
    assert (
        "error: the policy policy does not say which task it was trained for; name it with --task"
        in command("eval", "policy", "--observations", "obs.npz")[2]
    )
    save_policy(make_policy(task="toy"), tmp_path / "trained")
    few = ["--observations", "obs.npz", "--generations", 12, "--engine", "loop"]
    assert "12 generations to calibrate on leave nothing of 12 observations" in command("eval", "trained", *few)[2]
    assert "error: the policy does not fit task pusht" in command("eval", "trained", "--task", "pusht", *few)[2]


def test_the_verb_refuses_unknown_tasks_and_missing_simulators(shell, monkeypatch):
    assert "error: unknown task 'nope'; known tasks are" in shell(task="nope")[2]
    assert "error: the policy does not fit task pusht" in shell(task="pusht")[2]

    def missing(spec):
        raise ImportError("No module named 'gym_toy'")

    monkeypatch.setattr("toy_task.Toy", missing)
    code, _, err = shell()
    assert code == 2
    assert '"blockcache[toy]"' in err


# ---- the video


def test_the_video_shows_both_policies_side_by_side(shell, tmp_path):
    image = pytest.importorskip("PIL.Image")
    assert shell("-m", "uniform:S=3", "--video", "film.gif")[0] == 0
    film = image.open(tmp_path / "film.gif")
    assert film.n_frames == 10  # the start and nine steps
    assert film.size == (2 * 384, 256 + 18)
    film.seek(9)
    pixels = np.asarray(film.convert("RGB"))
    assert abs(int(pixels[100, 100, 0]) - 225) < 4
    assert abs(int(pixels[100, 500, 0]) - 225) < 4


@pytest.mark.parametrize("clock", [(), ("--clock", "150ms", "--replan", "2")])
def test_a_recording_for_rerun_holds_both_policies(shell, tmp_path, clock):
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    assert shell("-m", "uniform:S=3", "--rerun", "run.rrd", *clock)[0] == 0
    rows = rows_of(tmp_path / "run.rrd")
    first = 2 if clock else 0
    for name in ("full", r"uniform\:S\=3"):
        assert [tick for tick, _ in rows[f"/{name}/observation"]] == list(range(9))
        assert [tick for tick, _ in rows[f"/{name}/view"]] == list(range(10))
        assert [tick for tick, _ in rows[f"/{name}/action"]] == list(range(first, 9))
        assert rows[f"/{name}/planned/0"][first][1] == rows[f"/{name}/action"][0][1]
        assert [value for _, value in rows.get(f"/{name}/latency_ms", ())] == ([[150.0]] * 4 if clock else [])


def test_a_film_that_ends_early_stays_on_its_last_picture(tmp_path):
    image = pytest.importorskip("PIL.Image")
    frames = [np.full((4, 4, 3), value, dtype=np.uint8) for value in (10, 90, 200)]
    write_video(tmp_path / "film.gif", {"short": frames[:1], "long": frames})
    film = image.open(tmp_path / "film.gif")
    film.seek(2)
    pixels = np.asarray(film.convert("RGB"))
    assert abs(int(pixels[200, 100, 0]) - 10) < 4
    assert abs(int(pixels[200, 400, 0]) - 200) < 4


def test_an_mp4_can_be_read_back(tmp_path):
    cv2 = pytest.importorskip("cv2")
    write_video(tmp_path / "film.mp4", {"one": [np.full((40, 40, 3), (200, 0, 0), dtype=np.uint8)] * 5})
    film = cv2.VideoCapture(str(tmp_path / "film.mp4"))
    found, picture = film.read()
    assert found
    assert picture[150, 100, 2] > 150 > 60 > picture[150, 100, 0]  # red, and OpenCV has blue first


def test_the_video_is_of_the_very_rollout_in_the_results(make_policy, results, tmp_path):
    frames = []
    done = ready(make_policy(), tmp_path / "state").play("uniform:S=3", 3, lambda toy: frames.append(toy.seed))
    assert done.score == results.of("uniform:S=3")[3].score
    assert frames == [3] * 10  # the start and nine steps; the last chunk of four is not used up


# ---- on the clock


def test_the_verb_lets_time_pass(shell, tmp_path):
    clock = ("--clock", "100ms", "--rate", 10, "--replan", 2)
    code, out, err = shell("-m", "ddim-3", "--engine", "loop", *clock, "--rtc", "-o", "clock.json")
    assert (code, err) == (0, "")
    found = Results.load(tmp_path / "clock.json")
    assert {item.first_action for item in found.clocked} == {0.1}
    assert "each chunk told of the one before, 10 ticks a second, replanning after 2" in out
    code, _, err = shell("-m", "ddim-3", "--engine", "loop", "-o", "clock.json")
    assert code == 2
    assert "holds results of another clock, or of none" in err
    code, _, _ = shell(
        "-m", "ddim-3", "--engine", "loop", "--clock", "clock.timings.json", "--rate", 1, "-o", "two.json"
    )
    assert code == 0
    assert set(Results.load(tmp_path / "two.json").setting["clock"]["latency"]) == {"full", "ddim-3"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--clock", "soon"), "a clock is live, a time such as 40ms"),
        (("--clock", "empty.txt"), "is empty"),
        (("--clock", "negative.txt"), "0 or more"),
        (("--clock", "900ms", "--rate", "10"), "needs a horizon of"),
        (("--clock", "10ms", "--stop", "--rtc"), "stops to think has nothing to tell"),
        (("--replan", "2"), "go with --clock"),
        (("--rtc",), "go with --clock"),
        (("--hold",), "go with --clock"),
        (("--clock", "10ms", "--rate", "0"), "--rate"),
    ],
)
def test_a_clock_that_cannot_be_is_refused_in_one_sentence(shell, tmp_path, arguments, said):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "negative.txt").write_text("-1\n")
    code, _, err = shell("-m", "ddim-3", "--engine", "loop", *arguments)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_a_whole_evaluation_gives_the_same_bytes_whatever_runs_it(tmp_path):
    """On Push-T, in processes of their own, whose hashes, addresses, threads and workers differ."""
    found = []
    for workers in (1, 2):
        output = tmp_path / f"{workers}.json"
        environment = {**os.environ, "PYTHONHASHSEED": str(workers), "OMP_NUM_THREADS": str(workers)}
        words = f"pusht/tuned -m ddpm-6 --rollouts 3 --group 1 --workers {workers} --repeats 0 -o {output}".split()
        code = f"from blockcache.cli import main; main(['eval', *{words}])"
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
        found.append(output.read_bytes())
    assert found[0] == found[1]


def test_until_settled_is_said_in_table_and_file(shell, tmp_path):
    code, out, _ = shell("-m", "uniform:S=3", "--until-settled", "-o", "settled.json")
    assert code == 0
    assert "as many pairs as its verdict took" in " ".join(out.split())
    assert Results.load(tmp_path / "settled.json").setting["until_settled"] is True
