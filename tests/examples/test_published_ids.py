"""Ids and their rows, and vocabularies that differ."""

import pytest
from published_ids import Ids, Vocabulary


def test_rows_are_found_by_number_and_by_text():
    ids, rows = Ids.of([10, 0, -2, 10, 2**70])
    assert list(ids) == [-2, 0, 10, 2**70] and rows.tolist() == [2, 1, 0, 2, 3] and len(ids) == 4
    assert ids.rows(["10", 10, "0", str(2**70), "-2"]).tolist() == [2, 2, 1, 3, 0]
    assert ids.rows([1, "010", "+10", "10.0", " 10", "", "-0", 10**80]).tolist() == [-1] * 8


def test_text_that_looks_like_an_integer_is_another_id():
    ids = Ids(["007", "7", "x"])
    assert list(ids) == ["007", "7", "x"] and ids.rows([7, "007", "7"]).tolist() == [1, 0, 1]


NAMES = {"user": [1, 2, 3], "item": ["a", "b"], "rating": [0.5, 4.0]}
DIFFERENCES = [
    ({"user": [1, 2, 4]}, "row 2 of 'user' is 4, not 3"),
    ({"user": [1, 2]}, "row 2 of 'user' is nothing, not 3"),
    ({"user": [0, 1, 2, 3]}, "row 0 of 'user' is 0, not 1"),
    ({"user": ["1", "2", "3"]}, "row 0 of 'user' is '1', not 1"),
    ({"rating": [0.5, 4.0, 5.0]}, "row 2 of 'rating' is 5.0, not nothing"),
    ({"item's genre": ["x"]}, "row 0 of \"item's genre\" is 'x', not nothing"),
]


@pytest.mark.parametrize(("changes", "expected"), DIFFERENCES)
def test_the_first_difference_is_named(changes, expected):
    first, other = Vocabulary(NAMES), Vocabulary(NAMES | changes)
    assert other.difference(first) == expected
    assert other.fingerprint != first.fingerprint


def test_a_vocabulary_is_read_as_it_was_written():
    first = Vocabulary({**NAMES, "large": [2**70, -1], "letters": ["é", "\u2028"]})
    again = Vocabulary.from_text(first.text)
    assert again.names == first.names and not again.difference(first)
    for text in ("", "[]", '{"user": 3}'):
        with pytest.raises(ValueError):
            Vocabulary.from_text(text)
