"""Placement: pinned, level, the same for whoever asks, and calm when nodes come and go."""

from __future__ import annotations

from collections import Counter

import pytest

from rl360.errors import BadInput
from rl360.sandboxes.placement import Placement

NODES = [f"http://node-{number}" for number in range(4)]


def placed(nodes: list[str] = NODES, images: int = 8, each: int = 8, **parts: float) -> Placement:
    placement = Placement(nodes, {f"image-{number}": each for number in range(images)}, **parts)  # type: ignore[arg-type]
    for number in range(images * each):
        placement.place(f"k{number}", f"image-{number % images}")
    return placement


def test_the_same_whoever_asks_and_in_whatever_order_nodes_are_named() -> None:
    first, second = placed(), placed(NODES[::-1])
    assert all(first.node_of(f"k{n}") == second.node_of(f"k{n}") for n in range(64))


def test_a_group_has_two_homes_and_no_node_more_than_its_share_and_a_quarter() -> None:
    placement = placed(images=64)
    homes = {image: {placement.node_of(f"k{n}") for n in range(512) if n % 64 == image} for image in range(64)}
    assert max(len(found) for found in homes.values()) <= 3
    assert sum(len(found) for found in homes.values()) < 1.2 * 2 * 64
    assert max(Counter(placement.node_of(f"k{n}") for n in range(512)).values()) <= 1.25 * 512 / 4


@pytest.mark.parametrize(("images", "nodes"), [(1, 2), (1, 5), (1, 20), (2, 4), (2, 5), (2, 10), (3, 8), (3, 20)])
def test_few_images_fill_all_nodes_alike(images: int, nodes: int) -> None:
    names, count = [f"http://10.0.0.{number}:8000" for number in range(nodes)], 512 // images * images
    placement = placed(names, images, each=512 // images)
    load = Counter(placement.node_of(f"k{n}") for n in range(count))
    assert max(load.values()) <= -(-count // nodes) and min(load.values()) >= count // nodes - nodes
    lost = placement.lose(names[0])
    load = Counter(placement.node_of(f"k{n}") for n in range(count))
    assert len(lost) <= -(-count // nodes) and max(load.values()) <= -(-count // (nodes - 1))


def test_a_popular_image_leaves_the_others_their_homes() -> None:
    names = [f"n{number}" for number in range(10)]
    sizes = {"popular": 320, **{f"rare-{number}": 8 for number in range(40)}}
    placement, alone = Placement(names, sizes), Placement(names, {})
    assert len(placement.homes("popular")) == 5
    assert all(placement.homes(f"rare-{n}") == alone.homes(f"rare-{n}") for n in range(40))
    assert len(placement.homes("rare-0")) == 2


def test_a_try_that_was_lost_goes_on_along_its_groups_ranking() -> None:
    placement = placed()
    tries = [placement.node_of("k0", lost) for lost in range(5)]
    assert tries[0] == placement.node_of("k0") == tries[4]
    assert sorted(tries[:4]) == NODES


def test_the_last_node_cannot_be_lost_and_none_is_refused() -> None:
    placement = placed(NODES[:1])
    with pytest.raises(BadInput, match="no other node"):
        placement.lose(NODES[0])
    with pytest.raises(BadInput, match="no node"):
        Placement([], {})


def test_what_is_there_twice_or_not_at_all_is_an_error() -> None:
    placement = placed()
    with pytest.raises(ValueError, match="k1 is placed"):
        placement.place("k1", "image-1")
    with pytest.raises(ValueError, match="not there"):
        placement.lose("http://elsewhere")
    placement.lose(NODES[0])
    with pytest.raises(ValueError, match="not there"):
        placement.lose(NODES[0])


def test_groups_are_spread_evenly_over_many_nodes() -> None:
    nodes = [f"n{number}" for number in range(64)]
    placement = Placement(nodes, {})
    first = Counter(placement.homes(f"g{number}")[0] for number in range(1280))
    assert len(first) == 64 and max(first.values()) < 45
