"""Finding pages again: which prefixes are found, and which are given up first."""

import pytest
from helpers import snapshot

import kvq_lib as kvq
from kvq_lib.pages import Pages
from kvq_lib.schemes import Law


def filled(pages, tokens):
    """A sequence with these tokens, fed in one step; the pages that were found."""
    handle = pages.add(tokens)
    start = pages.length(handle)
    rest = tokens[start:]
    pages.commit(pages.begin([handle], [len(rest)], [rest]))
    return handle, start


def found(pages, tokens):
    """How many tokens a new sequence would not have to compute; leaves no sequence."""
    handle = pages.add(tokens)
    length = pages.length(handle)
    pages.free(handle)
    return length


def test_at_least_one_token_is_left_to_compute():
    pages = Pages(Law(4, 0, 0), 8, 8)
    filled(pages, list(range(12)))
    for length, hit in [(0, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)]:
        tokens = [*range(12), 99][:length]
        assert found(pages, tokens) == hit


def test_a_page_is_found_only_behind_the_same_prefix():
    pages = Pages(Law(2, 0, 0), 9, 9)
    filled(pages, [1, 2, 3, 4, 5])
    assert found(pages, [1, 2, 3, 4, 9]) == 4
    filled(pages, [7, 8, 5])
    assert found(pages, [7, 8, 3, 4, 9]) == 2  # the same page, another history
    assert found(pages, [1, 9, 3, 4, 9]) == 0
    assert found(pages, [1, 2, 4, 3, 9]) == 2
    filled(pages, [1, 23, 4])
    assert found(pages, [12, 3, 4]) == 0  # the same digits, other tokens


def test_tokens_that_are_not_known_are_never_found():
    pages = Pages(Law(2, 0, 0), 9, 9)
    handle = pages.add()
    pages.commit(pages.begin([handle], [4]))
    pages.commit(pages.begin([handle], [4], [[1, 2, 3, 4]]))
    assert pages.index == {}
    assert found(pages, [1, 2, 3]) == 0


def test_pages_are_found_however_the_tokens_were_fed():
    pages = Pages(Law(4, 0, 0), 9, 9)
    handle = pages.add()
    for token in range(11):
        pages.commit(pages.begin([handle], [1], [[token]]))
    assert found(pages, [*range(11), 99]) == 8


def test_the_longest_unused_pages_are_given_up_first():
    pages = Pages(Law(2, 0, 0), num_hot=9, num_cold=6)
    prompts = [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]]
    for tokens in prompts:
        pages.free(filled(pages, tokens)[0])
    assert found(pages, [*prompts[0], 99]) == 4  # used again: now it is the latest
    other = pages.add()
    kept = []
    for _ in range(3):  # each page of another sequence takes the oldest one
        pages.commit(pages.begin([other], [4]))
        kept.append([found_without_using(pages, [*t, 99]) for t in prompts])
    assert kept == [[4, 0, 4], [4, 0, 0], [0, 0, 0]]


def test_the_longest_unused_hot_copies_are_given_up_first():
    # A window of one page: a hit after one page needs that page's hot copy.
    pages = Pages(Law(2, 0, 1), num_hot=4, num_cold=9)
    prompts = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    for tokens in prompts:
        pages.free(filled(pages, tokens)[0])
    assert found(pages, prompts[0]) == 2  # used again: now it is the latest
    other = pages.add()
    kept = []
    for new in (3, 2, 4):  # the first and the last step find one page free
        pages.commit(pages.begin([other], [new]))
        kept.append([found_without_using(pages, t) for t in prompts])
    assert kept == [[2, 0, 2], [2, 0, 0], [0, 0, 0]]


def test_the_end_of_a_prefix_is_given_up_before_its_start():
    pages = Pages(Law(2, 0, 0), num_hot=9, num_cold=3)
    pages.free(filled(pages, [1, 2, 3, 4, 5, 6])[0])
    other = pages.add()
    for left in (4, 2, 0):
        pages.commit(pages.begin([other], [2]))
        assert found_without_using(pages, [1, 2, 3, 4, 5, 6, 7]) == left


def found_without_using(pages, tokens):
    """As `found`, but leaves the order of use as it was."""
    return len(pages._match(tokens)[0]) * pages.law.page_size


def test_pages_in_use_are_never_given_up():
    pages = Pages(Law(2, 0, 0), num_hot=4, num_cold=3)
    first, _ = filled(pages, [1, 2, 3, 4])
    twin = pages.add([1, 2, 3, 4, 5])
    assert pages.length(twin) == 4
    pages.free(first)
    other = pages.add()
    pages.commit(pages.begin([other], [2]))
    with pytest.raises(kvq.OutOfPages, match=r"1 cold .*0 of 3"):
        pages.begin([other], [2])
    pages.free(twin)
    pages.commit(pages.begin([other], [2]))


def test_a_prefix_hit_needs_the_hot_copies_of_the_window():
    # Window of one page, pages of two tokens.  After 8 tokens the hot copies of pages
    # 0 to 2 are idle; taking them away must end hits, though their cold form is there.
    pages = Pages(Law(2, 0, 1), num_hot=5, num_cold=9)
    filled(pages, [1, 2, 3, 4, 5, 6, 7, 8])
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [found(pages, tokens[:n]) for n in (9, 8, 7, 6, 5, 3)] == [8, 6, 6, 4, 4, 2]
    other = pages.add()
    pages.commit(pages.begin([other], [7]))  # takes all idle hot pages
    assert [found(pages, tokens[:n]) for n in (9, 8, 7, 6, 5, 3)] == [8, 0, 0, 0, 0, 0]


def test_a_prefix_hit_needs_the_hot_copies_of_the_sinks():
    pages = Pages(Law(2, 1, 0), num_hot=3, num_cold=9)
    handle, _ = filled(pages, [1, 2, 3, 4])
    pages.free(handle)
    assert found(pages, [1, 2, 3, 4, 5]) == 4
    other = pages.add()
    pages.commit(pages.begin([other], [5]))  # takes every hot page
    assert found(pages, [1, 2, 3, 4, 5]) == 0


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ([0], None),
        ([-1], None),
        ([1.0], None),
        ([True], None),
        ([1, 1], None),
        ([], None),
        ([2], [[1]]),
        ([1], [[1], [2]]),
        ([1], []),
    ],
)
def test_a_step_that_makes_no_sense_is_refused_without_a_trace(lengths, tokens):
    pages = Pages(Law(2, 0, 0), 4, 4)
    handle = pages.add()
    before = snapshot(pages)
    with pytest.raises(kvq.InvalidArgument):
        pages.begin([handle], lengths, tokens)
    assert snapshot(pages) == before


def test_a_sequence_cannot_stand_twice_in_one_step():
    pages = Pages(Law(2, 0, 0), 4, 4)
    handle = pages.add()
    with pytest.raises(kvq.InvalidArgument, match="twice"):
        pages.begin([handle, handle], [1, 1])
    pages.commit(pages.begin([handle], [1]))


@pytest.mark.parametrize("bad", [None, "1", 1.5, [], -1, 10**9])
def test_what_was_never_issued_is_no_handle(bad):
    pages = Pages(Law(2, 0, 0), 4, 4)
    for call in (pages.length, pages.free, pages.fork, lambda h: pages.begin([h], [1])):
        with pytest.raises(kvq.UnknownSequence):
            call(bad)


def test_a_handle_fits_no_other_cache_and_is_never_issued_again():
    one, two = Pages(Law(2, 0, 0), 4, 4), Pages(Law(2, 0, 0), 4, 4)
    handles = [one.add(), two.add()]
    with pytest.raises(kvq.UnknownSequence):
        two.length(handles[0])
    one.free(handles[0])
    handles.append(one.add())
    assert len(set(handles)) == 3
