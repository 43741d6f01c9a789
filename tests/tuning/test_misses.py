"""Why none of a kernel's known configs serves a call: the nearest reason."""

import dataclasses

import pytest

from tests.tuning.records import key, record
from triax.tuning import misses

KEY = dataclasses.replace(key(0), triton="3.9.0")


def known(place="user store", **changes):
    return dataclasses.replace(record(0), key=dataclasses.replace(KEY, **changes)), place


def find(wanted, places):
    return misses.described(wanted, misses.nearest(wanted, places))


def test_nothing_is_known():
    assert find(KEY, []) == ""
    assert find(KEY, [(record(1), "user store")]) == ""  # of another kernel
    assert find(KEY, [known()]) == ""  # it is in a file of another name, say


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"triton": "3.6.0"}, "Triton 3.6.0, this is 3.9.0"),
        ({"compute_capability": 80}, "compute capability 80, this is 90"),
        ({"source": "1" * 20}, "another source of the kernel or its helpers"),
        ({"candidates": ("BLOCK=64",)}, "other configs to choose from"),
        ({"options": {"debug": "True"}}, "options debug=True, this is none"),
        ({"dtypes": {"x_ptr.0": "int8"}}, "dtypes x_ptr.0=int8, this is x_ptr.0=float32"),
        ({"arguments": {"n": "7"}}, "n=7, this is n=0"),
        ({"moved_bytes": 16385}, "bytes moved: 16385, this is 4096"),
        ({"triton": "3.6.0", "moved_bytes": 16384}, "Triton 3.6.0, this is 3.9.0"),  # near enough
        (
            {"gpu": "Other", "triton": "3.6.0"},
            "Triton 3.6.0, this is 3.9.0; Other, this is Imaginary GPU",
        ),
        ({"triton": "3.6.0\n" + "x" * 1000}, None),
    ],
)
def test_what_differs(changes, text):
    found = find(KEY, [known(**changes)])
    if text is None:  # a file of anybody's
        assert "\n" not in found
        assert len(found) < 150
    else:
        assert found == f"known for {text} (user store)"


def test_another_gpu():
    place = known(gpu="Other")
    assert find(KEY, [place]) == ("known for Other, this is Imaginary GPU (user store)")
    nowhere = dataclasses.replace(KEY, gpu="")
    assert find(nowhere, [place]) == ("known for Other, this is a GPU without a name (user store)")


def test_the_nearest_counts():
    """Those of equal calls on another Triton or GPU go before those of other calls."""
    places = [
        known(arguments={"n": "7"}),
        known(source="1" * 20, triton="3.6.0"),
        known("package a", triton="3.6.0"),
        known(gpu="Other"),
        known("package b", triton="3.5.1"),
        known("package a", triton="3.6.0", moved_bytes=8192),
    ]
    assert find(KEY, places) == (
        "known for Triton 3.6.0, 3.5.1, this is 3.9.0 (package a, package b)"
    )
    sizes = [known(moved_bytes=4096 << i) for i in (9, 8, 7, 6, 5)]
    assert find(KEY, sizes) == (
        "known for bytes moved: 131072, 262144, 524288, …, this is 4096 (user store)"
    )


def test_nearest_of_the_card():
    """Another Triton's before another source's; another card's are no guess."""
    places = [
        known(place="far", source="1" * 20, triton="3.6.0"),
        known(place="source", source="1" * 20),
        known(place="card", gpu="Other"),
        known(place="architecture", compute_capability=80),
        known(place="triton", triton="3.6.0"),
        (record(1), "another kernel"),
    ]
    near = misses.nearest(KEY, places)
    assert [one.place for one in near] == ["triton", "card", "architecture", "source", "far"]
    assert [one.place for one in misses.of_the_card(KEY, near)] == ["triton", "source", "far"]
    unnamed = dataclasses.replace(KEY, gpu="")
    near = misses.of_the_card(unnamed, misses.nearest(unnamed, places))
    assert {one.place for one in near} == {"triton", "source", "far", "card"}
