"""Pictures: names beside their points can be read."""

from itertools import combinations

import pytest
from matplotlib.text import Text

from blockcache.report.drawing import Label, new_figure, write_labels


@pytest.fixture
def axes():
    found = new_figure(7.0, 5.0).add_subplot()
    found.set_xlim(0, 10)
    found.set_ylim(0, 10)
    return found


def written(axes):
    axes.figure.draw_without_rendering()
    return [Text.get_window_extent(text) for text in axes.texts]  # without the line to its point


def test_names_of_points_that_lie_together_do_not_cover_one_another(axes):
    labels = [Label(f"method {n}", 5 + 0.02 * n, 5 + 0.05 * (n % 3), "black") for n in range(9)]
    axes.plot([label.x for label in labels], [label.y for label in labels], "o")
    write_labels(axes, labels)
    assert [text.get_text() for text in axes.texts] == [label.text for label in labels]
    boxes = written(axes)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    points = axes.transData.transform([(label.x, label.y) for label in labels])
    assert not any(box.contains(*point) for box in boxes for point in points)


def test_a_name_alone_stands_right_beside_its_point(axes):
    write_labels(axes, [Label("alone", 5, 5)])
    (box,) = written(axes)
    x, y = axes.transData.transform((5, 5))
    assert 0 < box.x0 - x < 20
    assert box.y0 < y < box.y1
    assert axes.texts[0].arrow_patch is None
