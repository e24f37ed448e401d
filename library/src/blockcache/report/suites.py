"""What methods are called in tables and pictures. Knows nothing of torch or of pages."""

from __future__ import annotations

from blockcache.compare.methods import (
    ActionBudget,
    FewerSteps,
    FittedSteps,
    Reused,
    SamplerFile,
    ScheduleFile,
    Solved,
    TeaCache,
    TunedFiles,
    parse_method,
)

_NAMES = {"bac": "BAC", "uniform": "Uniform", "unified": "Unified ACS", "blockwise": "Block-wise ACS"}
_METRICS = {"mse": "MSE", "l1": "L1", "wasserstein": "Wasserstein"}


def family(name: str) -> str:
    """The kind of a method: "BAC", "BAC on DDIM", "DDIM-N"."""
    method = parse_method(name)
    sampler = None if method.sampler is None else _sampler(method.sampler)
    if isinstance(method.sampler, TunedFiles):
        return "tuned"
    if isinstance(method.sampler, SamplerFile) and method.reuse is None:
        return "sampler file"
    if method.reuse is None:
        return "full precision" if sampler is None else f"{sampler}-N"
    kind = _NAMES[method.reuse.method] if isinstance(method.reuse, Solved) else type(method.reuse).__name__
    kind = "Action costs" if isinstance(method.reuse, ActionBudget) else kind
    return kind if sampler is None else f"{kind} on {sampler}"


def kind_of(name: str) -> str:
    """The kind of a method as pictures of the frontier tell them apart."""
    method = parse_method(name)
    return "reuse on few steps" if method.sampler is not None and method.reuse is not None else family(name)


def _sampler(part: FewerSteps | FittedSteps | SamplerFile | TunedFiles) -> str:
    """The kind of a sampler: "DDIM", "placed DDPM", "fitted"."""
    if isinstance(part, FewerSteps):
        return f"placed {_solver(part.kind)}" if part.placed else _solver(part.kind)
    return "fitted" if isinstance(part, FittedSteps) else "a sampler file"


def _solver(kind: str) -> str:
    """As papers write it: "DDPM", "SDE-DPM-Solver++"."""
    return kind.upper().replace("DPMSOLVER", "DPM-Solver")


def _named(part: FewerSteps | FittedSteps | SamplerFile | TunedFiles) -> str:
    """A sampler for people: "DDIM-40", "DDPM-8 placed", "fitted-5 spread=1"."""
    if isinstance(part, FewerSteps):
        return f"{_solver(part.kind)}-{part.steps}" + (" placed" if part.placed else "")
    if isinstance(part, TunedFiles):
        return "tuned"
    return str(part).replace(":", " ") if isinstance(part, FittedSteps) else part.path


def label(name: str) -> str:
    """A method for people: "BAC S=10 n=5", "DDIM-40 + BAC S=5 n=3"."""
    method = parse_method(name)
    parts = [] if method.sampler is None else [_named(method.sampler)]
    parts += [] if method.reuse is None else [_reuse(method.reuse)]
    return " + ".join(parts) or "full precision"


def _reuse(part: Reused) -> str:
    if isinstance(part, ActionBudget):
        return "Action costs " + (f"S={part.updates}" if part.budget is None else f"{part.budget:g}")
    if isinstance(part, TeaCache):
        return f"TeaCache {part.threshold:g}"
    if isinstance(part, ScheduleFile):
        return part.path
    words = [_NAMES[part.method], f"S={part.updates}"] + ([f"n={part.union}"] if part.method == "bac" else [])
    words += [_METRICS[part.metric]] if part.metric != "cosine" else []
    words += [part.objective] if part.objective != "anchor" else []
    words += ["and the last step"] if part.last else []
    return " ".join(words)
