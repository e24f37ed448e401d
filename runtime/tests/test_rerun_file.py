"""A control loop as a file for the Rerun viewer, read back by Rerun's own reader."""

import math

import numpy as np
import pytest

from blockcache_runtime import Player
from blockcache_runtime.chunks import Due
from blockcache_runtime.errors import EngineError, FileError
from blockcache_runtime.rerun_file import LANES, RerunFile, check_rerun
from clocked_player import ACTIONS, RATE, Clock, Ramp, Worker, play
from listener import Listener, rows_of


def played(watcher, ticks=30):
    clock = Clock()
    player = Player(Ramp(), RATE, 4, clock=clock, worker=Worker(clock, lambda: 0.03), watcher=watcher)
    return play(player, clock, ticks)


def test_a_watcher_hears_what_the_player_sees_plans_and_does():
    listener = Listener()
    found = played(listener)
    assert listener.seen == [(tick, [float(tick)]) for tick in range(30)]
    assert listener.done == [(tick, action, False) for tick, action in enumerate(found)]
    begins = [begin for begin, *_ in listener.plans]
    assert begins == list(range(0, 28, 4))
    for begin, arrived, actions, figures in listener.plans:
        assert arrived == begin + 2
        assert actions == [float(begin + place) for place in range(ACTIONS)]
        assert set(figures) == {"latency_ms"}


def test_what_was_seen_planned_and_done_is_in_the_file_on_one_timeline(tmp_path):
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    with RerunFile(tmp_path / "run.rrd") as file:
        found = played(file.watcher("robot", RATE))
    rows = rows_of(tmp_path / "run.rrd")
    assert rows["/robot/observation"] == [(tick, [float(tick)]) for tick in range(30)]
    assert rows["/robot/action"] == [(tick, [action]) for tick, action in enumerate(found) if action is not None]
    assert rows["/robot/held"] == [(tick, [0.0]) for tick in range(2, 30)]
    assert [tick for tick, _ in rows["/robot/latency_ms"]] == list(range(2, 30, 4))
    for lane, begin in enumerate(range(0, 28, 4)):
        *actions, (_, (end,)) = rows[f"/robot/planned/{lane}"]
        assert actions == [(begin + place, [float(begin + place)]) for place in range(ACTIONS)]
        assert math.isnan(end), "the line of one chunk goes on to the next"
    assert f"/robot/planned/{LANES}" not in rows


def test_frames_are_pictures_and_names_are_kept(tmp_path):
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    with RerunFile(tmp_path / "run.rrd") as file:
        watcher = file.watcher("a/b", 10)
        watcher.observed(3, {"top": np.zeros((3, 4, 5), np.uint8), "hand": np.zeros(2)})
        watcher.acted(3, Due(None))
        watcher.pictured(np.zeros((8, 8, 3), np.uint8))
    rows = rows_of(tmp_path / "run.rrd")
    assert rows[r"/a\/b/observation/top"] == [(3, None)]
    assert rows[r"/a\/b/observation/hand"] == [(3, [0.0, 0.0])]
    assert rows[r"/a\/b/view"] == [(0, None)]
    assert r"/a\/b/action" not in rows


def test_what_cannot_be_written_is_one_sentence(monkeypatch, tmp_path):
    with pytest.raises(FileError, match=r"a recording for Rerun is a \.rrd file, got x.txt"):
        check_rerun("x.txt")
    monkeypatch.setattr("blockcache_runtime.rerun_file.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"needs rerun-sdk, .* blockcache-runtime\[rerun\]"):
        RerunFile(tmp_path / "run.rrd")
    monkeypatch.undo()
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    with pytest.raises(FileError, match="cannot write"):
        RerunFile(tmp_path / "nowhere" / "run.rrd")
