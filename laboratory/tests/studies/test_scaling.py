"""What an export and a calibration take, each in processes of their own."""

from blockcache.models.dpt.policy import Shape
from blockcache_lab.studies.scaling import calibration, footprint


def test_the_footprint_is_measured_without_torch():
    found = footprint(Shape(width=16, layers=2, steps=10), calls=3, generations=2)
    assert found["p99_ms"] >= found["p50_ms"] > 0
    assert found["load_s"] > 0
    assert found["file_mb"] > found["weights_mb"]


def test_what_calibration_takes_is_measured_in_processes_of_their_own():
    found = calibration(Shape(width=16, layers=2, steps=10), observations=2)
    assert (found["observations"], found["blocks"], found["steps"]) == (2, 6, 10)
    assert min(found["plain_s"], found["costs_s"], found["solve_s"]) > 0
    assert 100 < found["plain_mb"] < found["costs_mb"] + 50 < 2000  # torch alone takes more than 100
