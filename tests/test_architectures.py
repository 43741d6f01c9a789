"""The table of what cards have."""

from triax import architectures


def test_tensor_cores_of_the_generations():
    kinds = {c: architectures.of(c).products for c in (80, 89, 90, 100, 103, 120, 121)}
    assert kinds == {
        80: "mma.sync",
        89: "mma.sync",
        90: "wgmma",
        100: "tcgen05.mma",
        103: "tcgen05.mma",
        120: "mma.sync",
        121: "mma.sync",
    }
    assert [c for c in kinds if architectures.of(c).multiplies_from_shared] == [90, 100, 103]


def test_shared_memory_of_the_generations():
    """In kB, from the CUDA C++ Programming Guide."""
    known = {64: (75,), 163: (80, 87), 99: (86, 89, 120, 121), 227: (90, 100, 103, 110)}
    wanted = {capability: size << 10 for size, of in known.items() for capability in of}
    assert {c: each.shared_bytes for c, each in architectures.BY_CAPABILITY.items()} == wanted


def test_one_that_is_not_listed_is_like_the_one_below():
    assert architectures.of(122) is architectures.of(121)
    assert architectures.of(88) is architectures.of(87)
    assert architectures.of(70) is architectures.of(75)
    assert 122 not in architectures.BY_CAPABILITY
