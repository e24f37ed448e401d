"""The page's section of rollouts on the clock: scores against delays, and what time did to each method."""

from blockcache.fingerprint import Fingerprint
from blockcache.measure.action_error import ActionError
from blockcache.report.clock import clock_panels, clock_section
from blockcache.report.document import Document
from blockcache.report.markdown import render
from blockcache.report.overview.sources import Source
from blockcache.results.rollouts import Clocked, MethodRun, Record, Results

SCORES = {"full": 0.25, "ddim-3": 0.75}


def clocked(milliseconds, mode="asynchronous", rtc=False):
    """Two methods whose chunks take so long; None: each was timed live."""
    error = ActionError(0.1, 0.2)
    methods = tuple(MethodRun(name, "loop", {"type": "ddpm"}, None, True, 10**6, 0.0, error) for name in SCORES)
    runs = [(name, seed) for name in SCORES for seed in range(4)]
    records = tuple(Record(name, seed, SCORES[name], seed > 0, 9, None, 0.1, None) for name, seed in runs)
    times = {} if milliseconds is None else {"chunks": 3, "median_ms": milliseconds}
    clock = {"rate": 12.5, "replan": 4, "mode": mode, "latency": dict.fromkeys(SCORES, times), "rtc": rtc}
    calibration = {"generations": 2, "seed": 0, "observations": "x"}
    setting = {"first_seed": 0, "rollouts": 4, "group": 2, "open_loop_observations": 2, "calibration": calibration}
    bound = Fingerprint("dp-t", ("layers.0.SA",), {"width": 8}, 4, {"type": "ddpm"}, "w" * 64)
    return Results(
        task={"name": "toy", "success": "none", "max_steps": 9},
        policy={"source": "tiny", "fingerprint": bound.to_dict()},
        setting={**setting, "clock": clock},
        noise_floor=error,
        methods=methods,
        records=records,
        clocked=tuple(Clocked(item.method, item.seed, 0.5, 3, 1, 0.125, 11.0) for item in records),
    )


def text_of(*found):
    sections = clock_section([Source(f"run-{place}.json", one) for place, one in enumerate(found)])
    assert [section.title for section in sections] == ["On the clock"]
    return render(Document("A policy", tuple(sections)))


def test_without_rollouts_on_the_clock_there_is_no_section():
    assert clock_section([]) == []


def test_a_panel_has_a_line_for_each_method_from_the_shortest_delay_to_the_longest():
    found = [clocked(160.0), clocked(80.0), clocked(80.0, "stop and think"), clocked(80.0, rtc=True), clocked(None)]
    asynchronous, stop, told = clock_panels(found, "Toy: ")
    assert [panel.title for panel in (asynchronous, stop, told)] == [
        "Toy: asynchronous",
        "Toy: stop and think",
        "Toy: asynchronous, told (RTC)",
    ]
    lines = {series.name: (series.x, series.y) for series in asynchronous.layers}
    assert {y for _, y in lines.values()} == {(0.25, 0.25), (0.75, 0.75)}
    assert {x for x, _ in lines.values()} == {(80.0, 160.0)}
    assert len(stop.layers) == len(told.layers) == 2


def test_the_section_says_what_time_did_to_each_method():
    text = text_of(clocked(80.0), clocked(None, "stop and think"))
    for words in ("Score against delay", "asynchronous", "stop and think", "run-0.json", "run-1.json"):
        assert words in text
    for figure in ("80", "live", "12.5", "0.250", "0.750", "0.50", "11.0"):
        assert figure in text, figure
    assert "12.5 ticks a second, replanning after 4" in text


def test_what_was_timed_live_is_in_the_table_and_in_no_chart():
    text = text_of(clocked(None))
    assert "Score against delay" not in text
    assert "live" in text
