"""`assert_close` sees what is wrong, and says where."""

import ml_dtypes
import numpy as np
import pytest

from triax.testing import TOLERANCES, assert_close

RNG = np.random.default_rng(0)
DTYPES = {"bfloat16": ml_dtypes.bfloat16}
WANTED = RNG.standard_normal(1000)
SCALE = np.abs(WANTED).max()


@pytest.mark.parametrize("terms", [1, 9])
@pytest.mark.parametrize("name", TOLERANCES)
def test_the_largest_and_the_mean_error(name, terms):
    limit = SCALE * TOLERANCES[name] * terms**0.5
    got = WANTED.astype(DTYPES.get(name, name))
    wanted = got.astype(np.float64)
    assert_close(got, wanted, terms=terms)
    one, all_of_them = wanted.copy(), wanted + 0.4 * limit
    one[7] += 0.9 * limit * (1 if abs(one[7] + limit) < SCALE else -1)
    assert_close(got, one, terms=terms)
    one[7] += 2 * (one[7] - wanted[7])
    with pytest.raises(AssertionError, match=rf"largest error .* of {name} > .*: at \(7,\) it is"):
        assert_close(got, one, terms=terms)
    with pytest.raises(AssertionError, match=f"RMS error .* of {name} > "):
        assert_close(got, all_of_them, terms=terms)


@pytest.mark.parametrize(
    ("got", "wanted", "said"),
    [
        ([1, np.nan, 2], [1, 3, 2], r"1 NaNs .*: at \(1,\) it is nan, not 3"),
        ([1, 3, 2], [1, np.nan, np.nan], r"2 NaNs .*: at \(1,\) it is 3, not nan"),
        ([1, np.inf], [1, -np.inf], r"1 NaNs .*: at \(1,\) it is inf, not -inf"),
        ([1, np.inf], [1, 5], r"largest error inf .*: at \(1,\) it is inf, not 5"),
        ([0, 1e-30], [0, 0], r"largest error .*: at \(1,\) it is 1e-30, not 0"),
    ],
)
def test_numbers_that_are_not_finite_and_zeros(got, wanted, said):
    with pytest.raises(AssertionError, match=f"of a row {said}"):
        assert_close(np.float32(got), np.float64(wanted), err_msg="of a row")


def test_the_same_places_are_right():
    special = np.float32([np.nan, np.inf, -np.inf, 0, 2])
    assert_close(special, special.astype(np.float64))
    assert_close(np.float32([np.nan]), np.float64([np.nan]))


def test_digits_show_the_difference():
    with pytest.raises(AssertionError, match=r"it is 1\.0000000000000999, not 1;"):
        assert_close(np.float64([1.0000000000001]), np.float64([1]))


def test_shapes_are_the_same():
    with pytest.raises(AssertionError, match=r"shape \(2,\) is not \(1, 2\)"):
        assert_close(np.float32([1, 2]), np.float64([[1, 2]]))
