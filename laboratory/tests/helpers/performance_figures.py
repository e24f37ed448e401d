"""A performance.json with made-up figures."""


def synthetic(bench_result):
    """A performance.json with made-up figures around a real benchmark."""
    foot = {
        "weights_mb": 36.0, "file_mb": 39.0, "export_s": 2.0, "calls": 30, "generations": 60, "p50_ms": 40.0,
        "p99_ms": 50.0, "peak_over_weights": 2.5, "load_s": 1.0, "peak_mb": 90.0, "growth_mb": 0.1,
    }  # fmt: skip
    engines = ("patched", "loop", "onnx_1", "onnx_n")
    return {
        "format": "blockcache.performance",
        "version": 1,
        "bench": bench_result,
        "shapes": [{"name": "T = 16", "ms": dict.fromkeys(engines, 5.0), "difference": dict.fromkeys(engines, 2e-6)}],
        "footprint": {"8 x 256, T = 10": foot},
        "calibration": {
            "observations": 16,
            "blocks": 24,
            "steps": 100,
            "plain_s": 20.0,
            "costs_s": 40.0,
            "plain_mb": 600.0,
            "costs_mb": 900.0,
            "solve_s": 0.5,
        },
    }
