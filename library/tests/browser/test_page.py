"""The page in a real browser: it draws, answers to pointer and keys, fits, prints, and asks nobody for anything."""

import json

import pytest
from playwright.sync_api import expect

NAMES = ("results", "analysis", "large", "nasty")


def chart_names(tab):
    return [chart["name"] for chart in json.loads(tab.locator("#charts").text_content())["charts"]]


def colour(tab, selector, style):
    return tab.locator(selector).first.evaluate(f"element => getComputedStyle(element).{style}")


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_drawn_without_a_complaint_or_a_request(opened, name):
    page = opened(name)
    drawn = chart_names(page.tab)
    assert drawn
    for chart in drawn:
        plot = page.tab.locator(f"#figure-{chart} .plot")
        assert plot.locator("svg.main-svg").count() >= 1, chart
        shapes = plot.locator(".heatmaplayer image, .scatterlayer .trace, .barlayer .trace")
        assert shapes.count() >= 1, chart
        assert plot.bounding_box()["height"] > 80, chart
    assert page.complaints == []
    assert page.asked == [page.path.as_uri()]


def test_what_leaves_the_page_would_be_noticed(opened):
    page = opened("nasty")
    page.tab.evaluate("() => { new Image().src = 'https://example.org/a.png'; }")
    page.tab.wait_for_timeout(200)
    assert page.complaints  # the page's own policy forbids it, before it is even asked for


def test_the_pointer_gets_exact_figures(opened):
    page = opened("large")
    plot = page.tab.locator("#figure-schedule-1 .plot")
    plot.scroll_into_view_if_needed()
    box = plot.locator(".heatmaplayer image").bounding_box()
    page.tab.mouse.move(box["x"] + box["width"] * (2.5 / 20), box["y"] + box["height"] * (0.5 / 84))
    readout = page.tab.locator("#figure-schedule-1 .readout")
    page.tab.wait_for_function("() => document.querySelector('#figure-schedule-1 .readout').classList.contains('live')")
    assert readout.text_content().startswith("layers.0.SA, step 2: ")
    expect(page.tab.locator("#figure-schedule-1 .hoverlayer .hovertext")).to_have_count(1)


def test_the_keys_get_the_same_figures(opened):
    page = opened("large")
    plot, readout = page.tab.locator("#figure-schedule-1 .plot"), page.tab.locator("#figure-schedule-1 .readout")
    plot.focus()
    assert readout.text_content().startswith("layers.0.SA, step 0: update")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
        page.tab.keyboard.press(key)
    assert readout.text_content().startswith("layers.0.FFN, step 1: ")
    assert "similarity to what is reused" in readout.text_content()
    expect(page.tab.locator("#figure-schedule-1 .hoverlayer .hovertext")).to_have_count(1)
    page.tab.keyboard.press("End")
    assert readout.text_content().startswith("layers.0.FFN, step 19: ")
    page.tab.keyboard.press("ArrowRight")  # there is nothing behind the last
    assert readout.text_content().startswith("layers.0.FFN, step 19: ")
    page.tab.locator("#figure-similarity .plot").focus()
    page.tab.keyboard.press("PageDown")
    assert page.tab.locator("#figure-similarity .readout").text_content().startswith("layers.1.CA: step 0, step 0")
    assert page.complaints == []


def test_every_value_of_every_figure_can_be_reached(opened):
    """From panel to panel, and to the end of each."""
    page = opened("analysis")
    for chart in json.loads(page.tab.locator("#charts").text_content())["charts"]:
        readout = page.tab.locator(f"#figure-{chart['name']} .readout")
        page.tab.locator(f"#figure-{chart['name']} .plot").focus()
        said = {readout.text_content()}
        for _ in chart["panels"]:
            for key in ("Home", "ArrowRight", "ArrowDown", "End"):
                page.tab.keyboard.press(key)
                said.add(readout.text_content())
            page.tab.keyboard.press("PageDown")
        assert len(said) >= 2 * len(chart["panels"]), chart["name"]
        assert not any("undefined" in text or "NaN" in text for text in said)
    assert page.complaints == []


def test_tab_alone_goes_through_the_page(opened):
    page = opened("large")
    reached = []
    for _ in range(40):
        page.tab.keyboard.press("Tab")
        reached.append(
            page.tab.evaluate("() => document.activeElement.dataset.chart || document.activeElement.tagName")
        )
    assert reached[0] == "A"  # to the content, without the menu
    assert {"BUTTON", "SUMMARY", "schedule-1", "similarity"} <= set(reached)
    page.tab.locator("#figure-schedule-1 summary").focus()
    page.tab.keyboard.press("Enter")
    assert page.tab.locator("#figure-schedule-1 details table tbody tr").count() == 84
    assert page.tab.locator("#figure-schedule-1 details").get_attribute("open") is not None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_follow_the_system_and_the_button(opened, scheme):
    page = opened("results", scheme=scheme)
    ground = {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 21, 26)"}
    other = {"light": "dark", "dark": "light"}[scheme]
    ink = colour(page.tab, "#figure-front .xtick text", "fill")
    assert colour(page.tab, "body", "backgroundColor") == ground[scheme]
    page.tab.locator("#theme").click()
    assert colour(page.tab, "body", "backgroundColor") == ground[other]
    assert colour(page.tab, "#figure-front .xtick text", "fill") != ink  # the figures follow
    page.tab.locator("#theme").click()
    assert colour(page.tab, "#figure-front .xtick text", "fill") == ink
    assert page.complaints == []


@pytest.mark.parametrize("name", NAMES)
def test_a_phone_shows_it_without_sideways_scrolling(opened, name):
    page = opened(name, width=360)
    assert page.tab.evaluate("() => document.documentElement.scrollWidth") <= 360
    for chart in chart_names(page.tab):
        assert page.tab.locator(f"#figure-{chart} svg.main-svg").first.bounding_box()["width"] <= 360
    page.tab.set_viewport_size({"width": 900, "height": 700})
    page.tab.wait_for_function(
        "() => [...document.querySelectorAll('.plot')].every("
        "plot => plot.querySelector('.main-svg').clientWidth === plot.clientWidth)"
    )
    assert page.complaints == []


def test_names_are_words_and_nothing_else(opened):
    page = opened("nasty")
    said = []
    page.tab.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.tab.locator("#figure-schedule-1 .plot").focus()
    assert "<script>alert(1)</script>" in page.tab.locator("#figure-schedule-1 .readout").text_content()
    expect(page.tab.locator("#figure-schedule-1 .hoverlayer")).to_contain_text("<script>alert(1)")
    assert "<script>alert(1)</script>" in page.tab.locator("#figure-schedule-1 .yaxislayer-above").text_content()
    assert page.tab.locator("script").count() == 3
    assert said == []


def test_paper_is_light_and_no_wider_than_a_page(opened):
    page = opened("results", scheme="dark")
    page.tab.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
    assert colour(page.tab, "body", "backgroundColor") == "rgb(255, 255, 255)"
    assert page.tab.locator("#figure-front .main-svg").first.bounding_box()["width"] == 680
    page.tab.evaluate("() => window.dispatchEvent(new Event('afterprint'))")
    assert colour(page.tab, "body", "backgroundColor") == "rgb(17, 21, 26)"
    assert len(page.tab.pdf()) > 10_000
    assert page.complaints == []


def test_every_figure_says_what_it_shows_and_has_its_numbers(opened):
    page = opened("analysis")
    for chart in chart_names(page.tab):
        figure = page.tab.locator(f"#figure-{chart}")
        assert len(figure.locator(".plot").get_attribute("aria-label")) > 60
        assert figure.locator("details table tbody tr").count() >= 1
        assert figure.locator("figcaption strong").text_content().strip()
