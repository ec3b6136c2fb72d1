"""When a submission came, what lateness costs, and how points are printed."""

import datetime as dt
from decimal import Decimal

import pytest

from kvq_lib.course.homework import late, report
from kvq_lib.errors import InvalidArgument

DUE = "2026-03-01T23:59+01:00"


@pytest.mark.parametrize(
    "rule, minutes, lost",
    [
        (None, 9999, "0"),
        ("10%/day", 0, "0"),
        ("10%/day", -5, "0"),
        ("10%/day", 1, "10"),
        ("10%/day", 1440, "10"),
        ("10%/day", 1441, "20"),
        ("10% per day, at most 50%", 99999, "50"),
        ("12.5%/hour", 61, "25.0"),
        ("60%/day", 3000, "100"),
        ("10%/day, at most 50%, 15 min grace", 15, "0"),
        ("10%/day, at most 50%, grace 15 minutes", 16, "10"),
        ("5 % / hour, 1 hour grace", 61, "10"),
    ],
)
def test_what_lateness_costs(rule, minutes, lost):
    policy = late.policy(DUE, rule)
    _, found = policy.lost(policy.due + dt.timedelta(minutes=minutes))
    assert found == Decimal(lost)


@pytest.mark.parametrize(
    "rule",
    [
        "10",
        "ten%/day",
        "10%/year",
        "at most 50%",
        "10%/day; x",
        "110%/day",
        "",
        "10%/day, 10%/hour",
        "1%/day, at most 5%, at most 6%",
        "1%/d, 1 h grace, grace 2 h",
    ],
)
def test_unclear_rules_are_refused(rule):
    with pytest.raises(InvalidArgument, match="unclear"):
        late.policy(DUE, rule)


def test_times_have_zones():
    same_moment = {
        late.moment(text, "x").astimezone(dt.UTC)
        for text in (
            "2026-03-01 23:59 Europe/Berlin",
            "2026-03-01T22:59Z",
            "2026-03-01 22:59 Z",
            "2026-03-01 22:59 UTC",
            "2026-03-01T23:59:00+01:00",
        )
    }
    assert same_moment == {dt.datetime(2026, 3, 1, 22, 59, tzinfo=dt.UTC)}
    summer = late.moment("2026-07-01 12:00 Europe/Berlin", "x")
    assert summer.utcoffset() == dt.timedelta(hours=2)
    for text in ("2026-03-01", "2026-03-01 23:59", "soon", "2026-03-01 23:59 Europe/X"):
        with pytest.raises(InvalidArgument, match="due: "):
            late.moment(text, "due")


@pytest.mark.parametrize(
    "text, message",
    [
        ("2026-03-01 Europe/Berlin", "no time of day: add 23:59"),
        ("20260301 UTC", "no time of day"),
        ("2026-03-29 02:30 Europe/Berlin", "clocks were set forward"),
        ("2026-03-08T02:00 America/New_York", "clocks were set forward"),
    ],
)
def test_times_that_say_too_little_or_never_were_are_refused(text, message):
    with pytest.raises(InvalidArgument, match=message):
        late.moment(text, "due")


def test_times_beside_a_change_of_clocks_hold():
    for text, hour in (("01:59", 0), ("03:00", 1)):
        found = late.moment(f"2026-03-29 {text} Europe/Berlin", "due")
        assert found.astimezone(dt.UTC).hour == hour
    twice = late.moment("2026-10-25 02:30 Europe/Berlin", "due")  # the first counts
    assert twice.astimezone(dt.UTC).hour == 0


@pytest.mark.parametrize(
    "text, message",
    [
        ("time\n1", "no column 'student' in its first line, but time$"),
        ("", "no column 'student' in its first line, but nothing"),
        ("student;time\nann;1", "but student;time; put commas between columns"),
        ("student,time\nann,2026-03-01", "line 2.*no time zone"),
        ("student,time\nann,2026-03-01T00:00Z\nann,2026-03-01T00:00Z", "line 3.*twice"),
    ],
)
def test_bad_lists_of_times_are_refused(tmp_path, text, message):
    (tmp_path / "times.csv").write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        late.times(tmp_path / "times.csv")


def test_points_are_printed_as_they_are():
    cases = {"7.50": "7.5", "10": "10", "0.0": "0", "100": "100", "1E+1": "10"}
    for number, text in cases.items():
        assert report.plain(Decimal(number)) == text
    assert report.decimal(0.1) + report.decimal(0.2) == report.decimal(0.3)
