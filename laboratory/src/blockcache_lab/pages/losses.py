"""docs/generated/losses.md: how well each task's losses are predicted by all the others. Knows nothing of torch."""

from __future__ import annotations

from blockcache.report.document import Document, Paragraph, plain, table
from blockcache.results.losses import CERTAINTY, FLOOR, LEAST_LOST, LossData, judge


def losses_document(data: LossData) -> Document:
    """How far the data can be trusted, and the data."""
    model, judged = data.model, judge(data)
    silent = sorted({row.task for row in data.rows} - set(data.told))
    rows = [
        [plain(one.task), str(one.methods), f"{one.rank:.2f}", f"{one.highest:.2f}", f"{one.covered:.2f}"]
        for one in judged
    ]
    shown = [
        [
            plain(row.task),
            plain(row.method),
            f"{row.features.shift:.3f}",
            f"{row.features.beyond_spread:.3f}",
            f"{row.features.wider:+.2f}",
            f"{row.features.rougher:+.3f}",
            f"{(found := model.predict(row.features, row.family, row.actions)).loss:.3f}",
            "" if found.bound is None else f"{found.bound:.3f}",
            row.difference.text("{:+.3f}"),
        ]
        for row in sorted(data.rows, key=lambda row: (row.task, -row.difference.mean))
    ]
    beyond, root, rough = model.weights
    return Document(
        "How losses are predicted",
        (
            Paragraph(
                f"{len(data.rows)} methods that were rolled out in pairs, each drawn again at {data.observations} "
                f"observations, {data.samples} chunks each. Made by `blockcache paper losses docs/generated/records/*`."
            ),
            Paragraph(
                f"Predicted loss: {beyond:.3f} x energy beyond spread + {root:.3f} x its root + {rough:.3f} x root of the added "
                "roughness; "
                f"bound ({CERTAINTY:.0%}): {model.factor:.2f} x (prediction + {FLOOR})."
            ),
            Paragraph(
                "Each task below is predicted by a model that did not see it. *Highest*: the rank correlation that a perfect "
                "order would have, as many methods lose exactly the same. *Covered*: methods that lose no more than their bound."
            ),
            table(["task", "methods", "rank correlation", "highest", "covered"], rows, left=1),
            Paragraph(
                f"Nothing is learnt from {', '.join(map(plain, silent))}: fewer than {LEAST_LOST} methods are shown to lose anything there."
                if silent
                else "Every task tells methods apart."
            ),
            table(
                [
                    "task",
                    "method",
                    "shift",
                    "beyond spread",
                    "wider",
                    "rougher",
                    "predicted",
                    "bound",
                    "in closed loop",
                ],
                shown,
                left=2,
            ),
        ),
    )
