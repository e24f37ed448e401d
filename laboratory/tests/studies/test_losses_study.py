"""The data on losses: methods drawn again exactly as a results file says that they ran."""

from dataclasses import replace

import numpy as np
import pytest

from blockcache.compare.candidates import Candidate, running
from blockcache.errors import ObservationError
from blockcache.fitting.clouds import draw_chunks
from blockcache.measure.action_error import ActionError
from blockcache.measure.features import action_features
from blockcache.report.markdown import render
from blockcache.results.rollouts import MethodRun, Record, Results
from blockcache.samplers import DDPM
from blockcache.schedule import Schedule
from blockcache_lab.pages.losses import losses_document
from blockcache_lab.studies import losses
from blockcache_lab.studies.loss_data import LossData
from blockcache_lab.studies.losses import measure_losses

OBS = np.random.default_rng(0).standard_normal((12, 2, 5), dtype=np.float32)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(losses, "OBSERVATIONS", 6)
    monkeypatch.setattr(losses, "SAMPLES", 4)


def results(port, source="tiny", task="toy", full=1.0, **lost):
    """`full` is the full policy's score; by method, what is lost of it at every seed."""
    own = dict(port.sampling.settings)
    every_other = {block.name: [0, 2, 4] for block in port.adapter.blocks}
    runs = {
        "full": (own, None),
        "ddpm-3": (DDPM(num_inference_steps=3).to_dict(), None),
        "mine": (own, {"updates": every_other}),
        "teacache": (own, {"coefficients": [1.0], "threshold": 0.1}),
    }
    methods = [
        MethodRun(name, "loop", sampler, reuse, True, 10, 0.0, ActionError(0.1, 0.2))
        for name, (sampler, reuse) in runs.items()
    ]
    records = [
        Record(name, seed, full - lost.get(name, 0.0), True, 9, None, 0.1, None) for name in runs for seed in range(8)
    ]
    return Results(
        task={"name": task, "success": "none", "max_steps": 9},
        policy={"source": source, "fingerprint": port.fingerprint.to_dict()},
        setting={
            "first_seed": 0, "rollouts": 8, "group": 2, "open_loop_observations": 2, "calibration": {"generations": 2},
        },
        noise_floor=ActionError(0.1, 0.2),
        methods=tuple(methods),
        records=tuple(records),
    )  # fmt: skip


def test_a_method_is_drawn_as_it_ran(port):
    found = measure_losses([results(port, mine=0.25)], {"tiny": (port, OBS)}, progress=False)
    assert [row.method for row in found.rows] == ["ddpm-3", "mine"]  # what decides while it runs is left out
    fewer, mine = found.rows
    assert (mine.task, mine.policy, mine.family, mine.actions) == ("toy", "tiny", "dp-t", port.n_action_steps)
    assert (mine.difference.mean, fewer.difference.mean) == (-0.25, 0.0)
    chosen = np.sort(np.random.default_rng(0).permutation(12)[:6])

    def chunks(candidate):
        with running(port, candidate) as fast:
            return draw_chunks(fast.act, OBS[chosen], 4, port.action_scale, 0)

    schedule = Schedule(len(port.timesteps), {block.name: [0, 2, 4] for block in port.adapter.blocks})
    own = chunks(Candidate(engine="auto"))
    assert mine.features == action_features(chunks(Candidate(schedule, "auto")), own)
    assert fewer.features == action_features(chunks(Candidate(None, "auto", DDPM(num_inference_steps=3))), own)


def test_the_most_rollouts_count_and_what_tells_nothing_is_left_out(port):
    more = results(port, mine=0.5)
    fewer = replace(results(port), records=tuple(record for record in results(port).records if record.seed < 3))
    weak, stranger = results(port, task="too hard", full=0.2), results(port, source="not here")
    found = measure_losses([fewer, more, weak, stranger], {"tiny": (port, OBS)}, progress=False)
    assert {row.task for row in found.rows} == {"toy"}
    assert {row.method: row.difference.mean for row in found.rows} == {"ddpm-3": 0.0, "mine": -0.5}
    assert found.left_out == {
        "not here on toy": "no such policy is shipped",
        "tiny on too hard": "full precision scores 0.20, below 0.5",
    }


def test_what_has_rollouts_but_no_rows_is_named_with_the_reason(port, tmp_path):
    otherwise = results(port, task="else")
    methods = tuple(replace(one, execution={"replan": 4}) if one.name != "full" else one for one in otherwise.methods)
    weak, stranger = results(port, task="too hard", full=0.2), results(port, source="not here")
    sources = [replace(otherwise, methods=methods), weak, stranger, results(port, mine=0.25)]
    found = measure_losses(sources, {"tiny": (port, OBS)}, progress=False)
    assert found.left_out["tiny on else"] == "its methods execute chunks otherwise, or decide while they run"
    found.save(tmp_path / "losses.json")
    assert LossData.load(tmp_path / "losses.json") == found
    told = tuple(replace(found.rows[1], task=f"task {place}", method=str(n)) for place in range(3) for n in range(3))
    page = render(losses_document(replace(found, rows=told)))
    assert (
        "Rolled out, but not in the data: tiny on too hard (full precision scores 0.20, below 0.5); tiny on else ("
        in page
    )


def test_features_that_are_known_are_not_measured_again(port, monkeypatch):
    ports = {"tiny": (port, OBS)}
    before = measure_losses([results(port, mine=0.25)], ports, progress=False)
    monkeypatch.setattr(losses, "_chunks", None)
    assert measure_losses([results(port, mine=0.25)], ports, before, progress=False) == before


def test_a_policy_that_draws_no_noise_is_left_out_and_the_others_are_not(port, monkeypatch):
    own, told, still = losses._chunks, [], np.zeros((6, 4, port.n_action_steps, 3))
    other = port.copy()
    monkeypatch.setattr(losses, "_chunks", lambda of, *given: still if of is other else own(of, *given))
    both, ports = [results(port), results(port, source="dull")], {"tiny": (port, OBS), "dull": (other, OBS)}
    found = measure_losses(both, ports, progress=False, tell=told.append)
    assert {row.policy for row in found.rows} == {"tiny"}
    assert told[0].startswith("ddpm-3 of dull is left out: the reference's samples are all equal")


def successes(port, ends, task="toy"):
    """Results whose episodes succeed after so many steps, by method; None is never."""
    found = results(port, task=task)
    records = [
        replace(record, score=float(end is not None), success=end is not None, steps=end or 300)
        for record in found.records
        for end in [ends.get(record.method, lambda seed: 50)(record.seed)]
    ]
    return replace(found, records=tuple(records))


def test_a_tighter_limit_is_taken_where_it_tells_more(port):
    late = successes(port, {"full": lambda seed: 40 + seed, "mine": lambda seed: 60 + seed})
    found = measure_losses([late], {"tiny": (port, OBS)}, progress=False)
    fewer, mine = found.rows
    assert (mine.task, mine.difference.mean, fewer.difference.mean) == ("toy@steps=46", -0.875, -0.875)
    lost = successes(port, {"mine": lambda seed: None, "ddpm-3": lambda seed: 50})
    same = measure_losses([lost], {"tiny": (port, OBS)}, progress=False)
    assert {row.task for row in same.rows} == {"toy"}  # as much is lost at any limit


def test_a_tighter_limit_is_not_taken_where_the_own_one_tells_enough(port, monkeypatch):
    """One method loses at the own limit of steps, two at a tighter one."""
    ends = {"full": lambda seed: 40 + seed, "mine": lambda seed: None, "ddpm-3": lambda seed: 60 + seed}
    for least, task in ((2, "toy@steps=46"), (1, "toy")):
        monkeypatch.setattr(losses, "LEAST_LOST", least)
        found = measure_losses([successes(port, ends)], {"tiny": (port, OBS)}, progress=False)
        assert {row.task for row in found.rows} == {task}


def test_a_tighter_limit_gives_the_records_of_shorter_episodes(port):
    ended = losses.in_time(successes(port, {"mine": lambda seed: 48 + seed}), 50)
    assert [(one.success, one.score, one.steps) for one in ended.of("mine").values()][:4] == [
        (True, 1.0, 48), (True, 1.0, 49), (True, 1.0, 50), (False, 0.0, 50),
    ]  # fmt: skip


def test_pairs_of_the_same_method_in_several_files_are_put_together(port):
    first, second = results(port, mine=0.5), results(port, mine=0.1)
    later = replace(second, records=tuple(replace(one, seed=one.seed + 100) for one in second.records))
    found = measure_losses([first, later], {"tiny": (port, OBS)}, progress=False)
    mine = {row.method: row.difference for row in found.rows}["mine"]
    assert (mine.n, round(mine.mean, 9)) == (16, -0.3)


def renamed(found, old, new):
    methods = tuple(replace(one, name=new) if one.name == old else one for one in found.methods)
    records = tuple(replace(one, method=new) if one.method == old else one for one in found.records)
    return replace(found, methods=methods, records=records)


def test_what_ran_under_two_names_counts_once_with_the_pairs_of_both(port):
    first, second = results(port, mine=0.5), renamed(results(port, mine=0.1), "mine", "mine too")
    later = replace(second, records=tuple(replace(one, seed=one.seed + 100) for one in second.records))
    found = measure_losses([first, later], {"tiny": (port, OBS)}, progress=False)
    rows = {row.method: row.difference for row in found.rows}
    assert set(rows) == {"ddpm-3", "mine"}
    assert (rows["mine"].n, round(rows["mine"].mean, 9)) == (16, -0.3)
    same = measure_losses([first, second], {"tiny": (port, OBS)}, progress=False)  # the same episodes: one each
    assert {row.method: row.difference.n for row in same.rows} == {"ddpm-3": 8, "mine": 8}


def test_another_execution_of_the_same_is_not_put_together_with_it(port):
    first, second = results(port, mine=0.5), renamed(results(port, mine=0.1), "mine", "mine+replan=4")
    methods = tuple(replace(one, execution={"replan": 4}) if "replan" in one.name else one for one in second.methods)
    later = replace(second, methods=methods, records=tuple(replace(one, seed=one.seed + 100) for one in second.records))
    found = measure_losses([first, later], {"tiny": (port, OBS)}, progress=False)
    mine = {row.method: row.difference for row in found.rows}["mine"]
    assert (mine.n, round(mine.mean, 9)) == (8, -0.5)


def test_too_few_observations_are_refused(port):
    with pytest.raises(ObservationError, match="are of 6 observations, and tiny has 5; record more"):
        measure_losses([results(port)], {"tiny": (port, OBS[:5])}, progress=False)


def test_the_page_says_how_well_each_task_is_predicted(port):
    rows = measure_losses([results(port, mine=0.25)], {"tiny": (port, OBS)}, progress=False).rows
    tasks = [replace(row, task=f"task {place}") for place in range(3) for row in (rows[1], rows[1], rows[1], rows[0])]
    page = render(losses_document(LossData(6, 4, (*tasks, *rows))))
    assert "14 methods that were rolled out in pairs" in page
    assert "| task 2 | 4 |" in page
    assert "with fewer than 3, or chunks too short for a roughness, nothing is learnt from a task (toy)" in page


def test_a_method_that_executes_chunks_otherwise_is_left_out():
    plain = MethodRun(
        "fewer", "loop", DDPM(num_inference_steps=3).to_dict(), None, True, 10, 0.0, ActionError(0.1, 0.2)
    )
    assert losses.candidate_of(plain) == Candidate(None, "auto", DDPM(num_inference_steps=3))
    assert losses.candidate_of(replace(plain, execution={"replan": 4})) is None
