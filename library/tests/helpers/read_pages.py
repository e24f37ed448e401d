"""Pages of `report` as a browser reads them."""

import json
import re
from html.parser import HTMLParser

from blockcache.report import html
from blockcache.report.document import charts
from blockcache.report.overview.page import page
from blockcache.report.overview.sources import load_sources


class Reader(HTMLParser):
    """What a browser would make of a page: its elements with their attributes, and its words."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self.within = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.within.append(tag)

    def handle_endtag(self, tag):
        while self.within and self.within.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self.within):
            self.words.append(data)


def chart_data(text):
    return json.loads(re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL)[1])


def sources_of(*files):
    return load_sources({str(file): file for file in files})


def check_page(path, charted):
    """The file makes a page that names it, with a picture if it is `charted`; every picture has words and a table."""
    found = page(sources_of(path))
    text = html.render(found)
    assert chart_data(text)["charts"] or not charted
    assert str(path) in Reader(text).words
    for chart in charts(found.blocks):
        assert chart.table.rows, chart.name
        assert len(chart.alt) > 20, chart.name
