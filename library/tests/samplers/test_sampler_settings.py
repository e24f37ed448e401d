"""A sampler's settings: defaults, what is refused, dicts and files."""

import json
import math
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import numpy as np
import pytest

import blockcache
from blockcache.errors import FileError, SamplerError
from blockcache.files import read_json
from blockcache.samplers import DDIM, DDPM, SAMPLERS, DPMSolver, Euler, SamplerConfig, SDEDPMSolver, fewer_steps, table
from repository import RECORDS


def test_tables_and_configs_are_frozen():
    config = DDIM()
    made = table(config)
    for name in ("timesteps", "a", "b", "e", "c", "s", "x0_x", "x0_out", "eps_x", "eps_out"):
        column = getattr(made, name)
        assert column.shape == (100,)
        assert column.dtype == np.float64
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
    with pytest.raises(FrozenInstanceError):
        made.clip = None
    with pytest.raises(FrozenInstanceError):
        config.eta = 1.0


def test_the_shipped_checkpoint_is_understood():
    settings_of_pusht = {
        "type": "ddpm",
        "num_train_timesteps": 100,
        "num_inference_steps": 100,
        "beta_schedule": "squaredcos_cap_v2",
        "beta_start": 0.0001,
        "beta_end": 0.02,
        "variance_type": "fixed_small",
        "clip_sample": True,
        "prediction_type": "epsilon",
    }
    config = SamplerConfig.from_dict(settings_of_pusht)
    assert config == DDPM()
    assert settings_of_pusht.items() <= config.to_dict().items()
    assert table(config).clip == 1.0


def test_a_dict_holds_the_settings_of_its_type_in_json_types():
    config = DDIM(num_inference_steps=16, eta=1, beta_start=np.float64(0.001))
    kept = config.to_dict()
    assert {type(value) for value in kept.values()} == {str, int, float, bool}
    assert "variance_type" not in kept
    assert "solver_order" not in kept
    assert SamplerConfig.from_dict(json.loads(json.dumps(kept))) == config
    assert len({config, SamplerConfig.from_dict(kept)}) == 1


def test_defaults_are_those_of_the_type():
    ddpm, solver = DDPM(), DPMSolver(num_inference_steps=10)
    assert (ddpm.clip_sample, ddpm.timestep_spacing) == (True, "leading")
    assert (solver.clip_sample, solver.timestep_spacing) == (False, "linspace")
    assert table(solver).clip is None
    assert table(replace(ddpm, clip_sample=False)).clip is None
    assert table(replace(ddpm, clip_sample_range=2)).clip == 2.0
    assert table(replace(solver, clip_sample=True)).clip == 1.0  # ours: diffusers' scheduler cannot
    assert [kind().num_inference_steps for kind in (DDPM, DDIM, Euler)] == [100] * 3


def test_the_shared_settings_alone_are_no_sampler():
    with pytest.raises(TypeError, match="abstract"):
        SamplerConfig(num_inference_steps=6)


LONG_TRAINING = {"beta_schedule": "linear", "num_train_timesteps": 100_000}


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"type": "heun"}, r"type: expected one of .*'ddim', 'ddpm', 'dpmsolver\+\+', .*; got 'heun'"),
        ({"type": ["ddpm"]}, r"type: .* got \['ddpm'\]"),
        ({"type": None}, "type: .* got None"),
        ({"beta_schedule": "sigmoid"}, "beta_schedule: .* got 'sigmoid'"),
        ({"prediction_type": "flow_prediction"}, "prediction_type: .* got 'flow_prediction'"),
        ({"variance_type": "learned_range"}, "variance_type: .* got 'learned_range'"),
        ({"variance_type": "fixed_large_log"}, "variance_type: .* got 'fixed_large_log'"),
        ({"clip_sample": 1}, "clip_sample: expected one of True, False; got 1"),
        ({"clip_sample_range": -1.0}, "clip_sample_range: .* got -1.0"),
        ({"clip_sample_range": math.inf}, "clip_sample_range: .* got inf"),
        ({"clip_sample_range": "1"}, "clip_sample_range: .* got '1'"),
        ({"timestep_spacing": "karras"}, "timestep_spacing: .* got 'karras'"),
        ({"steps_offset": -1}, "steps_offset: .* got -1"),
        (
            {"steps_offset": 1, "timestep_spacing": "linspace"},
            "steps_offset: expected 0, as 'linspace' .* got 1",
        ),
        ({"steps_offset": 1}, r"distinct timesteps in 0\.\.99 \('leading' spacing\); got 100"),
        ({"num_train_timesteps": 1}, "num_train_timesteps: expected an int from 2 to .* got 1"),
        ({"num_train_timesteps": 100.0}, "num_train_timesteps: .* got 100.0"),
        ({"num_inference_steps": 0}, "num_inference_steps: .* got 0"),
        ({"num_inference_steps": True}, "num_inference_steps: .* got True"),
        ({"num_inference_steps": 101}, "num_inference_steps: .* distinct timesteps .* got 101"),
        ({"num_inference_steps": 29, "timestep_spacing": "trailing"}, "distinct timesteps .* got 29"),
        ({"beta_start": math.nan}, "beta_start: expected a number from 0 to 1; got nan"),
        ({"beta_end": 1.5}, "beta_end: .* got 1.5"),
        ({"beta_schedule": "linear", "beta_start": 0.0}, "beta_schedule: .* got 'linear'"),
        ({"beta_schedule": "linear", "beta_end": 1.0}, "beta_schedule: .* got 'linear'"),
        (LONG_TRAINING, "beta_schedule: .* at each of 100000 timesteps, but never all"),
        ({"eta": 0.5}, r"settings of ddpm: expected only .* got unknown \['eta'\]"),
        ({"set_alpha_to_one": False}, r"settings of ddpm: .* got unknown \['set_alpha_to_one'\]"),
        ({"solver_order": 1}, r"settings of ddpm: .* got unknown \['solver_order'\]"),
        ({"lower_order_final": False}, r"settings of ddpm: .* got unknown \['lower_order_final'\]"),
        ({"final_sigmas_type": "sigma_min"}, r"settings of ddpm: .* got unknown \['final_sigmas_type'\]"),
        ({"type": "ddim", "variance_type": "fixed_large"}, r"settings of ddim: .* got unknown \['variance_type'\]"),
        ({"type": "euler", "clip_sample": True}, r"settings of euler: .* got unknown \['clip_sample'\]"),
        ({"type": "euler", "num_inference_steps": 0}, "num_inference_steps: .* got 0"),
        ({"type": "ddim", "eta": 1.1}, "eta: expected a number from 0 to 1; got 1.1"),
        ({"type": "ddim", "set_alpha_to_one": None}, "set_alpha_to_one: .* got None"),
        ({"type": "dpmsolver++"}, r"distinct timesteps .* \('linspace' spacing\); got 100"),
        ({"type": "dpmsolver++", "clip_sample": 1}, "clip_sample: expected one of True, False; got 1"),
        ({"type": "sde-dpmsolver++", "solver_order": 3}, "solver_order: expected one of 1, 2; got 3"),
        ({"type": "dpmsolver++", "solver_order": 3}, "solver_order: expected one of 1, 2; got 3"),
        ({"type": "dpmsolver++", "solver_order": 2.0}, "solver_order: .* got 2.0"),
        ({"type": "dpmsolver++", "lower_order_final": 0}, "lower_order_final: .* got 0"),
        ({"type": "dpmsolver++", "final_sigmas_type": "one"}, "final_sigmas_type: .* got 'one'"),
    ],
)
def test_refused_settings(wrong, expected):
    with pytest.raises(SamplerError, match=expected):
        SamplerConfig.from_dict({"type": "ddpm", **wrong})


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"type": "dpmsolver++", "thresholding": True}, r"got unknown \['thresholding'\]"),
        ({"type": "dpmsolver++", "algorithm_type": "sde-dpmsolver++"}, r"unknown \['algorithm_type'\]"),
        ({"type": "ddim", "use_clipped_model_output": True, 3: 4}, "'use_clipped_model_output', '3'"),
        ({"num_train_timesteps": 100}, "at least a 'type'; got {'num_train"),
        (None, "at least a 'type'; got None"),
        (["type"], "at least a 'type'; got"),
    ],
)
def test_refused_dicts(wrong, expected):
    with pytest.raises(SamplerError, match=expected):
        SamplerConfig.from_dict(wrong)


LISTED = [70, 57.5, 20, 5]


@pytest.mark.parametrize("kind", ["ddpm", "ddim", "dpmsolver++", "sde-dpmsolver++"])
@pytest.mark.parametrize(
    ("timesteps", "expected"),
    [
        ([70, 57.5, 99.5], r"timesteps: expected numbers in 0\.\.99; got 99.5"),
        ([70, -1], r"timesteps: expected numbers in 0\.\.99; got -1"),
        ([70, math.nan], r"timesteps: expected a list of one or more numbers, 10,000 at most; got \[70, nan\]"),
        ([70, 57.5, 57.5], "timesteps: expected each number once; got 57.5 twice"),
        ([70, 20, 57.5], "timesteps: expected falling numbers; got 57.5 after 20"),
        ([70, 70 - 1e-9], "timesteps: expected numbers far enough apart for different noise levels"),
        ([], "timesteps: expected a list of one or more numbers"),
        ("70", "timesteps: expected a list of one or more numbers, 10,000 at most; got '70'"),
        (70, "timesteps: expected a list of one or more numbers, 10,000 at most; got 70"),
        ([70, "20"], "timesteps: expected a list of one or more numbers"),
        ([True], "timesteps: expected a list of one or more numbers"),
        ([[70, 20]], "timesteps: expected a list of one or more numbers"),
    ],
)
def test_refused_timesteps(kind, timesteps, expected):
    with pytest.raises(SamplerError, match=expected) as caught:
        SAMPLERS[kind](timesteps=timesteps)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("timesteps", "expected"),
    [
        ([0, 0.5, 1], "timesteps: expected numbers from 0 to below 1; got 1"),
        ([-0.1], "timesteps: expected numbers from 0 to below 1; got -0.1"),
        ([0, 0.5, 0.5], "timesteps: expected each number once; got 0.5 twice"),
        ([0.5, 0], "timesteps: expected rising numbers; got 0 after 0.5"),
    ],
)
def test_refused_times_of_a_flow(timesteps, expected):
    with pytest.raises(SamplerError, match=expected):
        Euler(timesteps=timesteps)


def test_timesteps_are_counted():
    assert DDPM(timesteps=LISTED).num_inference_steps == 4
    assert (
        DDPM(timesteps=LISTED, num_inference_steps=4)
        == DDPM(timesteps=tuple(LISTED))
        == DDPM(timesteps=np.array(LISTED))
    )
    with pytest.raises(
        SamplerError, match="num_inference_steps: expected 4, the number of timesteps, or none given; got 5"
    ):
        DDPM(timesteps=LISTED, num_inference_steps=5)
    with pytest.raises(SamplerError, match="num_inference_steps: expected 4"):
        replace(DDPM(), timesteps=LISTED)


def test_timesteps_stand_in_the_dict_only_if_given():
    assert "timesteps" not in DDPM().to_dict()
    kept = DDPM(timesteps=[70.0, 57.5]).to_dict()
    assert kept["timesteps"] == [70, 57.5]
    assert json.dumps(kept) == json.dumps(DDPM(timesteps=(70, 57.5)).to_dict())  # one digest for equal samplers
    assert SamplerConfig.from_dict(json.loads(json.dumps(kept))) == DDPM(timesteps=[70, 57.5])


def stored_samplers():
    """Every sampler in the results that are kept, and in the policies that are shipped."""

    def found(value):
        if isinstance(value, dict):
            if isinstance(value.get("sampler"), dict):
                yield value["sampler"]
            value = list(value.values())
        for item in value if isinstance(value, list) else ():
            yield from found(item)

    package = Path(blockcache.__file__).parent
    files = [
        *package.glob("assets/policies/*/config.json"),
        *RECORDS.glob("*/*.json.gz"),
    ]
    return [(file, sampler) for file in files for sampler in found(read_json(file, "file"))]


def test_stored_samplers_are_read_and_written_as_they_were():
    """Digests and fingerprints of stored files are made of these dicts."""
    stored = stored_samplers()
    assert len({file for file, _ in stored}) > 10
    for file, sampler in stored:
        made = SamplerConfig.from_dict(sampler).to_dict()
        hand_written = set(made) - set(sampler) if file.name == "config.json" else set()
        assert {name: value for name, value in made.items() if name not in hand_written} == sampler, file


EVERY = [
    DDPM(variance_type="fixed_large"),
    DDPM(timesteps=LISTED),
    DDIM(num_inference_steps=16, eta=0.5),
    DPMSolver(num_inference_steps=8, solver_order=1),
    SDEDPMSolver(timesteps=LISTED, clip_sample=True),
    Euler(num_inference_steps=10),
    Euler(timesteps=[0, 0.1, 0.5]),
]


@pytest.mark.parametrize("config", EVERY, ids=repr)
def test_a_sampler_goes_through_a_file(config, tmp_path):
    config.save(tmp_path / "sampler.json")
    assert SamplerConfig.load(tmp_path / "sampler.json") == config
    written = json.loads((tmp_path / "sampler.json").read_text())
    assert (written["format"], written["version"]) == ("blockcache.sampler", 1)
    assert written["made_by"].startswith("blockcache ")


@pytest.mark.parametrize(
    ("change", "error", "expected"),
    [
        ({"format": "blockcache.schedule"}, FileError, "is not a sampler"),
        ({"version": 2}, FileError, "format version 2"),
        ({"colour": "red"}, FileError, "unknown keys: colour"),
        ({"sampler": {"type": "ddpm", "timesteps": [120]}}, SamplerError, "sampler.json: .* timesteps: .* got 120"),
        ({"sampler": None}, FileError, "sampler.json .* under 'sampler', got None"),
    ],
)
def test_another_file_is_refused_with_its_path(change, error, expected, tmp_path):
    file = tmp_path / "sampler.json"
    DDPM().save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(error, match=expected) as caught:
        SamplerConfig.load(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("kind", ["ddpm", "ddim", "dpmsolver++", "sde-dpmsolver++"])
def test_fewer_steps_keep_the_diffusion_and_nothing_else(kind):
    own = DDPM(
        num_train_timesteps=50,
        num_inference_steps=50,
        beta_schedule="linear",
        beta_end=0.03,
        prediction_type="sample",
        clip_sample_range=2.0,
        timestep_spacing="trailing",
    )
    made = fewer_steps(own, kind, 8)
    shared = {item.name for item in fields(own)} - {"num_inference_steps", "timestep_spacing", "variance_type"}
    assert {name: getattr(made, name) for name in shared} == {name: getattr(own, name) for name in shared}
    plain = SAMPLERS[kind](num_inference_steps=8)
    rest = {item.name for item in fields(made)} - shared
    assert {name: getattr(made, name) for name in rest} == {name: getattr(plain, name) for name in rest}


def test_a_flow_stays_a_flow():
    assert fewer_steps(Euler(timesteps=[0, 0.9]), "euler", 10) == Euler(num_inference_steps=10)
    for own, kind in ((DDPM(), "euler"), (Euler(), "ddpm"), (Euler(), "dpmsolver++")):
        with pytest.raises(SamplerError) as caught:
            fewer_steps(own, kind, 10)
        assert str(caught.value).startswith(f"a policy trained for {own.type} cannot be run by {kind}: ")
    with pytest.raises(SamplerError, match=r"type: expected one of .* got 'heun'"):
        fewer_steps(DDPM(), "heun", 10)
