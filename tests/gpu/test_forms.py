"""The table of forms on a GPU: every cell of it. `make flags` runs it under XLA's flags too."""

import pytest

from tests.forms.check import cells, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:ragged_dot dequantizes its weights"),  # some do, rightly
]


@pytest.mark.parametrize("is_round", [True, False], ids=["round", "odd"])
@pytest.mark.parametrize(("name", "form"), cells())
def test_form(name, form, is_round):
    check(name, form, is_round, "triton")
