"""What is wrong with a file that somebody wrote: where, what it must be, what it is."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantkit.errors import DataError
from quantkit.specs import as_record, problems, read_yaml, shown


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Cat(Strict):
    kind: Literal["cat"]
    lives: int = Field(default=9, ge=1, le=9)


class Dog(Strict):
    kind: Literal["dog"]
    owner_name: str


class House(Strict):
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = []
    size: int | Literal["auto"] | None = None
    rooms: dict[str, Cat] = {}
    warmth: float = Field(default=0.5, gt=0, lt=1)
    street: str = Field(default="x", alias="road")


def told(data):
    with pytest.raises(ValidationError) as found:
        House.model_validate(data)
    return problems(found.value, House)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"petz": []}, "petz: unknown key; did you mean pets?"),
        ({"zzz": []}, "zzz: unknown key; choose from: pets, size, rooms, warmth, road"),
        ({1: []}, "1: unknown key; choose from: pets, size, rooms, warmth, road"),
        ({"pets": "cat"}, "pets: must be a list, such as [a, b], not 'cat'"),
        ({"pets": [{"lives": 3}]}, "pets #1.kind: is missing; choose from: cat, dog"),
        (
            {"pets": [{"kind": "cat", "cat": 1}]},
            "pets #1.cat: unknown key; choose from: kind, lives",
        ),
        (
            {"pets": [{"kind": "cta"}]},
            "pets #1.kind: must be cat or dog, not 'cta'; did you mean cat?",
        ),
        ({"pets": [{"kind": "dog"}]}, "pets #1.owner_name: is missing"),
        (
            {"pets": [{"kind": "dog", "owner_name": 3}]},
            "pets #1.owner_name: must be text, not 3; put it into quotes",
        ),
        (
            {"pets": [{"kind": "cat"}, {"kind": "cat", "live": 3}]},
            "pets #2.live: unknown key; did you mean lives?",
        ),
        ({"pets": [{"kind": "cat", "lives": 10}]}, "pets #1.lives: must be 9 or less, not 10"),
        ({"size": "atuo"}, "size: must be a whole number or auto, not 'atuo'; did you mean auto?"),
        (
            {"rooms": {"attic": {"kind": "cat", "life": 1}}},
            "rooms.attic.life: unknown key; did you mean lives?",
        ),
        ({"rooms": {"a\nb": 3}}, "rooms.'a\\nb': must be lines such as `key: value`, not 3"),
        ({"warmth": 1}, "warmth: must be below 1, not 1"),
        ({"warmth": None}, "warmth: must be a number, not nothing"),
        ({"road": []}, "road: must be text, not []"),
    ],
)
def test_a_problem_is_one_line_in_our_words(data, line):
    assert told(data) == [line]


def test_all_problems_are_told_each_once():
    lines = told({"warmth": 0, "size": "x", "pets": [{"kind": "cat", "lives": 0, "a": 1}]})
    assert [line.split(":")[0] for line in lines] == [
        "pets #1.lives",
        "pets #1.a",
        "size",
        "warmth",
    ]


def test_what_was_given_is_shown_short_and_in_one_line():
    assert shown("a\nb") == "'a\\nb'"
    assert len(shown("x" * 1000)) == 40
    assert [shown(v) for v in (None, True, 1.5, [1], {})] == [
        "nothing",
        "true",
        "1.5",
        "a list",
        "{}",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "is not valid YAML at line 1: expected "),
        ("a: 1\nb: {c: 1, c: 2}", ": c appears twice, again in line 2"),
        ("a: !!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(tmp_path, text, words):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(DataError) as refused:
        read_yaml(path, DataError)
    assert str(refused.value).startswith(str(path))
    assert words in str(refused.value)


def test_keys_that_are_merged_from_elsewhere_stand_once(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("a: &a {x: 1}\nb: &b {y: 2}\nc: {<<: *a, x: 3}\n")
    assert read_yaml(path, DataError)["c"] == {"x": 3}


class Figure(BaseModel):
    value: float
    n: int
    is_better: bool = False
    pair: tuple[int, int] = (0, 0)


def test_text_that_looks_like_a_number_is_not_one_in_a_record():
    good = {"value": 1, "n": 2, "is_better": True, "pair": [3, 4]}
    assert as_record(Figure, good) == Figure(value=1.0, n=2, is_better=True, pair=(3, 4))
    for key, odd in (("value", "1"), ("n", "1"), ("n", 1.0), ("is_better", "1"), ("is_better", 1)):
        with pytest.raises(ValidationError, match=key):
            as_record(Figure, good | {key: odd})
