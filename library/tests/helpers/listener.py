"""A watcher that keeps what it is told, and what a .rrd file holds, read by Rerun's own reader."""

from collections import defaultdict


class Listener:
    def __init__(self):
        self.seen, self.plans, self.done = [], [], []

    def observed(self, tick, observation):
        self.seen.append((tick, observation.tolist()))

    def planned(self, begin, arrived, actions, figures):
        self.plans.append((begin, arrived, actions[:, 0].tolist(), dict(figures)))

    def acted(self, tick, due):
        self.done.append((tick, None if due.action is None else float(due.action[0]), due.held))


def rows_of(path):
    """Rows by entity: (tick, values), in the order of ticks; pictures have no values."""
    from rerun.chunk import RrdReader

    found = defaultdict(list)
    for chunk in RrdReader(str(path)).stream():
        batch = chunk.to_record_batch()
        if "tick" in batch.schema.names:
            numbers = "Scalars:scalars" in batch.schema.names
            values = batch.column("Scalars:scalars").to_pylist() if numbers else [None] * chunk.num_rows
            found[chunk.entity_path] += zip(batch.column("tick").to_pylist(), values, strict=True)
    return {entity: sorted(rows, key=lambda row: row[0]) for entity, rows in found.items()}
