"""What the mock interview keeps in the browser: tabs, damage, no room at all."""

import json

import pytest
from questions import reload, show  # noqa: F401
from test_questions_page import (
    ANSWERS,
    answer,
    answer_all,
    current,
    finish,
    interview,
    reviewed,
    shown,
    start,
)

KEY = "kvq-mock-interview"


def stored(page):
    return json.loads(page.evaluate(f"localStorage['{KEY}']"))


def deaf(show_page, page=None):
    """A page that hears nothing of other tabs, as one that the browser has frozen."""
    silence = """<script>addEventListener("storage",
      (e) => e.stopImmediatePropagation(), true)</script>"""
    context = page.context if page else None
    return show_page(interview(), before=silence, context=context)


@pytest.mark.browser
@pytest.mark.parametrize("hear", [True, False])
def test_two_tabs_keep_the_interviews_of_both(show, hear):  # noqa: F811
    one = show(interview()) if hear else deaf(show)
    two = show(interview(), context=one.context) if hear else deaf(show, one)
    start(one, number=3)
    start(two, number=2)
    one.locator("[data-jump='1']").click()
    assert shown(one, "count") == "Question 2 of 3"
    finish(one)
    finish(two)
    assert [entry["all"][0] for entry in stored(one)["history"]] == [3, 2]
    assert "2 interviews so far" in shown(two, "history-note")
    if hear:
        one.get_by_text("2 interviews so far").wait_for()
    for page, count in ((one, 3), (two, 2)):
        reload(page)  # each tab has its own interview again
        assert shown(page, "score").split(" of ")[1].startswith(f"{count} points")
        assert "2 interviews so far" in shown(page, "history-note")


@pytest.mark.browser
@pytest.mark.parametrize("hear", [True, False])
def test_an_interview_that_one_tab_has_finished_stays_finished(show, hear):  # noqa: F811
    one = show(interview())
    start(one)
    two = show(interview(), context=one.context) if hear else deaf(show, one)
    assert two.locator("[data-part=session]").is_visible()
    finish(one)
    if not hear:
        two.locator("[data-jump='1']").click()  # any change will do
    two.get_by_text("finished in another tab").wait_for()
    assert two.locator("[data-part=results]").is_visible()
    assert len(stored(two)["history"]) == 1
    assert stored(two)["sessions"][0]["finished"] is not None
    reload(two)
    assert two.locator("[data-part=results]").is_visible()


@pytest.mark.browser
def test_tabs_of_one_interview_show_the_same_answers(show):  # noqa: F811
    one = show(interview())
    start(one)
    two = show(interview(), context=one.context)
    answer(one, current(one))
    question = current(one)
    done = two.get_by_role("button", name="Question 1, answered")
    if ANSWERS[question.id][0]:
        done.wait_for()
    assert current(two) == question
    finish(two)
    one.get_by_text("finished in another tab").wait_for()
    assert shown(one, "score").split(",")[0] == shown(two, "score").split(",")[0]


@pytest.mark.browser
@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_interview_that_was_deleted_stays_deleted(show, elsewhere):  # noqa: F811
    page = show(interview())
    start(page)
    answer_all(page)
    other = deaf(show, page) if elsewhere else page
    for _ in range(2):
        other.get_by_role("button", name="Delete").click()
    reviewed(page, "memory-why-cache").get_by_label("Compares the work").check()
    assert shown(page, "score").startswith("5 of 11 points")
    assert stored(page)["history"] == []
    assert "No interview yet" in shown(page, "history-note")
    page.locator("[data-do=again]").click()
    reload(page)
    assert "No interview yet" in shown(page, "history-note")
    assert page.locator("[data-part=setup]").is_visible()


@pytest.mark.browser
def test_an_interview_that_another_tab_removed_is_not_brought_back(show):  # noqa: F811
    one = show(interview())
    start(one)
    finish(one)
    two = deaf(show, one)
    assert two.locator("[data-part=results]").is_visible()
    one.locator("[data-do=again]").click()
    reviewed(two, "memory-why-cache").get_by_label("Compares the work").click()
    assert "removed in another tab" in shown(two, "message")
    assert two.locator("[data-part=setup]").is_visible()
    assert stored(one)["sessions"] == [] and len(stored(one)["history"]) == 1


NOTHING = ["{", "[]", "3", '"a"', '{"sessions": {}, "history": []}', "{}"]


@pytest.mark.browser
@pytest.mark.parametrize("kept", NOTHING)
def test_whatever_the_browser_has_kept_the_page_opens(show, kept):  # noqa: F811
    setting = f"<script>localStorage['{KEY}'] ||= {json.dumps(kept)}</script>"
    page = show(interview(), before=setting)
    assert "was damaged" in shown(page, "message")
    start(page, number=1)
    assert shown(page, "count") == "Question 1 of 1"
    before = page.evaluate(f"localStorage['{KEY}']")
    reload(page)
    assert shown(page, "message") == "", before


#: What somebody may do to a good session or entry: a path, and what is put there.
DAMAGE = [
    (("sessions", 0, "items"), 3),
    (("sessions", 0, "items"), []),
    (("sessions", 0, "items", 0), None),
    (("sessions", 0, "items", 0, "id"), "nobody"),
    (("sessions", 0, "items", 0, "answer"), {"length": 1}),
    (("sessions", 0, "items", 0, "answer"), 5),
    (("sessions", 0, "items", 0, "order"), [0, 0, 1]),
    (("sessions", 0, "items", 0, "order"), [7]),
    (("sessions", 0, "items", 0, "met"), "no"),
    (("sessions", 0, "items", 0, "met"), [99]),
    (("sessions", 0, "at"), -1),
    (("sessions", 0, "at"), "0"),
    (("sessions", 0, "at"), 99),
    (("sessions", 0, "started"), "then"),
    (("sessions", 0, "deadline"), "soon"),
    (("sessions", 0, "finished"), 9e15),
    (("sessions", 0, "id"), 7),
    (("sessions", 0), None),
    (("sessions", 0), [1]),
    (("history", 0, "all"), [1, 2]),
    (("history", 0, "all"), [1e9, 2]),
    (("history", 0, "topics"), []),
    (("history", 0, "topics"), {"memory": [11, None]}),
    (("history", 0, "when"), "0"),
    (("history", 0), None),
    (("history", 0), "x"),
]


@pytest.mark.browser
def test_a_damaged_part_goes_and_the_rest_stays(show):  # noqa: F811
    page = show(interview())
    start(page)
    answer_all(page)
    page.locator("[data-do=again]").click()
    start(page)
    good = stored(page)
    for path, value in DAMAGE:
        bad = json.loads(json.dumps(good))
        place = bad
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        page.evaluate("([k, v]) => localStorage.setItem(k, v)", [KEY, json.dumps(bad)])
        reload(page)
        assert "was damaged" in shown(page, "message"), (path, value)
        part = "setup" if path[0] == "sessions" else "session"
        assert page.locator(f"[data-part={part}]").is_visible(), (path, value)
        count = len(stored(page)["history"])
        assert count == (1 if path[0] == "sessions" else 0), (path, value)


@pytest.mark.browser
def test_a_browser_that_keeps_nothing_says_so_and_asks_all_the_same(show):  # noqa: F811
    refuse = """<script>for (const name of ["localStorage", "sessionStorage"])
      Object.defineProperty(window, name,
        {get() { throw new DOMException("no", "SecurityError"); }})</script>"""
    page = show(interview(), before=refuse)
    assert "keeps nothing" in shown(page, "history-note")  # from the beginning
    start(page)
    answer_all(page)
    assert shown(page, "score").startswith("4.5 of 11")
    assert "keeps nothing" in shown(page, "history-note")
    page.locator("[data-do=again]").click()
    start(page)
    finish(page)
    assert page.locator("[data-show=history] tr").count() == 2
