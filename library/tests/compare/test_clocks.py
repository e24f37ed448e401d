"""`eval --clock`: what the command line and files say, and evaluations on the clock of a policy that is told or not."""

import json

import numpy as np
import pytest

from blockcache.compare import paired
from blockcache.compare.clocks import Latencies, choose_clock, describe_clocks, read_latencies
from blockcache.errors import FileError
from blockcache.fingerprint import Fingerprint
from blockcache.measure.latency import Latency
from blockcache.report.evaluation import evaluation_blocks
from blockcache.report.terminal import display
from blockcache.results.rollouts import EvaluationError, Results
from blockcache.results.timings import Timings
from blockcache.tasks import Clock
from blockcache_runtime.errors import EngineError
from toy_evaluation import ready

pytestmark = pytest.mark.usefixtures("exports_stay_here")
PLAY = paired.play


@pytest.mark.parametrize(
    ("text", "seconds"), [("live", None), ("40ms", (0.04,)), ("0.4s", (0.4,)), ("0ms", (0.0,)), ("1.5ms", (0.0015,))]
)
def test_a_clock_is_live_or_a_time(text, seconds):
    assert read_latencies(text).of("anything") == seconds


def test_a_clock_file_has_a_time_in_each_line(tmp_path):
    (tmp_path / "jetson.txt").write_text("0.05\n\n0.06\n 0 \n")
    assert read_latencies(str(tmp_path / "jetson.txt")).of("full") == (0.05, 0.06, 0.0)


def test_in_a_timings_file_each_method_has_its_own(tmp_path):
    machine = {"processor": "p", "cores": 2}
    seconds = {"full": Latency(np.array([0.1, 0.2])), "bac": Latency(np.array([0.01, 0.02]))}
    Timings(Fingerprint(), machine, "here", seconds).save(tmp_path / "t.timings.json")
    found = read_latencies(str(tmp_path / "t.timings.json"))
    assert (found.of("full"), found.of("bac")) == ((0.1, 0.2), (0.01, 0.02))
    with pytest.raises(EvaluationError, match="no times of the method ddim-4; it has those of full, bac"):
        found.of("ddim-4")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("\n  \n", "is empty"),
        ("0.1\n-0.2\n", "0 or more, in each line, got '-0.2'"),
        ("0.1\nnan\n", "got 'nan'"),
        ("inf", "got 'inf'"),
        ("fast", "got 'fast'"),
        ('{"format": "else"}', "t.txt"),
        ("\udcff".encode("utf-8", "surrogatepass"), "in each line"),
    ],
)
def test_a_clock_file_that_holds_no_times_is_refused(tmp_path, content, said):
    path = tmp_path / "t.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FileError, match=said):
        read_latencies(str(path))


@pytest.mark.parametrize("text", ["fast", "40", "-40ms", "40 ms", "none.json", "."])
def test_what_is_no_clock_is_refused(text):
    with pytest.raises(EvaluationError, match=r"a clock is live, a time such as 40ms or 0\.4s, or a file"):
        read_latencies(text)


def test_replanning_left_open_is_after_half_a_chunk():
    assert choose_clock((0.1,), 8, rate=10, replan=None).replan == 4
    assert choose_clock((0.1,), 1, rate=10, replan=None).replan == 1
    assert choose_clock((0.1,), 8, rate=10, replan=None, stop=True).replan == 8
    assert choose_clock((0.1,), 8, rate=10, replan=3).replan == 3


def test_what_a_results_file_says_of_the_clock():
    found = describe_clocks({"full": Clock(10, 4, (0.1, 0.3)), "fast": Clock(10, 4, (0.02,))})
    times = {"full": {"chunks": 2, "median_ms": 200.0}, "fast": {"chunks": 1, "median_ms": 20.0}}
    assert found == {"rate": 10, "replan": 4, "mode": "asynchronous", "latency": times}
    assert describe_clocks({"full": Clock(10, 4, None, rtc=True)})["latency"] == {"full": {}}


def evaluation(policy, state, clock, rollouts=4):
    return ready(policy, state, methods=["ddim-3"], rollouts=rollouts, clock=clock)


def test_an_evaluation_on_the_clock_is_the_same_whoever_runs_it(policy, tmp_path):
    clock = lambda name: Clock(10, 1, (0.0, 0.1), rtc=True)  # noqa: E731
    prepared = evaluation(policy, tmp_path / "one", clock)
    found = prepared.run(progress=False)
    again = evaluation(policy, tmp_path / "other", clock).run(progress=False)
    assert found == again
    assert [(item.method, item.seed) for item in found.clocked] == [(item.method, item.seed) for item in found.records]
    assert found.setting["clock"]["rtc"] is True
    assert all(0 <= item.stale <= 1 and item.first_action in (0.0, 0.1) for item in found.clocked)
    found.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == found
    with pytest.raises(EvaluationError, match="another clock, or of none"):
        evaluation(policy, tmp_path / "one", None).check_output(tmp_path / "results.json")
    prepared.check_output(tmp_path / "results.json")


def test_the_table_shows_what_time_did(policy, tmp_path, capsys):
    found = evaluation(policy, tmp_path, lambda name: Clock(10, 1, (0.1,)), rollouts=2).run(progress=False)
    display(*evaluation_blocks(found))
    shown = capsys.readouterr().out
    assert "latency ms" in shown
    assert "asynchronous" in shown
    assert "first action s" in shown


def test_a_results_file_without_a_clock_is_what_it_was(policy, tmp_path):
    found = evaluation(policy, tmp_path, None, rollouts=2).run(progress=False)
    found.save(tmp_path / "results.json")
    content = json.loads((tmp_path / "results.json").read_text())
    assert "clocked" not in content
    assert "clock" not in content["setting"]
    assert Results.load(tmp_path / "results.json") == found


def test_zero_latency_and_whole_chunks_give_the_scores_of_always(policy, tmp_path):
    plain = evaluation(policy, tmp_path, None).run(progress=False)
    clocked = evaluation(policy, tmp_path, lambda name: Clock(10, policy.n_action_steps, (0.0,))).run(progress=False)
    for one, other in zip(plain.records, clocked.records, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-5)
        assert (one.steps, one.seed, one.method) == (other.steps, other.seed, other.method)


def test_an_overlap_too_short_says_which_horizon_would_do(policy, tmp_path):
    with pytest.raises(EngineError, match="needs a horizon of"):
        evaluation(policy, tmp_path, lambda name: Clock(10, 1, (3.0,)))  # before anything runs
    held = evaluation(policy, tmp_path, lambda name: Clock(10, 1, (3.0,), hold=True), rollouts=2).run(progress=False)
    assert held.setting["clock"]["hold"] is True
    held.save(tmp_path / "held.json")
    assert Results.load(tmp_path / "held.json") == held


def test_rollouts_that_were_timed_live_are_run_again(policy, tmp_path, monkeypatch):
    """What is measured now is not what was measured then, so that nothing of it is taken from the state directory."""
    played = []
    monkeypatch.setattr(paired, "play", lambda setting, group, *others: played.append(group) or PLAY(setting, group))
    for clock in (Clock(10, 1, None), Clock(10, 1, (0.0,))):
        played.clear()
        for _ in range(2):
            evaluation(policy, tmp_path, lambda name, clock=clock: clock, rollouts=2).run(progress=False)
        assert len(played) == (4 if clock.seconds is None else 2)  # two methods, one group each


def test_latencies_of_all_methods_alike():
    assert Latencies((0.1,)).of("any") == (0.1,)
