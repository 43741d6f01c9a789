"""What is replaced comes back, also where replacing or undoing was torn."""

import types

import pytest

from triax.compat import patching
from triax.compat.patching import ABSENT, Change, grouped


class Torn(Exception):
    """Raised where a signal might be."""


class Holder:
    """Attributes that can refuse to be set a few times."""

    refusals = 0

    def __setattr__(self, name, value):
        if Holder.refusals:
            Holder.refusals -= 1
            raise Torn
        super().__setattr__(name, value)


@pytest.fixture
def holder():
    holder = Holder()
    holder.a, holder.b = 1, 2
    yield holder
    Holder.refusals = 0
    patching.undo()


def test_attributes_and_items_come_back(holder):
    class Class:
        x = 1

    settings = {"on": False}
    module = types.ModuleType("module")
    changes = [
        Change(holder, "a", 10),
        Change(holder, "new", 11),
        Change(Class, "x", 12),
        Change(Class, "y", 13),
        Change(settings, "on", True),
        Change(settings, "more", True),
        Change(module, "z", 14),
        Change(holder, "a", 15),
        Change(holder, "b", ABSENT),
    ]
    patching.replace(grouped(changes))
    assert vars(holder) == {"a": 15, "new": 11}
    assert (Class.x, Class.y, settings, module.z) == (12, 13, {"on": True, "more": True}, 14)
    patching.undo()
    assert vars(holder) == {"a": 1, "b": 2}
    assert (Class.x, hasattr(Class, "y"), settings) == (1, False, {"on": False})
    assert not hasattr(module, "z")
    holder.a = 5
    patching.undo()  # nothing is left to undo
    assert holder.a == 5


def test_what_others_change_in_a_watched_holder_comes_back(holder):
    changed = patching.watch([holder])
    holder.a = 10
    holder.new = 11
    del holder.b
    assert changed() == [(holder, {"a": 10, "new": 11, "b": ABSENT})]
    patching.undo()
    assert vars(holder) == {"a": 1, "b": 2}
    assert changed() == [(holder, {})]


def test_a_torn_replacement_is_undone(holder):
    refusing = Holder()
    Holder.refusals = 1
    with pytest.raises(Torn):
        patching.replace([(vars(holder), {"a": 10}), (refusing, {"b": 20})])
    assert vars(holder) == {"a": 10, "b": 2}
    patching.undo()
    assert vars(holder) == {"a": 1, "b": 2}


@pytest.mark.parametrize("watched", [False, True])
def test_a_torn_undoing_goes_on_where_it_stopped(holder, watched):
    if watched:
        patching.watch([holder])
        holder.a, holder.b = 10, 20
    else:
        patching.replace([(holder, {"a": 10, "b": 20})])
    Holder.refusals = 2
    for _ in range(2):
        with pytest.raises(Torn):
            patching.undo()
    patching.undo()
    assert vars(holder) == {"a": 1, "b": 2}
