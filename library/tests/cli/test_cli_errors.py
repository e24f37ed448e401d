"""The command line when something is wrong: one line on standard error, nothing written, the right exit code."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from blockcache import cli
from cli_inputs import SMALL, answers, shell

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


@contextmanager
def cut_short(path):
    """For a while the file has lost its second half."""
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[: len(whole) // 2])
    yield
    Path(path).write_bytes(whole)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("show", "Missing argument 'SCHEDULE'"),
        ("show square_ph --nonsense", "No such option"),
        ("show nowhere.json", "no schedule 'nowhere.json': neither a file nor one of can_ph, lift_ph,"),
        ("show .", "cannot read the schedule ."),
        ("calibrate nowhere", "no policy 'nowhere': it is neither a directory nor one of the shipped policies ("),
        ("calibrate policy --generations 0", "Invalid value for '--generations'"),
        ("calibrate policy --observations nowhere.npz", "no observations at nowhere.npz: the file does not exist"),
        ("calibrate policy --seed x", "Invalid value for '--seed'"),
        ("calibrate no_such_module:make", "no policy 'no_such_module:make': there is no module 'no_such_module'"),
        ("export cli_inputs:make", "no policy 'cli_inputs:make' (AttributeError: module 'cli_inputs' has no att"),
        ("export cli_inputs:check_help", "cli_inputs:check_help failed (TypeError: "),
        ("calibrate foreign_policy:Policy", "the policy foreign_policy:Policy brings no observations"),
        ("solve nowhere.safetensors", "no recording at nowhere.safetensors"),
        ("export policy square_ph", "does not fit the policy"),
        ("export nowhere", "no policy 'nowhere'"),
        ("bench --width 10", "n_emb must be even"),
        ("bench --horizon 4", "the executed slice ends at 9, behind the horizon 4"),
        ("bench --sampler eular", "'eular' is not one of 'ddim', 'ddpm'"),
        ("bench --steps 101", "num_inference_steps"),
        ("bench --batch 0", "Invalid value for '--batch'"),
        ("demo nowhere", "no policy 'nowhere'"),
        ("demo policy --generations 8", "of 8 observations, 8 to calibrate on leave none to compare on"),
        ("eval policy", "the policy policy does not say which task it was trained for; name it with --task"),
        ("eval foreign_policy:Policy", "the policy foreign_policy:Policy does not say which task it was trained for"),
        ("eval policy --task pusht --seed 3", "No such option"),
    ],
)  # fmt: skip
def test_errors_are_one_line(refused, policy_directory, words, sentence):
    before = set(Path().rglob("*"))
    assert sentence in refused(*words.split())
    assert set(Path().rglob("*")) <= before | {Path("cache")}


def test_sizes_beside_a_policy_are_refused(refused, policy_directory):
    line = refused("bench", policy_directory, "--width", 32, "--steps", 5)
    assert line == "--steps, --width and a policy exclude one another: a policy has its own shape"


def test_a_policy_without_observations_says_so(refused, policy_directory):
    (policy_directory / "observations.npz").unlink()
    for words in (["calibrate"], ["demo"], ["tune", "--loss", 0.03]):
        assert "brings no observations" in refused(words[0], policy_directory, *words[1:])


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        ({"obs": np.zeros((4, 3, 5))}, "have shape (4, 3, 5), expected (N, 2, 5)"),
        ({"obs": np.zeros((0, 2, 5))}, "have shape (0, 2, 5), expected (N, 2, 5)"),
        ({"obs": np.full((4, 2, 5), "x")}, "are no numbers"),
        ({"obs": np.full((4, 2, 5), np.nan)}, "NaN or infinity"),
        ({"obs": np.array([{}])}, "cannot read the observations"),
        ({"other": np.zeros((4, 2, 5))}, "cannot read observations"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_observations_that_are_refused(refused, policy_directory, array, sentence):
    np.savez("obs.npz", **array)
    assert sentence in refused("calibrate", policy_directory, "--observations", "obs.npz")
    assert not Path("recording.safetensors").exists()


def test_damaged_files_are_one_line(blockcache, refused, policy_directory):
    blockcache("calibrate", policy_directory, "--generations", 1)
    blockcache("solve", "recording.safetensors", "-S", 5)
    for file, words in (
        (policy_directory / "config.json", ["calibrate", policy_directory]),
        (policy_directory / "model.safetensors", ["calibrate", policy_directory]),
        (policy_directory / "observations.npz", ["calibrate", policy_directory]),
        ("recording.safetensors", ["solve", "recording.safetensors"]),
        ("schedule.json", ["show", "schedule.json"]),
        ("schedule.json", ["export", policy_directory, "schedule.json"]),
    ):
        with cut_short(file):
            line = refused(*words)
        assert str(file) in line
        assert "should not happen" not in line
    blockcache("show", "schedule.json")


@pytest.mark.parametrize(
    "words",
    [
        "calibrate policy --generations 1 -o file/x",
        "solve recording.safetensors -S 5 -o file/x",
        "export policy -o file/x",
        "bench --quick --json file/x",
        "bench --quick --plot file/x",
    ],
)
def test_an_unwritable_place_is_one_line(blockcache, refused, policy_directory, monkeypatch, words):
    monkeypatch.setattr("blockcache.measure.machine.peak_gflops.__defaults__", (64, 0.05))
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)
    Path("file").write_text("not a directory")
    if words.startswith("solve"):
        blockcache("calibrate", policy_directory, "--generations", 1)
    more = SMALL if words.startswith("bench") else []
    line = refused(*words.split(), *more)
    assert line.startswith("cannot write")
    assert line.endswith("; nothing was changed")
    assert Path("file").read_text() == "not a directory"


OUTPUTS = [
    "calibrate pusht -o",
    "solve recording.safetensors -o",
    "export pusht -o",
    "bench --json",
    "bench --plot",
    "eval pusht -o",
    "eval pusht --video",
    "eval pusht --rerun",
    "policy observe pusht -o",
]


def test_a_place_that_cannot_be_written_is_refused_before_any_work_and_before_torch_is_loaded():
    Path("file").write_text("not a directory")
    Path("place").mkdir()
    none, file = "the directory none does not exist; make it first", "Not a directory; nothing was changed"
    cases = [(f"{verb} none/x.gif", f"none/x.gif: {none}") for verb in OUTPUTS]
    cases += [(f"{verb} file/x.gif", f"file/x.gif: {file}") for verb in OUTPUTS]
    cases += [(f"{verb} place", "place: it is not a regular file; nothing was changed") for verb in OUTPUTS]
    assert answers(*(words for words, _ in cases)) == [f"cannot write {sentence}" for _, sentence in cases]
    assert sorted(os.listdir()) == ["file", "place"]


POLICIES = ["demo", "calibrate", "export", "bench", "eval", "policy observe"]
WRONG = {
    **{f"{verb} nowhere": "no policy 'nowhere': it is neither a directory nor one" for verb in POLICIES},
    **{f"{verb} no_such:thing": "no policy 'no_such:thing': there is no module 'no_such'" for verb in POLICIES},
    **{f"{verb} empty": "no policy config at empty/config.json" for verb in POLICIES},
    "export pusht nowhere.json": "no schedule 'nowhere.json': neither a file nor one of",
    "export pusht broken.json": "the schedule broken.json is not valid JSON",
    "bench --schedule nowhere.json": "no schedule 'nowhere.json'",
    "bench --sampler eular": "'eular' is not one of",
    "bench pusht --width 3": "--width and a policy exclude one another",
    "show nowhere": "no schedule 'nowhere'",
    "solve nowhere": "no recording at nowhere",
    "solve nowhere --method bca": "'bca' is not one of",
    "calibrate pusht --observations nowhere.npz": "no observations at nowhere.npz",
    "demo pusht --observations broken.json": "cannot read the observations broken.json",
    "calibrate mute": "the policy mute brings no observations; give some with --observations FILE.npz",
    "eval pusht -m bca": "unknown method 'bca'",
    "eval pusht -m nowhere.json": "no schedule at nowhere.json",
    "eval pusht -m bac:S=0": "S must be a whole number from 1 to 999999",
    "eval pusht --task psuht": "unknown task 'psuht'; known tasks are",
    "eval pusht --engine fast": "'fast' is not one of",
    "eval pusht --video x.avi": "a video is a .gif or a .mp4 file",
    "eval pusht --rerun x.gif": "a recording for Rerun is a .rrd file",
    "eval pusht --ray auto --workers 2": "exclude one another",
    "eval mute": "the policy mute does not say which task it was trained for; name it with --task",
    "policy observe mute": "the policy mute does not say which task",
    "policy observe pusht --task psuht": "unknown task 'psuht'",
}


def test_wrong_input_is_answered_before_anything_heavy_is_imported():
    Path("empty").mkdir()
    Path("mute").mkdir()
    Path("mute/config.json").write_text("{}")
    Path("broken.json").write_text("{")
    for (words, sentence), answer in zip(WRONG.items(), answers(*WRONG), strict=True):
        assert sentence in answer, words
    assert sorted(os.listdir()) == ["broken.json", "empty", "mute"]


def test_debug_gives_the_traceback():
    for words in (["--debug", "show", "nowhere"], ["show", "nowhere", "--debug"]):
        done = shell(*words)
        assert done.returncode != 0
        assert done.stderr.startswith("Traceback")
        assert "FileError: no schedule 'nowhere'" in done.stderr


def test_without_debug_a_process_ends_with_2_and_one_line():
    done = shell("show", "nowhere")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: no schedule 'nowhere'")


def test_what_should_not_happen_is_one_line_too(refused, monkeypatch):
    monkeypatch.setattr("blockcache.schedule.Schedule.load", lambda path: 1 // 0)
    Path("schedule.json").write_text("{}")
    line = refused("show", "schedule.json")
    assert line.startswith("ZeroDivisionError: ")
    assert line.endswith("(this should not happen; run again with --debug)")


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("blockcache.schedule.Schedule.load", interrupt)
    Path("schedule.json").write_text("{}")
    with pytest.raises(SystemExit) as caught:
        cli.main(["show", "schedule.json"])
    assert caught.value.code == 130
    assert capsys.readouterr().err.strip() == "interrupted"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tun"], "No such command 'tun'. Did you mean 'tune'?"),
        (["policy", "observ"], "Did you mean 'observe'?"),
        (["eval", "pusht", "-m", "bca:S=3"], "did you mean bac?"),
        (["eval", "pusht", "-m", "dpm-16"], "did you mean ddpm-N?"),
        (["tune", "pusht", "--deadline", "15"], "a deadline needs its unit: 15ms or 15s?"),
        (["tune", "pusht", "--deadline", "15m"], "a deadline is a time above 0, such as 25ms or 0.025s, got '15m'"),
    ],
)
def test_what_was_nearly_right_is_answered_with_what_was_meant(refused, words, sentence):
    assert sentence in refused(*words)


def test_without_click_one_sentence_says_so():
    code = "import sys; sys.modules['click'] = None; from blockcache.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the command line needs click, which is not installed; ")
    assert done.stderr.count("\n") == 1


def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", "from blockcache.cli import main; main(['show', 'square_ph'])"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("seconds", [0.03, 0.06, 0.1, 0.15])
def test_an_interrupt_right_at_the_start_is_no_traceback(seconds):
    """The verb is reached within a few milliseconds of Python's own start, which is waited for."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "import sys, blockcache.cli; print('started', flush=True); blockcache.cli.main(['demo', '--help'])\n"
        "import time; time.sleep(9)"
    )
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "started\n"
    time.sleep(seconds / 10)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert (started.returncode, err.strip()) in ((130, "interrupted"), (-signal.SIGINT, "interrupted"))


def test_what_cannot_be_interrupted_without_a_traceback_is_short():
    """Before `main` runs there is nobody to catch Ctrl-C: its module loads nothing that takes its time."""
    code = "import sys, blockcache.cli; print(sorted({'click', 'numpy', 'blockcache.cli.verbs'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_reader_that_goes_away_is_no_error():
    """As in `blockcache show square_ph --plan | head -1`."""
    read, write = os.pipe()
    os.close(read)
    code = "from blockcache.cli import main; main(['show', 'square_ph', '--plan'])"
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
