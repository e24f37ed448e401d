"""Suite realtime: every delay and mode through to the page, resumed in the middle, and what it refuses."""

import pytest

from blockcache.compare import paired
from blockcache.errors import FileError
from blockcache.models.registry import port_of
from blockcache.report.markdown import render
from blockcache.results.rollouts import Results
from blockcache.samplers import DDPM
from blockcache_lab.pages.realtime import RealtimeSuite, page
from blockcache_lab.studies.suite_runs import RolloutCounts, SuiteSetting, prepare_suite, realtime_clocks, run_realtime
from toy_task import Toy, observations

PLAY = paired.play


def ready(make_policy, state):
    policy = make_policy(sampler=DDPM(num_inference_steps=24), n_layer=3)
    counts = RolloutCounts(rollouts=2, main_rollouts=2, group=2, generations=3)
    setting = SuiteSetting(
        port_of(policy), "toy", observations(), state, counts, "tiny", "loop", make=Toy, progress=False
    )
    return prepare_suite(setting, "realtime")


def test_cells_have_a_file_each_and_no_delay_is_told_of_nothing():
    clocks = realtime_clocks(8, (0, 6))
    assert sorted(clocks) == [
        "realtime-async-0",
        "realtime-async-6",
        "realtime-rtc-6",
        "realtime-stop-0",
        "realtime-stop-6",
    ]
    assert (clocks["realtime-async-6"].replan, clocks["realtime-stop-6"].replan) == (4, 8)
    assert clocks["realtime-rtc-6"].ticks(clocks["realtime-rtc-6"].seconds[0]) == 6
    assert clocks["realtime-async-6"].hold


def test_a_suite_that_was_stopped_goes_on_and_its_page_shows_all_cells(make_policy, tmp_path, monkeypatch):
    played = []

    def play(setting, group, *others):
        if len(played) == 9:
            raise KeyboardInterrupt
        played.append(group)
        return PLAY(setting, group, *others)

    monkeypatch.setattr(paired, "play", play)
    with pytest.raises(KeyboardInterrupt):
        list(run_realtime(ready(make_policy, tmp_path / "state"), tmp_path, (0, 1), progress=False))
    assert (tmp_path / "realtime-async-0.json").exists()
    played.append("the interrupted one")  # from here on nothing is interrupted
    done = list(run_realtime(ready(make_policy, tmp_path / "state"), tmp_path, (0, 1), progress=False))
    groups = [repr(group) for group in played if group != "the interrupted one"]
    assert len(groups) == len(set(groups)) == 5 * 6, "what was finished was run again, or cells are missing"
    assert all(Results.load(path) == results for path, results in done)
    text = render(page([RealtimeSuite.load(str(tmp_path))]))
    assert "| BAC S=7 n=3 |" in text
    assert "--delay 0 --delay 1" in text
    assert "71% at 39.2 Hz" in text


def test_a_directory_without_cells_is_refused(tmp_path):
    with pytest.raises(FileError, match="no files of suite realtime"):
        RealtimeSuite.load(str(tmp_path))
