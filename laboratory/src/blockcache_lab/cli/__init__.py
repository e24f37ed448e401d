"""Verbs of the laboratory: `paper ...`, `analyse`, and `train`, `pretrain`, `demonstrate` and `replay` of `policy`."""

from blockcache.cli.lazy import LazyGroup

paper = LazyGroup(
    "paper",
    package=__name__,
    help="The paper's comparisons and measurements, and the pages made from them.",
    verbs={
        "suite": (".suites:suite", "One of the paper's comparisons, the frontier or RDT, in closed loop."),
        "timing": (".suites:timing", "Milliseconds of all the suites' methods, in one interleaved run."),
        "results": (".suite_pages:results", "The page of results, from the suites' files."),
        "distances": (".suites:distances", "How far the frontier's actions are from the policy's own."),
        "losses": (".losses:losses", "The data that losses are predicted from, and how well they are."),
        "frontier": (".suite_pages:frontier", "The page of suite frontier, with its pictures."),
        "rdt": (".suite_pages:rdt", "The page of suite rdt, with its pictures."),
        "checkpoints": (".checkpoints:checkpoints", "The best and the mean of the last checkpoints of training runs."),
        "realtime": (".suite_pages:realtime", "The page of suite realtime, with its picture."),
        "tables": (".suite_pages:tables", "The paper's tables beside what was measured here, and when BAC is free."),
        "figures": (".suite_pages:figures", "The records' figures, put into pages that people write."),
        "performance": (".studies:performance", "Everything that the page on performance shows, and the page."),
        "guard": (".studies:guard", "What a guard notices when a task is changed, and whether full precision helps."),
        "flops": (".studies:flops", "FLOPs of one generation, in full and under schedules."),
    },
)
VERBS = {
    "analyse": (
        "blockcache_lab.cli.analyse:analyse",
        "Why caching works for a policy and where it hurts: the paper's analyses.",
    ),
    "paper": ("blockcache_lab.cli:paper", "The paper's comparisons and measurements, and the pages made from them."),
    "policy demonstrate": (
        "blockcache_lab.cli.training:demonstrate",
        "Let a simulator's own expert show a task, to train on.",
    ),
    "policy pretrain": (
        "blockcache_lab.cli.training:pretrain",
        "Give a policy a camera: an encoder learns to tell what it sees as numbers.",
    ),
    "policy replay": (
        "blockcache_lab.cli.training:replay",
        "Play demonstrations again, and compare with what was recorded.",
    ),
    "policy train": ("blockcache_lab.cli.training:train", "Train a policy of any family from demonstrations."),
}
"""What the entry point `blockcache.verbs` names."""
